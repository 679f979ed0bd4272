"""Metrics of the server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from finetune_contract.choices import WRITING_TASKS, Task
from finetune_contract.layout import LATENCY_METRIC, REQUESTS_METRIC

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class ServingMetrics:
    """Metrics of one server."""

    def __init__(self, model: str, task: Task, revision: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._task, self._revision = task, revision
        names = ["path", "code", "model"]
        registry = self._registry
        self.requests = Counter(REQUESTS_METRIC, "Requests answered.", names, registry=registry)
        self.seconds = Histogram(LATENCY_METRIC, "Time of a request.", ["path"], buckets=_SECONDS, registry=registry)
        self.queue = Gauge("finetune_serving_queue_rows", "Rows that wait or are computed.", registry=registry)
        self._most = Gauge(
            "finetune_serving_max_queue_rows", "Most rows of the queue, spec.endpoint.maxQueue.", registry=registry
        )
        self._bound = Gauge(
            "finetune_serving_max_latency_seconds",
            "Target time of a request, spec.endpoint.maxLatencyMilliseconds; tasks that generate text have none.",
            ["task"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "finetune_serving_requests_in_flight", "Requests that wait for an answer.", registry=registry
        )
        self._rows = Histogram("finetune_serving_batch_rows", "Rows of a batch.", buckets=_ROWS, registry=registry)
        self._batch = Histogram(
            "finetune_serving_batch_tokens", "Tokens of a batch.", buckets=_TOKENS, registry=registry
        )
        by = ["model"]
        self._tokens = Counter("finetune_serving_tokens", "Tokens computed.", by, registry=registry)
        self._busy = Counter("finetune_serving_compute_seconds", "Time spent computing.", by, registry=registry)
        self._rate = Gauge(
            "finetune_serving_tokens_per_second", "Tokens a second in the last batch.", registry=registry
        )
        about = ["model", "task", "revision"]
        self._info = Gauge("finetune_serving_model_info", "A model that is served.", about, registry=registry)
        self.describe({model: revision})

    def describe(self, models: Mapping[str, str | None]) -> None:
        """Show the models that are served, with their revisions; None: the server's."""
        self._info.clear()
        for name, revision in models.items():
            self._info.labels(name, self._task, revision or self._revision).set(1)

    def set_limits(self, max_queue: int, max_latency_seconds: float) -> None:
        """Show the limits of the queue, in rows, and of the latency. The time of a generated text follows from its
        length, so that tasks that generate text have no target.
        """
        self._most.set(max_queue)
        if self._task not in WRITING_TASKS:
            self._bound.labels(self._task).set(max_latency_seconds)

    def batch(self, model: str, rows: int, tokens: int, seconds: float) -> None:
        """Count a batch of a model."""
        self._rows.observe(rows)
        self._batch.observe(tokens)
        self._tokens.labels(model).inc(tokens)
        self._busy.labels(model).inc(seconds)
        self._rate.set(tokens / max(seconds, 1e-9))

    def text(self) -> bytes:
        """Return all metrics, for a scrape."""
        return generate_latest(self._registry)
