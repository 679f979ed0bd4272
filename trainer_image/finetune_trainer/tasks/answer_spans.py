"""Spans of answers: the candidates by a model's scores, and the choice among a question's windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.tasks.task_protocol import (
    Answer,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune_trainer.data.prepared import PreparedSplit


LONGEST_ANSWER = 30
"""Limit in tokens, as in the scripts of SQuAD's baselines."""
_BEST = 20
"""Number of starts, and of ends, of a window that are considered, as there."""
_CANDIDATES = 5
"""Number of candidates in a prediction."""
NOWHERE = -1


@dataclass(frozen=True)
class Span:
    """A part of a paragraph."""

    score: float
    """Sum of the logits of start and end."""
    first: int
    """First character in the paragraph."""
    last: int


@dataclass(frozen=True)
class ChosenAnswer:
    """The answer to one question."""

    text: str
    share: float
    first: int | None
    last: int | None
    candidates: list[dict[str, Any]]


def spans_of(answer: Answer, first: NDArray[np.int32], last: NDArray[np.int32]) -> list[Span]:
    """Return the best spans of a window."""
    inside = np.flatnonzero(first != NOWHERE)
    starts, ends = (inside[np.argsort(-answer[name][inside], kind="stable")[:_BEST]] for name in ("start", "end"))
    return [
        Span(float(answer["start"][start] + answer["end"][end]), int(first[start]), int(last[end]))
        for start in starts
        for end in ends
        if start <= end < start + LONGEST_ANSWER
    ]


def chosen_answer(spans: Sequence[Span], none: float | None, context: str) -> ChosenAnswer:
    """Return the best of the spans, or no answer when that scores higher. `none`: its score, where it may be right."""
    distinct = {(span.first, span.last): span for span in sorted(spans, key=lambda span: span.score)}
    best = sorted(distinct.values(), key=lambda span: -span.score)[:_BEST]
    scores = [span.score for span in best] + ([] if none is None else [none])
    if not scores:
        return ChosenAnswer("", 1.0, None, None, [])
    shares = np.exp(np.asarray(scores) - max(scores))
    shares /= shares.sum()
    candidates: list[dict[str, Any]] = [
        {"answer": context[span.first : span.last], "score": float(share), "start": span.first, "end": span.last}
        for span, share in zip(best, shares, strict=False)
    ]
    if none is not None:
        candidates.append({"answer": "", "score": float(shares[-1]), "start": None, "end": None})
    candidates.sort(key=lambda candidate: -candidate["score"])
    top = candidates[0]
    return ChosenAnswer(top["answer"], top["score"], top["start"], top["end"], candidates[:_CANDIDATES])


def measured(predicted: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute exact match and F1 as the scripts of SQuAD do, as shares of 1: the best over all gold answers of a row;
    for a row without one, the empty answer is the right one.
    """
    from torchmetrics.functional.text import squad

    predictions = [{"id": str(at), "prediction_text": text} for at, text in enumerate(predicted)]
    wanted: list[Any] = [
        {"id": str(at), "answers": {"text": list(texts or [""]), "answer_start": [0] * max(1, len(texts))}}
        for at, texts in enumerate(gold)
    ]
    return {name: float(percent) / 100 for name, percent in squad(predictions, wanted).items()}


def span_nll(logits: NDArray[np.float32], wanted: int) -> float:
    """Return the cross-entropy of one position in nats."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(np.log(np.exp(shifted).sum()) - shifted[wanted])


def gold_span(split: PreparedSplit) -> list[list[str]]:
    """Return the right answers of each row."""
    return [list(answers["text"]) for answers in split.raw()[split.inputs["answers"]]]
