"""Watches of the operator: one that the server ends is resumed at once, and one that ends by a bug fails /healthz."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.aio import client

from finetune_operator.api.settings import Settings
from finetune_operator.kubernetes_api.answers import Page, WatchEvent
from finetune_operator.kubernetes_api.errors import GoneError, UnavailableError
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB, Resource
from finetune_operator.shell import watches
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.kube import Kube
from finetune_operator.shell.queue import WorkQueue
from finetune_operator.shell.serving import OperatorView
from finetune_operator.shell.state import OperatorState, ProgressBook
from finetune_operator.shell.store import Store
from finetune_operator.shell.watches import Watchers
from suite_plugins.patience import patient

OUTAGE = UnavailableError("watch jobs", 503, "", "restarting")


class Clock:
    """Time that passes only where a test says so; a sleep is recorded, and takes no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await real_sleep(0)


real_sleep = asyncio.sleep
Watch = Callable[[], Awaitable[None]]


class Lists(Kube):
    """Kube whose lists are empty, and whose watches of jobs are given; the last one goes on for ever."""

    def __init__(self, *given: Watch) -> None:
        super().__init__(client.ApiClient(client.Configuration(host="http://x")))
        self.given = list(given)
        self.lists = 0
        self.watched = asyncio.Event()
        """Set once the last watch runs."""

    async def pages(self, resource: Resource, *_: Any, **__: Any) -> AsyncGenerator[Page, None]:
        self.lists += resource is FINETUNE_JOB
        yield Page([], 7, first=True, next_page="")

    async def watch(self, resource: Resource, *_: Any, **__: Any) -> AsyncGenerator[WatchEvent, None]:
        if resource is FINETUNE_JOB and self.given:
            await self.given.pop(0)()
            return
        if resource is FINETUNE_JOB:
            self.watched.set()
        await asyncio.Event().wait()
        yield WatchEvent("BOOKMARK", {}, 8)


async def followed(kube: Lists, until: Callable[[asyncio.Task[None]], Awaitable[Any]]) -> list[str]:
    """Follow until the condition; return what /healthz would tell."""
    state = OperatorState(
        settings=Settings(), namespace="ops", kube=kube, store=Store(Settings()), queue=WorkQueue(),
        progress=ProgressBook(), leading=asyncio.Event(), synced=asyncio.Event(), leader_address=lambda: None,
    )  # fmt: skip
    task = asyncio.create_task(Watchers(state, Discovery(kube)).run(), name="following")
    state.tasks.append(task)
    try:
        await asyncio.wait_for(until(task), patient(30))
        return list(OperatorView(state).faults())
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await task
        await kube.api.close()  # type: ignore[no-untyped-call]


def following(monkeypatch: pytest.MonkeyPatch, *given: Callable[[Clock], Watch]) -> tuple[Clock, Lists, list[str]]:
    clock = Clock()
    monkeypatch.setattr(watches, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)

    async def run() -> tuple[Lists, list[str]]:
        kube = Lists(*(watch(clock) for watch in given))
        return kube, await followed(kube, lambda _task: kube.watched.wait())

    return clock, *asyncio.run(run())


def ended_after(seconds: float, error: Exception | None = None) -> Callable[[Clock], Watch]:
    def watch_of(clock: Clock) -> Watch:
        async def watch() -> None:
            clock.now += seconds
            if error is not None:
                raise error

        return watch

    return watch_of


def test_watch_that_the_server_ends_in_order_is_resumed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pod created in between reports within a second, and is refused (403) while its creation was not read.
    clock, kube, faults = following(monkeypatch, ended_after(300.0), ended_after(600.0))
    assert (clock.slept, kube.lists, faults) == ([], 1, [])


BROKEN = {"the server ends it at once": ended_after(0.0), "an outage ends it": ended_after(300.0, OUTAGE)}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_watch_is_resumed_after_a_pause(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kube, faults = following(monkeypatch, BROKEN[case])
    assert [0.5 * watches.AGAIN_SECONDS <= slept <= 1.5 * watches.AGAIN_SECONDS for slept in clock.slept] == [True]
    assert (kube.lists, faults) == (1, [])


def test_watch_with_a_dropped_version_begins_with_another_list(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kube, faults = following(monkeypatch, ended_after(300.0, GoneError("watch jobs", 410, "Expired", "too old")))
    assert (clock.slept, kube.lists, faults) == ([], 2, [])


def test_watch_that_ends_by_a_bug_fails_healthz() -> None:
    async def bug() -> None:
        raise RecursionError("deep")

    async def run() -> list[str]:
        return await followed(Lists(bug), lambda task: asyncio.wait([task]))

    assert asyncio.run(run()) == ["following has ended"]
