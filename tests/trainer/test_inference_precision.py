"""Evaluation and prediction in bf16, where the plan requests it, of every task."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_contract.choices import InferencePrecision, Task
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.predict.runner import model_to_use, reference_model
from finetune_trainer.report.reporting import write_report
from finetune_trainer.tasks.task_registry import task_of
from trainer_support.tasks import (
    WORDS,
    predictions,
    task_job,
    trained,
    training_of,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

LABELS = ("bad", "so-so", "good")


def random_text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def row_of(draw: random.Random, number: int) -> dict[str, Any]:
    """Return a row with columns for every task."""
    text = random_text(draw, 12)
    tokens = text.split()
    return {
        "text": text,
        "masked": f"{text} [MASK] {random_text(draw, 3)}",
        "label": LABELS[number % 3],
        "labels": sorted({LABELS[number % 3], LABELS[number % 2]}),
        "amount": float(len(tokens)),
        "tokens": tokens,
        "tags": ["B-animal" if token in ("cat", "dog", "bird") else "O" for token in tokens],
        "question": random_text(draw, 4),
        "answers": {"text": [tokens[-1]], "answer_start": [len(text) - len(tokens[-1])]},
        "prompt": random_text(draw, 4),
        "chosen": random_text(draw, 6),
        "rejected": random_text(draw, 6),
        "target": random_text(draw, 4),
    }


TASKS: dict[str, tuple[Task, str, dict[str, str]]] = {
    "one label": ("text-classification", "bert", {"text": "text", "label": "label"}),
    "several labels": ("text-classification", "bert", {"text": "text", "label": "labels"}),
    "a number": ("text-classification", "bert", {"text": "text", "label": "amount"}),
    "tags": ("token-classification", "bert", {"tokens": "tokens", "tags": "tags"}),
    "answers": ("question-answering", "bert", {"question": "question", "context": "text", "answers": "answers"}),
    "hidden words": ("masked-lm", "bert", {"text": "masked"}),
    "text of llama": ("text-generation", "llama", {"text": "text"}),
    "text of gpt2": ("text-generation", "gpt2", {"text": "text"}),
    "preferences": ("preference-tuning", "llama", {name: name for name in ("prompt", "chosen", "rejected")}),
    "summaries": ("summarization", "t5", {"source": "text", "target": "target"}),
    "translations": ("translation", "bart", {"source": "text", "target": "target"}),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for seed, (split, count) in enumerate({"train": 32, "validation": 6, "test": 24}.items()):
        draw = random.Random(seed)
        write_lines(folder / f"{split}.jsonl", [row_of(draw, number) for number in range(count)])
    return folder


def a_model(folder: Path, family: str, tiny_bert: Callable[..., Path]) -> Path:
    """Write a random model; its weights are large enough for rows to differ."""
    match family:
        case "bert":
            return tiny_bert(folder, words=WORDS, initializer_range=0.2)
        case "t5" | "bart":
            return write_encoder_decoder(folder, family)
        case _:
            return write_decoder(folder, family, initializer_range=0.2)


def at(job: TrainerJob, precision: InferencePrecision) -> TrainerJob:
    assert job.evaluation is not None
    assert job.predict is not None
    return job.model_copy(
        update={
            "evaluation": job.evaluation.model_copy(update={"precision": precision}),
            "predict": job.predict.model_copy(update={"precision": precision}),
        }
    )


def figures(node: object) -> list[float]:
    """Return all numbers in a prediction, in order."""
    match node:
        case dict():
            return [number for value in node.values() for number in figures(value)]
        case list():
            return [number for value in node for number in figures(value)]
        case float():
            return [node]
        case _:
            return []


@pytest.mark.parametrize("case", TASKS)
def test_each_task_is_evaluated_and_predicts_in_bf16_about_as_in_fp32(
    case: str, rows: Path, tmp_path: Path, paths: JobPaths, tiny_bert: Callable[..., Path], caplog: Any
):
    task, family, columns = TASKS[case]
    job = task_job(
        task,
        a_model(tmp_path / "model", family, tiny_bert),
        rows,
        columns,
        training=training_of(steps=3),
        generation={"max_new_tokens": 4},
        preparation={"max_length": 32},
    )
    trained(job, paths)
    measured, results, predicted = {}, {}, {}
    for precision in ("fp32", "bf16"):
        requested = at(job, precision)
        caplog.clear()
        with caplog.at_level("INFO", "finetune_trainer.predict"):
            measured[precision] = evaluate(requested, paths, NoProgress())["evaluate"]
            results[precision] = predict(requested, paths, NoProgress())
        assert ("computes in bf16" in caplog.text) == (precision == "bf16")
        predicted[precision] = predictions(paths)
    assert json.loads(paths.metrics.read_text())["evaluate"] == measured["bf16"]
    card = (paths.model / "README.md").read_text(encoding="utf-8")
    assert ("test split in bf16." in card) == ("## Results" in card)
    write_report(job, None, paths)
    assert "test split in bf16" in (paths.root / "report.html").read_text(encoding="utf-8")
    assert [(measured[each].get("computed_in"), results[each].get("computed_in")) for each in measured] == [
        (None, None),
        ("bf16", "bf16"),
    ]
    # Rounding to bf16 is off by up to 2^-9, 0.2 percent. Measured: losses by up to 0.18 percent.
    loss = {precision: found["loss"] for precision, found in measured.items()}
    assert loss["bf16"] == pytest.approx(loss["fp32"], rel=0.01)
    assert loss["bf16"] != pytest.approx(loss["fp32"], rel=1e-6), "computed in fp32 all the same"
    assert len(predicted["bf16"]) == len(predicted["fp32"]) == 24
    assert [row.keys() for row in predicted["bf16"]] == [row.keys() for row in predicted["fp32"]]
    if task in ("text-classification", "token-classification"):
        numbers = {
            precision: np.array([number for row in found for number in figures(row)])
            for precision, found in predicted.items()
        }
        assert len(numbers["bf16"]) >= 24
        np.testing.assert_allclose(numbers["bf16"], numbers["fp32"], atol=0.05, rtol=0.05)


def test_weights_and_reference_have_the_requested_dtype(rows: Path, tmp_path: Path, paths: JobPaths):
    model = write_decoder(tmp_path / "model")
    job = task_job("preference-tuning", model, rows, TASKS["preferences"][2], training=training_of(steps=1))
    trained(job, paths)
    wanted: dict[InferencePrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for precision, dtype in wanted.items():
        judged_one = model_to_use(job, paths, PreparedData.open(paths), precision)
        before = reference_model(job, task_of(job).head, precision)
        assert {each.dtype for network in (judged_one, before) for each in network.parameters()} == {dtype}
