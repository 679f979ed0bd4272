"""Probes and metrics over plain HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import aiohttp

from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.probes import BEATS, Endpoints, Heartbeat


@dataclass
class Operator:
    wrong: list[str] = field(default_factory=list)
    not_there: list[str] = field(default_factory=list)

    async def faults(self) -> list[str]:
        return self.wrong

    def missing(self) -> list[str]:
        return self.not_there


def pages(operator: Operator, *paths: str, heartbeat: Heartbeat | None = None) -> list[tuple[int, str]]:
    """Return the status and the text of each path."""

    async def go() -> list[tuple[int, str]]:
        endpoints = Endpoints(operator, operator, Metrics(), heartbeat)
        port = await endpoints.start("127.0.0.1", 0)
        found = []
        try:
            async with aiohttp.ClientSession() as session:
                for path in paths:
                    async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                        found.append((answer.status, await answer.text()))
        finally:
            await endpoints.stop()
        return found

    return asyncio.run(go())


def test_an_operator_that_has_read_everything_is_alive_and_ready() -> None:
    assert pages(Operator(), "/healthz", "/readyz") == [(200, "ok\n"), (200, "ok\n")]


def test_an_operator_that_is_still_reading_is_alive_but_not_ready() -> None:
    operator = Operator(not_there=["the objects have not all been listed from the API server yet"])
    assert pages(operator, "/healthz", "/readyz") == [
        (200, "ok\n"),
        (503, "the objects have not all been listed from the API server yet\n"),
    ]


def test_operator_with_an_ended_worker_is_not_alive() -> None:
    assert pages(Operator(wrong=["worker 1 has ended"]), "/healthz") == [(503, "worker 1 has ended\n")]


def test_operator_with_an_event_loop_late_by_a_minute_is_not_alive() -> None:
    for late, expected in [(61.0, (200, "ok\n")), (62.0, (503, "the event loop is 61 s late\n"))]:
        times = iter([0.0])
        heartbeat = Heartbeat(clock=lambda times=times, late=late: next(times, late))  # type: ignore[misc]
        assert pages(Operator(), "/healthz", heartbeat=heartbeat) == [expected]


def test_heartbeat_keeps_its_largest_delay_for_a_minute() -> None:
    times = [7.0]
    heartbeat = Heartbeat(clock=lambda: times[-1])
    lags = [heartbeat.largest_lag()]
    for at in (7.0, 9.5, 10.5):  # the first beat sets the start; each of the others is due a second after the last
        times.append(at)
        heartbeat.beat()
        lags.append(heartbeat.largest_lag())
    times.append(15.5)
    lags.append(heartbeat.largest_lag())
    for at in range(16, 17 + BEATS):
        times.append(at)
        heartbeat.beat()
    assert [*lags, heartbeat.largest_lag()] == [0.0, 0.0, 1.5, 1.5, 4.0, 0.0]


def test_metrics_have_the_prometheus_format_and_unknown_paths_get_404() -> None:
    (status, text), (other, _) = pages(Operator(), "/metrics", "/debug")
    assert (status, other) == (200, 404)
    assert "# TYPE finetune_jobs gauge\n" in text
