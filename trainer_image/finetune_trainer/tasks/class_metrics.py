"""Metrics of classes, for all tasks whose answer is a class: of a row, or of a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probability of each class, for logits of shape (answers, classes)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def cross_entropy(logits: NDArray[np.float32], ids: NDArray[Any]) -> float:
    """Return the mean over the answers in nats; `ids`: the right class of each."""
    return float(-np.log(np.maximum(softmax(logits)[np.arange(len(ids)), ids], 1e-45)).mean())


def class_scores(ids: NDArray[Any], answers: NDArray[Any]) -> dict[str, float]:
    """Return accuracy, and f1, precision and recall as the plain mean over the classes that are right or answered
    somewhere, as scikit-learn does. An answer below 0 is none, and never right.
    """
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    classes = np.union1d(ids, answers)
    precision, recall, f1, _ = precision_recall_fscore_support(
        ids, answers, labels=classes[classes >= 0], average="macro", zero_division=0
    )
    scores = {"accuracy": accuracy_score(ids, answers), "f1": f1, "precision": precision, "recall": recall}
    return {name: float(score) for name, score in scores.items()}


@dataclass(frozen=True)
class Confusion:
    """Counts of given classes by right class."""

    names: tuple[str, ...]
    counts: NDArray[np.int64]
    """Shape (classes, classes): rows are the right class, columns the answer."""
    unit: str
    """Name of the counted items, in the plural."""

    @classmethod
    def of(
        cls, ids: NDArray[Any], answers: NDArray[Any], names: Sequence[str], *, unit: str, none: str = "no answer"
    ) -> Confusion:
        """Count. `ids`: the right classes; `answers`: the given ones, -1 for none, which is a class called `none`."""
        missing = answers < 0
        if missing.any():
            names, answers = (*names, none), np.where(missing, len(names), answers)
        count = len(names)
        counts = np.bincount(ids.astype(np.int64) * count + answers, minlength=count * count)
        return cls(tuple(names), counts.reshape(count, count).astype(np.int64), unit)

    def largest(self, most: int) -> Confusion:
        """Return it with at most `most` classes: those of the most rows, in their order, and the others as one."""
        if len(self.names) <= most:
            return self
        kept = np.sort(np.argsort(-self.counts.sum(axis=1), kind="stable")[: most - 1])
        group = np.full(len(self.names), most - 1)
        group[kept] = np.arange(most - 1)
        joined = np.zeros((most, most), np.int64)
        np.add.at(joined, (group[:, None], group[None, :]), self.counts)
        others = f"{len(self.names) - len(kept)} others"
        return Confusion((*(self.names[at] for at in kept), others), joined, self.unit)

    def mistakes(self, most: int) -> list[tuple[str, str, int]]:
        """Return the most frequent mistakes: right class, answer, count."""
        wrong = self.counts * ~np.eye(len(self.names), dtype=bool)
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        places = [divmod(int(at), len(self.names)) for at in order]
        return [(self.names[i], self.names[j], int(wrong[i, j])) for i, j in places if wrong[i, j]]


def informative_rows(wrong: NDArray[np.float64], most: int) -> list[int]:
    """Return at most `most` rows for the report: the worst first (at most half), then the first right ones. `wrong`:
    error of each row's answer, 0 where it is right.
    """
    worst = np.flatnonzero(wrong > 0)
    worst = worst[np.argsort(-wrong[worst], kind="stable")][: most // 2]
    right = np.flatnonzero(wrong == 0)[: most - len(worst)]
    return [*worst.tolist(), *right.tolist()]
