"""Names of labels: whole numbers that are not class ids, and names that the job gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import pytest

from finetune_contract.data_settings import Columns
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.tasks.task_protocol import Labels, Targets
from finetune_trainer.tasks.task_registry import task_parts

COLUMNS = Columns(text="text", label="label")
OPINIONS = {"-1": "negative", "1": "positive"}


def split(labels: Sequence[Any], name: str = "train", classes: Sequence[str] | None = None) -> RawSplit:
    rows = datasets.Dataset.from_dict({"text": ["a text"] * len(labels), "label": list(labels)})
    if classes is not None:
        rows = rows.cast_column("label", datasets.ClassLabel(names=list(classes)))
    return RawSplit(name, f"{name}.jsonl", rows)


def targets_of(
    train: Sequence[Any] | RawSplit,
    given: Mapping[str, str] | None = None,
    known: Labels | None = None,
    separator: str | None = None,
    **others: Sequence[Any] | RawSplit,
) -> Targets:
    splits = {"train": train, **others}
    raw = {role: labels if isinstance(labels, RawSplit) else split(labels, role) for role, labels in splits.items()}
    encoding = task_parts("text-classification", label_names=given, label_separator=separator).encoding
    return encoding.targets(raw, COLUMNS, known)


@dataclass(frozen=True)
class Case:
    labels: Sequence[Any]
    names: tuple[str, ...]
    ids: Sequence[Any]
    given: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


CASES = {
    "class ids from 0": Case([1, 0, 2], ("0", "1", "2"), [1, 0, 2]),
    "stars from 1 to 5": Case([5, 1, 2, 3, 4], ("1", "2", "3", "4", "5"), [4, 0, 1, 2, 3], note="are used as names"),
    "stars in CSV": Case(["5", "1", "2", "3", "4"], ("1", "2", "3", "4", "5"), [4, 0, 1, 2, 3], note="used as names"),
    "numbers in CSV are sorted by size": Case(["10", "9"], ("9", "10"), [1, 0], note="the labels 9, 10"),
    "-1 and 1": Case([1, -1, 1], ("-1", "1"), [1, 0, 1], note='{"-1": NAME, "1": NAME}'),
    "against, neutral and for": Case([-1, 0, 1], ("-1", "0", "1"), [0, 1, 2], note="used as names"),
    "0 and 4, as Sentiment140 has": Case([4, 0], ("0", "4"), [1, 0], note="used as names"),
    "words": Case(["pos", "neg"], ("neg", "pos"), [1, 0]),
    "named numbers": Case([1, -1], ("negative", "positive"), [1, 0], OPINIONS),
    "named numbers in CSV": Case(["1", "-1"], ("negative", "positive"), [1, 0], OPINIONS),
    "named fractions": Case([1.0, -1.0], ("negative", "positive"), [1, 0], OPINIONS),
    "named words": Case(["n", "p"], ("bad", "good"), [0, 1], {"n": "bad", "p": "good"}),
    "named truth": Case([True, False], ("no", "yes"), [1, 0], {"true": "yes", "false": "no"}),
    "values that share a name": Case(
        [1, 2, 3, 4, 5], ("bad", "good"), [0, 0, 0, 1, 1],
        {"1": "bad", "2": "bad", "3": "bad", "4": "good", "5": "good"},
    ),
    "named numbers in the order of their size": Case(
        [10, 9], ("nine", "ten"), [1, 0], {"10": "ten", "9": "nine"}
    ),
    "a name that no row has": Case(
        [1, -1], ("negative", "neutral", "positive"), [2, 0], {**OPINIONS, "0": "neutral"},
        note="dataset.labels has neutral, and no row has such a label",
    ),
    "named numbers in lists": Case(
        [[7], [7, 9], []], ("seven", "nine"), [[1, 0], [1, 1], [0, 0]], {"7": "seven", "9": "nine"}
    ),
    "lists of numbers from 1": Case([[1], [1, 2], []], ("1", "2"), [[1, 0], [1, 1], [0, 0]], note="used as names"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_labels_get_their_names_and_ids(case: str) -> None:
    want = CASES[case]
    made = targets_of(want.labels, want.given)
    assert made.labels.names == want.names
    assert made.of["train"].tolist() == want.ids
    assert bool(made.notes) == bool(want.note)
    assert all(want.note in note for note in made.notes)


def test_classes_of_the_hub_are_named_by_their_names_or_ids() -> None:
    rows = split([1, 0, 1], classes=["neg", "pos"])
    for given in ({"neg": "bad", "pos": "good"}, {"0": "bad", "1": "good"}):
        made = targets_of(rows, given)
        assert (made.labels.names, made.of["train"].tolist()) == (("bad", "good"), [1, 0, 1])


def test_a_model_that_is_not_trained_keeps_its_order_of_labels() -> None:
    known = Labels(("positive", "negative"), "single_label_classification")
    made = targets_of([1, -1], OPINIONS, known)
    assert (made.labels.names, made.of["train"].tolist()) == (known.names, [0, 1])


def test_a_model_trained_on_numbers_takes_the_same_numbers() -> None:
    known = Labels(("1", "2", "3"), "single_label_classification")
    assert targets_of([3, 1], known=known).of["train"].tolist() == [2, 0]


@pytest.mark.parametrize("given", [None, OPINIONS])
def test_a_number_that_train_lacks_is_refused_with_its_row(given: Mapping[str, str] | None) -> None:
    with pytest.raises(StageError) as caught:
        targets_of([-1, 1], given, test=[1, 3])
    assert "Split test (test.jsonl), row 2: column 'label' is 3" in caught.value.message


def test_a_test_split_of_minus_ones_is_unlabelled_unless_it_is_a_label() -> None:
    assert "test" not in targets_of([0, 1], test=[-1, -1]).of
    assert targets_of([1, -1], test=[-1, -1]).of["test"].tolist() == [0, 0]
    assert targets_of([1, -1], OPINIONS, test=[-1, -1]).of["test"].tolist() == [0, 0]


# ---------------------------------------------------------------------------------- names of the data and of the model

STARS = ("neutral", "negative", "positive")


@dataclass(frozen=True)
class Evaluated:
    labels: RawSplit
    head: tuple[str, ...]
    ids: Sequence[Any] | str
    """Ids of the head, or the error's text."""
    note: str = ""


