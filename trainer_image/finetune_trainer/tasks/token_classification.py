"""Token classification: one tag for each word of a row, as in named-entity recognition.

Rows are lists of words. A row that is longer than the model's input is cut into overlapping windows, and each word is
learnt and answered once, in the window in which it has most text around it: training, evaluation and prediction count
every word alike, and none is lost. A word's tag belongs to its first token; its other tokens have none. A word without
tokens cannot be learnt; it is answered with `O` where there is such a tag, and counts as missed where another one was
right.

Longformer attends to a window of neighbours; its first token attends to all of them, and they to it. The model itself
pads inputs to a multiple of its attention window.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FailureClass
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.models.loading import load_config
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.class_metrics import Confusion, class_scores, cross_entropy, informative_rows, softmax
from finetune_trainer.tasks.encoding import never_empty
from finetune_trainer.tasks.head_labels import is_new
from finetune_trainer.tasks.label_names import absent_note
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import class_names, is_list, is_text, needed_columns, row_error
from finetune_trainer.tasks.task_protocol import (
    WARM_TEXT,
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
from finetune_trainer.tasks.windows import made_ready

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit
from finetune_trainer.tasks.tag_columns import OUTSIDE, check_tags, known_tag_ids, tag_ids, tag_names

_HEAD = "ForTokenClassification"
_NOT_COUNTED = -100
"""Label that the loss of transformers' models ignores."""
_NO_WORD = -1
_NO_TAG = -1
"""Answer to a word without tokens where no tag is `O`."""
_LEAST = 1e-12
"""Confidence in the answer to a word without tokens, for sorting answers: wrong, and last of the wrong."""
_GLOBAL_ATTENTION = ("longformer", "led")
"""Values of `model_type` whose inputs mark the tokens that attend to all others."""
_ENTITY_TAG = re.compile(r"[BIESLU]-.+")
_METRICS = METRICS["token-classification"]


def token_classification() -> TaskParts:
    """Return the parts of `token-classification`.

    A target is the tag ids of a row's words. A feature has `words`: for each token the index of the word whose first
    token it is, or -1, also for words that another window answers; and `tags`, the tag id of that word, or -100. An
    answer has the `logits` of its words, in their order.
    """
    return TaskParts(_Encoding(), _Head(), _Scoring(), _Description())


