"""The event loop of the cluster tests' stand-ins ends with everything that was started in it."""

from __future__ import annotations

import asyncio
import gc

from cluster_support.background import Background


def test_closing_ends_tasks_that_a_stand_in_left_behind() -> None:
    background = Background()
    reports: list[str] = []
    background._loop.set_exception_handler(lambda _loop, context: reports.append(context["message"]))
    cancelled: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("left")
            raise

    async def stand_in() -> None:
        left = asyncio.ensure_future(wait_for_ever())
        await asyncio.sleep(0)
        await asyncio.wait([left])

    async def started() -> None:
        background.spawn(stand_in())
        await asyncio.sleep(0.01)

    background.run(started())
    background.close()
    gc.collect()
    assert cancelled == ["left"]
    assert reports == []


def test_closing_runs_the_last_coroutines_after_the_tasks_have_ended() -> None:
    background = Background()
    order: list[str] = []

    async def stand_in() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("task")

    async def last() -> None:
        order.append("last")

    async def started() -> None:
        background.spawn(stand_in())
        await asyncio.sleep(0.01)

    background.run(started())
    background.close(last())
    assert order == ["task", "last"]
