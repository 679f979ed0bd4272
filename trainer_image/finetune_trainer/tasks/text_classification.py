"""Text classification over one text or a pair of texts: one class a row, several, or a number (`label_forms.py`).

Classes are ids 0 to n-1 without gaps, or names; names get ids in the sorted order of the train split's labels, or in
that of a head that the checkpoint has for them (`head_labels.py`). Whole numbers that are no such ids (1 to 5, -1 and
1) are names. Everything else (missing labels, a label that train lacks, 7 among 0 and 1) is refused with the row,
because a wrong label costs accuracy silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune_contract.choices import LabelForm
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.models.loading import load_config
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.class_metrics import Confusion, informative_rows
from finetune_trainer.tasks.encoding import encodings, never_empty
from finetune_trainer.tasks.head_labels import is_new
from finetune_trainer.tasks.label_forms import FEW_NUMBERS, FORMS, SECRET, Form, Logits, form_of
from finetune_trainer.tasks.label_names import (
    PATH,
    absent_note,
    flat,
    mapped,
    mapped_names,
    names_in,
    numbers_note,
    separated,
    separator_note,
    similar_note,
    unused_note,
    whole_numbers_note,
)
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import is_text, needed_columns, refuse_not_text, row_error
from finetune_trainer.tasks.task_protocol import (
    Answer,
    Card,
    Coding,
    Description,
    Encoded,
    Encoding,
    Feature,
    Labels,
    Scoring,
    Targets,
    TaskParts,
    labels_of,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

_HEAD = "ForSequenceClassification"


def text_classification(label_names: Mapping[str, str], label_separator: str | None) -> TaskParts:
    """Return the parts of `text-classification`. A target is its form's value of a label, an answer has `logits`, one
    for each label. `label_names`, `label_separator`: the job's `dataset.labels` and `dataset.labelSeparator`.
    """
    return TaskParts(_Encoding(label_names, label_separator), _Head(), _Scoring(), _Description())


class _Encoding(Encoding):
    def __init__(self, label_names: Mapping[str, str], label_separator: str | None) -> None:
        self._label_names, self._label_separator = label_names, label_separator

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of the text, and of the pair's second text and the label when named."""
        contents = {"text": "the text", "text_pair": None, "label": "the label"}
        rule = "text-classification reads text, textPair and label"
        return needed_columns(columns, setting, contents, rule, target="label", labelled=labelled)

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `text`, and `text_pair` for pairs."""
        named = {"text": columns.text, "text_pair": columns.text_pair}
        return {role: name for role, name in named.items() if name is not None}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that every text exists and is text."""
        table = split.table
        for role, name in self.inputs(columns).items():
            path = f"{setting}.columns.{'textPair' if role == 'text_pair' else role}"
            refuse_not_text(split, path, name, table[name])

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode without padding; truncate the longer text of a pair first."""
        texts, pairs = list(rows["text"]), list(rows["text_pair"]) if "text_pair" in rows else None
        # token_type_ids distinguish the two texts of a pair; with one text they are all 0, the models' default.
        types = pairs is not None and "token_type_ids" in coding.tokenizer.model_input_names
        made = encodings(texts, pairs, coding)
        if made is None:
            features, truncated = _called(texts, pairs, coding, types=types)
        else:
            features = {"input_ids": [encoding.ids for encoding in made]}
            if types:
                features["token_type_ids"] = [encoding.type_ids or [0] for encoding in made]
            truncated = sum(bool(encoding.overflowing) for encoding in made)
        features["input_ids"] = never_empty(features["input_ids"], coding)
        if targets is not None:
            features[_column_of(targets)] = targets.tolist()
        return Encoded(features, truncated=truncated)

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the targets, with names from the model (`known`), from `dataset.labels`, from a Hub data set's class
        names, or from the first split with labels; likewise their form.
        """
        column, given = columns.label, self._label_names
        labelled = {role: split for role, split in raw.items() if column in split.rows.column_names}
        if column is None or not labelled:
            return Targets(known or Labels())
        if self._label_separator is not None:
            labelled = {role: separated(split, column, self._label_separator) for role, split in labelled.items()}
        first = labelled.get("train") or next(iter(labelled.values()))
        form = FORMS[known.form] if known is not None and known.form is not None else form_of(first, column, given)
        for split in labelled.values():
            _refuse_other_form(split, column, form, given)
        values = {role: form.values(split, column) for role, split in labelled.items()}
        for role in [role for role in values if role in ("test", "predict") and _is_secret(values[role])]:
            if str(SECRET) not in given and SECRET not in values.get("train", ()):
                del values[role]
        if not values:
            return Targets(known or Labels())
        role = "train" if "train" in values else next(iter(values))
        split = labelled[role]
        if given and form.name != "regression":
            values = {role: mapped(labelled[role], column, labels, given) for role, labels in values.items()}
            names, notes = mapped_names(given), unused_note(split, column, values[role], given)
        elif known is None:
            names = form.names(split, column, values[role])
            notes = _notes(split, column, form, values[role], names)
        else:
            names, notes = known.names, ()
        names_of = dict.fromkeys(values, names)
        if known is not None:
            names = known.names
            for role, labels in values.items():
                names_of[role], assumed = names_in(labelled[role], column, flat(labels), names)
                notes += assumed
        if form.name == "single_label_classification" and len(names) < 2:
            raise _one_label(split, names)
        if form.name == "multi_label_classification" and not names:
            raise row_error("NoLabels", split, 0, PATH, column, values[role][0], "no row has a label")
        targets = {
            role: form.targets(labelled[role], column, labels, names_of[role]) for role, labels in values.items()
        }
        for role, ids in targets.items():
            if role != "train":
                notes += absent_note(labelled[role], form.counts(ids, names))
        return Targets(Labels(names, form.name), targets, tuple(dict.fromkeys(notes)))

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Count the rows of each label."""
        return _form(labels.form).counts(targets, labels.names)

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad on the right."""
        batch = padded(features, {"input_ids": pad_token_id, "token_type_ids": 0})
        for form in FORMS.values():
            if form.column in features[0]:
                batch["labels"] = form.batch(features)
        return batch

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the rows."""
        return len(batch["labels"])


class _Head(heads.AutoHead):
    auto = "AutoModelForSequenceClassification"
    label_place = "same"
    smoothed_form = "single_label_classification"
    named_outputs = True

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Read `id2label` and `problem_type`, when the checkpoint was saved with a classification head."""
        names = heads.labels_of(config, _HEAD)
        if names is None:
            return None
        form = config.problem_type or ("regression" if len(names) == 1 else "single_label_classification")
        return Labels(() if form == "regression" else names, form)

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model; a head for other labels in the checkpoint is replaced."""
        config = load_config(job)
        head, form = self.model_labels(config), _form(facts.label_form)
        heads.name_labels(config, facts.labels or (form.column,))
        config.problem_type = form.name
        model = self.built(job, config, dtype, new_outputs=head is not None and is_new(head, labels_of(facts)))
        heads.adopt_padding(job, model)
        return model


class _Scoring(Scoring):
    metrics: Mapping[LabelForm | None, tuple[str, ...]] = {name: form.metrics for name, form in FORMS.items()}

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the logits of each row."""
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
        return [{"logits": row} for row in outputs.logits.float().cpu().numpy()]

    def labelled(self, split: PreparedSplit) -> bool:
        """Return whether rows have a label."""
        return _form(split.facts.label_form).column in split.columns

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Score by the form of the labels."""
        form, logits = _form(split.facts.label_form), _logits(answers)
        targets = _targets(split, form)
        return {"loss": form.loss(logits, targets), **form.measured(logits, targets, split.facts.labels)}

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """Compute the baseline by the form of the labels."""
        form = _form(split.facts.label_form)
        return form.constant(_targets(split, form), split.facts.labels)

    def confusion(self, answers: Sequence[Answer], split: PreparedSplit) -> Confusion | None:
        """Count for rows that have one class each."""
        form = _form(split.facts.label_form)
        if form.name != "single_label_classification":
            return None
        return Confusion.of(_targets(split, form), _logits(answers).argmax(axis=1), split.facts.labels, unit="rows")

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the worst answers (at most half), then the first right ones."""
        form = _form(split.facts.label_form)
        seen = form.sample(_logits(answers), _targets(split, form), split.facts.labels)
        return [
            {"row": row, "label": seen.right[row], "predicted": seen.predicted[row], "score": float(seen.sure[row])}
            for row in informative_rows(seen.wrong, most)
        ]


