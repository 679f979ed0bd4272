"""An event loop in a thread of its own, for stand-ins that act while a test waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from suite_plugins.patience import patient

T = TypeVar("T")


class Background:
    """Runs coroutines for a synchronous test; `check` raises the error of the first broken stand-in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._broken: list[BaseException] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-ins", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        """Return the coroutine's result, within `seconds` scaled by `patient`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patient(seconds))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine that runs until `close`; callable from any thread."""
        self._loop.call_soon_threadsafe(self.spawn, work)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine from within the loop."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.append(error)

    def check(self) -> None:
        """Raise the first error of a stand-in since the last call."""
        if self._broken:
            broken, self._broken = self._broken[0], []
            raise broken

    def close(self, *last: Coroutine[Any, Any, Any]) -> None:
        """Cancel all tasks, then run the coroutines `last`, and end what they and the tasks left behind."""

        async def cancel() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for work in last:
                await work
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patient(10))
        self._loop.close()
