"""A prediction's memory does not grow with its rows: by counts of objects, and of returns to the kernel."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data import row_shards
from finetune_trainer.predict import predict as stage
from finetune_trainer.predict.prediction_parts import PartFacts, Parts
from trainer_support.tasks import freeze_heap

ROWS = 3200
SHARDS = 32
PART_BLOCKS = 60
"""Python allocations that may stay of a part of 100 rows: its key and facts. Its rows would be more than 100."""


@pytest.fixture
def job(tmp_path: Path, tiny_bert: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> TrainerJob:
    model = tiny_bert(tmp_path / "m", words=["word"], labels=("bad", "good"))
    line = json.dumps({"text": "word word"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(line * ROWS, encoding="utf-8")
    monkeypatch.setattr(row_shards, "LEAST_BYTES", len(line) * ROWS // SHARDS)
    rows = {"uri": f"file://{tmp_path}/rows.jsonl", "columns": {"text": "text"}}
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{model}"},
            "predict": {"device": "cpu", "batch_tokens": 4096, "dataset": rows},
        }
    )


def test_answered_rows_leave_no_memory_and_freed_memory_is_returned(
    job: TrainerJob, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []
    given_back: list[int] = []
    write = Parts.write

    def counted(*arguments: object) -> PartFacts:
        facts = write(*arguments)  # type: ignore[arg-type]
        gc.collect()
        blocks.append(sys.getallocatedblocks())
        return facts

    freeze_heap()
    monkeypatch.setattr(Parts, "write", counted)
    monkeypatch.setattr(stage, "give_back_freed_memory", lambda: given_back.append(len(blocks)))
    assert stage.predict(job, paths, NoProgress())["rows"] == ROWS
    assert len(blocks) == SHARDS
    assert given_back == list(range(stage.GIVE_BACK_EVERY, SHARDS + 1, stage.GIVE_BACK_EVERY))
    half = SHARDS // 2
    assert (blocks[-1] - blocks[half]) / (SHARDS - 1 - half) < PART_BLOCKS
