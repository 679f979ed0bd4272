"""Prometheus metrics whose labels take values of closed sets only, and their descriptions.

A value outside of its set is counted as `other`, so that no text from outside becomes a series.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

OTHER = "other"

M = TypeVar("M", bound=MetricWrapperBase)
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

# A time of creation beside each counter would double their series, and nothing here reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Row:
    """Description of a metric."""

    name: str
    """Name in queries; a histogram's ends in _bucket, _sum and _count there."""
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    """Values of each label, in order."""
    meaning: str
    max_series: int
    """Maximum number of series."""


class Family(Generic[M]):
    """One metric."""

    def __init__(self, metric: M, labels: Mapping[str, tuple[str, ...]]) -> None:
        self._metric: M = metric
        self.labels = labels
        """Values of each label."""

    def of(self, *values: str) -> M:
        """Return the child for these values of the labels, in their order."""
        if not self.labels and not values:
            return self._metric
        known = zip(values, self.labels.values(), strict=True)
        return self._metric.labels(*(value if value in allowed else OTHER for value, allowed in known))

    def show(self, *rows: Sequence[str]) -> None:
        """Create these series from the start: a series that appears with its first count has no increase in a query."""
        for row in rows or itertools.product(*self.labels.values()):
            self.of(*row)


class Families:
    """All metrics of a registry, in the order of the reference."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows: list[Row] = []

    def counter(self, name: str, meaning: str, **labels: Collection[str]) -> Family[Counter]:
        """Add a counter; `name` without _total."""
        values = _ordered(labels)
        self.rows.append(Row(f"{name}_total", "counter", values, meaning, _combinations(values)))
        return Family(Counter(name, meaning, list(values), registry=self.registry), values)

    def gauge(self, name: str, meaning: str, **labels: Collection[str]) -> Family[Gauge]:
        """Add a gauge."""
        values = _ordered(labels)
        self.rows.append(Row(name, "gauge", values, meaning, _combinations(values)))
        return Family(Gauge(name, meaning, list(values), registry=self.registry), values)

    def histogram(
        self, name: str, meaning: str, buckets: Sequence[float], **labels: Collection[str]
    ) -> Family[Histogram]:
        """Add a histogram; `buckets` are upper bounds, to which the one without a bound is added."""
        values = _ordered(labels)
        # Beside the buckets: the one without a bound, the sum and the number.
        self.rows.append(Row(name, "histogram", values, meaning, _combinations(values) * (len(buckets) + 3)))
        metric = Histogram(name, meaning, list(values), buckets=buckets, registry=self.registry)
        return Family(metric, values)


def _ordered(labels: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return the labels with `other` at the end of every set; sets without an order of their own are sorted."""
    return {
        name: (*(one for one in (sorted(values) if isinstance(values, frozenset) else values) if one != OTHER), OTHER)
        for name, values in labels.items()
    }


def _combinations(labels: Mapping[str, Iterable[str]]) -> int:
    return len(list(itertools.product(*labels.values())))
