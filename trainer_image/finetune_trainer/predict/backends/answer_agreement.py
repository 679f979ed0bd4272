"""Comparison of a backend's answers and metrics with those of the plain model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from finetune_contract.metrics import LOWER_IS_BETTER

CLOSE = 1e-3
"""Difference, relative or absolute, up to which two numeric answers count as equal: between the rounding errors of fp32
and of bf16 (up to 2^-9).
"""

Rows = Sequence[Mapping[str, Any]]
"""Predictions, one for each row."""


class WorstMetric(NamedTuple):
    """Metric with the largest loss."""

    name: str
    by: float
    """Loss of the metric; below 0: all metrics improved."""


def worst_metric(reference: Mapping[str, float], measured: Mapping[str, float]) -> WorstMetric | None:
    """Return the metric that is worst against the reference; None if none was measured. A metric that became NaN or
    infinite is infinitely worse.
    """
    metrics = [WorstMetric(name, _worse(name, reference[name], measured[name])) for name in reference]
    return max(metrics, key=lambda metric: metric.by, default=None)


def _worse(name: str, reference: float, measured: float) -> float:
    if not math.isfinite(measured):
        return math.inf if math.isfinite(reference) else 0.0
    return (measured - reference) * (1 if name in LOWER_IS_BETTER else -1)


def agreement(reference: Rows, answers: Rows) -> float:
    """Return the share of rows with equal answers: labels, words and spans; numbers (within `CLOSE`) only if a row has
    nothing else, as in regression. A number that is not finite equals no finite one.
    """
    if not reference:
        return 1.0
    return sum(_agree(one, other) for one, other in zip(reference, answers, strict=True)) / len(reference)


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = _paired(one, other)
    if pairs is None or any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return False
    return bool(_without_reals(one)) or all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in pairs)


def _paired(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[float, float]] | None:
    """Return the real numbers at the same places; None if the rest of the answers differs."""
    if _without_reals(one) != _without_reals(other):
        return None
    ours, theirs = _reals(one), _reals(other)
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else None


def largest_difference(reference: Rows, answers: Rows) -> float:
    """Return the largest difference of two real numbers at the same place, among rows that agree apart from them."""
    pairs = (pair for rows in zip(reference, answers, strict=True) for pair in _paired(*rows) or ())
    return max((abs(one - other) for one, other in pairs if math.isfinite(one) and math.isfinite(other)), default=0.0)


def _without_reals(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_reals(inner) for name, inner in value.items() if not isinstance(inner, float)}
    if isinstance(value, list | tuple):
        return [_without_reals(inner) for inner in value if not isinstance(inner, float)]
    return value


def _reals(value: Any) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, Mapping):
        return [real for inner in value.values() for real in _reals(inner)]
    if isinstance(value, list | tuple):
        return [real for inner in value for real in _reals(inner)]
    return []
