"""Checkpoints whose head is trained already: its outputs keep their labels, or are drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from finetune_contract.facts import DataFacts
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.prepare.check import Trains, check
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_registry import task_parts
from trainer_support.tasks import INFERENCE, task_job, trained, training_of, write_lines

WORDS = ["ball", "goal", "soup", "bread", "lamp", "chair", "the", "a", "was", "and"]
NAMES = ("sport", "food", "home")
"""In no alphabetical order."""
TAGS = ("B-place", "O", "B-person")
LORA = {"method": "lora", "rank": 2, "alpha": 4, "dropout": 0.0}
AUTO = {
    "text-classification": ("AutoModelForSequenceClassification", NAMES),
    "token-classification": ("AutoModelForTokenClassification", TAGS),
}


def of_labels(notes: Sequence[str]) -> list[str]:
    """Return the notes but that on random rows of two splits that are equal."""
    return [note for note in notes if "same inputs" not in note]


def random_texts(count: int, seed: int) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    return [draw.choice(WORDS, draw.integers(1, 8)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function: task, labels and further config -> a random checkpoint with a head for these labels."""

    def model_of(task: str, names: Sequence[str], **config: Any) -> Path:
        import transformers

        folder = tiny_bert(tmp_path_factory.mktemp("model") / "m", words=WORDS, initializer_range=0.5)
        auto = getattr(transformers, AUTO[task][0])
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        whole = transformers.AutoConfig.from_pretrained(folder, **labels, **config)
        torch.manual_seed(2)
        auto.from_config(whole).save_pretrained(folder)
        return folder

    return model_of


def plain_ids(task: str, model: Path, texts: Sequence[Sequence[str]]) -> list[Any]:
    """Return the checkpoint's answers by transformers alone: an id for each text, or for each of its words."""
    import transformers

    network = getattr(transformers, AUTO[task][0]).from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    answers = []
    with torch.inference_mode():
        for words in texts:  # each word is one token
            ids = network(**tokenizer(" ".join(words), return_tensors="pt")).logits[0].argmax(-1)
            answers.append(ids.item() if ids.ndim == 0 else ids[1:-1].tolist())
    return answers


def write_data(task: str, model: Path, folder: Path, names: Sequence[Any]) -> Path:
    """Write rows whose labels are the checkpoint's own answers, called `names`."""
    for seed, (split, count) in enumerate({"train": 30, "validation": 10, "test": 40}.items()):
        texts = random_texts(count, seed)
        ids = plain_ids(task, model, texts)
        if task == "text-classification":
            rows = [{"text": " ".join(words), "label": names[i]} for words, i in zip(texts, ids, strict=True)]
        else:
            rows = [
                {"tokens": words, "tags": [names[i] for i in of_row]} for words, of_row in zip(texts, ids, strict=True)
            ]
        write_lines(folder / f"{split}.jsonl", rows)
    return folder


def a_job(task: str, model: Path, data: Path, **changes: Any) -> TrainerJob:
    """Return a job that trains for one step without an effect; `changes`: further sections."""
    columns = ["text", "label"] if task == "text-classification" else ["tokens", "tags"]
    labels = changes.pop("labels", {})
    still = training_of(steps=1, learning_rate=1e-9, threads=1, steps_per_epoch=3, **changes.pop("with_training", {}))
    job = task_job(task, model, data, columns, training=still, preparation={"max_length": 32}, predict=None, **changes)
    assert job.dataset is not None
    return job.model_copy(update={"dataset": job.dataset.model_copy(update={"labels": labels})})


