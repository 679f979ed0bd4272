"""Processes that hold one model agree on batches that fit the one with the least memory, before the first of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.devices.pass_memory import MARGIN, probe
from finetune_trainer.predict import predict as stage
from finetune_trainer.predict.predict import predict_as
from finetune_trainer.predict.runner import answers_of, fitted_budgets
from finetune_trainer.predict.tensor_group import ProbedWay, WholeModel
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_registry import task_parts
from finetune_trainer.tasks.writing import WRITTEN
from process_support.group_batches import BATCH_TOKENS, SmallMemory
from trainer_support.forking import fork_server
from trainer_support.tasks import WORDS, task_job, write_decoder, write_lines

LENGTHS = [1 + at * 7 % 20 for at in range(30)] + [35]
"""Words of each row; the last is wider than the batches of the smallest memory."""
MUCH = 10_000


@pytest.mark.parametrize(
    ("stage", "limits", "least"),
    [
        pytest.param(Stage.EVALUATE, [MUCH, MUCH, MUCH, 40], 40, id="evaluation by two models"),
        pytest.param(Stage.PREDICT, [MUCH, 160], 160, id="generation"),
    ],
)
def test_batches_fit_the_process_with_the_least_memory(
    stage: Stage, limits: list[int], least: int, tmp_path: Path, paths: JobPaths
) -> None:
    rows = [{"text": " ".join(WORDS[(at + each) % len(WORDS)] for each in range(n))} for at, n in enumerate(LENGTHS)]
    data = write_lines(tmp_path / "data" / "test.jsonl", rows)
    model = write_decoder(tmp_path / "model")
    changes: dict[str, Any] = {"generation": {"max_new_tokens": 8}, "preparation": {"max_length": 48}}
    job = task_job("text-generation", model, data, ["text"], **changes)
    prepare(job, paths, NoProgress())
    case = {
        "processes": len(limits),
        "call": "process_support.group_batches:answer",
        "arguments": {
            "job": job.model_dump(mode="json"),
            "root": str(paths.root),
            "stage": str(stage),
            "limits": limits,
            "out": str(tmp_path),
        },
        "environment": {},
        "log": str(tmp_path / "log"),
    }
    codes, output = fork_server().run(case)
    assert codes == [0] * len(limits), output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(limits))]
    (budget,) = found[0]["budgets"]
    assert 0.9 * MARGIN * least < budget < 1.1 * MARGIN * least
    assert all(each["budgets"] in ([budget], []) for each in found)
    # Also those with more memory; a pass that exceeds its process's memory would fail.
    assert all(max(each["tried"]) <= least for each in found)
    assert [each["tried"] for each in found[::2]] == [each["tried"] for each in found[1::2]]

    network = task_parts(job.task).head.load_model(job, str(model), {}, torch.float32)
    split = PreparedData.open(paths).of("test")
    how: dict[str, Any] = {"device": "cpu", "batch_tokens": BATCH_TOKENS, "progress": NoProgress()}
    alone = answers_of(stage, job, network, split, **how)
    assert fitted_budgets(stage, job, network, split, batch_tokens=BATCH_TOKENS) == [BATCH_TOKENS]
    if stage is Stage.PREDICT:
        assert found[0]["texts"] == [str(each[WRITTEN]) for each in alone]
    else:
        for mine, theirs in zip(found[0]["losses"], alone, strict=True):
            np.testing.assert_allclose(mine, theirs["nll"], rtol=1e-4, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class SmallGroup(WholeModel):
    """Processes of one model, of which the others have less memory than a planned batch takes."""

    memory: SmallMemory
    size: int = 2

    def loaded(self, empty: Callable[[], Any], load: Callable[[Mapping[str, Any]], Any]) -> Any:
        model = load({})
        self.memory.limit(model)
        return model

    def fitted(self, way: ProbedWay, budget: int) -> int:
        return min(budget, self.memory.tokens)


def test_prediction_computes_batches_that_the_group_agreed_on(tmp_path: Path, paths: JobPaths) -> None:
    data = write_lines(tmp_path / "data" / "rows.jsonl", [{"text": " ".join(WORDS[:n])} for n in LENGTHS])
    rows = {"uri": f"file://{data}", "columns": {"text": "text"}}
    predicts = {"device": "cpu", "batch_tokens": BATCH_TOKENS, "dataset": rows, "max_bad_share": 0.0}
    model = write_decoder(tmp_path / "model")
    changes: dict[str, Any] = {"generation": {"max_new_tokens": 8}, "predict": predicts, "dataset": None}
    job = task_job("text-generation", model, tmp_path, ["text"], evaluation=None, **changes)
    group = SmallGroup(memory=SmallMemory(100))
    assert predict_as(None, job, paths, NoProgress(), group=group)["rows"] == len(LENGTHS)
    assert 50 < max(group.memory.tried) <= 100


class Stopped(NoProgress):
    """Ends an attempt with its first rows."""

    def update(self, step: int, total: int, **values: float) -> None:
        raise KeyboardInterrupt


def test_retry_on_a_gpu_computes_the_halved_batches_of_the_first_attempt(
    tmp_path: Path, paths: JobPaths, tiny_bert: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is in the manifest, so that a GPU with more memory writes the same bytes."""
    data = write_lines(tmp_path / "data" / "rows.jsonl", [{"text": " ".join(WORDS[:n])} for n in LENGTHS])
    rows = {"uri": f"file://{data}", "columns": {"text": "text"}}
    predicts = {"device": "cuda", "batch_tokens": BATCH_TOKENS, "dataset": rows}
    model = tiny_bert(tmp_path / "model", words=WORDS, labels=("a", "b"))
    job = task_job("text-classification", model, tmp_path, ["text"], evaluation=None, predict=predicts, dataset=None)
    memory = SmallMemory(100)
    monkeypatch.setattr(stage, "settle", lambda network, _device: memory.limit(network))
    with pytest.raises(KeyboardInterrupt):
        predict_as(None, job, paths, Stopped())
    halved = BATCH_TOKENS // 8
    first = list(memory.tried)
    assert [each > 100 for each in first] == [True] * 3 + [False] * (len(first) - 3)
    assert max(first[3:]) <= halved
    memory.tokens = MUCH
    memory.tried.clear()
    assert predict_as(None, job, paths, NoProgress())["rows"] == len(LENGTHS)
    assert max(memory.tried) <= halved


@pytest.mark.parametrize(
    ("tokens", "at", "rows"), [(1, 1, 1), (5, 1, 1), (14, 0, 2), (29, 0, 4), (30, 2, 1), (95, 2, 3)]
)
def test_probe_repeats_the_widest_row_that_fits(tokens: int, at: int, rows: int) -> None:
    assert probe(np.array([7, 3, 30]), tokens).tolist() == [at] * rows
