"""Text classification with several classes a row, and with a number: learnt, judged, predicted, and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_contract.job import TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.data.prepare import prepare
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.failures import StageError
from finetune_trainer.inference.evaluate import evaluate
from finetune_trainer.inference.predict import predict
from finetune_trainer.progress import NoProgress
from finetune_trainer.tasks.base import task_module

TOPICS = {"sport": ["ball", "goal"], "food": ["soup", "bread"], "home": ["lamp", "chair"]}
OTHERS = ["the", "a", "was", "and", "we"]
WORDS = [*OTHERS, *(word for words in TOPICS.values() for word in words)]
INFERENCE: dict[str, Any] = {"device": "cpu", "batch_tokens": 256}


def several(draw: random.Random) -> dict[str, Any]:
    """A text that has words of its topics; some have none."""
    topics = [topic for topic in TOPICS if draw.random() < 0.4]
    words = [draw.choice(TOPICS[topic]) for topic in topics] + draw.choices(OTHERS, k=draw.randint(2, 8))
    draw.shuffle(words)
    return {"text": " ".join(words), "label": topics}


def number(draw: random.Random) -> dict[str, Any]:
    """A text whose value is the share of its words that are of a topic."""
    words = draw.choices(WORDS, k=draw.randint(3, 12))
    return {"text": " ".join(words), "label": sum(word not in OTHERS for word in words) / len(words)}


MAKE: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "multi_label_classification": several,
    "regression": number,
}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_data(folder: Path, form: str) -> Path:
    for seed, (split, count) in enumerate({"train": 200, "validation": 20, "test": 40}.items()):
        draw = random.Random(seed)
        write_lines(folder / f"{split}.jsonl", [{"id": i, **MAKE[form](draw)} for i in range(count)])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(
        tmp_path_factory.mktemp("model") / "m", words=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    return JobPaths(tmp_path / "job")


def a_job(model: Path, data: Path, **training: Any) -> TrainerJob:
    section = {
        "max_steps": 40,
        "steps_per_epoch": 12,
        "learning_rate": 5e-3,
        "scheduler": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optimizer": "adamw",
        "seed": 11,
        "label_smoothing": 0.0,
        "precision": "fp32",
        "strategy": {"name": "single"},
        "batch": {"global_batch_size": 16, "micro_batch_size": 4, "gradient_accumulation": 4, "data_parallel": 1},
        "world": {"nodes": 1, "processes_per_node": 1, "device": "cpu", "threads_per_process": 1},
        "checkpoints": {"every_steps": 1000, "keep": 2},
        **training,
    }
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{model}"},
            "dataset": {"uri": f"file://{data}", "columns": {"text": "text", "label": "label"}},
            "preparation": {"max_length": 32},
            "training": section,
            "evaluation": INFERENCE,
            "predict": {**INFERENCE, "columns": ("id",)},
        }
    )


def train(job: TrainerJob, paths: JobPaths) -> TrainerJob:
    from finetune_trainer.distributed import ProcessWorld
    from finetune_trainer.training.interruption import Interruption
    from finetune_trainer.training.run import train as run

    prepare(job, paths, NoProgress())
    run(job, paths, NoProgress(), world=ProcessWorld(), deepspeed=None, interruption=Interruption())
    paths.state.mkdir(exist_ok=True)
    (paths.state / "train.json").write_text("{}")
    return job


def rows_of(data: Path, split: str = "test") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def predictions(paths: JobPaths) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.predictions_jsonl.read_text(encoding="utf-8").splitlines()]


def plainly(paths: JobPaths, rows: Sequence[dict[str, Any]], labels: torch.Tensor) -> tuple[np.ndarray, float]:
    """Logits and the mean loss of the model itself, row by row."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    logits, losses = [], []
    for row, label in zip(rows, labels, strict=True):
        with torch.inference_mode():
            said = network(**tokenizer(row["text"], return_tensors="pt"), labels=label[None])
        logits.append(said.logits[0].numpy())
        losses.append(said.loss.item())
    return np.stack(logits), float(np.mean(losses))


