"""The clock of the API server, derived from its answers."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web
from kubernetes.aio import client

from finetune_operator.controller.cluster.clock import ClusterClock
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Local:
    """The clock of the process; each reading takes a while."""

    def __init__(self, takes: float = 0.0) -> None:
        self.now = NOON
        self.takes = timedelta(seconds=takes)

    def __call__(self) -> datetime:
        self.now += self.takes
        return self.now


def difference(clock: ClusterClock, local: Local) -> float:
    return (clock.now() - local.now).total_seconds()


@pytest.mark.parametrize(("skew", "expected"), [(0, 0), (1, 0), (-1, 0), (30, 30.5), (-30, -29.5), (86_400, 86_400.5)])
def test_a_difference_of_seconds_is_taken_over_and_a_smaller_one_is_not(skew: int, expected: float) -> None:
    local = Local()
    clock = ClusterClock(local)
    clock.answered(format_datetime(NOON + timedelta(seconds=skew), usegmt=True), clock.local())
    assert difference(clock, local) == expected


def test_a_clock_that_was_set_right_counts_from_the_next_answer_on(caplog: pytest.LogCaptureFixture) -> None:
    local = Local()
    clock = ClusterClock(local)
    with caplog.at_level(logging.WARNING):
        for skew in (-60, -60, 0):
            clock.answered(format_datetime(NOON + timedelta(seconds=skew), usegmt=True), NOON)
    assert difference(clock, local) == 0
    assert [record.message.split(" the clock of")[0] for record in caplog.records] == [
        "The API server's clock is 60 s behind",
        "The API server's clock is 0 s behind",
    ]


@pytest.mark.parametrize(
    "date",
    [None, "", "yesterday", "Thu, 01 Jan 2026 12:01:00 -0000", "Thu, 99 Jan 2026 12:00:00 GMT"],
)
def test_an_answer_without_a_time_that_can_be_read_changes_nothing(date: str | None) -> None:
    local = Local()
    clock = ClusterClock(local)
    clock.answered(date, NOON)
    assert difference(clock, local) == 0


def test_slow_answer_does_not_set_the_clock() -> None:
    local = Local(takes=1.5)
    clock = ClusterClock(local)
    clock.answered(format_datetime(NOON + timedelta(hours=1), usegmt=True), clock.local())
    assert difference(clock, local) == 0


def test_every_answer_of_the_api_server_is_listened_to() -> None:
    ahead = timedelta(minutes=10)

    async def answer(_: web.Request) -> web.Response:
        date = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}}, headers={"Date": date})

    async def go() -> timedelta:
        application = web.Application()
        application.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        api = client.ApiClient(client.Configuration(host=f"http://{host}:{port}"))
        try:
            kube = Kube(api)
            while kube.clock.now() < datetime.now(UTC) + ahead / 2:
                # On a slow machine the first answers may take too long to count.
                await kube.list_objects(FINETUNE_JOB)
            return kube.clock.now() - datetime.now(UTC)
        finally:
            await api.close()
            await runner.cleanup()

    assert abs(asyncio.run(go()) - ahead) < timedelta(minutes=1)
