"""Fill the store by one list per kind, and again whenever kopf's watches may have missed something.

Objects that vanished while a watch was interrupted are in no event. So a list is read after an outage, and after each
list of kopf, which lists at the start and when a watch cannot be resumed where it ended (kopf_guard.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from finetune_operator.controller.cluster.discovery import Discovery
from finetune_operator.controller.reconcile.operator_state import OperatorState, is_new
from finetune_operator.controller.store.store import Key, UnreadableError, key_of
from finetune_operator.jobs.leftover_claims import CLAIM_SELECTOR, claims_used, without_job
from finetune_operator.jobs.render.render_types import JOB_LABEL, Manifest
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.kubernetes_api.client import plural_in
from finetune_operator.kubernetes_api.errors import ApiError
from finetune_operator.kubernetes_api.resources import CLAIM, FINETUNE_JOB, POD, Resource

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""Requests that arrive within this time are answered by one list."""
AGAIN_SECONDS = 2.0
"""Delay before the next try when a list failed in spite of all retries."""
TURN_SECONDS = 0.02
"""Longest stretch of storing objects before other tasks get their turn."""
CLAIMS_SECONDS = 600.0
"""Interval between two counts of the claims of deleted jobs, which are paid by the hour."""
SERVED_SECONDS = 15.0
"""Interval between two discoveries of served kinds, while a job waits to begin."""


