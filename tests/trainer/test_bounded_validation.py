"""Validation during a sharded training computes batches that fit the process with the least memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_contract.choices import Task
from finetune_contract.trainer_job import Pipeline, Strategy
from finetune_trainer.devices.pass_memory import MARGIN, CudaMemory, fitted_tokens
from trainer_support.forking import fork_server
from trainer_support.tasks import lines_with, task_job, texts, training_of, write_decoder, write_lines

MUCH = 10_000
LENGTH = 32
"""Tokens of the longest row."""
LEAST = 100
"""Tokens that fit the smallest device. A validation batch is planned with up to 4 x 8 rows of 32."""
COLUMNS: dict[Task, list[str]] = {"text-generation": ["text"], "preference-tuning": ["prompt", "chosen", "rejected"]}
CASES = {
    "fsdp": Strategy(name="fsdp"),
    "ZeRO-3": Strategy(name="deepspeed", zero_stage=3),
    "tensor": Strategy(name="ddp", tensor=2),
    "pipeline": Strategy(name="ddp", pipeline=Pipeline(degree=2, micro_batches=2, schedule="1f1b")),
    "sequence": Strategy(name="ddp", sequence=2),
    "fsdp over sequence": Strategy(name="fsdp", sequence=2),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, prepared: Callable[..., Any]) -> Callable[[Task], Any]:
    """Return a function: task -> a training in one process with whole validation batches, after its end."""
    data, made = tmp_path_factory.mktemp("data"), {}
    for seed, (split, count) in enumerate({"train": 32, "validation": 41}.items()):
        rows = [{**row, "prompt": "the cat", "chosen": row["text"], "rejected": "a"} for row in texts(count, seed, 25)]
        write_lines(data / f"{split}.jsonl", rows)

    def run(task: Task) -> Any:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            settings: dict[str, Any] = {"training": training_of(steps=4, threads=1), "predict": None}
            settings["preparation"] = {"max_length": LENGTH}
            job = task_job(task, write_decoder(folder / "model", "llama"), data, COLUMNS[task], **settings)
            made[task] = prepared(folder / "bench", job)
            made[task].train_here()
        return made[task]

    return run


def validations(run: Any) -> list[dict[str, float]]:
    lines = lines_with(run.paths, "eval_loss")
    return [{name: value for name, value in line.items() if name.startswith("eval_")} for line in lines]


def sharded(whole: Any, strategy: Strategy, folder: Path, limits: list[int]) -> tuple[Any, str, list[dict[str, Any]]]:
    """Train in as many processes as `limits`, the tokens that fit the device of each. Return the run, the output, and
    what each process found.
    """
    processes = len(limits)
    run = whole.at(folder / "w").in_replicas(strategy, processes // strategy.replica_ranks, micro=8)
    case = run.case(processes=processes, deepspeed=run.deepspeed_config() if strategy.name == "deepspeed" else None)
    arguments = {"arguments": case["arguments"], "limits": limits, "out": str(folder)}
    call = "process_support.bounded_validation:train"
    codes, output = fork_server().run({**case, "call": call, "arguments": arguments})
    assert codes == [0] * processes, output
    return run, output, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("name", CASES)
def test_validation_batches_fit_process_with_least_memory(name: str, whole: Any, tmp_path: Path) -> None:
    strategy, alone = CASES[name], whole("text-generation")
    processes = 4 if name == "fsdp over sequence" else 2
    limits = [MUCH] * (processes - 1) + [LEAST // strategy.sequence]
    run, output, found = sharded(alone, strategy, tmp_path, limits)
    bound = re.search(r"Batches of the validation split have at most (\d+) padded tokens, and not 1,024", output)
    assert bound is not None, output
    assert 0.9 * MARGIN * LEAST < int(bound[1]) <= MARGIN * LEAST
    for each in found:
        # One row, then two; the second validation uses the result of the first.
        assert each["probes"] == 2
        assert LEAST // 2 < strategy.sequence * max(each["tried"]) <= MARGIN * LEAST
    assert len(validations(run)) == 2
    for ours, theirs in zip(validations(run), validations(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_reference_answers_fit_process_with_least_memory(whole: Any, tmp_path: Path) -> None:
    alone = whole("preference-tuning")
    run, output, found = sharded(alone, CASES["fsdp"], tmp_path, [MUCH, LEAST])
    # The answers before the training have batches of their own.
    for split, times in {"train": 1, "validation": 2}.items():
        assert output.count(f"Batches of the {split} split have at most") == times, output
    assert all(max(each["tried"]) <= MARGIN * LEAST for each in found)
    for ours, theirs in zip(validations(run), validations(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_validation_of_whole_copies_is_not_measured(whole: Any, tmp_path: Path) -> None:
    _, output, found = sharded(whole("text-generation"), Strategy(name="ddp"), tmp_path, [MUCH, MUCH])
    assert "padded tokens" not in output
    assert [each["probes"] for each in found] == [0, 0]


@pytest.mark.parametrize(
    ("room", "fixed", "bound", "tried"),
    [
        pytest.param(10_000, 0, 640, [1, 4, 16, 64], id="budget"),
        pytest.param(100, 0, 80, [1, 4, 8], id="linear"),
        pytest.param(1_000, 200, 553, [1, 3, 10, 26, 45], id="weights that a pass gathers"),
        pytest.param(10, 0, 8, [1], id="less than the widest row needs with the margin"),
    ],
)
def test_probes_grow_within_estimate_of_former_probe(room: int, fixed: int, bound: int, tried: list[int]) -> None:
    widths, passed = np.array([10, 3, 7] * 30), []

    def share_of(wanted: Any) -> float:
        assert set(wanted.tolist()) == {0}
        passed.append(len(wanted))
        needed = fixed + 10 * len(wanted)
        assert needed <= room
        return room / needed

    assert fitted_tokens(share_of, widths, 640, first=10, least_growth=1.5) == bound
    assert passed == tried


def test_reported_peaks_outlast_reset_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"max_memory_allocated": 70, "max_memory_reserved": 90}
    now = {"memory_allocated": 40, "memory_reserved": 50, "mem_get_info": (30, 100), "empty_cache": None}
    monkeypatch.setattr(CudaMemory, "_before", (0, 0))
    for name in peaks:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: peaks[name])
    for name, value in now.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: peaks.update(max_memory_allocated=40, max_memory_reserved=50)
    )
    memory = CudaMemory()
    memory.begin()
    peaks["max_memory_allocated"] = 50
    assert memory.share() == (30 + 50 - 40) / (50 - 40)
    assert CudaMemory.peaks() == (70, 90)
    memory.begin()
    peaks.update(max_memory_allocated=80, max_memory_reserved=95)
    assert CudaMemory.peaks() == (80, 95)
