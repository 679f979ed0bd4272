"""Metrics of an endpoint's servers with each series once: our server's, and those of vLLM that dashboards query.

The names and labels of vLLM are those of `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from finetune_trainer.serving.serving_metrics import ServingMetrics

TARGET = {
    "namespace": "ops", "pod": "reviews-endpoint-1-0", "instance": "10.0.0.2:8080", "finetunejob": "reviews",
    "endpoint_revision": "1",
}  # fmt: skip
"""Labels that Prometheus adds to the series of a server, the last two by the relabelings of the chart's PodMonitor."""
VLLM_TARGET = {
    "namespace": "ops", "pod": "chat-endpoint-3-0", "instance": "10.0.0.3:8080", "finetunejob": "chat",
    "endpoint_revision": "3",
}  # fmt: skip
_ENGINE = ("model_name", "engine")
_SECONDS = (0.1, 0.5, 1, 5, 10)


def server_metrics() -> ServingMetrics:
    """Return the metrics of a server that has recorded each of them once."""
    metrics = ServingMetrics("reviews", "text-classification", "abc")
    metrics.set_limits(256, 0.1)
    for path, code in (("/", "200"), ("/v2/models/{name}/infer", "429"), ("/", "504"), ("/metrics", "200")):
        metrics.requests.labels(path, code, "reviews").inc()
        metrics.seconds.labels(path).observe(0.02)
    metrics.batch("reviews", 4, 100, 0.01)
    return metrics


class VllmMetrics:
    """Metrics of a vLLM server, counted by `request`."""

    def __init__(self, model: str = "chat") -> None:
        self.registry = CollectorRegistry()
        own: Mapping[str, CollectorRegistry] = {"registry": self.registry}
        self._values = (model, "0")
        self._running = Gauge("vllm:num_requests_running", "Requests in a batch.", _ENGINE, **own)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests that wait.", _ENGINE, **own)
        self._cache = Gauge("vllm:kv_cache_usage_perc", "Share of the cache; 1 is all.", _ENGINE, **own)
        self._ended = Counter("vllm:request_success", "Ended requests.", (*_ENGINE, "finished_reason"), **own)
        self._refused = Counter("vllm:admission_rejections", "Refused requests.", ("model_name", "reason"), **own)
        self._read = Counter("vllm:prompt_tokens", "Tokens read.", _ENGINE, **own)
        self._written = Counter("vllm:generation_tokens", "Tokens written.", _ENGINE, **own)
        self._text = Histogram("vllm:e2e_request_latency_seconds", "Whole text.", _ENGINE, buckets=_SECONDS, **own)
        self._first = Histogram("vllm:time_to_first_token_seconds", "First token.", _ENGINE, buckets=_SECONDS, **own)

    def request(self, reason: str = "stop") -> None:
        """Count a request that ended for this reason; `refused`: the queue was full."""
        if reason == "refused":
            self._refused.labels(self._values[0], "max_num_queued_reqs").inc()
            return
        self._running.labels(*self._values).set(1)
        self._waiting.labels(*self._values).set(2)
        self._cache.labels(*self._values).set(0.25)
        self._ended.labels(*self._values, reason).inc()
        self._read.labels(*self._values).inc(30)
        self._written.labels(*self._values).inc(20)
        self._text.labels(*self._values).observe(0.8)
        self._first.labels(*self._values).observe(0.05)


def vllm_metrics() -> VllmMetrics:
    """Return the metrics of a vLLM server that has recorded each of them once."""
    metrics = VllmMetrics()
    for reason in ("stop", "error", "refused"):
        metrics.request(reason)
    return metrics
