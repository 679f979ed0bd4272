"""Work queue of jobs: each is processed once however often it was added, never twice at a time.

A key that is added while it is being processed is processed once more afterwards. Namespaces take turns, and the keys
of one come out in the order in which they went in, so that neither a job with many events nor a tenant with many jobs
holds up the others; but jobs that are new come first, for the most part. When hundreds come at once, each then starts
before there is much to report about the first. One event loop; not for threads.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

from finetune_operator.controller.store.fair_queue import FairQueue


class JobKey(NamedTuple):
    """One FineTuneJob by name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


NEW_IN_A_ROW = 16
"""New jobs that come out before one that is not, when both wait."""


class WorkQueue:
    """Keys to be processed now, and keys to be processed later."""

    def __init__(self) -> None:
        self._waiting: FairQueue[JobKey] = FairQueue()
        self._new: FairQueue[JobKey] = FairQueue()
        self._new_in_a_row = 0
        self._queued: set[JobKey] = set()
        self._in_progress: set[JobKey] = set()
        self._timers: dict[JobKey, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()
        self._no_new_jobs = asyncio.Event()
        self._no_new_jobs.set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, key: JobKey, new: bool = False) -> None:
        """Queue a job for as soon as its turn comes; `new`: nothing was done for this job yet."""
        if key in self._queued:
            return
        self._queued.add(key)
        if key not in self._in_progress:
            (self._new if new else self._waiting).add(key.namespace, key)
            self._filled.set()
            if new:
                self._no_new_jobs.clear()

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Queue a job `seconds` from now; of several such times, only the earliest counts."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        set_already = self._timers.get(key)
        if set_already is not None:
            if set_already.when() <= due:
                return
            set_already.cancel()
        self._timers[key] = loop.call_at(due, self._timer_expired, key)

    def _timer_expired(self, key: JobKey) -> None:
        del self._timers[key]
        self.add(key)

    def forget(self, key: JobKey) -> None:
        """Cancel the timer of a deleted job."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def take(self) -> JobKey | None:
        """Return the next key, which is in progress from now until `done`; None once the queue is closed."""
        while not self._closed and not self._waiting and not self._new:
            self._filled.clear()
            await self._filled.wait()
        if self._closed:
            return None
        key = self._next()
        if self._waiting or self._new:
            self._filled.set()
        self._queued.discard(key)
        self._in_progress.add(key)
        return key

    def _next(self) -> JobKey:
        if self._new and (not self._waiting or self._new_in_a_row < NEW_IN_A_ROW):
            self._new_in_a_row += 1
            key = self._new.take()
            if not self._new:
                self._no_new_jobs.set()
        else:
            self._new_in_a_row = 0
            key = self._waiting.take()
        assert key is not None, "take waits until there is one"
        return key

    def done(self, key: JobKey) -> None:
        """Mark a key as no longer in progress."""
        self._in_progress.discard(key)
        if key in self._queued:
            self._waiting.add(key.namespace, key)
            self._filled.set()

    async def wait_for_new_jobs(self, seconds: float) -> None:
        """Wait until no new job waits, at most `seconds`: for work that new jobs go before."""
        # Not wait_for: until Python 3.12 it can swallow the cancellation of its caller, which then never ends.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._no_new_jobs.wait()

    def close(self) -> None:
        """Hand out no more keys: a worker finishes the one that it has, a waiting one gets None."""
        self._closed = True
        self._filled.set()
        self._no_new_jobs.set()
        for key in list(self._timers):
            self.forget(key)
