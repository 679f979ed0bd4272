"""Extractive question answering: the answer to a question is a span of a paragraph, or there is none.

A paragraph that does not fit beside its question is cut into overlapping windows. A window without the whole answer is
taught to point to its first token, like a question without an answer: the method of BERT's authors for SQuAD. An answer
is the best span over all windows of a row; where the data or the model have questions without an answer, it is compared
with the no-answer score (the least over the windows, as each window has to agree).

Models let the padding of a batch compete with the paragraph for the answer. Their loss would depend on how rows are cut
into micro-batches; the loss here leaves padding out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from finetune_trainer.tasks.answer_spans import (
    NOWHERE,
    ChosenAnswer,
    Span,
    chosen_answer,
    gold_span,
    measured,
    span_nll,
    spans_of,
)
from finetune_trainer.tasks.class_metrics import informative_rows
from finetune_trainer.tasks.encoding import never_empty
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import (
    first_row,
    is_list,
    needed_columns,
    refuse_not_text,
    row_error,
)
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
    Objective,
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

_HEAD = "ForQuestionAnswering"
NO_ANSWER = "no answer"
"""The only label: where it is known, questions may have no answer."""
_MAY_BE_MISSING = "answers_may_be_missing"
"""Field of a model's config."""


@dataclass(frozen=True)
class SpanLoss:
    """Objective: cross-entropy of start and end over the tokens of a window, without padding."""

    compares: tuple[str, ...] = ()
    of_rows: Objective | None = None

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over windows of the mean of start and end, in nats."""
        import torch

        outputs = model(**_without_targets(batch))
        padding = batch["attention_mask"] == 0
        parts = [
            torch.nn.functional.cross_entropy(logits.float().masked_fill(padding, -torch.inf), wanted)
            for logits, wanted in (
                (outputs.start_logits, batch["start_positions"]),
                (outputs.end_logits, batch["end_positions"]),
            )
        ]
        return torch.stack(parts).mean()


def question_answering() -> TaskParts:
    """Return the parts of `question-answering`.

    A target is a pair of a row's answers and the characters at which they begin. A feature has `start` and `end`, the
    answer's tokens, and the range of each token's characters in the paragraph, `first` and `last`, or -1. An answer has
    the logits `start` and `end` of each token.
    """
    return TaskParts(_Encoding(), _Head(), _Scoring(), _Description())


class _Encoding(Encoding):
    windows = True

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of question and paragraph, and of the answers when named."""
        contents = {"question": "the question", "context": "the paragraph", "answers": "the answers"}
        rule = "question-answering reads question, context and answers"
        return needed_columns(columns, setting, contents, rule, target="answers", labelled=labelled)

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `question` and `context`."""
        assert columns.question is not None
        assert columns.context is not None
        return {"question": columns.question, "context": columns.context}

    def judged(self, columns: Columns) -> dict[str, str]:
        """Return `answers`: answers are compared with their texts."""
        return {} if columns.answers is None else {"answers": columns.answers}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that every question and paragraph exists and is text."""
        table = split.table
        for role, name in self.inputs(columns).items():
            path, values = f"{setting}.columns.{role}", table[name]
            refuse_not_text(split, path, name, values)
            row = first_row(values, lambda part: pc.equal(pc.utf8_trim_whitespace(part), ""))
            if row is not None:
                raise row_error("NullText", split, row, path, name, values[row].as_py(), f"a row needs its {role}")

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the targets; rows may have several answers, or none if the model (`known`) has learnt that, or a split
        has such rows: a model that was trained elsewhere does not say what it has learnt.
        """
        answered = {role: split for role, split in raw.items() if columns.answers in split.rows.column_names}
        targets = {role: _answers(split, columns) for role, split in answered.items()}
        open_ends = any(not texts for split in targets.values() for texts, _ in split)
        return Targets(Labels((NO_ANSWER,)) if open_ends else known or Labels(), targets)

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Count the rows without an answer, where there may be such."""
        return {name: sum(not texts for texts, _ in targets) for name in labels.names}

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Cut each paragraph into windows behind the whole question; a question is cut to half of a window. A row is
        truncated when its question is cut, or when no window holds its answer.

        Raise StageError DATA for an answer without tokens: it could not be learnt.
        """
        room, tokenizer = made_ready(coding, pair=True), coding.tokenizer
        types = "token_type_ids" in tokenizer.model_input_names
        questions = list(rows["question"])
        cut = _shorten(questions, coding, room)
        encoded = tokenizer(
            questions,
            list(rows["context"]),
            truncation="only_second",
            max_length=coding.max_length,
            stride=coding.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=types,
            verbose=False,
        )
        of_row = [int(row) for row in encoded["overflow_to_sample_mapping"]]
        features: dict[str, list[Any]] = {
            "input_ids": never_empty(encoded["input_ids"], coding),
            "first": [],
            "last": [],
        }
        if types:
            features["token_type_ids"] = [type_ids or [0] for type_ids in encoded["token_type_ids"]]
        for at in range(len(of_row)):
            inside = [part == 1 for part in encoded.sequence_ids(at)]
            offsets = encoded["offset_mapping"][at]
            first = [offset[0] if is_in else NOWHERE for offset, is_in in zip(offsets, inside, strict=True)]
            last = [offset[1] if is_in else NOWHERE for offset, is_in in zip(offsets, inside, strict=True)]
            features["first"].append(first or [NOWHERE])
            features["last"].append(last or [NOWHERE])
        if targets is not None:
            features |= {"start": [], "end": []}
            for row, windows in groupby(range(len(of_row)), key=of_row.__getitem__):
                texts, starts = targets[row]
                spans = _answer_tokens(texts, starts, [(features["first"][at], features["last"][at]) for at in windows])
                if spans is None:
                    raise _without_tokens(texts[0], rows["question"][row])
                features["start"] += [start for start, _ in spans]
                features["end"] += [end for _, end in spans]
                if texts and not any(end for _, end in spans):
                    cut.add(row)
        return Encoded(features, rows=of_row, truncated=len(cut))

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad on the right."""
        import torch

        batch = padded(features, {"input_ids": pad_token_id, "token_type_ids": 0})
        if "start" in features[0]:
            batch["start_positions"] = torch.tensor([int(feature["start"]) for feature in features])
            batch["end_positions"] = torch.tensor([int(feature["end"]) for feature in features])
        return batch

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the windows."""
        return len(batch["start_positions"])


class _Head(heads.AutoHead):
    auto = "AutoModelForQuestionAnswering"
    objective = SpanLoss()

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Return the labels of a checkpoint with a head for spans: `NO_ANSWER` if it knows missing answers."""
        if heads.labels_of(config, _HEAD) is None:
            return None
        return Labels((NO_ANSWER,) if getattr(config, _MAY_BE_MISSING, False) else ())

    def shown(self, facts: DataFacts) -> dict[str, Any]:
        """Return that answers may be missing, if rows without an answer are evaluated."""
        return {_MAY_BE_MISSING: True} if NO_ANSWER in facts.labels else {}

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model; a head of another kind in the checkpoint is replaced."""
        config = load_config(job)
        heads.name_labels(config, ("start", "end"))
        setattr(config, _MAY_BE_MISSING, NO_ANSWER in facts.labels)
        return self.built(job, config, dtype)

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Build an empty model with one output for starts and one for ends, whatever the labels."""
        return super().empty_model(config, 2)


