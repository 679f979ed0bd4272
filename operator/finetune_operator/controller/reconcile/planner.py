"""Plan jobs in processes of their own: the event loop answers probes and serves other jobs meanwhile, and a plan that
takes too long or too much memory harms no other job.

Namespaces take turns by the time that their plans took, and each has one plan in progress at most: a tenant with a
thousand large jobs holds up those of another by nothing.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

from finetune_contract.python_command import module_command
from finetune_operator.controller.reconcile import plan_process
from finetune_operator.controller.reconcile.plan_process import LENGTH, Limits, frame, too_much
from finetune_operator.controller.store.fair_queue import FairQueue
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.jobs.state.plan_table import Answer, PlannerLostError, PlanningFailedError, refusal
from finetune_operator.plan.types.plan_types import PlanRequest
from finetune_operator.spec.settings.settings import Settings

log = logging.getLogger(__name__)

PROCESSES = 2
"""Enough that one tenant's large plan does not hold up the others; each takes 45 MB once it is needed."""
ANSWER_SECONDS = 300.0
"""Time after which a process is stopped that neither answers nor uses its CPU time."""


class Planner:
    """See the module. `answered` gets each job with its request and the answer."""

    def __init__(
        self,
        settings: Settings,
        answered: Callable[[JobKey, PlanRequest, Answer], None],
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._answered = answered
        self._turns: FairQueue[JobKey] = FairQueue()
        self._waiting: dict[JobKey, PlanRequest] = {}
        self._in_progress: dict[JobKey, PlanRequest] = {}
        self._changed = asyncio.Condition()

    async def ask(self, key: JobKey, request: PlanRequest) -> int:
        """Plan a job when its turn comes, in place of what was asked for it before. Return how many of its namespace
        wait.
        """
        if self._in_progress.get(key) == request:
            return 0
        if key not in self._waiting:
            self._turns.add(key.namespace, key)
        self._waiting[key] = request
        async with self._changed:
            self._changed.notify()
        return self._turns.waiting(key.namespace)

    def forget(self, key: JobKey) -> None:
        """Plan a deleted job no more."""
        self._waiting.pop(key, None)

    async def run(self) -> None:
        """Plan jobs one after another, for ever, in one process that is started when it is needed."""
        process: Process | None = None
        try:
            while True:
                key, request = await self._next()
                began = time.monotonic()
                try:
                    if process is None or process.returncode is not None:
                        process = await self._started()
                    answer = await self._answer(process, request)
                except OSError as error:
                    answer = PlannerLostError(f"the process that plans cannot be reached: {error}")
                finally:
                    del self._in_progress[key]
                    self._turns.charge(key.namespace, time.monotonic() - began)
                self._answered(key, request, answer)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    async def _next(self) -> tuple[JobKey, PlanRequest]:
        async with self._changed:
            while True:
                busy = {key.namespace for key in self._in_progress}
                key = self._turns.take(cost=0.0, busy=busy)
                if key is None:
                    await self._changed.wait()
                elif (request := self._waiting.pop(key, None)) is not None:
                    self._in_progress[key] = request
                    return key, request

    async def _started(self) -> Process:
        process = await asyncio.create_subprocess_exec(*module_command(plan_process.__name__), stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(frame((self._settings, self._limits)))
        return process

    async def _answer(self, process: Process, request: PlanRequest) -> Answer:
        """Return the answer of the process, or of its end."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                process.stdin.write(frame(request))
                await process.stdin.drain()
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                answer: Answer = pickle.loads(await process.stdout.readexactly(length))
                return answer
        except TimeoutError:
            process.kill()
            await process.wait()
            return PlannerLostError(f"the process that plans has not answered within {ANSWER_SECONDS:g} s")
        except asyncio.IncompleteReadError:
            code = await process.wait()
        if code == -signal.SIGPROF:
            log.warning(
                "%s took more than %g s of CPU to plan, and is refused", request.job.name, self._limits.cpu_seconds
            )
            return refusal((too_much(f"{self._limits.cpu_seconds:g} s of CPU"),))
        # Others send these two signals, and a process that exits by itself has not begun to plan.
        lost = code >= 0 or code in (-signal.SIGKILL, -signal.SIGTERM)
        kind = PlannerLostError if lost else PlanningFailedError
        return kind(f"the process that plans has ended with code {code}")