class _Description(Description):
    answer_columns = frozenset(column for form in FORMS.values() for column in form.columns)

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema by the form of the labels."""
        return _form(labels.form).answer_schema(labels.names)

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Predict by the form of the labels."""
        return pa.table(_form(split.facts.label_form).predictions(_logits(answers[rows]), split.facts.labels))

    def served_facts(self, labels: Labels, columns: Columns, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the form of the labels, and whether a row is a pair."""
        return {"label_form": labels.form, "pairs": columns.text_pair is not None}

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use with one text, or with a pair."""
        pair = bool(job.dataset and job.dataset.columns.text_pair)
        example = '{"text": "first text", "text_pair": "second text"}' if pair else '"a text"'
        # A model with several labels should return all of them, and a number is no probability.
        more = {"multi_label_classification": ", top_k=None", "regression": ', function_to_apply="none"'}
        cut = f", truncation=True, max_length={facts.max_length}"
        return Card(
            use=f"print(model({example}{cut}{more.get(facts.label_form or '', '')}))",
            long_rows=f"Inputs are cut after {facts.max_length} tokens.",
            counted="rows",
            baseline=_form(facts.label_form).baseline,
        )


def _called(
    texts: list[str], pairs: list[str] | None, coding: Coding, *, types: bool
) -> tuple[dict[str, Sequence[Any]], int]:
    """Return features and the number of truncated ones, by only calling the tokenizer."""
    tokenizer, max_length = coding.tokenizer, coding.max_length
    arguments: dict[str, Any] = {"padding": False, "return_attention_mask": False, "return_token_type_ids": types}
    encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length, verbose=False, **arguments)
    features = {"input_ids": encoded["input_ids"]}
    if types:
        features["token_type_ids"] = [type_ids or [0] for type_ids in encoded["token_type_ids"]]
    full = [i for i, ids in enumerate(features["input_ids"]) if len(ids) >= max_length]
    if not full:
        return features, 0
    whole = tokenizer(
        [texts[i] for i in full], None if pairs is None else [pairs[i] for i in full], verbose=False, **arguments
    )
    return features, sum(len(ids) > max_length for ids in whole["input_ids"])


