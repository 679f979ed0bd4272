"""Validate jobs off the event loop: probes and reports are answered while a large job is validated.

Validation takes time linear in the size of a job, which is bounded (spec/problems.py). The time limit is for bugs: a
job that takes longer is refused with that reason, and the others are validated by other threads. Namespaces take turns.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

from pydantic import JsonValue

from finetune_operator.controller.store.fair_queue import Turns
from finetune_operator.controller.store.store import key_of
from finetune_operator.jobs.observed import Validate, is_unchanged, job_view
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.spec.settings.settings import Settings

log = logging.getLogger(__name__)

THREADS = 2
LIMIT_SECONDS = 30.0
"""A hundred times the duration of the worst job within the bounds."""


class TooSlowError(Exception):
    """A job could not be validated in time."""


class JobValidator:
    """See the module."""

    def __init__(
        self, settings: Settings, *, validate: Validate | None = None, limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        self._settings = settings
        self._validate = validate
        self._limit = limit_seconds
        self._threads = _threads()
        self._turns = Turns(THREADS)
        """Ensures that a thread begins its work at once, so that its time limit starts with it."""

    async def view(self, raw: Manifest, before: JobView | None) -> JobView:
        """Return the job as `observed.job_view` does."""
        if before is not None and is_unchanged(raw, before):
            return job_view(raw, self._settings, before)
        _, namespace, _ = key_of(raw)
        async with self._turns.turn(namespace):
            threads = self._threads
            work = partial(job_view, raw, self._settings, before, self._validate)
            task = asyncio.get_running_loop().run_in_executor(threads, work)
            done, _ = await asyncio.wait([task], timeout=self._limit)
            if done:
                return await task
            if threads is self._threads:
                # One of its threads hangs; the other finishes its work.
                self._threads = _threads()
                threads.shutdown(wait=False)
        log.error("a FineTuneJob could not be validated within %g s and is refused", self._limit)
        return job_view(raw, self._settings, before, self._too_slow)

    def _too_slow(self, value: JsonValue, settings: Settings) -> NoReturn:
        raise TooSlowError(f"validation took longer than {self._limit:g} s")

    def close(self) -> None:
        """Validate no more jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="judge")
