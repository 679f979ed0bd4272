"""Queue of the Kubernetes events about jobs, which are created behind the jobs' objects and statuses."""

from __future__ import annotations

import asyncio
import logging

from finetune_operator.controller.reconcile.job_memory import JobMemory
from finetune_operator.controller.reconcile.operator_state import OperatorState
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.state.decision_types import EventNote, JobView
from finetune_operator.kubernetes_api.errors import ApiError, NamespaceTerminatingError
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB

log = logging.getLogger(__name__)

YIELD_SECONDS = 2.0
"""Longest delay of a status or an event while there are jobs for which nothing was created yet."""


class JobEvents:
    """Events to be created. Jobs do not wait for them: three events a job are half of its requests."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state
        self._queue: asyncio.Queue[tuple[Manifest, str, EventNote]] = asyncio.Queue()
        """The object that an event is about, its salt, and the note."""

    def add(self, involved: Manifest, salt: str, note: EventNote) -> None:
        """Queue one event about the object `involved`. The same note with another salt is another event."""
        self._queue.put_nowait((involved, salt, note))

    def add_of_job(
        self, key: JobKey, job: JobView, version: str, notes: tuple[EventNote, ...], memory: JobMemory
    ) -> None:
        """Queue the notes that were decided at `version` of the job, each once."""
        memory.queued = {queued for queued in memory.queued if queued[0] == version}
        involved = _involved(key, job)
        for note in notes:
            mark = (version, note.reason, note.message)
            if mark not in memory.queued:
                memory.queued.add(mark)
                self.add(involved, version, note)

    async def check(self, key: JobKey, job: JobView) -> None:
        """Raise NamespaceTerminatingError if the job's namespace is being deleted. It is a dry run of an event, which
        stores nothing and needs no further right.
        """
        try:
            involved = _involved(key, job)
            await self._state.kube.create_event(involved, "Normal", "NamespaceCheck", "dry run", dry_run=True)
        except NamespaceTerminatingError:
            raise
        except ApiError as error:
            log.debug("%s: it is not known whether its namespace is being deleted: %s", key, error)

    async def write(self) -> None:
        """Create events in their order, for ever."""
        while True:
            involved, salt, note = await self._queue.get()
            await self._state.queue.wait_for_new_jobs(YIELD_SECONDS)
            try:
                if involved["uid"] not in self._state.ending:
                    await self._state.kube.create_event(involved, note.type, note.reason, note.message, salt=salt)
            except NamespaceTerminatingError:
                self._state.namespace_ends(str(involved["namespace"]))
            except ApiError as error:
                # The status has it all.
                log.warning(
                    "%s/%s: event %s was not created: %s", involved["namespace"], involved["name"], note.reason, error
                )
            finally:
                self._queue.task_done()

    async def written(self) -> None:
        """Wait until all events are created."""
        await self._queue.join()


def _involved(key: JobKey, job: JobView) -> Manifest:
    """Return the reference to the job that an event names."""
    return {
        "apiVersion": FINETUNE_JOB.api_version,
        "kind": FINETUNE_JOB.kind,
        "namespace": key.namespace,
        "name": key.name,
        "uid": job.uid,
    }
