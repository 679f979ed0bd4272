"""Follow jobs, the objects that run their attempts, and their pods: a list, and then a watch from its version on.

One reader for all kinds. Objects are cut to bounds before they are parsed (kubernetes_api/client.py); a broken watch
resumes where it ended; and a bug ends the whole task, which /healthz reports.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing

from finetune_operator.kubernetes_api.answers import WatchEvent
from finetune_operator.kubernetes_api.errors import ApiError, GoneError
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB, POD, Resource
from finetune_operator.rendering.render_types import JOB_LABEL
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.state import OperatorState
from finetune_operator.shell.sync import TimeSlice, read_all, store_object

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Delay before a broken watch is resumed, give or take a half: many would otherwise come back at once."""


class Watchers:
    """One follower for each kind and namespace; a kind that is served later gets its own then."""

    def __init__(self, state: OperatorState, discovery: Discovery) -> None:
        self._state = state
        self._discovery = discovery

    async def run(self) -> None:
        """Follow, for ever. A follower that ends with an error is a bug, and ends them all."""
        following: set[tuple[Resource, str | None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for resource in (FINETUNE_JOB, POD, *self._discovery.resources):
                    for namespace in self._state.settings.namespaces or (None,):
                        if (resource, namespace) not in following:
                            following.add((resource, namespace))
                            name = f"following {resource.plural}"
                            tasks.create_task(_Watcher(self._state, resource, namespace).run(), name=name)
                await self._discovery.changed.wait()
                self._discovery.changed.clear()


class _Watcher:
    """Keeps the store's view of one kind, in one namespace or in all."""

    def __init__(self, state: OperatorState, resource: Resource, namespace: str | None) -> None:
        self._state = state
        self._resource = resource
        self._namespace = namespace
        self._version: int | None = None
        """Version at which the next watch begins; None: not known, so that a list comes first."""

    async def run(self) -> None:
        while True:
            try:
                if self._version is None:
                    self._version = await read_all(self._state, self._resource, self._namespace)
                began = time.monotonic()
                await self._watch(self._version)
                if time.monotonic() > began + AGAIN_SECONDS:
                    # The server ends a watch in order now and then. A pod that is created meanwhile may report at once.
                    continue
            except TimeoutError:
                log.debug("restarting the watch of %s: the API server did not answer", self._resource.plural)
            except GoneError:
                # The server has dropped the events since: after a restart, or a long silence.
                self._version = None
                self._state.measurements.relisted("relist")
                continue
            except ApiError as error:
                log.debug("restarting the watch of %s: %s", self._resource.plural, error)
            await asyncio.sleep(AGAIN_SECONDS * (0.5 + random.random()))

    async def _watch(self, version: int) -> None:
        """Store events until the watch ends. TimeoutError after an outage of the API server."""
        labels = None if self._resource is FINETUNE_JOB else JOB_LABEL
        events = self._state.kube.watch(self._resource, version, self._namespace, labels)
        async with self._state.kube.outage.until_end(), aclosing(events):
            time_slice = TimeSlice()
            async for event in events:
                await self._take(event)
                await time_slice.shared()

    async def _take(self, event: WatchEvent) -> None:
        if event.type != "BOOKMARK":
            await store_object(self._state, self._resource, event.object, deleted=event.type == "DELETED")
        self._version = event.version