class _Encoding(Encoding):
    windows = True

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of the words, and of the tags when named."""
        contents = {"tokens": "the list of words", "tags": "a tag for each word"}
        rule = "token-classification reads tokens and tags"
        return needed_columns(columns, setting, contents, rule, target="tags", labelled=labelled)

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `tokens`."""
        assert columns.tokens is not None
        return {"tokens": columns.tokens}

    def judged(self, columns: Columns) -> dict[str, str]:
        """Return `tags`: those of words without tokens are in no feature."""
        return {} if columns.tags is None else {"tags": columns.tags}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that every row is a list of at least one word, and that every word is text."""
        path, name = f"{setting}.columns.tokens", self.inputs(columns)["tokens"]
        values = split.table[name]
        if not is_list(values.type) or not is_text(values.type.value_type):
            rule = f"the column is of type {values.type}, not a list of words"
            raise row_error("NotWords", split, 0, path, name, values[0].as_py(), rule)
        empty = pc.equal(pc.fill_null(pc.list_value_length(values), 0), 0)
        if pc.any(empty).as_py():
            row = pc.index(empty, True).as_py()
            raise row_error("NoWords", split, row, path, name, values[row].as_py(), "a row needs at least one word")
        words = pc.list_flatten(values)
        if words.null_count:
            row = pc.list_parent_indices(values)[pc.index(pc.is_null(words), True).as_py()].as_py()
            raise row_error("NullWord", split, row, path, name, values[row].as_py(), "a word is text")

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the targets, with names from the model (`known`), from a Hub data set's class names, or from the first
        split with tags: `O` first, then the others in their order.
        """
        column = columns.tags
        tagged = {role: split for role, split in raw.items() if column in split.rows.column_names}
        if column is None or not tagged:
            return Targets(known or Labels())
        for split in tagged.values():
            check_tags(split, column, self.inputs(columns)["tokens"])
        first = tagged.get("train") or next(iter(tagged.values()))
        names = known.names if known is not None else class_names(first, column) or tag_names(first, column)
        if len(names) < 2:
            raise StageError(
                FailureClass.DATA,
                "OneLabel",
                f"Split {first.name} ({first.origin}) has the one tag {names[0]!r}; a tagger needs two.",
                "Check dataset.columns.tags.",
            )
        labels, ids, notes = Labels(names), {}, list[str]()
        for role, split in tagged.items():
            if known is None:
                ids[role] = tag_ids(split, column, names)
            else:
                ids[role], assumed = known_tag_ids(split, column, names)
                notes.extend(assumed)
            if role != "train" and not _of_entities(names):
                notes.extend(absent_note(split, self.count_labels(ids[role], labels)))
        return Targets(labels, ids, tuple(dict.fromkeys(notes)))

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Count the words of each tag."""
        counts = np.bincount(np.concatenate(targets), minlength=len(labels.names))
        return dict(zip(labels.names, counts.tolist(), strict=True))

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Cut each row into windows. No row is truncated."""
        made_ready(coding, pair=False)
        encoded = coding.tokenizer(
            list(rows["tokens"]),
            is_split_into_words=True,
            truncation=True,
            max_length=coding.max_length,
            stride=coding.stride,
            return_overflowing_tokens=True,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        of_row = [int(row) for row in encoded["overflow_to_sample_mapping"]]
        features: dict[str, list[Any]] = {"input_ids": never_empty(encoded["input_ids"], coding), "words": []}
        if coding.model_type in _GLOBAL_ATTENTION:
            features["global_attention_mask"] = [[1, *[0] * (len(ids) - 1)] for ids in features["input_ids"]]
        if targets is not None:
            features["tags"] = []
        for row, windows in groupby(range(len(of_row)), key=of_row.__getitem__):
            for owned in _owned([encoded.word_ids(window) for window in windows], coding.stride):
                words = owned or [_NO_WORD]
                features["words"].append(words)
                if targets is not None:
                    features["tags"].append([_NOT_COUNTED if at == _NO_WORD else int(targets[row][at]) for at in words])
        learnt = [sum(tag != _NOT_COUNTED for tag in tags) for tags in features.get("tags", ())]
        return Encoded(features, rows=of_row, learnt=learnt or None)

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad on the right."""
        fills = {"input_ids": pad_token_id, "global_attention_mask": 0, "tags": _NOT_COUNTED}
        batch = padded(features, fills)
        if "tags" in batch:
            batch["labels"] = batch.pop("tags")
        return batch

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the words."""
        return int(batch["labels"].ne(_NOT_COUNTED).sum())


class _Head(heads.AutoHead):
    auto = "AutoModelForTokenClassification"
    label_place = "same"
    named_outputs = True

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Read `id2label`, when the checkpoint was saved with a head for tags."""
        names = heads.labels_of(config, _HEAD)
        return None if names is None else Labels(names)

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model; a head for other tags in the checkpoint is replaced."""
        config = load_config(job)
        head = self.model_labels(config)
        heads.name_labels(config, facts.labels)
        return self.built(job, config, dtype, new_outputs=head is not None and is_new(head, labels_of(facts)))


class _Scoring(Scoring):
    metrics = _METRICS
    learnt = "tags"

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the logits of the words that each window answers."""
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
        logits = outputs.logits.float().cpu().numpy()
        # A model may pad its input and return logits for the padding; features have the true length.
        return [
            {"logits": logits[row, np.flatnonzero(feature["words"] != _NO_WORD)]}
            for row, feature in enumerate(features)
        ]

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Return the mean cross-entropy of a word with tokens in nats; for all words see `measured`."""
        loss = cross_entropy(np.concatenate(_logits_by_row(answers, split)), np.concatenate(_tags_by_row(split)))
        predicted = [predicted.ids for predicted in _predicted_tags(answers, split, slice(None))]
        return {"loss": loss, **measured(_gold(split), predicted, split.facts.labels)}

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """Judge the most frequent tag of the very words that are judged, usually `O`: no entity at all."""
        tags = _gold(split)
        most = np.bincount(np.concatenate(tags)).argmax()
        return measured(tags, [np.full_like(tag, most) for tag in tags], split.facts.labels)

    def confusion(self, answers: Sequence[Answer], split: PreparedSplit) -> Confusion | None:
        """Count for words; one without tokens may have no tag."""
        predicted = [tag.ids for tag in _predicted_tags(answers, split, slice(None))]
        right = np.concatenate(_gold(split))
        return Confusion.of(right, np.concatenate(predicted), split.facts.labels, unit="words", none="no tag")

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return rows with the most confident wrong tag first (at most half), then the first right rows."""
        tags, predicted, names = _gold(split), list(_predicted_tags(answers, split, slice(None))), split.facts.labels
        wrong = np.array([
            float(np.where(prediction.ids != right, np.maximum(prediction.scores, _LEAST), 0.0).max())
            for prediction, right in zip(predicted, tags, strict=True)
        ])  # fmt: skip
        return [
            {
                "row": row,
                "label": " ".join(names[at] for at in tags[row]),
                "predicted": " ".join("-" if at == _NO_TAG else names[at] for at in predicted[row].ids),
                "score": float(predicted[row].scores.min()),
            }
            for row in informative_rows(wrong, most)
        ]


class _Description(Description):
    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `tags`, `scores` and `entities`, whatever the labels."""
        return pa.schema(
            [
                ("tags", pa.list_(pa.string())),
                ("scores", pa.list_(pa.float64())),
                ("entities", pa.list_(_ENTITY)),
            ]
        )

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `tags` and their probabilities `scores`, one for each word, and `entities` with their type, first and
        last word (counted from 0), text and the least probability of their words. A word without tokens has the score
        0, and no tag (null) where no tag is `O`.
        """
        names, raw = split.facts.labels, split.raw_values(split.inputs["tokens"], rows)
        tags, scores, entities = [], [], []
        for predicted, words in zip(_predicted_tags(answers, split, rows), raw, strict=True):
            tags.append([None if at == _NO_TAG else names[at] for at in predicted.ids])
            scores.append(predicted.scores)
            entities.append(_entities([tag or OUTSIDE for tag in tags[-1]], words, predicted.scores))
        columns = {"tags": tags, "scores": scores, "entities": entities}
        return pa.table(columns, schema=self.answer_schema(labels_of(split.facts)))

    def warm_row(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the words of a text."""
        return {"tokens": WARM_TEXT.split()}

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use with `pipeline`, which splits a text into words itself."""
        return Card(
            use='print(model("a text with names in it", aggregation_strategy="simple"))',
            long_rows=f"Longer inputs were cut into windows of {facts.max_length} tokens that overlap; `pipeline` does "
            "so with `stride`.",
            counted="words",
            baseline="always predicting the most frequent tag",
        )


_ENTITY = pa.struct(
    [
        pa.field("type", pa.string()),
        pa.field("first", pa.int64()),
        pa.field("last", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("score", pa.float64()),
    ]
)


# -------------------------------------------------------------------------------------------------------------- windows


def _owned(windows: Sequence[Sequence[int | None]], stride: int) -> list[list[int]]:
    """Return for each token of each window the word whose first token it is and that this window answers, else -1.

    `windows`: for each token the index of its word in the row, None for special tokens; neighbours share `stride`
    tokens. A word that begins in several windows is answered by the one whose nearer end is farthest from it.
    """
    step = sum(word is not None for word in windows[0]) - stride
    begins: dict[int, int] = {}
    places: list[tuple[int, int, int, int]] = []
    for number, words in enumerate(windows):
        token = number * step
        for at, word in enumerate(words):
            if word is not None:
                begins.setdefault(word, token)
                places.append((number, at, word, token))
                token += 1
    best: dict[int, tuple[int, int, int]] = {}
    for number, at, word, token in places:
        room = min(at, len(windows[number]) - 1 - at)
        if token == begins[word] and (word not in best or room > best[word][0]):
            best[word] = (room, number, at)
    made = [[_NO_WORD] * len(words) for words in windows]
    for word, (_, number, at) in best.items():
        made[number][at] = word
    return made


# -------------------------------------------------------------------------------------------------------------- results


def _by_row(
    split: PreparedSplit, part: Callable[[int], NDArray[Any]], rows: slice
) -> Iterator[tuple[NDArray[np.int32], NDArray[Any]]]:
    """Yield for some rows the answered words, in their order, and the value of `part` for each; words without tokens
    are missing. `part`: of a feature, one value for each of the words that it answers.
    """
    for features in split.features_by_row[rows]:
        words = np.concatenate([_answered(split.list_of("words", at)) for at in features])
        order = np.argsort(words, kind="stable")
        yield words[order], np.concatenate([part(at) for at in features])[order]


def _answered(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the words that a feature answers, in the order of its answer."""
    answered: NDArray[np.int32] = words[words != _NO_WORD]
    return answered


def _tags_by_row(split: PreparedSplit) -> list[NDArray[np.int32]]:
    """Return for each row the tag ids of its words."""

    def tags_of(at: int) -> NDArray[np.int32]:
        tags: NDArray[np.int32] = split.list_of("tags", at)[split.list_of("words", at) != _NO_WORD]
        return tags

    return [tags for _, tags in _by_row(split, tags_of, slice(None))]


def _logits_by_row(answers: Sequence[Answer], split: PreparedSplit) -> list[NDArray[np.float32]]:
    """Return for each row its words' logits."""
    return [logits for _, logits in _by_row(split, lambda at: answers[at]["logits"], slice(None))]


@dataclass(frozen=True)
class _PredictedTags:
    """Answer to all words of a row."""

    ids: NDArray[np.int32]
    """Ids of their tags; for a word without tokens the id of `O`, or `_NO_TAG`."""
    scores: NDArray[np.float64]
    """Their probabilities; for a word without tokens 0."""


def _predicted_tags(answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> Iterator[_PredictedTags]:
    """Yield the answer to each of some rows."""
    names = split.facts.labels
    absent = names.index(OUTSIDE) if OUTSIDE in names else _NO_TAG
    raw = split.raw_values(split.inputs["tokens"], rows)
    answered = _by_row(split, lambda at: answers[at]["logits"], rows)
    for (words, logits), tokens in zip(answered, raw, strict=True):
        predicted = _PredictedTags(np.full(len(tokens), absent, np.int32), np.zeros(len(tokens)))
        if len(words):
            shares = softmax(logits)
            predicted.ids[words], predicted.scores[words] = shares.argmax(axis=1), shares.max(axis=1)
        yield predicted


def _gold(split: PreparedSplit) -> list[NDArray[np.int32]]:
    """Return for each row the right tag ids of all its words."""
    raw = RawSplit(split.role, "the prepared data", split.raw())
    return list(known_tag_ids(raw, split.inputs["tags"], split.facts.labels)[0])


def measured(tags: Sequence[NDArray[Any]], answers: Sequence[NDArray[Any]], names: Sequence[str]) -> dict[str, float]:
    """Return accuracy of words; f1, precision and recall of whole entities by seqeval where tags are those of entities
    (`B-person`), else of tags, as the plain mean over those that occur. `tags` and `answers`: tag ids of each row's
    words; an answer may be `_NO_TAG`, which is never right.
    """
    scores = class_scores(np.concatenate(tags), np.concatenate(answers))
    if _of_entities(names):
        from seqeval.metrics import f1_score, precision_score, recall_score

        words = [[[OUTSIDE if at == _NO_TAG else names[at] for at in row] for row in rows] for rows in (tags, answers)]
        of_entities = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
        scores |= {name: float(score(*words, zero_division=0)) for name, score in of_entities.items()}
    return {name: scores[name] for name in _METRICS[None]}


def _of_entities(names: Sequence[str]) -> bool:
    return all(name == OUTSIDE or _ENTITY_TAG.fullmatch(name) for name in names)


def _entities(tags: Sequence[str], words: Sequence[str], scores: NDArray[np.float64]) -> list[dict[str, Any]]:
    if not _of_entities(tags):
        return []
    from seqeval.metrics.sequence_labeling import get_entities

    return [
        {
            "type": kind,
            "first": first,
            "last": last,
            "text": " ".join(words[first : last + 1]),
            "score": float(scores[first : last + 1].min()),
        }
        for kind, first, last in get_entities(list(tags))
    ]
