"""Text classification with one label a row, over one text or a pair of texts.

Labels are class ids 0 to n-1 without gaps, or words; words get ids in the sorted order of the train split's labels.
Anything else (lists, fractions, missing labels) is refused with the row, for a wrong label costs accuracy silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

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
from finetune_trainer.models import load_config, load_error, resolve_model
from finetune_trainer.tasks.base import Feature, LabelIds, Labels, Logits

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_UNLABELLED = -1
"""What Hub data sets write where the labels of a test split are kept secret."""
_COLUMNS = ("text", "text_pair", "label")
_HEAD = "ForSequenceClassification"


class TextClassification:
    """The TaskModule of `text-classification`."""

    # --------------------------------------------------------------------------------------------------------- data

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Text, the pair's second text when named, the label when named."""
        if columns.text is None:
            raise _not_set(f"{setting}.columns.text", "the column that holds the text")
        if labelled and columns.label is None:
            raise _not_set(f"{setting}.columns.label", "the column that holds the label")
        _refuse_other_columns(columns, setting)
        needs = [ColumnNeed(f"{setting}.columns.text", columns.text)]
        if columns.text_pair is not None:
            needs.append(ColumnNeed(f"{setting}.columns.textPair", columns.text_pair))
        if columns.label is not None:
            needs.append(ColumnNeed(f"{setting}.columns.label", columns.label, required=labelled))
        return tuple(needs)

    def texts(self, columns: Columns) -> dict[str, str]:
        """`text`, and `text_pair` for pairs."""
        named = {"text": columns.text, "text_pair": columns.text_pair}
        return {role: name for role, name in named.items() if name is not None}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Every text is there and is text."""
        table = arrow_table(split.rows)
        for role, name in self.texts(columns).items():
            path = f"{setting}.columns.{'textPair' if role == 'text_pair' else role}"
            values = table[name]
            if not _is_text(values.type):
                kind = "all null" if pa.types.is_null(values.type) else f"of type {values.type}"
                raise _row_error("NotText", split, 0, path, name, values[0].as_py(), f"the column is {kind}, not text")
            if values.null_count:
                row = pc.index(pc.is_null(values), True).as_py()
                raise _row_error("NullText", split, row, path, name, None, "a row needs its text")

    def encode(
        self, rows: Mapping[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> tuple[dict[str, list[list[int]]], int]:
        """Truncates the longer text of a pair first; no padding."""
        texts, pairs = list(rows["text"]), list(rows["text_pair"]) if "text_pair" in rows else None
        # token_type_ids tell the two texts of a pair apart; with one text they are all 0, which is what models assume
        # anyway.
        types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
        arguments: dict[str, Any] = {"padding": False, "return_attention_mask": False, "return_token_type_ids": types}
        encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length, verbose=False, **arguments)
        names = ["input_ids", *(["token_type_ids"] if types else [])]
        features: dict[str, list[list[int]]] = {name: encoded[name] for name in names}
        if encoded.encodings is not None:
            return features, sum(bool(each.overflowing) for each in encoded.encodings)
        full = [i for i, ids in enumerate(features["input_ids"]) if len(ids) >= max_length]
        if not full:
            return features, 0
        whole = tokenizer(
            [texts[i] for i in full], None if pairs is None else [pairs[i] for i in full], verbose=False, **arguments
        )
        return features, sum(len(ids) > max_length for ids in whole["input_ids"])

    # ------------------------------------------------------------------------------------------------------- labels

    def labels(self, raw: Mapping[str, RawSplit], columns: Columns, known: Sequence[str] | None) -> Labels:
        """Names from the model (`known`), from a Hub data set's class names, or from the first split with labels."""
        column = columns.label
        labelled = {role: split for role, split in raw.items() if column in split.rows.column_names}
        if column is None or not labelled:
            return Labels(tuple(known or ()), {})
        values = {role: _label_values(split, column) for role, split in labelled.items()}
        secret = [role for role in values if role in ("test", "predict") and set(values[role]) == {_UNLABELLED}]
        for role in secret:
            del values[role]
        if not values:
            return Labels(tuple(known or ()), {})
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
        return Labels(names, {role: _ids(labelled[role], column, values[role], names) for role in values})

    def model_labels(self, config: PretrainedConfig) -> tuple[str, ...] | None:
        """From `id2label`, when the checkpoint was saved with a classification head."""
        if not any(name.endswith(_HEAD) for name in config.architectures or ()):
            return None
        names = cast(dict[int, str], config.id2label or {})
        return tuple(str(names[i]) for i in range(len(names)))

    # ------------------------------------------------------------------------------------------------------- models

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """A head of another size in the checkpoint is replaced; the names of the new weights are logged by
        transformers.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        name, arguments = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
        config = load_config(job)
        _set_labels(config, facts.labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.training.seed if job.training else job.seed)
            try:
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    name,
                    config=config,
                    dtype=dtype or torch.float32,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **arguments,
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise load_error(job.model, error, part="weights") from error
            except Exception as error:  # safetensors raises its own class, which has no common base but Exception
                if type(error).__name__ == "SafetensorError":
                    raise load_error(job.model, error, part="weights") from error
                raise
        _refuse_foreign_weights(job, model, info["missing_keys"])
        _adopt_padding(job, model)
        built: PreTrainedModel = model
        return built

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """For counting parameters on the meta device."""
        from transformers import AutoModelForSequenceClassification

        _set_labels(config, [str(i) for i in range(labels)])
        model: PreTrainedModel = cast(Any, AutoModelForSequenceClassification).from_config(config)
        return model

    def load_model(self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """Refuses a checkpoint whose head is missing: its answers would be random."""
        import torch
        from transformers import AutoModelForSequenceClassification

        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name_or_path, dtype=torch.float32, output_loading_info=True, **arguments
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise load_error(job.model, error, part="weights") from error
        if info["missing_keys"]:
            raise StageError(
                FailureClass.MODEL,
                "NoHead",
                f"{name_or_path} lacks the weights {', '.join(sorted(info['missing_keys'])[:4])}; "
                "its answers would be random.",
                "Train it first (training: {}), or name a model that was trained for text classification.",
            )
        loaded: PreTrainedModel = model
        return loaded

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pads on the right."""
        import torch

        longest = max(len(feature["input_ids"]) for feature in features)
        shape = (len(features), longest)
        ids, mask = np.full(shape, pad_token_id, np.int64), np.zeros(shape, np.int64)
        types = np.zeros(shape, np.int64) if "token_type_ids" in features[0] else None
        for row, feature in enumerate(features):
            length = len(feature["input_ids"])
            ids[row, :length], mask[row, :length] = feature["input_ids"], 1
            if types is not None:
                types[row, :length] = feature["token_type_ids"]
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if types is not None:
            batch["token_type_ids"] = torch.from_numpy(types)
        if "label" in features[0]:
            batch["labels"] = torch.tensor([int(feature["label"]) for feature in features])
        return batch

    # ------------------------------------------------------------------------------------------------------ results

    def metrics(self, logits: Logits, labels: LabelIds, names: Sequence[str]) -> dict[str, float]:
        """Accuracy, and f1, precision and recall as the plain mean over the labels."""
        return _scores(labels, logits.argmax(axis=1), len(names))

    def majority(self, labels: LabelIds, names: Sequence[str]) -> dict[str, float]:
        """The most frequent label of the very rows that are judged: no constant answer scores higher accuracy."""
        return _scores(labels, np.full_like(labels, np.bincount(labels, minlength=len(names)).argmax()), len(names))

    def loss(self, logits: Logits, labels: LabelIds) -> float:
        """Cross-entropy in nats."""
        return float(-np.log(np.maximum(_probabilities(logits)[np.arange(len(labels)), labels], 1e-45)).mean())

    def predictions(self, logits: Logits, facts: DataFacts) -> list[dict[str, Any]]:
        """`label`, its probability `score`, and `scores` with the probability of each label."""
        rows = []
        for row in _probabilities(logits):
            best = int(row.argmax())
            scores = dict(zip(facts.labels, row.tolist(), strict=True))
            rows.append({"label": facts.labels[best], "score": float(row[best]), "scores": scores})
        return rows


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _not_set(path: str, what: str) -> StageError:
    return StageError(FailureClass.CONFIG, "MissingSetting", f"{path} is not set; it names {what}.", f"Set {path}.")


