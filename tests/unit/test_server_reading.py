"""Reading servers' metrics during a canary: from real HTTP servers, good ones and hostile ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web

from finetune_operator.reconcile.observed import pod_view
from finetune_operator.reconcile.reconcile_types import JobView, PodView, RequestCounts
from finetune_operator.shell.server_reading import MOST_BYTES, ServerMemory, ServerReading, request_counts
from finetune_trainer.serving.serving_metrics import ServingMetrics
from reconcile_world import NOON
from rollout_world import NAME, edit, serving, stands


def metrics(answers: dict[tuple[str, str], int], seconds: float = 0.5) -> ServingMetrics:
    """Return the metrics of a server after these answers, by path and code."""
    found = ServingMetrics("reviews", "text-classification", "abc")
    for (path, code), count in answers.items():
        for _ in range(count):
            found.requests.labels(path, code, "reviews").inc()
            found.seconds.labels(path).observe(seconds)
    return found


def test_requests_to_the_model_are_counted_and_no_others() -> None:
    found = metrics({
        ("/", "200"): 3,
        ("/v2/models/{name}/infer", "503"): 1,
        ("/v1/chat/completions", "429"): 2,
        ("/", "422"): 1,
        ("/metrics", "200"): 9,
        ("/v2/health/ready", "503"): 9,
    })  # fmt: skip
    assert request_counts(found.text().decode()) == RequestCounts(requests=7, errors=3, seconds=3.5)


VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 3.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="chat"} 20.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="chat"} 5.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="chat"} 2.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="chat"} 1.0
# TYPE vllm:admission_rejections_total counter
vllm:admission_rejections_total{model_name="chat",reason="max_num_queued_reqs"} 4.0
vllm:admission_rejections_total{model_name="chat",reason="max_num_queued_tokens"} 0.0
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="chat"} 28.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="chat"} 28.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="chat"} 42.5
# TYPE http_requests_total counter
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 28.0
"""


def test_requests_to_vllm_are_counted_with_those_that_it_refused() -> None:
    assert request_counts(VLLM_METRICS) == RequestCounts(requests=32, errors=5, seconds=42.5)


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        'finetune_serving_requests_total{path="/",code="200"} -1',
        'finetune_serving_requests_total{path="/",code="200"} +Inf',
        'finetune_serving_requests_total{path="/",code="200"} 1e300',
        'finetune_serving_request_seconds_sum{path="/"} NaN',
    ],
)
def test_odd_metrics_are_refused(text: str) -> None:
    kinds = "# TYPE finetune_serving_requests counter\n# TYPE finetune_serving_request_seconds histogram\n"
    with pytest.raises((ValueError, OverflowError)):
        request_counts(kinds + text)


@asynccontextmanager
async def server(answer: Any) -> AsyncIterator[int]:
    """Yield the port of a server whose /metrics `answer` returns."""

    async def page(request: web.BaseRequest) -> web.StreamResponse:
        assert (request.method, request.path) == ("GET", "/metrics")
        return await answer() if asyncio.iscoroutinefunction(answer) else answer()

    runner = web.ServerRunner(web.Server(page), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def a_canary() -> tuple[JobView, list[PodView]]:
    """Return a job with a canary, and a server of each revision at this machine."""
    world = serving(traffic={})
    edit(world, traffic={}, maxQueue=7)
    stands(world, 2, 1)
    pods = []
    for number in (1, 2):
        labels = world.servers[f"{NAME}-{number}"]["spec"]["template"]["metadata"]["labels"]
        about = {"name": f"pod-{number}", "uid": f"uid-{number}", "labels": labels}
        status = {"phase": "Running", "podIP": "127.0.0.1"}
        found = pod_view({"metadata": about, "spec": {}, "status": status})
        assert found is not None
        pods.append(found)
    return world.job(), pods


def text(found: ServingMetrics) -> web.Response:
    return web.Response(body=found.text(), content_type="text/plain")


def test_servers_are_read_at_intervals_and_forgotten_after_the_canary() -> None:
    async def run() -> None:
        found, (job, pods), memory = metrics({("/", "200"): 3}), a_canary(), ServerMemory()
        async with server(lambda: text(found)) as port:
            reader = ServerReading(port)
            await reader.refresh(job, pods, memory, NOON)
            assert memory.reading is not None
            assert (memory.reading.counts, memory.reading.failure) == ((), None)
            found.requests.labels("/", "500", "reviews").inc()
            await reader.refresh(job, pods, memory, NOON + timedelta(seconds=9))
            assert memory.reading.at == NOON, "it is not due"
            await reader.refresh(job, pods, memory, NOON + timedelta(seconds=10))
            one = RequestCounts(1, 1, 0.0)
            assert (memory.reading.seconds, dict(memory.reading.counts)) == (10.0, {1: one, 2: one})
            over = replace(job, status=job.status.model_copy(update={"endpoint": None}))
            await reader.refresh(over, pods, memory, NOON + timedelta(seconds=20))
            assert memory == ServerMemory()
            await reader.close()

    asyncio.run(run())


async def stuck() -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        pytest.param(lambda: web.Response(status=404), "/metrics answered 404", id="no metrics"),
        pytest.param(lambda: web.Response(status=302, headers={"Location": "/x"}), "answered 302", id="redirect"),
        pytest.param(
            lambda: web.Response(body=b"x" * (MOST_BYTES + 1)), "is larger than 524,288 bytes", id="too large"
        ),
        pytest.param(lambda: web.Response(body=b"\xff"), "not in the format of Prometheus", id="no text"),
        pytest.param(stuck, "no answer within", id="stuck"),
    ],
)
def test_hostile_server_is_a_failure_of_the_reading(answer: Any, failure: str) -> None:
    async def run() -> None:
        (job, pods), memory = a_canary(), ServerMemory()
        async with server(answer) as port:
            reader = ServerReading(port, seconds=0.5)
            await reader.refresh(job, pods, memory, NOON)
            assert memory.reading is not None
            assert failure in (memory.reading.failure or "")
            assert memory.counts is None
            await reader.close()

    asyncio.run(run())


def test_server_that_does_not_listen_or_has_no_address_is_a_failure() -> None:
    async def run() -> None:
        (job, pods), memory, reader = a_canary(), ServerMemory(), ServerReading(1)
        await reader.refresh(job, pods, memory, NOON)
        assert memory.reading is not None
        assert "ClientConnectorError at 127.0.0.1 port 1" in (memory.reading.failure or "")
        named = [replace(one, address="evil.example/?") for one in pods]
        await reader.refresh(job, named, memory, NOON + timedelta(seconds=10))
        assert "it has no IP address" in (memory.reading.failure or "")
        await reader.close()

    asyncio.run(run())
