"""Text classification with several classes a row, and with a number: trained, evaluated, predicted, and saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from finetune_contract.choices import SMOOTHED_TASKS, Task
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.check import Trains, check
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.label_forms import FORMS
from finetune_trainer.tasks.task_registry import task_parts
from trainer_support.tasks import (
    INFERENCE,
    predictions,
    read_lines,
    run_card,
    task_job,
    trained,
    training_of,
    write_lines,
)

TOPICS = {"sport": ["ball", "goal"], "food": ["soup", "bread"], "home": ["lamp", "chair"]}
OTHERS = ["the", "a", "was", "and", "we"]
WORDS = [*OTHERS, *(word for words in TOPICS.values() for word in words)]
SMALL = {**INFERENCE, "batch_tokens": 256}


def several(draw: random.Random) -> dict[str, Any]:
    """Return a text that has words of its topics; some have none."""
    topics = [topic for topic in TOPICS if draw.random() < 0.4]
    words = [draw.choice(TOPICS[topic]) for topic in topics] + draw.choices(OTHERS, k=draw.randint(2, 8))
    draw.shuffle(words)
    return {"text": " ".join(words), "label": topics}


def number(draw: random.Random) -> dict[str, Any]:
    """Return a text whose value is the share of its words that are of a topic."""
    words = draw.choices(WORDS, k=draw.randint(3, 12))
    return {"text": " ".join(words), "label": sum(word not in OTHERS for word in words) / len(words)}


MAKE: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "multi_label_classification": several,
    "regression": number,
}


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


def a_job(model: Path, data: Path, **training: Any) -> TrainerJob:
    """Return a job; `training` as in `training_of`."""
    usual = {"steps": 40, "micro": 4, "learning_rate": 5e-3, "threads": 1, "steps_per_epoch": 12}
    return task_job(
        "text-classification",
        model,
        data,
        ["text", "label"],
        training=training_of(**{**usual, **training}),
        preparation={"max_length": 32},
        evaluation=SMALL,
        predict={**SMALL, "columns": ("id",)},
    )


def rows_of(data: Path, split: str = "test") -> list[dict[str, Any]]:
    return read_lines(data / f"{split}.jsonl")


def plainly(paths: JobPaths, rows: Sequence[dict[str, Any]], labels: torch.Tensor) -> tuple[np.ndarray, float]:
    """Return logits and the mean loss of the model itself, row by row."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    logits, losses = [], []
    for row, label in zip(rows, labels, strict=True):
        with torch.inference_mode():
            outputs = network(**tokenizer(row["text"], return_tensors="pt"), labels=label[None])
        logits.append(outputs.logits[0].numpy())
        losses.append(outputs.loss.item())
    return np.stack(logits), float(np.mean(losses))