def _refuse_other_columns(columns: Columns, setting: str) -> None:
    """Columns that belong to other tasks: nothing would read them."""
    for name, value in columns:
        if value is not None and name not in _COLUMNS:
            path = f"{setting}.columns.{name}"
            raise StageError(
                FailureClass.CONFIG,
                "ColumnOfAnotherTask",
                f"{path} is {value!r}; text-classification reads text, textPair and label.",
                f"Leave {path} out.",
            )


def _row_error(reason: str, split: RawSplit, row: int, path: str, column: str, value: object, rule: str) -> StageError:
    """`row` counts from 0 here and from 1 in the message."""
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    return StageError(
        FailureClass.DATA,
        reason,
        f"Split {split.name} ({split.origin}), row {row + 1}: column {column!r} is {shown}; {rule}.",
        f"Correct the row, or check {path}.",
    )


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
    if _is_text(values.type):
        empty = pc.or_(empty, pc.equal(pc.fill_null(values, ""), ""))
    if pc.any(empty).as_py():
        row = pc.index(empty, True).as_py()
        raise _row_error("NullLabel", split, row, path, column, values[row].as_py(), "a row needs its label")
    if pa.types.is_boolean(values.type):
        return ["true" if value else "false" for value in values.to_pylist()]
    if not (_is_text(values.type) or pa.types.is_integer(values.type)):
        raise _row_error("LabelType", split, 0, path, column, values[0].as_py(), "a label is a whole number or a word")
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
        raise _row_error("LabelOutOfRange", split, row, "dataset.columns.label", column, values[row], rule)
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
        raise _row_error("LabelOutOfRange", split, row, "dataset.columns.label", column, values[row], rule)
    return np.asarray(ids, np.int64)


def _set_labels(config: PretrainedConfig, names: Sequence[str]) -> None:
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    config.problem_type = "single_label_classification"


def _refuse_foreign_weights(job: TrainerJob, model: PreTrainedModel, missing: Sequence[str]) -> None:
    """A checkpoint that fills less than half of the encoder belongs to another model; a missing pooler is common and
    fine.
    """
    prefix = f"{model.base_model_prefix}."
    encoder = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    absent = [name for name in missing if name.startswith(prefix)]
    if 2 * len(absent) > len(encoder):
        whole = f"{len(encoder)} tensors of {type(model).__name__}"
        why = f"they lack {len(absent)} of the {whole}, such as {sorted(absent)[0]}"
        raise load_error(job.model, ValueError(why), part="weights")


def _adopt_padding(job: TrainerJob, model: PreTrainedModel) -> None:
    """Decoder models find a row's last token by the padding token, which their config often lacks."""
    if model.config.pad_token_id is None:
        from finetune_trainer.models import load_tokenizer

        model.config.pad_token_id = load_tokenizer(job).pad_token_id


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
