"""Interrupted runs: the saved state, the process's end, and a resumed run that ends like an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import CheckpointSchedule, Strategy
from process_support.command_lines import command_of
from process_support.signals import handles
from suite_plugins.waiting import wait_until
from trainer_support.forking import TESTS, fork_server
from trainer_support.tasks import largest_difference

STEPS = 20
SCHEDULE = CheckpointSchedule(every_steps=5, keep=2)


def interrupted(bench, step: int, how: signal.Signals, ranks: Sequence[int], **settings: Any):
    """Send those ranks of a run of two processes the signal after that step, and return its end."""
    on, numbers = bench.workspace / "go on", bench.workspace / "ranks.json"
    numbers.unlink(missing_ok=True)
    case = bench.case(processes=2, **settings)
    held = {"step": step, "file": str(on), "arguments": case["arguments"]}
    case |= {"call": "process_support.held:train", "arguments": held, "ranks": str(numbers)}
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(fork_server().run, case)

        def came() -> bool:
            return run.done() or any(f'"step": {step},' in line for line in history(bench))

        wait_until(came, f"the history has step {step}")
        assert not run.done(), run.result()[1]
        for rank in ranks:
            os.kill(json.loads(numbers.read_text(encoding="utf-8"))[rank], how)
        on.touch()
        codes, output = run.result()
    return bench.ended(max(codes, key=abs), output)


def interrupted_under_torchrun(bench, step: int, how: signal.Signals, ranks: Sequence[int], **settings: Any):
    """Do the same with a launcher, which ends the other process when one has ended."""
    on = bench.workspace / "go on"
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = bench.start(
        processes=2,
        program=["process_support.held", str(step), str(on)],
        environment={"PYTHONPATH": os.pathsep.join(paths)},
        **settings,
    )

    def came() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(f'"step": {step},' in line for line in history(bench))

    wait_until(came, f"the history has step {step}")
    trains = workers(process)
    for rank in ranks:
        trains[rank].send_signal(how)
    on.touch()
    return bench.end(process)


def history(bench) -> list[str]:
    """Return the lines written so far."""
    return bench.paths.history.read_text(encoding="utf-8").splitlines() if bench.paths.history.exists() else []


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the training processes in the order of their ranks."""
    found = [child for child in psutil.Process(process.pid).children() if "process_support.held" in command_of(child)]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def over_two(bench, settings: dict[str, Any]):
    """Return the bench's training over two processes: two replicas, or two parts of one."""
    strategy = Strategy(name="ddp", **settings)
    replicas = 2 // strategy.model_ranks
    return bench.in_replicas(strategy, replicas, 4 if strategy.pipeline else 16 // replicas)


@pytest.mark.parametrize(
    ("strategy", "settings", "how"),
    [
        pytest.param("ddp", {}, signal.SIGTERM, id="ddp when rank 1 alone gets SIGTERM"),
        pytest.param("fsdp", {}, signal.SIGKILL, id="fsdp when a process is killed", marks=pytest.mark.slow),
        pytest.param("deepspeed", {"zero_stage": 2}, signal.SIGINT, id="ZeRO-2 when everything gets SIGINT"),
        pytest.param(
            "deepspeed",
            {"zero_stage": 3, "offload_parameters": "cpu", "offload_optimizer": "cpu"},
            signal.SIGKILL,
            id="ZeRO-3 in host memory when a process is killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp",
            {"offload_parameters": "cpu", "offload_optimizer": "cpu", "fsdp_sharding": "grad-op"},
            signal.SIGTERM,
            id="fsdp in host memory when rank 1 alone gets SIGTERM",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp",
            {"pipeline": {"degree": 2, "micro_batches": 4, "schedule": "1f1b"}},
            signal.SIGTERM,
            id="pipeline when rank 1 alone gets SIGTERM",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp",
            {"tensor": 2},
            signal.SIGTERM,
            id="tensor when rank 1 alone gets SIGTERM",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(
    strategy: str,
    settings: dict[str, Any],
    how: signal.Signals,
    bench,
    dropout_bench,
    family_bench,
    whole_run,
    spread_of,
    tmp_path: Path,
):
    if strategy == "ddp":
        # With dropout, so that a lost random state shows; how it is restored is the same for all strategies.
        whole_model = Strategy(name="ddp", **settings).model_ranks == 1
        base = dropout_bench if whole_model else family_bench("gpt2", (("resid_pdrop", 0.1), ("embd_pdrop", 0.1)))
        undisturbed, run = (over_two(base.at(tmp_path / folder), settings) for folder in ("whole", "w"))
        whole = undisturbed.run(processes=2)
        assert whole.exit_code == 0, whole.output
    else:
        undisturbed, _ = whole_run(spread_of(strategy, settings=tuple(settings.items())))
        run = bench.at(tmp_path / "w").spread(strategy, 2, **settings)
    run = run.with_training(checkpoints=SCHEDULE)
    config = run.deepspeed_config() if strategy == "deepspeed" else None
    # A launcher's effect depends on the signal, not on the strategy; its start-up takes as long as the training.
    interrupt = interrupted if settings and how != signal.SIGINT else interrupted_under_torchrun
    ended = interrupt(run, random.randint(6, 11), how, [0, 1] if how == signal.SIGINT else [1], deepspeed=config)

    assert ended.exit_code != 0
    assert not (run.paths.state / "train.json").exists()
    latest = int((run.paths.checkpoints / "latest").read_text().strip().removeprefix("step-"))
    if how == signal.SIGKILL:
        assert latest % 5 == 0
        assert ended.first_failure.failure.failure_class is FailureClass.COLLECTIVE
    else:
        failures = {rank: report.failure for rank, report in ended.reports.items()}
        assert {rank: (failure.failure_class, failure.exit_code) for rank, failure in failures.items()} == {
            0: (FailureClass.PREEMPTED, 143),
            1: (FailureClass.PREEMPTED, 143),
        }
        assert f"after step {latest} of {STEPS}" in failures[0].message

    resumed = run.run(processes=2, deepspeed=config)
    assert resumed.exit_code == 0, resumed.output
    assert f"step {latest}" in resumed.output
    lines = [json.loads(line) for line in run.paths.history.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert largest_difference(run.weights(), undisturbed.weights()) <= 1e-6
    assert (run.paths.state / "train.json").exists()


def test_checkpoint_of_two_processes_resumes_in_one_and_another_strategy(bench, whole_run, spread_of, tmp_path: Path):
    run = bench.at(tmp_path / "w").with_training(checkpoints=SCHEDULE)
    spread = run.spread("fsdp", 2)
    assert interrupted(spread, 11, signal.SIGKILL, [0, 1]).exit_code != 0
    # A damaged file makes the newest checkpoint useless; the one before it is used, and the file is named.
    newest = run.paths.checkpoints / (run.paths.checkpoints / "latest").read_text().strip()
    victim = newest / "state" / "shard-00001.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))

    resumed = run.spread("single", 1).run()
    assert resumed.exit_code == 0, resumed.output
    assert f"{victim} has changed since it was written" in resumed.output
    before = run.paths.checkpoints / f"step-{int(newest.name.removeprefix('step-')) - 5}"
    assert f"Resuming from {before}" in resumed.output
    whole, _ = whole_run(spread_of("single", processes=1))
    assert largest_difference(run.weights(), whole.weights()) <= 1e-6
    # As many checkpoints are left as requested, the last one of this run.
    assert sorted(path.name for path in run.paths.checkpoints.glob("step-*")) == ["step-15", "step-20"]


def test_deepspeed_checkpoint_of_another_stage_is_refused_with_a_hint(bench, tmp_path: Path):
    run = bench.at(tmp_path / "w").with_training(max_steps=4, checkpoints=CheckpointSchedule(every_steps=2, keep=1))
    first = run.spread("deepspeed", 1, zero_stage=2)
    assert first.run(deepspeed=first.deepspeed_config()).exit_code == 0
    other = run.with_training(max_steps=4).spread("deepspeed", 1, zero_stage=1)
    refused = other.run(deepspeed=other.deepspeed_config())
    assert refused.exit_code == 18
    failure = refused.first_failure.failure
    assert (failure.failure_class, failure.reason) == (FailureClass.CHECKPOINT, "CheckpointOfAnotherWorld")
    assert "written by strategy deepspeed-zero2" in failure.message
    assert "strategy deepspeed-zero2 on 1 processes" in failure.hint


@pytest.mark.slow
def test_a_deepspeed_checkpoint_goes_on_with_the_optimizer_in_host_memory(bench, tmp_path: Path):
    """The resumed run is that after memory ran out; see the ladder of the plan."""
    run = bench.at(tmp_path / "w").with_training(max_steps=4, checkpoints=CheckpointSchedule(every_steps=2, keep=2))
    first = run.spread("deepspeed", 1, zero_stage=2)
    assert first.run(deepspeed=first.deepspeed_config()).exit_code == 0
    losses, whole = run.losses(), run.weights()
    shutil.rmtree(run.paths.checkpoints / "step-4")
    (run.paths.checkpoints / "latest").write_text("step-2\n", encoding="utf-8")
    (run.paths.state / "train.json").unlink()
    moved = run.spread("deepspeed", 1, zero_stage=2, offload_optimizer="cpu")
    ended = moved.run(deepspeed=moved.deepspeed_config())
    assert ended.exit_code == 0, ended.output
    assert "step 2" in ended.output
    assert run.losses() == pytest.approx(losses, rel=1e-4)
    mine = run.weights()
    assert max((mine[name] - whole[name]).abs().max().item() for name in whole) <= 1e-5


def test_state_in_files_and_state_in_memory_do_not_go_on_from_each_other():
    from finetune_trainer.strategies.deepspeed import DeepSpeed

    here = Strategy(name="deepspeed", zero_stage=3, offload_optimizer="cpu")
    files = here.model_copy(update={"offload_optimizer": "nvme"})
    strategy = DeepSpeed(files, "fp32", 2, {}, Path("unused"))
    assert strategy.why_not_from(files.checkpoint_form, 2, 2) is None
    assert "reads its own shards only" in (strategy.why_not_from(here.checkpoint_form, 2, 2) or "")


ALONE = {"ddp": ["newest", "load_shards", "write_gathered"], "fsdp": ["write_tensors", "commit"]}
"""Calls that rank 0 makes alone with both strategies, each slow once: a delay is as long as the run."""


@pytest.mark.parametrize("strategy", ALONE)
def test_work_of_rank_0_alone_may_outlast_the_collective_timeout(strategy: str, bench, tmp_path: Path):
    saving = CheckpointSchedule(every_steps=2, keep=2)
    run = bench.at(tmp_path / "w").with_training(max_steps=4, checkpoints=saving).spread(strategy, 2)
    assert run.run(processes=2).exit_code == 0
    shutil.rmtree(run.paths.checkpoints / "step-4")
    (run.paths.checkpoints / "latest").write_text("step-2\n", encoding="utf-8")
    (run.paths.state / "train.json").unlink()
    case = run.case(processes=2)
    given = {"arguments": case["arguments"], "calls": ALONE[strategy]}
    call = {"call": "process_support.slow_rank:train", "arguments": given}
    codes, output = fork_server().run({**case, **call})
    assert codes == [0, 0], output
    assert "Resuming from" in output
    assert all(f"rank 0 alone: {name}" in output for name in ALONE[strategy])


def test_a_signal_before_the_first_step_ends_the_stage_as_preempted(bench, tmp_path: Path):
    run = bench.at(tmp_path / "w")
    process = run.start(Stage.TRAIN)
    wait_until(lambda: handles(process.pid, signal.SIGTERM), "the process handles SIGTERM")
    os.kill(process.pid, signal.SIGTERM)
    ended = run.end(process)
    assert ended.exit_code == 143
    assert ended.first_failure.failure.failure_class is FailureClass.PREEMPTED
