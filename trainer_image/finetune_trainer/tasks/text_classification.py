"""Text classification with one label a row, over one text or a pair of texts.

Labels are class ids 0 to n-1 without gaps, or words; words get ids in the sorted order of the train split's labels.
Anything else (lists, fractions, missing labels) is refused with the row, for a wrong label costs accuracy silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune_contract.facts import DataFacts
from finetune_contract.job import Columns, TrainerJob
from finetune_contract.layout import FailureClass
from finetune_trainer.data.prepared import arrow_table
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.failures import StageError
from finetune_trainer.models import load_config
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.base import Answer, Card, Coding, Encoded, Feature, Targets
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.rows import is_text, not_set, refuse_other_columns, row_error

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune_trainer.data.prepared import PreparedSplit

Logits: TypeAlias = "NDArray[np.float32]"
"""Shape (rows, labels)."""
LabelIds: TypeAlias = "NDArray[np.int64]"
"""Shape (rows,)."""
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_UNLABELLED = -1
"""What Hub data sets write where the labels of a test split are kept secret."""
_COLUMNS = ("text", "text_pair", "label")
_HEAD = "ForSequenceClassification"


class TextClassification:
    """The TaskModule of `text-classification`. A target is a label id, an answer has `logits`, one for each label."""

    metrics: tuple[str, ...] = ("accuracy", "f1", "precision", "recall")
    smooths_labels: bool = True
    answer_columns: frozenset[str] = frozenset({"label", "score", "scores"})

    # --------------------------------------------------------------------------------------------------------- data

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Text, the pair's second text when named, the label when named."""
        if columns.text is None:
            raise not_set(f"{setting}.columns.text", "the column that holds the text")
        if labelled and columns.label is None:
            raise not_set(f"{setting}.columns.label", "the column that holds the label")
        refuse_other_columns(columns, setting, _COLUMNS, "text-classification reads text, textPair and label")
        needs = [ColumnNeed(f"{setting}.columns.text", columns.text)]
        if columns.text_pair is not None:
            needs.append(ColumnNeed(f"{setting}.columns.textPair", columns.text_pair))
        if columns.label is not None:
            needs.append(ColumnNeed(f"{setting}.columns.label", columns.label, required=labelled))
        return tuple(needs)

    def inputs(self, columns: Columns) -> dict[str, str]:
        """`text`, and `text_pair` for pairs."""
        named = {"text": columns.text, "text_pair": columns.text_pair}
        return {role: name for role, name in named.items() if name is not None}

    def judged(self, columns: Columns) -> dict[str, str]:
        """Nothing: labels are features."""
        return {}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Every text is there and is text."""
        table = arrow_table(split.rows)
        for role, name in self.inputs(columns).items():
            path = f"{setting}.columns.{'textPair' if role == 'text_pair' else role}"
            values = table[name]
            if not is_text(values.type):
                kind = "all null" if pa.types.is_null(values.type) else f"of type {values.type}"
                raise row_error("NotText", split, 0, path, name, values[0].as_py(), f"the column is {kind}, not text")
            if values.null_count:
                row = pc.index(pc.is_null(values), True).as_py()
                raise row_error("NullText", split, row, path, name, None, "a row needs its text")

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Truncates the longer text of a pair first; no padding."""
        tokenizer, max_length = coding.tokenizer, coding.max_length
        texts, pairs = list(rows["text"]), list(rows["text_pair"]) if "text_pair" in rows else None
        # token_type_ids tell the two texts of a pair apart; with one text they are all 0, which is what models assume
        # anyway.
        types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
        arguments: dict[str, Any] = {"padding": False, "return_attention_mask": False, "return_token_type_ids": types}
        encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length, verbose=False, **arguments)
        names = ["input_ids", *(["token_type_ids"] if types else [])]
        features: dict[str, Sequence[Any]] = {name: encoded[name] for name in names}
        if targets is not None:
            features["label"] = targets.tolist()
        if encoded.encodings is not None:
            return Encoded(features, truncated=sum(bool(each.overflowing) for each in encoded.encodings))
        full = [i for i, ids in enumerate(features["input_ids"]) if len(ids) >= max_length]
        if not full:
            return Encoded(features)
        whole = tokenizer(
            [texts[i] for i in full], None if pairs is None else [pairs[i] for i in full], verbose=False, **arguments
        )
        return Encoded(features, truncated=sum(len(ids) > max_length for ids in whole["input_ids"]))

    # ------------------------------------------------------------------------------------------------------- labels

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Sequence[str] | None) -> Targets:
        """Names from the model (`known`), from a Hub data set's class names, or from the first split with labels."""
        column = columns.label
        labelled = {role: split for role, split in raw.items() if column in split.rows.column_names}
        if column is None or not labelled:
            return Targets(tuple(known or ()))
        values = {role: _label_values(split, column) for role, split in labelled.items()}
        secret = [role for role in values if role in ("test", "predict") and set(values[role]) == {_UNLABELLED}]
        for role in secret:
            del values[role]
        if not values:
            return Targets(tuple(known or ()))
        first = "train" if "train" in values else next(iter(values))
        names = tuple(known or _class_names(labelled[first], column) or _names(labelled[first], column, values[first]))
        if len(names) < 2:
            raise StageError(
                FailureClass.DATA,
                "OneLabel",
                f"Split {labelled[first].name} ({labelled[first].origin}) has the one label {names[0]!r}; "
                "a classifier needs two.",
                "Check dataset.columns.label.",
            )
        return Targets(names, {role: _ids(labelled[role], column, values[role], names) for role in values})

    def count_labels(self, targets: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
        """Rows of each label."""
        return dict(zip(names, np.bincount(targets, minlength=len(names)).tolist(), strict=True))

    # ------------------------------------------------------------------------------------------------------- models

    def model_labels(self, config: PretrainedConfig) -> tuple[str, ...] | None:
        """From `id2label`, when the checkpoint was saved with a classification head."""
        return heads.labels_of(config, _HEAD)

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """A head of another size in the checkpoint is replaced."""
        config = load_config(job)
        heads.name_labels(config, facts.labels)
        config.problem_type = "single_label_classification"
        model = heads.built(job, _auto(), config, dtype)
        heads.adopt_padding(job, model)
        return model

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """For counting parameters on the meta device."""
        heads.name_labels(config, [str(i) for i in range(labels)])
        return heads.empty(_auto(), config)

    def load_model(self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """Refuses a checkpoint whose head is missing: its answers would be random."""
        return heads.loaded(job, _auto(), name_or_path, arguments)

    # ------------------------------------------------------------------------------------------------------ batches

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pads on the right."""
        import torch

        batch = padded(features, {"input_ids": pad_token_id, "token_type_ids": 0})
        if "label" in features[0]:
            batch["labels"] = torch.tensor([int(feature["label"]) for feature in features])
        return batch

    # ------------------------------------------------------------------------------------------------------ results

    def items(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows."""
        return batch["labels"].ne(-100).sum()

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """The logits of each row."""
        said = model(**{name: value for name, value in batch.items() if name != "labels"})
        return [{"logits": row} for row in said.logits.float().cpu().numpy()]

    def labelled(self, split: PreparedSplit) -> bool:
        """Whether rows have a label."""
        return "label" in split.columns

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Cross-entropy in nats; accuracy, and f1, precision and recall as the plain mean over the labels."""
        logits, labels = _logits(answers), split.numbers("label")
        likelihood = _probabilities(logits)[np.arange(len(labels)), labels]
        loss = float(-np.log(np.maximum(likelihood, 1e-45)).mean())
        return {"loss": loss, **_scores(labels, logits.argmax(axis=1), len(split.facts.labels))}

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """The most frequent label of the very rows that are judged: no constant answer scores higher accuracy."""
        labels, count = split.numbers("label"), len(split.facts.labels)
        return _scores(labels, np.full_like(labels, np.bincount(labels, minlength=count).argmax()), count)

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """`label`, its probability `score`, and `scores` with the probability of each label."""
        names, shares = split.facts.labels, _probabilities(_logits(answers[rows]))
        best = shares.argmax(axis=1)
        return pa.table(
            {
                "label": pa.array([names[each] for each in best], pa.string()),
                "score": pa.array(shares[np.arange(len(best)), best], pa.float64()),
                "scores": pa.StructArray.from_arrays([pa.array(column) for column in shares.T], names=list(names)),
            }
        )

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Of one text, or of a pair."""
        pair = bool(job.dataset and job.dataset.columns.text_pair)
        asked = '{"text": "first text", "text_pair": "second text"}' if pair else '"a text"'
        return Card(
            use=f"print(model({asked}))",
            long_rows=f"Inputs are cut after {facts.max_length} tokens.",
            counted="rows",
            baseline="always answering the most frequent label",
        )

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """The wrong answers given with most confidence (at most half), then the first right ones."""
        shares, labels, names = _probabilities(_logits(answers)), split.numbers("label"), split.facts.labels
        best, sure = shares.argmax(axis=1), shares.max(axis=1)
        wrong = np.flatnonzero(best != labels)
        wrong = wrong[np.argsort(-sure[wrong], kind="stable")][: most // 2]
        right = np.flatnonzero(best == labels)[: most - len(wrong)]
        return [
            {"row": row, "label": names[labels[row]], "predicted": names[best[row]], "score": float(sure[row])}
            for row in [*wrong.tolist(), *right.tolist()]
        ]


def _auto() -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification


def _logits(answers: Sequence[Answer]) -> Logits:
    return np.stack([answer["logits"] for answer in answers])


def _label_values(split: RawSplit, column: str) -> list[Any]:
    """Ints, or texts, one for each row; whole numbers written as text stay text."""
    values = arrow_table(split.rows)[column]
    path = "dataset.columns.label"
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        raise StageError(
            FailureClass.CONFIG,
            "NotYetSupported",
            f"{path} is {column!r}, which holds lists in split {split.name}: "
            "several labels a row are not supported yet.",
            "Give each row one label.",
        )
    empty = pc.is_null(values)
    if is_text(values.type):
        empty = pc.or_(empty, pc.equal(pc.fill_null(values, ""), ""))
    if pc.any(empty).as_py():
        row = pc.index(empty, True).as_py()
        raise row_error("NullLabel", split, row, path, column, values[row].as_py(), "a row needs its label")
    if pa.types.is_boolean(values.type):
        return ["true" if value else "false" for value in values.to_pylist()]
    if not (is_text(values.type) or pa.types.is_integer(values.type)):
        raise row_error("LabelType", split, 0, path, column, values[0].as_py(), "a label is a whole number or a word")
    labels: list[Any] = values.to_pylist()
    return labels


def _class_names(split: RawSplit, column: str) -> tuple[str, ...] | None:
    feature = split.rows.features[column]
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _names(split: RawSplit, column: str, values: list[Any]) -> tuple[str, ...]:
    """The names by the values of the split that defines them."""
    distinct = set(values)
    if not isinstance(values[0], int):
        numbers = [int(word) for word in distinct] if all(_WHOLE_NUMBER.fullmatch(word) for word in distinct) else []
        if sorted(numbers) == list(range(len(distinct))):
            return tuple(str(i) for i in range(len(distinct)))
        return tuple(sorted(distinct))
    count = next(i for i in range(len(distinct) + 1) if i not in distinct)
    if count < len(distinct):
        row = next(i for i, value in enumerate(values) if not 0 <= value < count)
        rule = f"class ids count from 0 without gaps, and no row has {count}"
        raise row_error("LabelOutOfRange", split, row, "dataset.columns.label", column, values[row], rule)
    return tuple(str(i) for i in range(count))


def _ids(split: RawSplit, column: str, values: list[Any], names: Sequence[str]) -> LabelIds:
    position: dict[Any, int] = {name: i for i, name in enumerate(names)}
    if isinstance(values[0], int):
        position = {i: i for i in range(len(names))}
    elif not any(value in position for value in values) and set(values) <= {str(i) for i in range(len(names))}:
        position = {str(i): i for i in range(len(names))}  # class ids as a CSV file has them
    ids = [position.get(value, _UNLABELLED) for value in values]
    if _UNLABELLED in ids:
        row = ids.index(_UNLABELLED)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        rule = f"the labels are {shown} (ids 0 to {len(names) - 1})"
        raise row_error("LabelOutOfRange", split, row, "dataset.columns.label", column, values[row], rule)
    return np.asarray(ids, np.int64)


def _probabilities(logits: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _scores(labels: LabelIds, answers: LabelIds, count: int) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(
        labels, answers, labels=list(range(count)), average="macro", zero_division=0
    )
    return {
        "accuracy": float(accuracy_score(labels, answers)),
        "f1": float(f1),
        "precision": float(precision),
        "recall": float(recall),
    }