class _Scoring(Scoring):
    metrics = METRICS["question-answering"]
    learnt = "start"

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the logits of starts and ends."""
        outputs = model(**_without_targets(batch))
        starts, ends = (logits.float().cpu().numpy() for logits in (outputs.start_logits, outputs.end_logits))
        sizes = [len(feature["input_ids"]) for feature in features]
        return [{"start": starts[row, :size], "end": ends[row, :size]} for row, size in enumerate(sizes)]

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Return the mean cross-entropy of start and end over windows in nats, as models compute it; exact match and F1
        of SQuAD, between 0 and 1: for a row without an answer both are 1 if none was given.
        """
        losses = [
            (span_nll(answer["start"], start) + span_nll(answer["end"], end)) / 2
            for answer, start, end in zip(answers, split.numbers("start"), split.numbers("end"), strict=True)
        ]
        predicted = [best.text for best in _decided(answers, split, slice(None))]
        return {"loss": float(np.mean(losses)), **measured(predicted, gold_span(split))}

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """Judge never answering, where that may be right."""
        if NO_ANSWER not in split.facts.labels:
            return {}
        gold = gold_span(split)
        return measured([""] * len(gold), gold)

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the most confident wrong answers (at most half), then the first right ones."""
        gold = gold_span(split)
        decided = list(_decided(answers, split, slice(None)))
        right = np.array([measured([e.text], [g])["exact_match"] == 1.0 for e, g in zip(decided, gold, strict=True)])
        wrong = np.where(right, 0.0, [answer.share for answer in decided])
        return [
            {
                "row": row,
                "label": " | ".join(dict.fromkeys(gold[row])) or NO_ANSWER,
                "predicted": decided[row].text or NO_ANSWER,
                "score": decided[row].share,
            }
            for row in informative_rows(wrong, most)
        ]


class _Description(Description):
    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `answer`, `score`, `start`, `end` and `candidates`, whatever the labels."""
        return pa.schema(
            [
                ("answer", pa.string()),
                ("score", pa.float64()),
                ("start", pa.int64()),
                ("end", pa.int64()),
                ("candidates", pa.list_(_CANDIDATE)),
            ]
        )

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `answer` (empty: none), its probability among the `candidates`, the characters where it begins and
        ends, and the best candidates.
        """
        decided = list(_decided(answers, split, rows))
        columns = {
            "answer": [answer.text for answer in decided],
            "score": [answer.share for answer in decided],
            "start": [answer.first for answer in decided],
            "end": [answer.last for answer in decided],
            "candidates": [answer.candidates for answer in decided],
        }
        return pa.table(columns, schema=self.answer_schema(labels_of(split.facts)))

    def warm_row(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return a question and its paragraph."""
        return {"question": "What warms up?", "context": WARM_TEXT}

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use with the model itself: transformers has no pipeline for spans any more."""
        return Card(
            use=_USE.format(max_length=facts.max_length),
            auto=_Head.auto,
            long_rows=f"Longer paragraphs were cut into windows of {facts.max_length} tokens that overlap.",
            counted="rows",
            baseline="never answering",
        )


def _decided(answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> Iterator[ChosenAnswer]:
    """Yield the answer to each of some rows."""
    may_be_none = NO_ANSWER in split.facts.labels
    row_numbers = range(*rows.indices(split.rows))
    contexts = split.raw_values(split.inputs["context"], rows)
    for row, context in zip(row_numbers, contexts, strict=True):
        spans: list[Span] = []
        none = np.inf
        for at in split.features_by_row[row]:
            spans += spans_of(answers[at], split.list_of("first", at), split.list_of("last", at))
            none = min(none, float(answers[at]["start"][0] + answers[at]["end"][0]))
        yield chosen_answer(spans, none if may_be_none else None, context)


def _without_targets(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's inputs; with positions it would compute its own loss."""
    return {name: value for name, value in batch.items() if not name.endswith("_positions")}