def output_weights(model: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")["classifier.weight"]


def facts_of(job: TrainerJob, paths: JobPaths) -> DataFacts:
    prepare(job, paths, NoProgress())
    return PreparedData.open(paths).facts


CASES: dict[str, tuple[str, Sequence[Any], dict[str, Any], tuple[str, ...], str]] = {
    "names": ("text-classification", NAMES, {}, NAMES, ""),
    "names with capitals": ("text-classification", ("Sport", "Food", "Home"), {}, ("Sport", "Food", "Home"), ""),
    "names of an adapted model": ("text-classification", NAMES, {"with_training": {"adapter": LORA}}, NAMES, ""),
    "names that the job gives": (
        "text-classification", ("x", "y", "z"), {"labels": {"x": "sport", "y": "food", "z": "home"}}, NAMES, "",
    ),
    "class ids": ("text-classification", (0, 1, 2), {}, NAMES, "0 is sport, 1 is food, 2 is home."),
    "class ids as in CSV": ("text-classification", ("0", "1", "2"), {}, NAMES, "0 is sport, 1 is food, 2 is home."),
    "tags": ("token-classification", TAGS, {}, TAGS, ""),
    "tags of an adapted model": ("token-classification", TAGS, {"with_training": {"adapter": LORA}}, TAGS, ""),
    "tags as ids": ("token-classification", (0, 1, 2), {}, TAGS, "0 is B-place, 1 is O, 2 is B-person."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_keeps_the_labels_of_a_trained_head(
    case: str, model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    task, names, changes, kept, note = CASES[case]
    model = model_of(task, AUTO[task][1])
    data = write_data(task, model, tmp_path / "data", names)
    job = trained(a_job(task, model, data, **changes), paths)
    facts = PreparedData.open(paths).facts
    assert facts.labels == kept
    assert min(facts.label_counts.values()) > 0
    assert [note in text for text in of_labels(facts.notes)] == [True] * bool(note)
    assert evaluate(job, paths, NoProgress())["evaluate"]["accuracy"] == 1.0
    assert torch.allclose(output_weights(paths.model), output_weights(model), atol=1e-6)


OTHERS: dict[str, tuple[str, Sequence[str], Sequence[str], str]] = {
    "other names": (
        "text-classification", NAMES, ("bad", "fair", "good"),
        "head is for sport, food, home, and the data have bad, fair, good: training begins with a new head.",
    ),
    "a name in place of a number": (
        "text-classification", ("LABEL_0", "LABEL_1", "LABEL_2"), NAMES, "To keep the trained one, use class ids in",
    ),
    "other tags": ("token-classification", TAGS, ("B-food", "O", "B-drink"), "the data have O, B-drink, B-food:"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_training_begins_with_a_new_head_for_other_labels(
    case: str, model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    task, theirs, names, note = OTHERS[case]
    model = model_of(task, theirs)
    job = a_job(task, model, write_data(task, model, tmp_path / "data", names))
    facts = facts_of(job, paths)
    assert len([text for text in facts.notes if note in text]) == 1
    built = [task_parts(job.task).head.build_model(job, facts).state_dict() for _ in range(2)]
    bare = type(task_parts(job.task).head.build_model(job, facts)).from_pretrained(model).state_dict()
    assert all(torch.equal(weight, built[1][name]) for name, weight in built[0].items())
    drawn = {name for name, weight in built[0].items() if not torch.equal(weight, bare[name])}
    assert drawn <= {"classifier.weight", "classifier.bias"}
    assert (built[0]["classifier.weight"] - bare["classifier.weight"]).abs().min() > 0
    assert built[0]["classifier.weight"].std() == pytest.approx(0.5, rel=0.3)  # the config's initializer_range
    assert built[0]["classifier.bias"].abs().max() == 0


def test_ids_of_a_head_without_names_keep_its_outputs(
    model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    model = model_of("text-classification", ("LABEL_0", "LABEL_1", "LABEL_2"))
    job = trained(
        a_job("text-classification", model, write_data("text-classification", model, tmp_path / "d", (0, 1, 2))), paths
    )
    facts = PreparedData.open(paths).facts
    assert (facts.labels, of_labels(facts.notes)) == (("0", "1", "2"), [])
    assert evaluate(job, paths, NoProgress())["evaluate"]["accuracy"] == 1.0


def test_validation_of_the_data_compares_labels_with_the_head(model_of: Callable[..., Path], tmp_path: Path) -> None:
    model = model_of("text-classification", NAMES)
    job = a_job("text-classification", model, write_data("text-classification", model, tmp_path / "d", "abc"))
    for given, note in ((dict(zip("abc", NAMES, strict=True)), ""), ({}, "begins with a new head")):
        assert job.dataset is not None
        named = job.model_copy(update={"dataset": job.dataset.model_copy(update={"labels": given})})
        notes = of_labels(check(named, trains=Trains()).notes)
        assert [note in text for text in notes] == [True] * bool(note)
        problems = check(named.model_copy(update={"training": None})).problems
        assert [problem.reason for problem in problems] == ["LabelOutOfRange"] * bool(note)


@pytest.mark.parametrize("labels", [[0.5, 1.5, 2.5], [["food"], ["home", "sport"], []]], ids=["number", "several"])
def test_heads_of_other_forms_of_labels_follow_the_same_rule(
    labels: list[Any], model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    rows = [{"text": " ".join(words), "label": labels[i % 3]} for i, words in enumerate(random_texts(30, 0))]
    for split in ("train", "validation"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    regression = isinstance(labels[0], float)
    form = "regression" if regression else "multi_label_classification"
    for same in (True, False):
        config = {"problem_type": form if same else None}
        names = ("value",) if regression and same else NAMES if same else ("x",) if not regression else NAMES
        model = model_of("text-classification", names, **config)
        job = a_job("text-classification", model, tmp_path / "data")
        facts = facts_of(job, JobPaths(tmp_path / f"job-{same}"))
        assert facts.labels == (() if regression else NAMES if same else tuple(sorted(NAMES)))
        assert any("training begins with a new head" in note for note in facts.notes) == (not same)
        weight = task_parts(job.task).head.build_model(job, facts).state_dict()["classifier.weight"]
        assert len(weight) == (1 if regression else 3)
        assert torch.equal(weight, output_weights(model)) == same
    flags = PreparedData.open(JobPaths(tmp_path / "job-True")).of("validation")
    if not regression:  # sport, food, home
        assert np.stack(flags.lists("flags"))[:3].tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_prepared_data_depend_on_the_labels_of_the_head(
    model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    model = model_of("text-classification", NAMES)
    data = write_data("text-classification", model, tmp_path / "data", NAMES)
    other = model_of("text-classification", NAMES[::-1])
    facts = [facts_of(a_job("text-classification", each, data), paths) for each in (model, other)]
    assert [each.labels for each in facts] == [NAMES, NAMES[::-1]]
    assert facts[0].fingerprint != facts[1].fingerprint


@pytest.mark.parametrize("task", AUTO)
def test_evaluation_reads_numbered_classes_by_their_names(
    task: str, model_of: Callable[..., Path], tmp_path: Path, paths: JobPaths
) -> None:
    """The file numbers the classes by the alphabet, and no row has one of them, which is no part of f1."""
    names = AUTO[task][1]
    declared = sorted([*names, "another"])
    model = model_of(task, names)
    texts = random_texts(60, 3)
    answers = zip(texts, plain_ids(task, model, texts), strict=True)
    absent = names[2]
    if task == "text-classification":
        rows = [{"text": " ".join(words), "label": names[i]} for words, i in answers if names[i] != absent]
    else:
        rows = [{"tokens": words, "tags": [names[i] for i in ids]} for words, ids in answers]
        rows = [row for row in rows if absent not in row["tags"]]
        rows[0]["tokens"], rows[0]["tags"] = [*rows[0]["tokens"], "\u200b"], [*rows[0]["tags"], "O"]  # no token
    kind = datasets.ClassLabel(names=declared)
    columns = {"text": datasets.Value("string"), "label": kind}
    if task == "token-classification":
        columns = {"tokens": datasets.List(datasets.Value("string")), "tags": datasets.List(kind)}
    table = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    (tmp_path / "data").mkdir()
    table.to_parquet(tmp_path / "data" / "test.parquet")
    gate = {"gate": {"metric": "f1", "minimum": 1.0}}
    job = task_job(
        task, model, tmp_path / "data", list(columns), preparation={"max_length": 32}, predict=None,
        evaluation={**INFERENCE, **gate},
    )  # fmt: skip
    facts = facts_of(job, paths)
    assert facts.labels == names
    assert [absent in note for note in of_labels(facts.notes)] == [True] * (task == "text-classification")
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert (measured["accuracy"], measured["f1"], measured["rows"]) == (1.0, 1.0, len(rows))
