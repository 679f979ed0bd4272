"""Every failure of training ends with its own class and exit code, and leaves earlier results as they were."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_trainer.core.failures import StageError, classify


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file that a finished job leaves for people."""
    wanted = [*(folder / "model").rglob("*"), folder / "metrics.json", folder / "state" / "train.json"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in wanted if path.is_file()}


@pytest.fixture
def finished(whole_run, spread_of, tmp_path: Path):
    """A job that was trained before."""
    done, ended = whole_run(spread_of("single", processes=1))
    assert ended.exit_code == 0, ended.output
    run = type(done)(tmp_path / "w", done.job)
    shutil.copytree(done.paths.root, run.paths.root)
    return run


def refused(run, before: dict[str, str], failure_class: FailureClass, reason: str, **how: object) -> TrainerReport:
    """Run; check code, class, reason and that nothing was lost; return the first failure."""
    ended = run.run(**how)
    report = ended.first_failure
    assert report.failure is not None
    assert (report.failure.failure_class, report.failure.reason) == (failure_class, reason), ended.output
    if len(ended.reports) == 1:
        assert ended.exit_code == EXIT_CODES[failure_class]
    assert report.failure.message in ended.output
    assert before
    assert contents(run.paths.root) == before
    return report


def without_model(run):
    """Return the same job with a missing model: whoever loads it first fails."""
    model = run.job.model.model_copy(update={"uri": "file:///nowhere"})
    return type(run)(run.workspace, run.job.model_copy(update={"model": model}), run.environment)


def test_a_world_of_another_size_is_refused_before_anything_is_imported(finished):
    world = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    before = contents(finished.paths.root)
    # In a process of its own, which lists its imports: the fork server has imported everything.
    ended = finished.end(finished.start(environment={**world, "PYTHONPROFILEIMPORTTIME": "1"}))
    failure = ended.first_failure.failure
    assert (failure.failure_class, failure.reason) == (FailureClass.WORLD_SIZE, "WorldSizeMismatch"), ended.output
    assert ended.exit_code == EXIT_CODES[FailureClass.WORLD_SIZE]
    assert contents(finished.paths.root) == before
    assert "3 processes run (started by environment), and the plan has 1" in failure.message
    imported = set(re.findall(r"^import time:.*\| +(\w+)", ended.output, re.MULTILINE))
    assert "finetune_trainer" in imported
    assert not imported & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("arguments", "reason", "hint"),
    [
        pytest.param({"learning_rat": 1.0}, "UnknownArgument", "Did you mean learning_rate?", id="an unknown field"),
        pytest.param({"fp16": True}, "OwnedByPlan", "Set training.precision instead.", id="a field that the plan owns"),
        pytest.param(
            {"adam_beta1": "big"},
            "WrongType",
            "Write numbers and booleans without quotes",
            id="a value of the wrong type",
        ),
        pytest.param({"logging_steps": 5}, "FixedByTrainer", "Leave it out.", id="a field without effect"),
    ],
)
def test_bad_training_arguments_are_refused(arguments: dict[str, object], reason: str, hint: str, bench):
    from finetune_trainer.training.training_arguments import refuse_bad_arguments

    with pytest.raises(StageError) as caught:
        refuse_bad_arguments(bench.with_training(arguments=arguments).job.training)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, reason)
    assert hint in caught.value.hint


def test_bad_training_arguments_end_the_stage_before_a_model_is_loaded(finished):
    run = without_model(finished.with_training(arguments={"fp16": True, "learning_rat": 1.0}))
    report = refused(run, contents(run.paths.root), FailureClass.CONFIG, "OwnedByPlan")
    assert "training.arguments.learning_rat: " in report.failure.message


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        pytest.param({"schemaVersion": 2}, "UnknownSchemaVersion", "schemaVersion", id="a newer schema"),
        pytest.param({"colour": "blue"}, "JobNotUnderstood", "colour", id="an unknown field"),
    ],
)
def test_a_job_that_this_trainer_does_not_know_is_refused(
    change: dict[str, object], reason: str, named: str, bench, tmp_path: Path
):
    job = tmp_path / "job.json"
    job.write_text(json.dumps({**json.loads(bench.job.to_json()), **change}))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "finetune_trainer", "prepare", "--job", str(job), "--workspace", str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, "FINETUNE_REPORT": str(report)}, capture_output=True, text=True, check=False
    )
    failure = TrainerReport.model_validate_json(report.read_bytes()).failure
    assert failure is not None
    assert (ended.returncode, failure.failure_class, failure.reason) == (11, FailureClass.CONFIG, reason)
    assert named in failure.message


def test_deepspeed_file_of_another_stage_is_refused_before_training(finished):
    run = finished.spread("deepspeed", 1, zero_stage=2)
    before = contents(run.paths.root)
    config = run.deepspeed_config(stage=1)
    report = refused(run, before, FailureClass.STRATEGY_NOT_IN_EFFECT, "WrongZeroStage", deepspeed=config)
    assert "runs ZeRO stage 1, requested was 2" in report.failure.message