class Resync:
    """Lists objects, once or on request."""

    def __init__(self, state: OperatorState, discovery: Discovery) -> None:
        self._state = state
        self._discovery = discovery
        self._requests: dict[Resource, str] = {}
        """Kinds to be listed again, with the reason."""
        self._requested = asyncio.Event()
        self._listed: set[str] = set()
        """Paths of the collections that kopf has listed."""
        self._listing = asyncio.Lock()

    async def fill(self, reason: str) -> None:
        """List everything, retrying until it succeeds."""
        while True:
            try:
                await self._discovery.refresh()
                await self._list(self._resources(), reason)
            except ApiError as error:
                log.warning("cannot list the objects of the cluster, retrying: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self._state.synced.set()
            return

    def request(self, resource: Resource, reason: str) -> None:
        """Have a kind listed again soon."""
        self._requests.setdefault(resource, reason)
        self._requested.set()

    def request_all(self, reason: str) -> None:
        """Have all kinds listed again soon."""
        for resource in self._resources():
            self.request(resource, reason)

    def request_at(self, path: str) -> None:
        """Have the kind of this collection listed soon: kopf has listed it, and does not know what is known here."""
        reason = "relist" if path in self._listed else "start"
        self._listed.add(path)
        plural = plural_in(path)
        for resource in self._resources():
            if resource.plural == plural:
                self.request(resource, reason)

    async def run(self) -> None:
        """Serve requests, for ever."""
        while True:
            await self._requested.wait()
            await asyncio.sleep(QUIET_SECONDS)
            self._requested.clear()
            requests, self._requests = self._requests, {}
            resources = [resource for resource in self._resources() if resource in requests]
            try:
                await self._list(resources, *set(requests.values()))
            except ApiError as error:
                log.warning("cannot list the objects of the cluster, retrying: %s", error)
                for resource, reason in requests.items():
                    self.request(resource, reason)
                await asyncio.sleep(AGAIN_SECONDS)
                # A kind may no longer be served, which must not keep the others from being listed.
                self._discovery.outdated()
                with suppress(ApiError):
                    await self._discovery.refresh()

    async def launchers(self) -> None:
        """Requeue jobs that have not begun when the served kinds change, for ever: a training operator may be installed
        while they are suspended, or after they were refused for lack of it. Likewise endpoints that scale by custom
        metrics, lead requests by an HTTPRoute or scale to zero, once these are served. Discovery runs only while there
        are such jobs.
        """
        known = self._discovery.resources, self._discovery.endpoint_extensions
        while True:
            await asyncio.sleep(SERVED_SECONDS)
            store = self._state.store
            waiting = [
                key
                for key in store.jobs()
                if (job := store.job(key))
                and (job.status.start_time is None or store.lacks_servers(key) or self._lacks_extension(job))
            ]
            if not waiting:
                continue
            try:
                await self._discovery.refresh()
            except ApiError as error:
                log.debug("cannot discover the served kinds, retrying: %s", error)
                continue
            served = self._discovery.resources, self._discovery.endpoint_extensions
            if served != known:
                known = served
                for key in waiting:
                    self._state.queue.add(key)

    async def leftover_claims(self) -> None:
        """Count the claims of deleted jobs, for ever. Pods of others that use one are not seen: only labelled pods are
        watched.
        """
        while True:
            await self._state.synced.wait()
            try:
                self._state.measurements.claims_left_over(await self._leftover_sizes())
            except ApiError as error:
                log.warning("cannot count the claims of deleted jobs: %s", error)
            await asyncio.sleep(CLAIMS_SECONDS)

    async def _leftover_sizes(self) -> list[int]:
        """Return the bytes of each claim whose job is deleted and that no other job names."""
        store = self._state.store
        sizes: dict[tuple[str, str], tuple[str, int]] = {}
        for namespace in self._state.settings.namespaces or (None,):
            # No more than a page is in memory: anybody may add large annotations to claims.
            async for page in self._state.kube.pages(CLAIM, namespace, CLAIM_SELECTOR):
                sizes |= {claim.key: (claim.job, claim.size) for claim in without_job(page.items, ())}
        jobs = store.jobs()
        known, time_slice = set(jobs), TimeSlice()
        sizes = {key: one for key, one in sizes.items() if (key[0], one[0]) not in known}
        namespaces = {namespace for namespace, _ in sizes}
        used: set[tuple[str, str]] = set()
        for key in jobs:
            if key.namespace in namespaces and (view := store.job(key)) and view.job:
                spec = view.job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
                used |= {(key.namespace, name) for name in claims_used(spec)}
                await time_slice.shared()
        return [size for key, (_, size) in sizes.items() if key not in used]

    def _lacks_extension(self, job: JobView) -> bool:
        """Return whether the job's endpoint would use an API that is not served."""
        spec = None if job.job is None else job.job.spec
        if spec is None or spec.endpoint is None:
            return False
        wanted = (
            spec.endpoint.target_requests_in_flight is not None and spec.endpoint.idle is None,
            spec.routed_traffic is not None,
            spec.endpoint.idle is not None,
        )
        served = self._discovery.endpoint_extensions
        return any(uses and not there for uses, there in zip(wanted, served, strict=True))

    def _resources(self) -> tuple[Resource, ...]:
        return FINETUNE_JOB, POD, *self._discovery.resources

    async def _list(self, resources: Iterable[Resource], *reasons: str) -> None:
        async with self._listing:
            for resource in resources:
                for namespace in self._state.settings.namespaces or (None,):
                    await read_all(self._state, resource, namespace)
        for reason in reasons:
            self._state.measurements.relisted(reason)


class TimeSlice:
    """Share of the event loop for work that never waits: many objects in a row must not hold up a probe."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def shared(self) -> None:
        """Yield to other tasks if this turn was long."""
        if time.monotonic() > self._began + TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()


async def read_all(state: OperatorState, resource: Resource, namespace: str | None) -> int:
    """Read a kind whole, from one namespace or from all, and queue every job with news. Return the version at which it
    was read.
    """
    labels = None if resource is FINETUNE_JOB else JOB_LABEL
    listed: set[Key] = set()
    version = 0
    time_slice = TimeSlice()
    async for page in state.kube.pages(resource, namespace, labels):
        if page.first:
            listed.clear()
        version = page.version
        for raw in page.items:
            await time_slice.shared()
            await store_object(state, resource, raw)
            with suppress(UnreadableError):
                listed.add(key_of(raw))
    for key in state.store.retain_listed(
        resource.group_kind, listed, version, None if namespace is None else {namespace}
    ):
        state.queue.add(key)
    return version


async def store_object(state: OperatorState, resource: Resource, raw: Manifest, *, deleted: bool = False) -> None:
    """Put an object that was read into the store, and queue its job if it is news."""
    try:
        entry = state.store.remove(raw) if deleted else await state.put(raw)
    except UnreadableError as error:
        log.warning("ignoring a %s that cannot be read: %s", resource.kind, error)
        return
    except Exception:
        # A bug that one object triggers must not end the list of all others.
        log.exception("ignoring a %s because of an error in the operator", resource.kind)
        return
    if entry is not None:
        state.queue.add(entry.job, new=is_new(entry.view))