def _form(name: LabelForm | None) -> Form:
    """Return the form; one class without a name, as for data without labels."""
    return FORMS[name or "single_label_classification"]


def _column_of(targets: NDArray[Any]) -> str:
    """Return the column of features: targets of different forms differ in type or shape."""
    if targets.ndim == 2:
        return FORMS["multi_label_classification"].column
    return FORMS["regression" if targets.dtype.kind == "f" else "single_label_classification"].column


def _targets(split: PreparedSplit, form: Form) -> NDArray[Any]:
    return (
        np.stack(split.lists(form.column)) if form.name == "multi_label_classification" else split.numbers(form.column)
    )


def _logits(answers: Sequence[Answer]) -> Logits:
    return np.stack([answer["logits"] for answer in answers])


def _is_secret(values: Sequence[Any]) -> bool:
    return all(value == SECRET for value in values)


def _notes(split: RawSplit, column: str, form: Form, values: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return notes on labels that may mean something else, by the split that defines them."""
    if form.name != "regression":
        several = separator_note(split, column, names) if form.name == "single_label_classification" else ()
        return (*numbers_note(split, column, names), *similar_note(split, column, names), *several) if names else ()
    distinct = sorted(set(values))
    if len(distinct) > FEW_NUMBERS or not all(value.is_integer() for value in distinct):
        return ()
    written = {str(value) for value in FORMS["single_label_classification"].values(split, column)}
    return whole_numbers_note(split, column, sorted(written, key=float))


def _refuse_other_form(split: RawSplit, column: str, form: Form, given: Mapping[str, str]) -> None:
    """Raise StageError DATA for a split whose labels are of another form than those of the deciding split."""
    kind = split.table[column].type
    split_form = form_of(split, column, given)
    # Integers may stand for fractions, and names of one split may happen to look like them.
    lists = "multi_label_classification"
    if (split_form.name == lists) != (form.name == lists) or (
        split_form.name == "regression" and form.name == "single_label_classification" and not is_text(kind)
    ):
        value = split.table[column][0].as_py()
        rule = f"the column is of type {kind}, and the labels are those of {form.name.replace('_', ' ')}"
        raise row_error("LabelType", split, 0, PATH, column, value, rule)


def _one_label(split: RawSplit, names: Sequence[str]) -> StageError:
    return StageError(
        FailureClass.DATA,
        "OneLabel",
        f"Split {split.name} ({split.origin}) has the one label {names[0]!r}; a classifier needs two.",
        "Check dataset.columns.label.",
    )