EVALUATED = {
    "classes of the data in another order": Evaluated(split([0, 1, 2], classes=sorted(STARS)), STARS, [1, 0, 2]),
    "classes with other capitals": Evaluated(split([0, 1], classes=["pos", "neg"]), ("NEG", "POS"), [1, 0]),
    "words with other capitals": Evaluated(split(["pos", "neg"]), ("NEG", "POS"), [1, 0]),
    "fewer classes than the model": Evaluated(split([1, 0], classes=["positive", "negative"]), STARS, [1, 2]),
    "lists of classes": Evaluated(
        RawSplit("test", "test", datasets.Dataset.from_dict({"text": ["a", "b"], "label": [[0, 2], []]}).cast_column(
            "label", datasets.List(datasets.ClassLabel(names=sorted(STARS))))),
        STARS, [[0, 1, 1], [0, 0, 0]],
    ),
    "a class that the model lacks": Evaluated(
        split([0, 1], classes=["negative", "angry"]), STARS, "row 2: column 'label' is 'angry'; the labels are neutral",
    ),
    "classes of another model": Evaluated(split([0, 1], classes=["food", "home"]), ("neg", "pos"), "is 'food'"),
    "class ids": Evaluated(split([0, 2]), STARS, [0, 2], "0 is neutral, 1 is negative, 2 is positive."),
    "class ids in CSV": Evaluated(split(["2", "0"]), STARS, [2, 0], "0 is neutral, 1 is negative, 2 is positive."),
    "classes, and a model without names": Evaluated(
        split([1, 0], classes=["neg", "pos"]), ("LABEL_0", "LABEL_1"), [1, 0], "neg is LABEL_0, pos is LABEL_1.",
    ),
    "class ids, and a model without names": Evaluated(split([1, 0]), ("LABEL_0", "LABEL_1"), [1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", EVALUATED)
def test_labels_are_those_of_the_model_by_their_names(case: str) -> None:
    want = EVALUATED[case]
    several = isinstance(want.ids, list) and isinstance(want.ids[0], list)
    known = Labels(want.head, "multi_label_classification" if several else "single_label_classification")
    encoding = task_parts("text-classification").encoding
    if isinstance(want.ids, str):
        with pytest.raises(StageError) as caught:
            encoding.targets({"test": want.labels}, COLUMNS, known)
        assert (caught.value.reason, want.ids in caught.value.message) == ("LabelOutOfRange", True)
        return
    made = encoding.targets({"test": want.labels}, COLUMNS, known)
    assert (made.labels, made.of["test"].tolist()) == (known, want.ids)
    assert [want.note in note for note in made.notes if "have no row" not in note] == [True] * bool(want.note)


def test_splits_that_number_their_classes_differently_agree_by_name() -> None:
    made = targets_of(split([0, 1], classes=["neg", "pos"]), test=split([0, 1], "test", classes=["pos", "neg"]))
    assert (made.of["train"].tolist(), made.of["test"].tolist()) == ([0, 1], [1, 0])


def test_labels_without_rows_in_a_measured_split_are_noted() -> None:
    made = targets_of(["a", "b", "c"], test=["a", "a"], validation=["a", "b", "c"])
    (note,) = made.notes
    assert note.startswith("Split test (test.jsonl): 2 of 3 labels have no row, b, c. f1, precision and recall are")


# ------------------------------------------------------------------------------------------- several labels in one text

GENRES = ["movie, long", "movie", "", "long,movie,long", " short "]


def test_a_separator_splits_a_text_into_its_labels() -> None:
    """The ids are those of scikit-learn for the same lists."""
    from sklearn.preprocessing import MultiLabelBinarizer

    made = targets_of(GENRES, separator=",", test=["short,long"], validation=[""])
    binarizer = MultiLabelBinarizer()
    flags = binarizer.fit_transform([["movie", "long"], ["movie"], [], ["long", "movie"], ["short"]])
    assert made.labels == Labels(tuple(binarizer.classes_), "multi_label_classification")
    assert made.of["train"].tolist() == flags.tolist()
    assert made.of["test"].tolist() == binarizer.transform([["short", "long"]]).tolist()
    assert made.of["validation"].tolist() == [[0, 0, 0]]
    named = targets_of(["1|2", "2"], {"1": "one", "2": "two"}, separator="|")
    assert (named.labels.names, named.of["train"].tolist()) == (("one", "two"), [[1, 1], [0, 1]])
    known = targets_of(["B;a"], known=Labels(("b", "A"), "multi_label_classification"), separator=";")
    assert known.of["train"].tolist() == [[1, 1]]


@pytest.mark.parametrize(("labels", "reason"), [([1, 2], "LabelType"), (["a", None], "NullLabel")])
def test_a_separator_needs_texts(labels: list[Any], reason: str) -> None:
    with pytest.raises(StageError) as caught:
        targets_of(labels, separator=",")
    assert caught.value.reason == reason


def test_classes_that_seem_to_be_several_labels_get_advice() -> None:
    advice = 'If a text holds several labels, set dataset.labelSeparator: "{}".'
    for separator in ",;|":
        labels = [f"movie{separator} long", f"movie{separator} short", "movie", "long"]
        (note,) = targets_of(labels).notes
        assert note.startswith("Split train (train.jsonl): the 4 labels in column 'label' repeat each other's parts")
        assert note.endswith(advice.format(separator))
    assert targets_of(["Rome, Italy", "Paris, France"]).notes == ()
    with pytest.raises(StageError) as caught:
        targets_of(["movie, long", "movie", "short"], test=["movie, short"])
    assert (caught.value.reason, caught.value.hint) == ("LabelOutOfRange", advice.format(","))
    with pytest.raises(StageError) as caught:
        targets_of([f"a{i}, a{j}" for i in range(9) for j in range(9) if i < j] * 2 + [f"b{i}" for i in range(40)])
    assert (caught.value.reason, caught.value.hint) == ("TooManyLabels", advice.format(","))


# --------------------------------------------------------------------------------------------------- numbers as labels


@pytest.mark.parametrize(
    "labels",
    [
        ["5", "2.5", "0"],
        [*(f"{i / 1000:.3f}" for i in range(4000)), "5"],
        [" 1e-3", "+.5", "-2.", "7", "1.5"],
        [*map(str, range(100)), "3.5"],
    ],
    ids=["few", "one whole number", "forms of numbers", "many whole numbers"],
)
def test_texts_of_numbers_with_a_fraction_are_numbers(labels: list[str]) -> None:
    made = targets_of(labels, test=["1", "2", "4"])
    assert made.labels == Labels((), "regression")
    assert made.of["train"].tolist() == [float(label) for label in labels]
    assert made.of["test"].tolist() == [1.0, 2.0, 4.0]
    classes = targets_of(["5", "2.5", "0"], {"5": "good", "2.5": "fair", "0": "bad"})
    assert (classes.labels.names, classes.of["train"].tolist()) == (("bad", "fair", "good"), [2, 1, 0])


@pytest.mark.parametrize("text", [True, False])
def test_a_fraction_among_classes_is_a_mistake_in_train_alone(text: bool) -> None:
    mistaken = [0.5 if i == 7 else float(i % 3) for i in range(40)]
    labels = [f"{value:g}" for value in mistaken] if text else mistaken
    with pytest.raises(StageError, match=r"row 8.*a fraction among classes is a mistake"):
        targets_of(labels)
    made = targets_of([0.5, 1.0, 2.25], test=labels)
    assert made.of["test"].tolist() == mistaken
    known = targets_of(labels, known=Labels((), "regression"))
    assert known.of["train"].tolist() == mistaken


def test_a_word_among_numbers_of_another_split_is_refused() -> None:
    with pytest.raises(StageError, match=r"Split test \(test.jsonl\), row 2: column 'label' is 'good'"):
        targets_of(["0.5", "1"], test=["1", "good"])