def test_a_deepspeed_file_that_contradicts_the_job_is_refused(finished):
    run = finished.spread("deepspeed", 1, zero_stage=2)
    config = {**run.deepspeed_config(), "gradient_clipping": 9.0}
    report = refused(run, contents(run.paths.root), FailureClass.CONFIG, "DeepSpeedConfigMismatch", deepspeed=config)
    assert "gradient_clipping=9.0 vs hf max_grad_norm=1.0" in report.failure.message


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(finished):
    run = finished.with_training(learning_rate=1e30, warmup_steps=0, max_grad_norm=0.0)
    report = refused(run, contents(run.paths.root), FailureClass.LOSS_NOT_FINITE, "LossNotFinite")
    assert "The loss is nan at step" in report.failure.message


@pytest.mark.parametrize(
    ("strategy", "settings", "asynchronous"),
    [("single", {}, False), ("single", {}, True), ("deepspeed", {"zero_stage": 2}, False)],
)
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before_it(
    strategy: str, settings: dict[str, int], asynchronous: bool, finished, small_volume: Path
):
    from finetune_trainer.checkpoint.checkpoints import verify

    run = type(finished)(small_volume / "w", finished.job)
    shutil.copytree(finished.paths.root, run.paths.root)
    saving = CheckpointSchedule(every_steps=1, keep=100, asynchronous=asynchronous)
    run = run.spread(strategy, 1, **settings).with_training(checkpoints=saving)
    config = run.deepspeed_config() if strategy == "deepspeed" else None
    report = refused(run, contents(run.paths.root), FailureClass.STORAGE_FULL, "NoSpaceLeft", deepspeed=config)
    assert "checkpoints.keep" in report.failure.hint
    where, _, why = report.failure.message.partition(" is full: ")
    assert re.search(r"checkpoints/step-\d+\.partial$", where)
    assert re.match(r"the checkpoint of step \d+ needs more than the .* of 4\.0 MiB that were left", why)
    latest = run.paths.checkpoints / (run.paths.checkpoints / "latest").read_text().strip()
    assert verify(latest).manifest.step > 0
    assert not list(run.paths.checkpoints.glob("*.partial"))


def test_out_of_memory_has_its_own_class(finished, tmp_path: Path):
    from transformers import AutoTokenizer, BertConfig, BertModel

    # 200 MB of weights; gradients and Adam's two moments make 800 MB.
    big = tmp_path / "big"
    source = Path(finished.job.model.uri.removeprefix("file://"))
    config = BertConfig(
        vocab_size=100_000, hidden_size=512, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(big)
    AutoTokenizer.from_pretrained(source).save_pretrained(big)
    before = contents(finished.paths.root)
    model = finished.job.model.model_copy(update={"uri": f"file://{big}"})
    run = type(finished)(finished.workspace, finished.job.model_copy(update={"model": model}))
    # Address space of the libraries alone.
    peak = "next(line.split()[1] for line in open('/proc/self/status') if 'VmPeak' in line)"
    probe = f"import finetune_trainer.training.run; print({peak})"
    measured = subprocess.run(
        [sys.executable, "-c", probe], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    limit = int(measured.stdout.split()[-1]) * 1024 + 700 * 2**20
    report = refused(run, before, FailureClass.OUT_OF_MEMORY, "OutOfMemory", wrapper=["prlimit", f"--as={limit}"])
    assert "microBatchSize" in report.failure.hint


class Killed(list[int]):
    """Rows; a process that reads one is killed."""

    def __getitem__(self, index: Any) -> Any:
        signal.raise_signal(signal.SIGKILL)


def load_batch() -> None:
    from torch.utils.data import DataLoader

    list(DataLoader(Killed([0]), num_workers=1))  # type: ignore[arg-type]


def prepare_shard() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        pool.submit(signal.raise_signal, signal.SIGKILL).result()


@pytest.mark.parametrize("read", [load_batch, prepare_shard])
def test_killed_process_that_reads_rows_is_no_error_of_the_program(read: Callable[[], None]):
    with pytest.raises(RuntimeError) as caught:
        read()
    failure = classify(caught.value)
    assert (failure.failure_class, failure.reason, failure.exit_code) == (FailureClass.KILLED, "Killed", 137)


def test_report_uses_results_of_stages_and_survives_damaged_ones(finished):
    def write() -> subprocess.CompletedProcess[str]:
        job, workspace = finished.paths.root / "job.json", finished.workspace
        job.write_text(finished.job.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "finetune_trainer", "report", "--job", str(job), "--workspace", str(workspace)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    written = write()
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    page = finished.paths.report.read_text(encoding="utf-8")
    assert "polyline" in page
    assert "Loss, last 5 % of the steps" in page
    assert "transformers" in json.loads(finished.paths.environment.read_text(encoding="utf-8"))["versions"]

    finished.paths.metrics.write_text("{", encoding="utf-8")
    failed = write()
    assert failed.returncode == EXIT_CODES[FailureClass.PROGRAM]
    assert "DamagedFile" in failed.stderr
    assert "metrics.json is not JSON" in failed.stderr
    assert finished.paths.report.read_text(encoding="utf-8") == page