_CANDIDATE = pa.struct(
    [
        pa.field("answer", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
    ]
)
_USE = """question, paragraph = "Where is it?", "It is on the table."
options = {{"truncation": "only_second", "max_length": {max_length}}}
inputs = tokenizer(question, paragraph, return_tensors="pt", **options)
outputs = model(**inputs)
first, last = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))"""


# ------------------------------------------------------------------------------------------------------------- encoding


def _shorten(questions: list[str], coding: Coding, room: int) -> set[int]:
    """Cut questions so that they leave the paragraph half of the window, and more than the windows share; return the
    rows of the cut ones. `room`: tokens of a window that are not special ones.
    """
    most = max(1, room - max(coding.max_length // 2, coding.stride + 1))
    encoded = coding.tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    long = [at for at, ids in enumerate(encoded["input_ids"]) if len(ids) > most]
    for at in long:
        questions[at] = questions[at][: encoded["offset_mapping"][at][most - 1][1]]
    return set(long)


def _without_tokens(answer: str, question: str) -> StageError:
    return StageError(
        FailureClass.DATA,
        "AnswerWithoutTokens",
        f"The answer {answer!r} to the question {question!r} has no token: the tokenizer drops all of its characters.",
        "Correct the row: remove the answer, or use one with words.",
    )


def _answer_tokens(
    texts: Sequence[str], starts: Sequence[int], windows: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[int, int]] | None:
    """Return the first and the last token of a row's first answer in each of its windows, or the window's first token
    twice where it lacks tokens of the answer. None for an answer that has no token in any window.

    `windows`: the first and the last character of each token, see `question_answering`. A blank at the edge of an
    answer, and a character that the tokenizer drops, belong to no token, and are not missed.
    """
    if not texts:
        return [(0, 0)] * len(windows)
    begin, finish = starts[0], starts[0] + len(texts[0])
    tokens_by_window = [
        [at for at, (a, b) in enumerate(zip(*window, strict=True)) if 0 <= a < min(b, finish) and b > begin]
        for window in windows
    ]
    held = [
        (first[at], last[at]) for (first, last), tokens in zip(windows, tokens_by_window, strict=True) for at in tokens
    ]
    if not held:
        return None
    edges = min(first for first, _ in held), max(last for _, last in held)
    return [
        (tokens[0], tokens[-1]) if tokens and (first[tokens[0]], last[tokens[-1]]) == edges else (0, 0)
        for (first, last), tokens in zip(windows, tokens_by_window, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ answering


# -------------------------------------------------------------------------------------------------------------- answers


def _answers(split: RawSplit, columns: Columns) -> NDArray[Any]:
    """Return texts and starts of each row's answers; raise StageError DATA for those that their paragraph lacks."""
    assert columns.context is not None
    assert columns.answers is not None
    path, column = "dataset.columns.answers", columns.answers
    table = split.table
    values = table[column]
    kinds = {field.name: field.type for field in values.type} if pa.types.is_struct(values.type) else {}
    texts, starts = kinds.get("text"), kinds.get("answer_start")
    if texts is None or starts is None or not (is_list(texts) and is_list(starts)):
        rule = f"the column is of type {values.type}, not {{text: [...], answer_start: [...]}} as in SQuAD"
        raise row_error("NotAnswers", split, 0, path, column, values[0].as_py(), rule)
    contexts = table[columns.context].to_pylist()
    answers = np.empty(len(values), object)
    for row, (value, context) in enumerate(zip(values.to_pylist(), contexts, strict=True)):
        answer_texts, places = ((value or {}).get(name) or [] for name in ("text", "answer_start"))
        if len(answer_texts) != len(places) or None in answer_texts or None in places:
            rule = f"it has {len(answer_texts)} texts for {len(places)} places"
            raise row_error("NotAnswers", split, row, path, column, value, rule)
        for answer, place in zip(answer_texts, places, strict=True):
            if context[place : place + len(answer)] != answer or place < 0 or not answer:
                rule = f"its paragraph has {context[max(0, place) : max(0, place) + len(answer)]!r} at {place}"
                raise row_error("AnswerNotThere", split, row, path, column, value, rule)
        answers[row] = (answer_texts, places)
    return answers
