"""Figures of classes, for all tasks that answer with one: of a row, or of a word."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probability of each class, of logits of shape (answers, classes)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def cross_entropy(logits: NDArray[np.float32], ids: NDArray[Any]) -> float:
    """Mean over the answers in nats; `ids`: the right class of each."""
    return float(-np.log(np.maximum(softmax(logits)[np.arange(len(ids)), ids], 1e-45)).mean())


def class_scores(ids: NDArray[Any], answers: NDArray[Any], count: int) -> dict[str, float]:
    """Accuracy, and f1, precision and recall as the plain mean over `count` classes."""
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(
        ids, answers, labels=list(range(count)), average="macro", zero_division=0
    )
    scores = {"accuracy": accuracy_score(ids, answers), "f1": f1, "precision": precision, "recall": recall}
    return {name: float(score) for name, score in scores.items()}


def telling_rows(wrong: NDArray[np.float64], most: int) -> list[int]:
    """Rows for the report, at most so many: the worst first (at most half), then the first that are right. `wrong`: how
    wrong each row's answer is, 0 where it is right.
    """
    worst = np.flatnonzero(wrong > 0)
    worst = worst[np.argsort(-wrong[worst], kind="stable")][: most // 2]
    right = np.flatnonzero(wrong == 0)[: most - len(worst)]
    return [*worst.tolist(), *right.tolist()]
