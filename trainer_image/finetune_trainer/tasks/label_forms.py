"""Forms of a text's label: one class, several classes, or a number.

A form reads and checks labels, batches them, and judges the answers to them. The data decide the form: a column of
lists has several classes a row, a column of numbers of which one has a decimal point holds numbers, any other holds
classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune_contract.choices import LabelForm
from finetune_contract.layout import FailureClass
from finetune_contract.metrics import METRICS
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.tasks.class_metrics import class_scores, cross_entropy, softmax
from finetune_trainer.tasks.label_names import PATH, flat, names_of, positions, separator_hint
from finetune_trainer.tasks.row_checks import class_names, is_list, is_text, row_error, shown_names
from finetune_trainer.tasks.task_protocol import Feature

if TYPE_CHECKING:
    import torch

Logits: TypeAlias = NDArray[np.float32]
"""Shape (rows, labels)."""
_NUMBER = r"^\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"
_MANY_LABELS = 50
"""Number of classes up to which a column is taken for classes without a check."""
_FEW = 0.1
"""Share of fractions below which whole numbers are taken for classes, and the fractions for mistakes."""
FEW_NUMBERS = 10
"""Different whole numbers up to which a column of fractions looks like classes."""
SECRET = -1
"""Label in Hub data sets whose test labels are kept secret."""


class Form(Protocol):
    """One form of labels."""

    name: LabelForm
    column: str
    """Column of features, where the label is known."""
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    """Columns of predictions."""
    baseline: str
    """Description of the answer of `constant`, as the end of a sentence."""

    def values(self, split: RawSplit, column: str) -> list[Any]:
        """Return the label of each row as given; raise StageError DATA for the first invalid one."""

    def names(self, split: RawSplit, column: str, values: list[Any]) -> tuple[str, ...]:
        """Return the label names in the order of their ids, by the split that defines them; empty for numbers."""

    def targets(self, split: RawSplit, column: str, values: list[Any], names: Sequence[str]) -> NDArray[Any]:
        """Return `column`'s value for each row; raise StageError DATA for a label that is not in `names`."""

    def counts(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
        """Count the rows of each label."""

    def batch(self, features: Sequence[Feature]) -> torch.Tensor:
        """Return `labels` as the model expects them."""

    def loss(self, logits: Logits, targets: NDArray[Any]) -> float:
        """Compute the model's loss over all rows."""

    def measured(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Compute `metrics`."""

    def constant(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Compute those of `metrics` that apply to the best answer that is the same for all rows."""

    def answer_schema(self, names: Sequence[str]) -> pa.Schema:
        """Return names and types of the columns of `predictions`."""

    def predictions(self, logits: Logits, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return `columns`, one value for each row."""

    def sample(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> Sample:
        """Return the sample for the report."""


@dataclass(frozen=True)
class Sample:
    """Label, answer and score of each row for the report."""

    right: Sequence[str]
    predicted: Sequence[str]
    sure: NDArray[np.float64]
    wrong: NDArray[np.float64]
    """Error of the answer; 0: it is right."""


# ------------------------------------------------------------------------------------------------------------ one class


class SingleLabel:
    """One class: an id from 0 without gaps, or a name."""

    name: LabelForm = "single_label_classification"
    column: str = "label"
    metrics: tuple[str, ...] = METRICS["text-classification"]["single_label_classification"]
    columns: tuple[str, ...] = ("label", "score", "scores")
    baseline: str = "always predicting the most frequent label"

    def values(self, split: RawSplit, column: str) -> list[Any]:
        """Return ints, or texts; whole numbers written as text stay text."""
        values = split.table[column]
        empty = pc.is_null(values)
        if is_text(values.type):
            empty = pc.or_(empty, pc.equal(pc.fill_null(values, ""), ""))
        if pc.any(empty).as_py():
            row = pc.index(empty, True).as_py()
            raise row_error("NullLabel", split, row, PATH, column, values[row].as_py(), "a row needs its label")
        if pa.types.is_boolean(values.type):
            return ["true" if value else "false" for value in values.to_pylist()]
        if pa.types.is_floating(values.type):  # classes only by `dataset.labels`
            return [int(value) if value.is_integer() else value for value in values.to_pylist()]
        if not (is_text(values.type) or pa.types.is_integer(values.type)):
            rule = "a label is a whole number, a word, a fraction, or a list of words"
            raise row_error("LabelType", split, 0, PATH, column, values[0].as_py(), rule)
        once: dict[Any, Any] = {}  # equal names share one object, however many rows have them
        return [once.setdefault(label, label) for chunk in values.chunks for label in chunk.to_pylist()]

    def names(self, split: RawSplit, column: str, values: list[Any]) -> tuple[str, ...]:
        """Return the names of a Hub data set's classes, else the ids or names in the data."""
        names = class_names(split, column) or names_of(split, column, values, values)
        if len(names) > max(_MANY_LABELS, len(values) // 2):
            raise StageError(
                FailureClass.DATA,
                "TooManyLabels",
                f"Split {split.name} ({split.origin}): column {column!r} has {len(names)} labels in {len(values)} "
                "rows, too few rows per label to learn classes.",
                separator_hint(names) or f"Check {PATH}; to learn a number, write it as a fraction (7.0).",
            )
        return names

    def targets(self, split: RawSplit, column: str, values: list[Any], names: Sequence[str]) -> NDArray[Any]:
        """Return ids."""
        position = positions(split, column, values, names)
        ids = [position.get(value, SECRET) for value in values]
        if SECRET in ids:
            row = ids.index(SECRET)
            raise _strange(split, column, row, values[row], names)
        return np.asarray(ids, np.int64)

    def counts(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
        """Count the rows by id."""
        return dict(zip(names, np.bincount(targets, minlength=len(names)).tolist(), strict=True))

    def batch(self, features: Sequence[Feature]) -> torch.Tensor:
        """Return labels of shape (rows,)."""
        import torch

        return torch.tensor([int(feature[self.column]) for feature in features])

    def loss(self, logits: Logits, targets: NDArray[Any]) -> float:
        """Compute the cross-entropy in nats."""
        return cross_entropy(logits, targets)

    def measured(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Return accuracy, and f1, precision and recall as the plain mean over the labels that occur."""
        return class_scores(targets, logits.argmax(axis=1))

    def constant(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Judge the most frequent label of the very rows that are judged: no constant answer has a higher accuracy."""
        most = np.bincount(targets, minlength=len(names)).argmax()
        return class_scores(targets, np.full_like(targets, most))

    def answer_schema(self, names: Sequence[str]) -> pa.Schema:
        """Return the schema of `label` and its probabilities."""
        return pa.schema([("label", pa.string()), ("score", pa.float64()), ("scores", _by_name_type(names))])

    def predictions(self, logits: Logits, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return `label`, its probability `score`, and `scores` with the probability of each label."""
        shares = softmax(logits)
        best = shares.argmax(axis=1)
        return {
            "label": pa.array([names[index] for index in best], pa.string()),
            "score": pa.array(shares[np.arange(len(best)), best], pa.float64()),
            "scores": _by_name(shares, names),
        }

    def sample(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> Sample:
        """Rate a wrong label as worse the higher its probability."""
        shares = softmax(logits)
        best, sure = shares.argmax(axis=1), shares.max(axis=1)
        right, predicted = ([names[index] for index in ids] for ids in (targets, best))
        return Sample(right, predicted, sure, np.where(best == targets, 0.0, sure))


# ------------------------------------------------------------------------------------------------------ several classes


class MultiLabel:
    """Several classes: a list of class ids or names a row, which may be empty; each label is judged on its own."""

    name: LabelForm = "multi_label_classification"
    column: str = "flags"
    metrics: tuple[str, ...] = METRICS["text-classification"]["multi_label_classification"]
    columns: tuple[str, ...] = ("labels", "scores")
    baseline: str = "predicting for every row the labels that more than half of the rows have"

    def values(self, split: RawSplit, column: str) -> list[Any]:
        """Return lists of ints or of texts."""
        values = split.table[column]
        kind = values.type.value_type
        if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
            rule = f"the column is of type {values.type}, not a list of words or of class ids"
            raise row_error("LabelType", split, 0, PATH, column, values[0].as_py(), rule)
        label_lists: list[Any] = values.to_pylist()
        for row, labels in enumerate(label_lists):
            if labels is None or None in labels:
                raise row_error(
                    "NullLabel", split, row, PATH, column, labels, "a row needs its labels, or an empty list"
                )
            if len(set(labels)) < len(labels):
                raise row_error("LabelTwice", split, row, PATH, column, labels, "a row has a label once")
        return label_lists

    def names(self, split: RawSplit, column: str, values: list[Any]) -> tuple[str, ...]:
        """Return the names of a Hub data set's classes, else the ids or names in the data."""
        every = flat(values)
        return class_names(split, column) or (names_of(split, column, every, values) if every else ())

    def targets(self, split: RawSplit, column: str, values: list[Any], names: Sequence[str]) -> NDArray[Any]:
        """Return zeros and ones for each row, shape (rows, labels)."""
        position = positions(split, column, flat(values), names)
        flags = np.zeros((len(values), len(names)), np.int32)
        for row, labels in enumerate(values):
            for label in labels:
                if label not in position:
                    raise _strange(split, column, row, label, names)
                flags[row, position[label]] = 1
        return flags

    def counts(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
        """Count a row for each of its labels."""
        return dict(zip(names, targets.sum(axis=0).tolist(), strict=True))

    def batch(self, features: Sequence[Feature]) -> torch.Tensor:
        """Return labels of shape (rows, labels), zeros and ones as floats: the loss takes no integers."""
        import torch

        return torch.from_numpy(np.stack([feature[self.column] for feature in features]).astype(np.float32))

    def loss(self, logits: Logits, targets: NDArray[Any]) -> float:
        """Compute the binary cross-entropy in nats, the mean over rows and labels."""
        x = logits.astype(np.float64)
        # log(1 + e^-|x|) does not overflow.
        return float((np.maximum(x, 0) - x * targets + np.log1p(np.exp(-np.abs(x)))).mean())

    def measured(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Return f1, precision and recall as the plain mean over the labels that occur; accuracy: the share of rows
        whose labels are all right.
        """
        return _flag_scores(targets, (logits > 0).astype(np.int32))

    def constant(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Judge the usual labels of the very rows that are judged."""
        usual = (2 * targets.sum(axis=0) > len(targets)).astype(np.int32)
        return _flag_scores(targets, np.tile(usual, (len(targets), 1)))

    def answer_schema(self, names: Sequence[str]) -> pa.Schema:
        """Return the schema of `labels` and the probabilities."""
        return pa.schema([("labels", pa.list_(pa.string())), ("scores", _by_name_type(names))])

    def predictions(self, logits: Logits, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return the `labels` whose probability is above one half, and `scores` with the probability of each label."""
        shares = _sigmoid(logits)
        labels = [[name for name, share in zip(names, row, strict=True) if share > 0.5] for row in shares]
        return {"labels": pa.array(labels, pa.list_(pa.string())), "scores": _by_name(shares, names)}

    def sample(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> Sample:
        """Take the error of the most confidently wrong label, and the confidence of the least confident one."""
        shares = _sigmoid(logits)
        off = np.abs(shares - targets)
        predicted = [_together(row > 0.5, names) for row in shares]
        sure = np.maximum(shares, 1 - shares).min(axis=1)
        return Sample(
            [_together(row > 0, names) for row in targets], predicted, sure, np.where(off > 0.5, off, 0.0).max(axis=1)
        )


# ------------------------------------------------------------------------------------------------------------- a number


class Regression:
    """A number: a fraction, or a text of a number in a column where one has a decimal point."""

    name: LabelForm = "regression"
    column: str = "value"
    metrics: tuple[str, ...] = METRICS["text-classification"]["regression"]
    columns: tuple[str, ...] = ("value",)
    baseline: str = "always predicting the mean"

    def values(self, split: RawSplit, column: str) -> list[Any]:
        """Return finite floats."""
        values = split.table[column]
        numbers: list[Any] = []
        for row, value in enumerate(values.to_pylist()):
            try:
                number = None if value is None or value == "" else float(value)
            except (TypeError, ValueError):
                rule = "the labels of the other rows are numbers"
                raise row_error("LabelType", split, row, PATH, column, value, rule) from None
            if number is None or not np.isfinite(number):
                raise row_error("NullLabel", split, row, PATH, column, value, "a row needs its number")
            numbers.append(number)
        return numbers

    def names(self, split: RawSplit, column: str, values: list[Any]) -> tuple[str, ...]:
        """Return none. Raise StageError DATA `LabelType` for numbers that look like classes with a mistake."""
        odd = [row for row, number in enumerate(values) if not number.is_integer()]
        if odd and len(odd) < _FEW * len(values) and len({*values} - {values[row] for row in odd}) <= FEW_NUMBERS:
            rule = "nearly all labels are a few whole numbers: a fraction among classes is a mistake"
            raise row_error("LabelType", split, odd[0], PATH, column, values[odd[0]], rule)
        return ()

    def targets(self, split: RawSplit, column: str, values: list[Any], names: Sequence[str]) -> NDArray[Any]:
        """Return the numbers."""
        return np.asarray(values, np.float64)

    def counts(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
        """Count nothing: numbers are no classes."""
        return {}

    def batch(self, features: Sequence[Feature]) -> torch.Tensor:
        """Return labels of shape (rows,)."""
        import torch

        return torch.tensor([float(feature[self.column]) for feature in features], dtype=torch.float32)

    def loss(self, logits: Logits, targets: NDArray[Any]) -> float:
        """Compute the mean squared error."""
        return float(((logits[:, 0].astype(np.float64) - targets) ** 2).mean())

    def measured(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Return errors and correlations; a correlation is 0 where it is undefined, as for constant answers."""
        from scipy import stats
        from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

        predicted = logits[:, 0].astype(np.float64)
        varied = min(np.ptp(predicted), np.ptp(targets)) > 0
        return {
            "pearson": float(stats.pearsonr(targets, predicted)[0]) if varied else 0.0,
            "spearmanr": float(stats.spearmanr(targets, predicted)[0]) if varied else 0.0,
            "r2": float(r2_score(targets, predicted)) if len(targets) > 1 else 0.0,
            "mse": float(mean_squared_error(targets, predicted)),
            "mae": float(mean_absolute_error(targets, predicted)),
        }

    def constant(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, float]:
        """Judge the mean of the very rows that are judged: no constant has a smaller squared error."""
        return self.measured(np.full((len(targets), 1), targets.mean()), targets, names)

    def answer_schema(self, names: Sequence[str]) -> pa.Schema:
        """Return the schema of `value`."""
        return pa.schema([("value", pa.float64())])

    def predictions(self, logits: Logits, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return `value`."""
        return {"value": pa.array(logits[:, 0].astype(np.float64), pa.float64())}

    def sample(self, logits: Logits, targets: NDArray[Any], names: Sequence[str]) -> Sample:
        """Rate an answer by its distance, which the report shows as well: a number has no confidence."""
        predicted = logits[:, 0].astype(np.float64)
        right, shown = ([f"{value:.4g}" for value in values] for values in (targets, predicted))
        off = np.abs(predicted - targets)
        return Sample(right, shown, off, off)


FORMS: Mapping[LabelForm, Form] = {form.name: form for form in (SingleLabel(), MultiLabel(), Regression())}


def form_of(split: RawSplit, column: str, given: Mapping[str, str]) -> Form:
    """Return the form of a column, by its content; a column whose values have names (`given`) holds classes."""
    values = split.table[column]
    if is_list(values.type):
        return FORMS["multi_label_classification"]
    if given:
        return FORMS["single_label_classification"]
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        return FORMS["regression"]
    if is_text(values.type):
        written = pc.drop_null(values.combine_chunks())
        written = written.filter(pc.not_equal(written, ""))
        numbers = pc.all(pc.match_substring_regex(written, _NUMBER)).as_py()
        if numbers and pc.any(pc.match_substring(written, ".")).as_py():
            return FORMS["regression"]
    return FORMS["single_label_classification"]


# ------------------------------------------------------------------------------------------------------------- helpers


def _strange(split: RawSplit, column: str, row: int, label: object, names: Sequence[str]) -> Exception:
    classes = class_names(split, column)
    if classes is not None and isinstance(label, int) and 0 <= label < len(classes):
        label = classes[label]
    rule = f"the labels are {shown_names(names)}"
    hint = separator_hint([*names, label]) if isinstance(label, str) else ""
    return row_error("LabelOutOfRange", split, row, PATH, column, label, rule, hint)


def _sigmoid(logits: Logits) -> NDArray[np.float64]:
    # By the hyperbolic tangent, which does not overflow.
    return np.asarray((1 + np.tanh(logits.astype(np.float64) / 2)) / 2)


def _by_name_type(names: Sequence[str]) -> pa.StructType:
    return pa.struct([(name, pa.float64()) for name in names])


def _by_name(shares: NDArray[np.float64], names: Sequence[str]) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(column) for column in shares.T], names=list(names))


def _together(mask: NDArray[np.bool_], names: Sequence[str]) -> str:
    return ", ".join(name for name, is_chosen in zip(names, mask, strict=True) if is_chosen) or "none"


def _flag_scores(flags: NDArray[Any], answers: NDArray[Any]) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    there = np.flatnonzero(flags.any(axis=0) | answers.any(axis=0))
    labels = there if len(there) else None
    precision, recall, f1, _ = precision_recall_fscore_support(
        flags, answers, labels=labels, average="macro", zero_division=0
    )
    scores = {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy_score(flags, answers)}
    return {name: float(score) for name, score in scores.items()}
