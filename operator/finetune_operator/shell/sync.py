"""Fills the store by one list per kind, and again whenever a watch may have missed something.

A watch that was interrupted for long begins anew with a list, and objects that vanished meanwhile are in no event. So a
list is read again after an outage, and when a watch tells of known objects anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from finetune_operator.rendering.types import JOB_LABEL
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.kube import FINETUNE_JOB, POD, ApiError, Resource
from finetune_operator.shell.state import OperatorState

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""A list answers all requests of this long."""
AGAIN_SECONDS = 2.0
"""Before the next try when a list failed in spite of all retries."""
SERVED_SECONDS = 15.0
"""Between two questions for what is served, while a job waits to begin."""


class Syncer:
    """Lists, once or on request."""

    def __init__(self, state: OperatorState, discovery: Discovery) -> None:
        self._state = state
        self._discovery = discovery
        self._wanted: dict[str, str] = {}
        """Kinds to be listed again, and why."""
        self._asked = asyncio.Event()
        self._listing = asyncio.Lock()

    async def fill(self, reason: str) -> None:
        """List everything, trying until it is done."""
        while True:
            try:
                await self._discovery.refresh()
                await self._list(self._resources(), reason)
            except ApiError as error:
                log.warning("cannot read the state of the cluster, will try again: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self._state.synced.set()
            return

    def request(self, kind: str, reason: str) -> None:
        """Have a kind listed again soon."""
        self._wanted.setdefault(kind, reason)
        self._asked.set()

    def request_all(self, reason: str) -> None:
        """Have all kinds listed again soon."""
        for resource in self._resources():
            self.request(resource.kind, reason)

    async def run(self) -> None:
        """Answer requests, for ever."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(QUIET_SECONDS)
            self._asked.clear()
            wanted, self._wanted = self._wanted, {}
            resources = [resource for resource in self._resources() if resource.kind in wanted]
            try:
                await self._list(resources, *set(wanted.values()))
            except ApiError as error:
                log.warning("cannot read the state of the cluster, will try again: %s", error)
                for kind, reason in wanted.items():
                    self.request(kind, reason)
                await asyncio.sleep(AGAIN_SECONDS)

    async def launchers(self) -> None:
        """Have jobs that have not begun planned anew when other kinds are served than before, for ever: a training
        operator may come while they are suspended, or were refused for the want of it. Asks only while there are such
        jobs.
        """
        known = self._discovery.resources
        while True:
            await asyncio.sleep(SERVED_SECONDS)
            store = self._state.store
            waiting = [key for key in store.jobs() if (job := store.job(key)) and job.status.start_time is None]
            if not waiting:
                continue
            try:
                await self._discovery.refresh()
            except ApiError as error:
                log.debug("cannot ask what is served, will try again: %s", error)
                continue
            if self._discovery.resources != known:
                known = self._discovery.resources
                for key in waiting:
                    self._state.queue.add(key)

    def _resources(self) -> tuple[Resource, ...]:
        return FINETUNE_JOB, POD, *self._discovery.resources

    async def _list(self, resources: Iterable[Resource], *reasons: str) -> None:
        async with self._listing:
            for resource in resources:
                for namespace in self._state.settings.namespaces or (None,):
                    await read_all(self._state, resource, namespace)
        for reason in reasons:
            self._state.measurements.resynced(reason)


async def read_all(state: OperatorState, resource: Resource, namespace: str | None) -> int:
    """Read a kind whole, from one namespace or from all, and have every job looked at for which something is new. Gives
    the version at which it was read.
    """
    labels = None if resource is FINETUNE_JOB else JOB_LABEL
    found, version = await state.kube.list_objects(resource, namespace, labels)
    within = None if namespace is None else {namespace}
    for key in state.store.replace_all(resource.kind, found, version, within):
        state.queue.add(key)
    return version