def test_several_classes_are_learnt_and_judged_as_a_plain_loop_would(
    model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    data = write_data(tmp_path / "data", "multi_label_classification")
    job, rows = train(a_job(model, data), paths), rows_of(data)
    facts, names = PreparedData.open(paths).facts, sorted(TOPICS)
    assert (facts.labels, facts.label_form) == (tuple(names), "multi_label_classification")
    assert facts.label_counts == {name: sum(name in row["label"] for row in rows_of(data, "train")) for name in names}
    gold = np.array([[name in row["label"] for name in names] for row in rows], np.int32)
    logits, loss = plainly(paths, rows, torch.from_numpy(gold.astype(np.float32)))
    sections = evaluate(job, paths, NoProgress())
    measured = sections["evaluate"]
    assert measured["loss"] == pytest.approx(loss, rel=1e-4)
    assert measured["f1"] == pytest.approx(f1_score(gold, logits > 0, average="macro", zero_division=0))
    assert measured["accuracy"] == pytest.approx(accuracy_score(gold, logits > 0))
    assert measured["f1"] > sections["majority"]["f1"] + 0.2
    predict(job, paths, NoProgress())
    for line, row, scores in zip(predictions(paths), rows, logits, strict=True):
        assert line["id"] == row["id"]
        assert line["labels"] == [name for name, score in zip(names, scores, strict=True) if score > 0]
        assert line["scores"] == pytest.approx(
            {name: 1 / (1 + np.exp(-float(score))) for name, score in zip(names, scores, strict=True)}, abs=1e-5
        )


def test_a_number_is_learnt_and_judged_as_a_plain_loop_would(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    from scipy.stats import spearmanr

    data = write_data(tmp_path / "data", "regression")
    job, rows = train(a_job(model, data), paths), rows_of(data)
    facts = PreparedData.open(paths).facts
    assert (facts.labels, facts.label_form, facts.label_counts) == ((), "regression", {})
    gold = np.array([row["label"] for row in rows])
    logits, loss = plainly(paths, rows, torch.tensor(gold, dtype=torch.float32))
    sections = evaluate(job, paths, NoProgress())
    measured = sections["evaluate"]
    assert measured["loss"] == measured["mse"] == pytest.approx(loss, rel=1e-4)
    assert measured["pearson"] == pytest.approx(np.corrcoef(gold, logits[:, 0])[0, 1], rel=1e-4)
    assert measured["spearmanr"] == pytest.approx(spearmanr(gold, logits[:, 0])[0], rel=1e-4)
    assert measured["r2"] > 0.5
    assert sections["majority"] == {
        "pearson": 0.0, "spearmanr": 0.0, "r2": pytest.approx(0.0, abs=1e-9),
        "mse": pytest.approx(gold.var()), "mae": pytest.approx(np.abs(gold - gold.mean()).mean()),
    }  # fmt: skip
    predict(job, paths, NoProgress())
    assert [line["value"] for line in predictions(paths)] == pytest.approx(logits[:, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("form", MAKE)
def test_a_model_that_is_not_trained_here_keeps_the_form(
    form: str, model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    data = write_data(tmp_path / "data", form)
    train(a_job(model, data, max_steps=2), paths)
    texts = write_lines(tmp_path / "ask" / "test.jsonl", [{"id": 1, "text": "the ball was a lamp"}])
    ask = {"uri": f"file://{texts}", "columns": {"text": "text"}}
    job = a_job(paths.model, data)
    job = TrainerJob.model_validate(
        {
            **job.model_dump(),
            "training": None,
            "dataset": None,
            "evaluation": None,
            "predict": {**INFERENCE, "dataset": ask},
        }
    )
    again = JobPaths(tmp_path / "again")
    prepare(job, again, NoProgress())
    assert PreparedData.open(again).facts.label_form == form
    predict(job, again, NoProgress())
    (line,) = predictions(again)
    assert set(line) == {"row", *({"value"} if form == "regression" else {"labels", "scores"})}


@pytest.mark.parametrize("form", MAKE)
def test_the_card_s_own_lines_run(form: str, model: Path, tmp_path: Path, paths: JobPaths) -> None:
    import re

    job = train(a_job(model, write_data(tmp_path / "data", form), max_steps=2), paths)
    evaluate(job, paths, NoProgress())
    card = (paths.model / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    exec(code[1].replace(repr(f"{job.name}/model"), repr(str(paths.model))), {})


def test_numbers_written_as_text_are_numbers_and_whole_ones_are_classes(
    model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    for labels, form in ((["0.5", "1.25", "-3.0"], "regression"), (["0", "1", "2"], "single_label_classification")):
        lines = ["text,label", *(f"the ball,{labels[i % 3]}" for i in range(30))]
        file = tmp_path / form / "train.csv"
        file.parent.mkdir()
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        there = JobPaths(tmp_path / f"job-{form}")
        prepare(a_job(model, file).model_copy(update={"predict": None}), there, NoProgress())
        assert PreparedData.open(there).facts.label_form == form


def test_a_split_of_another_form_is_refused(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    data = write_data(tmp_path / "data", "multi_label_classification")
    write_lines(data / "test.jsonl", [{"id": 0, "text": "the ball", "label": "sport"}])
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.DATA, "LabelType")
    assert "Split test" in caught.value.message
    assert "multi label classification" in caught.value.message


@pytest.mark.parametrize(
    ("labels", "reason", "said"),
    [
        (["sport", None], "NullLabel", "or an empty list"),
        (["sport", "sport"], "LabelTwice", "a row has a label once"),
    ],
)
def test_bad_lists_are_refused_with_their_row(
    labels: list[Any], reason: str, said: str, model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    data = write_data(tmp_path / "data", "multi_label_classification")
    rows = rows_of(data, "train")
    rows[4]["label"] = labels
    write_lines(data / "train.jsonl", rows)
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.reason, "row 5" in caught.value.message, said in caught.value.message) == (reason, True, True)


@pytest.mark.parametrize(("metric", "good"), [("spearmanr", True), ("mse", False)])
def test_a_gate_takes_what_is_better_when_it_is_greater(
    metric: str, good: bool, model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    job = train(a_job(model, write_data(tmp_path / "data", "regression"), max_steps=2), paths)
    gate = {"metric": metric, "minimum": -1.0}
    job = TrainerJob.model_validate({**job.model_dump(), "evaluation": {**INFERENCE, "gate": gate}})
    if good:
        evaluate(job, paths, NoProgress())
        return
    with pytest.raises(StageError) as caught:
        evaluate(job, paths, NoProgress())
    assert (caught.value.reason, "evaluation.gate.metric is 'mse'" in caught.value.message) == ("UnknownMetric", True)


def test_smoothing_is_for_one_class_a_row(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    with pytest.raises(StageError) as caught:
        train(a_job(model, write_data(tmp_path / "data", "regression"), label_smoothing=0.1), paths)
    assert caught.value.reason == "LabelSmoothing"


def test_early_stopping_by_an_error_keeps_the_smallest(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    stopping = {"metric": "mse", "patience": 100}
    train(a_job(model, write_data(tmp_path / "data", "regression"), early_stopping=stopping), paths)
    lines = [json.loads(line) for line in paths.history.read_text().splitlines()]
    told = {line["step"]: line["eval_mse"] for line in lines if "eval_mse" in line}
    (kept,) = (paths.checkpoints / "best").iterdir()
    assert kept.name == f"step-{min(told, key=lambda step: told[step])}.pt"


def test_items_are_rows_also_where_a_number_is_what_others_leave_out() -> None:
    batch = {"labels": torch.tensor([-100.0, 0.5])}
    assert int(task_module("text-classification").items(batch)) == 2