def test_several_classes_are_learnt_and_judged_as_a_plain_loop_would(
    model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    data = write_data(tmp_path / "data", "multi_label_classification")
    job, rows = trained(a_job(model, data), paths), rows_of(data)
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
    job, rows = trained(a_job(model, data), paths), rows_of(data)
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
    assert (next(iter(measured)), measured["baseline"]) == ("pearson", "always predicting the mean")
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
    trained(a_job(model, data, steps=2), paths)
    texts = write_lines(tmp_path / "ask" / "test.jsonl", [{"id": 1, "text": "the ball was a lamp"}])
    dataset = {"uri": f"file://{texts}", "columns": {"text": "text"}}
    job = a_job(paths.model, data)
    job = TrainerJob.model_validate(
        {
            **job.model_dump(),
            "training": None,
            "dataset": None,
            "evaluation": None,
            "predict": {**SMALL, "dataset": dataset},
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
    job = trained(a_job(model, write_data(tmp_path / "data", form), steps=2), paths)
    evaluate(job, paths, NoProgress())
    run_card(job, paths)


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


def test_a_separator_makes_several_classes_of_a_text_in_all_stages(
    model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    for split in ("train", "validation", "test"):
        lines = ["text,label", 'the ball,"sport, home"', "a soup,food", "the chair,home", "and we,", "a goal,sport"]
        (tmp_path / f"{split}.csv").write_text("\n".join([lines[0], *lines[1:] * 4]) + "\n", encoding="utf-8")
    plain = a_job(model, tmp_path, steps=2, micro=2, batch=2).model_copy(update={"predict": None})
    assert plain.dataset is not None
    job = plain.model_copy(update={"dataset": plain.dataset.model_copy(update={"label_separator": ","})})
    counts = {"food": 4, "home": 8, "sport": 8}
    assert [split.labels for split in check(job, trains=Trains()).splits] == [counts] * 3
    trained(job, paths)
    facts = PreparedData.open(paths).facts
    assert (facts.labels, facts.label_form) == (tuple(counts), "multi_label_classification")
    assert facts.label_counts == counts
    assert evaluate(job, paths, NoProgress())["evaluate"]["rows"] == 20
    rows = [{"label": ["sport", "home"]}, {"label": ["food"]}, {"label": ["home"]}, {"label": []}, {"label": ["sport"]}]
    flags = PreparedData.open(paths).of("test").lists("flags")[:5]
    assert [list(row) for row in flags] == [[int(name in row["label"]) for name in counts] for row in rows]


def test_a_split_of_another_form_is_refused(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    data = write_data(tmp_path / "data", "multi_label_classification")
    write_lines(data / "test.jsonl", [{"id": 0, "text": "the ball", "label": "sport"}])
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.DATA, "LabelType")
    assert "Split test" in caught.value.message
    assert "multi label classification" in caught.value.message


@pytest.mark.parametrize(
    ("labels", "reason", "text"),
    [
        (["sport", None], "NullLabel", "or an empty list"),
        (["sport", "sport"], "LabelTwice", "a row has a label once"),
    ],
)
def test_bad_lists_are_refused_with_their_row(
    labels: list[Any], reason: str, text: str, model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    data = write_data(tmp_path / "data", "multi_label_classification")
    rows = rows_of(data, "train")
    rows[4]["label"] = labels
    write_lines(data / "train.jsonl", rows)
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.reason, "row 5" in caught.value.message, text in caught.value.message) == (reason, True, True)


@pytest.mark.parametrize(
    ("gate", "met"),
    [
        ({"metric": "spearmanr", "minimum": -1.0}, True),
        ({"metric": "mse", "maximum": 1e9}, True),
        ({"metric": "mse", "maximum": 0.0}, False),
    ],
    ids=str,
)
def test_a_gate_is_a_least_or_a_greatest_value(
    gate: dict[str, Any], met: bool, model: Path, tmp_path: Path, paths: JobPaths
) -> None:
    job = trained(a_job(model, write_data(tmp_path / "data", "regression"), steps=2), paths)
    job = TrainerJob.model_validate({**job.model_dump(), "evaluation": {**SMALL, "gate": gate}})
    if met:
        evaluate(job, paths, NoProgress())
        return
    with pytest.raises(StageError) as caught:
        evaluate(job, paths, NoProgress())
    assert caught.value.reason == "GateNotMet"


def test_smoothing_is_for_one_class_a_row(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    with pytest.raises(StageError) as caught:
        trained(a_job(model, write_data(tmp_path / "data", "regression"), label_smoothing=0.1), paths)
    assert caught.value.reason == "LabelSmoothing"


def test_early_stopping_by_an_error_keeps_the_smallest(model: Path, tmp_path: Path, paths: JobPaths) -> None:
    stopping = {"metric": "mse", "patience": 100}
    trained(a_job(model, write_data(tmp_path / "data", "regression"), early_stopping=stopping), paths)
    errors = {line["step"]: line["eval_mse"] for line in read_lines(paths.history) if "eval_mse" in line}
    (kept,) = (paths.checkpoints / "best").iterdir()
    assert kept.name == f"step-{min(errors, key=lambda step: errors[step])}.safetensors"


def test_float_labels_equal_to_the_ignored_index_count_as_rows() -> None:
    batch = {"labels": torch.tensor([-100.0, 0.5])}
    assert int(task_parts("text-classification").encoding.items(batch)) == 2


def test_tasks_with_smoothed_labels_are_those_of_the_contract() -> None:
    smoothed = {task for task in get_args(Task) if task_parts(task).head.label_place}
    assert smoothed == set(SMOOTHED_TASKS)


def test_labels_that_occur_nowhere_are_no_part_of_a_mean_as_in_sklearn() -> None:
    from sklearn.metrics import f1_score, precision_score, recall_score

    right = np.array([0, 0, 2, 2, 2])
    for answers in (right, np.array([0, 2, 2, 2, 0]), np.array([0, 3, 2, 2, 0])):
        logits = np.eye(5, dtype=np.float32)[answers]
        measured = FORMS["single_label_classification"].measured(logits, right, "abcde")
        for name, score in {"f1": f1_score, "precision": precision_score, "recall": recall_score}.items():
            assert measured[name] == score(right, answers, average="macro", zero_division=0)
    assert FORMS["single_label_classification"].measured(np.eye(5)[right], right, "abcde")["f1"] == 1.0
    flags = np.array([[1, 0, 0], [1, 0, 1]])
    several = FORMS["multi_label_classification"]
    assert several.measured(flags - 0.5, flags, "abc")["f1"] == 1.0
    answers = np.array([[1, 0, 1], [0, 0, 1]])
    expected = f1_score(flags[:, [0, 2]], answers[:, [0, 2]], average="macro")
    assert several.measured(answers - 0.5, flags, "abc")["f1"] == pytest.approx(expected)
    assert several.measured(flags * 0.0, flags * 0, "abc")["f1"] == 0.0  # there is no label at all
