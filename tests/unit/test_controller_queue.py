"""The work queue: each job once, never twice at a time, in order."""

import asyncio
from collections.abc import Awaitable, Callable

from finetune_operator.controller.store.queue import NEW_IN_A_ROW, JobKey, WorkQueue
from suite_plugins.patience import patient

A, B, C = (JobKey("team", name) for name in "abc")


def queued(work: Callable[[WorkQueue], Awaitable[None]]) -> None:
    """Run `work` with a queue, and fail rather than wait for ever."""

    async def run() -> None:
        async with asyncio.timeout(patient(60)):
            await work(WorkQueue())

    asyncio.run(run())


async def drained(queue: WorkQueue) -> list[JobKey]:
    """Return the keys that the queue hands out until none waits."""
    taken = []
    while len(queue):
        key = await queue.take()
        assert key is not None
        taken.append(key)
        queue.done(key)
    return taken


def test_keys_come_out_in_order_and_once():
    async def work(queue: WorkQueue) -> None:
        for key in (A, B, A, C, B):
            queue.add(key)
        assert await drained(queue) == [A, B, C]

    queued(work)


def test_a_key_in_hand_waits_until_it_is_done():
    async def work(queue: WorkQueue) -> None:
        queue.add(A)
        assert await queue.take() == A
        queue.add(A)
        queue.add(B)
        assert await queue.take() == B
        queue.done(B)
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not taking.done()
        queue.done(A)
        assert await taking == A

    queued(work)


def test_a_busy_job_does_not_hold_up_the_others():
    async def work(queue: WorkQueue) -> None:
        others = [JobKey("team", str(number)) for number in range(300)]
        for key in (A, *others):
            queue.add(key)
        seen = []
        while len(queue):
            key = await queue.take()
            assert key is not None
            seen.append(key)
            if key == A and len(seen) < 1000:
                queue.add(A)
            queue.done(key)
            if len(seen) > 301:
                break
        assert seen[:302] == [A, *others, A]

    queued(work)


def test_all_workers_get_something_to_do():
    async def work(queue: WorkQueue) -> None:
        takers = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0)
        for key in (A, B, C):
            queue.add(key)
        assert {await taker for taker in takers} == {A, B, C}

    queued(work)


def test_of_several_times_the_earliest_counts_once():
    async def work(queue: WorkQueue) -> None:
        queue.add_after(A, 3600)
        queue.add_after(A, 0.02)
        queue.add_after(A, 60)
        queue.add_after(B, -3600)
        assert await queue.take() == B
        assert await queue.take() == A
        assert len(queue) == 0

    queued(work)


def test_a_forgotten_job_is_not_looked_at_later():
    async def work(queue: WorkQueue) -> None:
        queue.add_after(A, 0.01)
        queue.forget(A)
        queue.add_after(B, 0.02)
        assert await queue.take() == B
        assert len(queue) == 0

    queued(work)


def test_a_closed_queue_sends_all_workers_home():
    async def work(queue: WorkQueue) -> None:
        queue.add(A)
        assert await queue.take() == A
        waiting = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.add_after(B, 0.0)
        queue.close()
        assert [await each for each in waiting] == [None, None, None]
        queue.add(C)
        assert await queue.take() is None
        queue.done(A)

    queued(work)


def test_new_jobs_come_first_and_others_are_not_forgotten():
    async def work(queue: WorkQueue) -> None:
        old = [JobKey("team", f"old-{number}") for number in range(2)]
        new = [JobKey("team", f"new-{number}") for number in range(NEW_IN_A_ROW + 2)]
        for key in old:
            queue.add(key)
        for key in new:
            queue.add(key, new=True)
        assert await drained(queue) == [*new[:NEW_IN_A_ROW], old[0], *new[NEW_IN_A_ROW:], old[1]]

    queued(work)


def test_it_is_calm_once_no_new_job_waits_or_after_a_while():
    async def work(queue: WorkQueue) -> None:
        await queue.wait_for_new_jobs(60)
        queue.add(A, new=True)
        await queue.wait_for_new_jobs(0.01)
        waiting = asyncio.create_task(queue.wait_for_new_jobs(60))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await queue.take() == A
        await waiting

    queued(work)


def test_wait_for_calm_can_be_cancelled():
    async def work(queue: WorkQueue) -> None:
        async def wait() -> None:
            while True:
                await queue.wait_for_new_jobs(60)
                await asyncio.sleep(0)

        for turns in range(12):
            waiting = asyncio.create_task(wait())
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting], timeout=patient(10))
            assert waiting.cancelled(), turns

    queued(work)
