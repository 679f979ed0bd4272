"""One reconcile of one job: known state -> `decide` -> carry it out.

Deletes come first, then creates, then the status that names the created objects, then the events about them. A
reconcile that stops in between leaves nothing half known: the next one finds the created objects, by name and label,
and goes on from there. So a reconcile may end at any point: by an error, a lost leadership, or the end of the process.

Nothing is ever overwritten by an older view. A create does not replace, a delete names the uid, and the status names
the version that it was computed from.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias

from pydantic import JsonValue

from finetune_contract.report import shortened
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJobStatus
from finetune_operator.kubernetes_api.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    WebhookError,
)
from finetune_operator.kubernetes_api.resources import (
    AUTOSCALER,
    CLAIM,
    DEPLOYMENT,
    FINETUNE_JOB,
    INFERENCE_SERVICE,
    JOB,
    LAUNCHER_RESOURCES,
    POD,
    REPLICA_SET,
    resource_of,
)
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.plan_types import LearnedRatios
from finetune_operator.reconcile.autoscaling import autoscaler_view, has_autoscaler, is_due
from finetune_operator.reconcile.learning import learned_from
from finetune_operator.reconcile.observed import pods_being_deleted, redacted_log, wanted_logs
from finetune_operator.reconcile.plan_checks import plan_check_of
from finetune_operator.reconcile.reconcile_state import has_started
from finetune_operator.reconcile.reconcile_types import (
    AutoscalerView,
    ChildView,
    Decision,
    EndpointView,
    EventNote,
    JobView,
    ObjectRef,
    Observed,
    Refusal,
)
from finetune_operator.rendering.pod_parts import CONTAINER_NAME
from finetune_operator.rendering.render_types import JOB_LABEL, UID_LABEL, Manifest, ProgressEndpoint
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.node_reading import NodeReading
from finetune_operator.shell.owners import controller_of
from finetune_operator.shell.queue import JobKey
from finetune_operator.shell.rate_limit import Rate
from finetune_operator.shell.state import OperatorState
from finetune_operator.shell.store import Entry, JobId

log = logging.getLogger(__name__)

Decide: TypeAlias = Callable[[JobView, Observed, datetime, Settings, ProgressEndpoint | None], Decision]
Outcome: TypeAlias = Literal["done", "refused", "conflict", "gone", "failed"]

StatusWrite: TypeAlias = Callable[[], Coroutine[Any, Any, Outcome]]
"""Remainder of a reconcile."""

STALE_SECONDS = 300.0
"""After this long without an update of a running attempt, the API server is asked once whether one was lost."""
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
YIELD_SECONDS = 2.0
"""Longest delay of a status or an event while there are jobs for which nothing was created yet."""
CONFLICT_SECONDS = 0.2
"""Delay before the next reconcile after a conflict, so that two writers do not race at full speed."""
CLAIM_SECONDS = 10.0
"""Time that an object may claim a job that is not its own before an event reports it. The garbage collector needs a
moment for the objects that an owner left behind.
"""
CLAIMS_BURST, CLAIMS_PER_SECOND = 10, 1 / 30
"""Events about such objects, for each namespace."""
MOST_CLAIMS = 10_000
QUEUED = float("-inf")
"""Value in place of the time: the event was queued."""
CONFLICT_CODE = 409
"""HTTP status of a create whose name is taken."""
_STORED_KINDS = frozenset(
    resource.group_kind for resource in (*LAUNCHER_RESOURCES.values(), DEPLOYMENT, INFERENCE_SERVICE)
)


@dataclass
class JobMemory:
    """State of one job that is remembered between reconciles, and may be lost."""

    uid: str
    refusals: tuple[Refusal, ...] = ()
    """Refusals of the last reconcile, until one that knew of them has been carried out."""
    logs: dict[str, str] = field(default_factory=dict)
    """Log tails by pod; read once."""
    last_logs: dict[str, str] = field(default_factory=dict)
    """Log tails by pod, read when its deletion began."""
    autoscaler: AutoscalerView | None = None
    autoscaler_read: float = float("-inf")
    """Time when the endpoint's autoscaler was read, on the monotonic clock."""
    queued: set[tuple[str, str, str]] = field(default_factory=set)
    """Events that were queued: version of the job that they were decided at, reason, message."""
    progress_written: float = float("-inf")
    """Time when the status was written last, on the monotonic clock."""
    checked_update: float = float("-inf")
    """Time of the last update after which the attempt was read again already."""
    failures: int = 0
    """Reconciles in a row that ended in an error."""


class Reconciler:
    """Reconciles jobs, each one once at a time."""

    def __init__(self, state: OperatorState, discovery: Discovery, nodes: NodeReading, decide: Decide) -> None:
        self._state = state
        self._discovery = discovery
        self._nodes = nodes
        self._decide = decide
        self._memories: dict[JobKey, JobMemory] = {}
        self._status_writes: asyncio.Queue[tuple[JobKey, StatusWrite]] = asyncio.Queue()
        self._events: asyncio.Queue[tuple[Manifest, str, EventNote]] = asyncio.Queue()
        """Events to be created: the object that they are about, their salt, and the note."""
        self._claims: OrderedDict[str, float] = OrderedDict()
        """Time when an object that claims a job and is not its own was seen first, by uid."""
        self._claims_rate = Rate(burst=CLAIMS_BURST, per_second=CLAIMS_PER_SECOND)

    async def work(self) -> None:
        """Run one worker, until the queue is closed."""
        while (key := await self._state.queue.take()) is not None:
            status_write: StatusWrite | None = None
            try:
                status_write = await self.reconcile(key)
            finally:
                if status_write is None:
                    self._state.queue.done(key)
            if status_write is not None:
                self._status_writes.put_nowait((key, status_write))

    async def write_statuses(self) -> None:
        """Write statuses after creations, for ever. The key stays in progress until then: no reconcile overlaps."""
        while True:
            key, status_write = await self._status_writes.get()
            await self._state.queue.wait_for_new_jobs(YIELD_SECONDS)
            try:
                await self._measured(key, status_write())
            finally:
                self._state.queue.done(key)
                self._status_writes.task_done()

    async def reconcile(self, key: JobKey) -> StatusWrite | None:
        """Reconcile one job. Only the leader acts; a replica that gains leadership reconciles every job again.

        Return the remainder of a reconcile that has created something: when many jobs come at once, the children of all
        of them are more urgent than the status of the first.
        """
        if not self._state.leading.is_set():
            return None
        return await self._measured(key, self._reconcile(key))

    async def _measured(self, key: JobKey, work: Coroutine[Any, Any, Outcome | StatusWrite]) -> StatusWrite | None:
        """Run it, count it, and ensure that an error is followed by another try."""
        began = time.monotonic()
        outcome: Outcome
        try:
            result = await work
        except ApiError as error:
            outcome = self._failed(key, str(error), None)
        except Exception as error:
            outcome = self._failed(key, f"{type(error).__name__}: {error}", error)
        else:
            if not isinstance(result, str):
                return result
            outcome = result
            if (memory := self._memories.get(key)) is not None:
                memory.failures = 0
        self._state.measurements.reconcile_done(time.monotonic() - began, outcome)
        return None

    def _failed(self, key: JobKey, message: str, error: Exception | None) -> Outcome:
        """Log the first of several errors in a row, with its trace if it is a bug, and retry ever more slowly."""
        memory = self._memories.get(key)
        failures = 0 if memory is None else memory.failures
        if memory is not None:
            memory.failures += 1
        delay = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failures, 10)) * (0.75 + random.random() / 2)
        level = logging.ERROR if error is not None else logging.WARNING
        log.log(
            level if failures == 0 else logging.DEBUG, "%s: retrying after an error: %s", key, message, exc_info=error
        )
        self._state.queue.add_after(key, delay)
        return "failed"

    # ------------------------------------------------------------------------------------------------- one reconcile

    async def _reconcile(self, key: JobKey) -> Outcome | StatusWrite:
        job = self._state.store.job(key)
        if job is None:
            self.forget(key)
            self._report_claims(key)
            return "gone"
        memory = self._memory(key, job.uid)
        await self._resolve_owners(job.id)
        self._report_claims(key)
        if job.job is not None and (job.status.plan is None or self._state.store.lacks_servers(key)):
            await self._discovery.refresh()
        if job.job is not None and job.job.spec.resources.gpus_per_node != 0 and not has_started(job.status):
            await self._nodes.refresh()
        await self._read_logs(key, memory)
        await self._read_stale_attempt(key, memory)
        await self._read_autoscaler(key, memory)
        # Read without awaiting in between: a view and the version that belongs to it.
        job, version = self._state.store.job(key), self._state.store.job_version(key)
        if job is None or version is None or job.uid != memory.uid:
            self._state.queue.add(key)
            return "conflict"
        observed = self._observed(job, memory)
        now = self._state.now()
        decision = self._decide(job, observed, now, self._state.settings, self._state.progress_endpoint)
        for ref in decision.delete:
            await self._delete(key.namespace, ref)
        for ref in decision.remove:
            await self._remove(job, ref)
        if not await self._create_and_apply(key, job, decision, memory):
            return "refused"
        status_write = partial(self._record, key, job, version, observed, decision, memory)
        return status_write if decision.create or decision.apply else await status_write()

    async def _record(
        self, key: JobKey, job: JobView, version: str, observed: Observed, decision: Decision, memory: JobMemory
    ) -> Outcome:
        """Write the status, then queue events, and schedule the next reconcile."""
        outcome = await self._write_status(key, job, version, decision, memory)
        if outcome != "done":
            return outcome
        self._queue_events(key, job, version, decision.events, memory)
        if decision.delete_job:
            await self._delete(key.namespace, ObjectRef(FINETUNE_JOB.api_version, FINETUNE_JOB.kind, key.name, job.uid))
        if memory.refusals == observed.refusals:
            memory.refusals = ()
        self._wake_later(key, job, decision, memory)
        return outcome

    async def _resolve_owners(self, job: JobId) -> None:
        """Read the objects between the job's children and pods; each once."""
        namespace, _ = job
        for owner in self._state.store.unresolved(job):
            try:
                resource = REPLICA_SET if owner.kind == REPLICA_SET.group_kind else JOB
                found = await self._state.kube.get(resource, namespace, owner.name)
                if resource is REPLICA_SET:
                    await self._read_deployment(namespace, found)
            except NotFoundError:
                found = None
            self._state.store.resolve(job, owner, found)

    async def _read_deployment(self, namespace: str, replica_set: Manifest) -> None:
        """Read the Deployment of a ReplicaSet if it is not known: KServe creates it, so that its pods may arrive first.
        NotFoundError.
        """
        metadata = replica_set.get("metadata")
        owner = controller_of(metadata) if isinstance(metadata, dict) else None
        if owner is None or owner.kind != DEPLOYMENT.group_kind:
            return
        if self._state.store.get(DEPLOYMENT.group_kind, namespace, owner.name) is None:
            self._state.store.put(await self._state.kube.get(DEPLOYMENT, namespace, owner.name))

    def _report_claims(self, key: JobKey) -> None:
        """Queue events about objects that are labelled as a job's and are not: each on that object, not on the job."""
        now = time.monotonic()
        for entry in self._state.store.foreign(key):
            first = self._claims.setdefault(entry.uid, now)
            while len(self._claims) > MOST_CLAIMS:
                self._claims.popitem(last=False)
            if now < first + CLAIM_SECONDS:
                self._state.queue.add_after(key, first + CLAIM_SECONDS - now)
            elif first != QUEUED and self._claims_rate.take(key.namespace):
                self._claims[entry.uid] = QUEUED
                log.warning(
                    "ignoring %s %s/%s: its labels name FineTuneJob %s, its owners do not",
                    entry.kind.name,
                    *entry.key[1:],
                    key,
                )
                self._events.put_nowait((_involved(entry), entry.uid, _claim_note(key, entry)))

    def _observed(self, job: JobView, memory: JobMemory) -> Observed:
        running = next((stage for stage in job.status.stages if stage.state == "Running"), None)
        attempt = None if running is None else (job.uid, running.name, running.attempt)
        progress = self._state.progress
        return Observed(
            children=self._state.store.children(job.id),
            pods=self._state.store.pods(job.id),
            endpoints=self._state.store.endpoints(job.id),
            kserve=self._discovery.kserve,
            custom_metrics=self._discovery.custom_metrics,
            autoscaler=memory.autoscaler,
            pods_before=self._state.store.pods_before(JobKey(job.namespace, job.name), job.uid),
            progress=None if attempt is None else progress.of(*attempt),
            logs=tuple(sorted(memory.logs.items())),
            last_logs=tuple(sorted(memory.last_logs.items())),
            served=self._discovery.served,
            nodes=self._nodes.answer,
            learned=self._learned(job),
            refusals=memory.refusals,
            last_progress_at=None if attempt is None else progress.last_progress_at(*attempt),
            reports_complete_since=self._state.reports_complete_since(),
        )

    def _learned(self, job: JobView) -> tuple[LearnedRatios, ...]:
        """Return the ratios of the namespace's finished jobs, until the job has started, if the settings allow it."""
        if not self._state.settings.planning.learn_from_jobs or has_started(job.status):
            return ()
        keys = (key for key in self._state.store.jobs() if key.namespace == job.namespace)
        views = (self._state.store.job(key) for key in keys)
        return learned_from(view.status for view in views if view is not None)

    async def _read_logs(self, key: JobKey, memory: JobMemory) -> None:
        job = self._state.store.job(key)
        if job is None:
            return
        # The log of a running pod is out of date in the next reconcile.
        pods = self._state.store.pods(job.id)
        over = {pod.name for pod in pods if pod.over}
        memory.logs = {name: text for name, text in memory.logs.items() if name in over}
        there = {pod.name for pod in pods}
        memory.last_logs = {name: text for name, text in memory.last_logs.items() if name in there}
        observed = self._observed(job, memory)
        for name in pods_being_deleted(job, observed):
            memory.last_logs[name] = await self._log_end(job, name)
        for name in wanted_logs(job, observed, self._state.now(), self._state.settings):
            memory.logs[name] = await self._log_end(job, name)

    async def _read_autoscaler(self, key: JobKey, memory: JobMemory) -> None:
        """Read the endpoint's autoscaler, at intervals: a watch on all autoscalers would need more rights."""
        job, now = self._state.store.job(key), time.monotonic()
        if job is None or not has_autoscaler(job):
            memory.autoscaler, memory.autoscaler_read = None, float("-inf")
        elif is_due(now - memory.autoscaler_read, memory.autoscaler):
            memory.autoscaler_read = now
            try:
                found = await self._state.kube.get(AUTOSCALER, key.namespace, JobNames.of(key.name).endpoint)
            except NotFoundError:
                memory.autoscaler = None
            else:
                memory.autoscaler = autoscaler_view(found)

    async def _log_end(self, job: JobView, pod: str) -> str:
        return redacted_log(job, await self._state.kube.pod_log(job.namespace, pod, CONTAINER_NAME))

    async def _create_and_apply(self, key: JobKey, job: JobView, decision: Decision, memory: JobMemory) -> bool:
        """Create and apply the objects of the decision; return False if one of them was refused."""
        steps = [*((self._create, one) for one in decision.create), *((self._apply, one) for one in decision.apply)]
        for step, manifest in steps:
            refusal = await step(job, manifest)
            if refusal is None:
                continue
            log.warning("%s: %s %s was refused: %s", key, refusal.ref.kind, refusal.ref.name, refusal.message)
            repeated = refusal in memory.refusals
            memory.refusals = (refusal,)
            # The decided status names an object that does not exist: the job is decided again.
            if repeated:
                self._state.queue.add_after(key, FIRST_RETRY_SECONDS)
            else:
                self._state.queue.add(key)
            return False
        return True

    # ------------------------------------------------------------------------------------------------------- objects

    async def _delete(self, namespace: str, ref: ObjectRef) -> None:
        resource = resource_of(ref.api_version, ref.kind)
        try:
            remaining = await self._state.kube.delete(resource, namespace, ref.name, ref.uid)
        except ConflictError:
            # Another object has the name: the one that was meant is deleted.
            remaining = None
        if remaining is None:
            self._state.store.mark_deleted(ref.group_kind, namespace, ref.name, ref.uid)
        else:
            await self._state.put(remaining)
        log.info("%s: deleted %s %s", namespace, ref.kind, ref.name)

    async def _create(self, job: JobView, manifest: Manifest) -> Refusal | None:
        """Create the object, or adopt the existing one if it is this job's."""
        ref = ObjectRef.of(manifest)
        try:
            stored = await self._state.kube.create(manifest, job.namespace)
        except AlreadyExistsError as error:
            stored = await self._existing(job, ref)
            if not _is_ours(stored, job):
                conflict = f'{ref.kind} "{ref.name}" exists already and does not belong to this job'
                return Refusal(ref, CONFLICT_CODE, conflict)
            if stored.get("data") != manifest.get("data"):
                # Left by a reconcile that ended early, before the spec was edited: nothing runs with it yet, or the
                # child would exist.
                await self._delete(job.namespace, replace(ref, uid=_uid(stored)))
                raise ConflictError(
                    f"{ref.kind} {ref.name}", 409, "Conflict", "it was created from an earlier spec"
                ) from error
        except (InvalidError, ForbiddenError, NotFoundError, WebhookError) as error:
            # Not when the namespace is being deleted: the job is deleted with it, and its status needs nothing.
            self._discovery.outdated()
            return Refusal(ref, error.code, error.message)
        else:
            log.info("%s/%s: created %s %s", job.namespace, job.name, ref.kind, ref.name)
        if ref.group_kind in _STORED_KINDS:
            self._state.store.put(stored)
        return None

    async def _apply(self, job: JobView, manifest: Manifest) -> Refusal | None:
        """Create the object, or change the existing one if it is this job's."""
        ref = ObjectRef.of(manifest)
        found = await self._found(job, ref)
        if found is not None and not _is_ours(found, job):
            if _is_being_deleted(found) or _is_of_earlier_job(found, job):
                raise ConflictError(
                    f"{ref.kind} {ref.name}", 409, "Conflict", "an object of that name is being deleted"
                )
            return Refusal(
                ref, CONFLICT_CODE, f'{ref.kind} "{ref.name}" exists already and does not belong to this job'
            )
        try:
            stored = await self._state.kube.apply(manifest, job.namespace, None if found is None else _uid(found))
        except (InvalidError, ForbiddenError, NotFoundError, WebhookError) as error:
            self._discovery.outdated()
            return Refusal(ref, error.code, error.message)
        log.info("%s/%s: applied %s %s", job.namespace, job.name, ref.kind, ref.name)
        if ref.group_kind in _STORED_KINDS:
            self._state.store.put(stored)
        return None

    async def _remove(self, job: JobView, ref: ObjectRef) -> None:
        """Delete the object if it exists and is this job's."""
        found = await self._found(job, ref)
        if found is None:
            self._state.store.mark_deleted(ref.group_kind, job.namespace, ref.name, ref.uid)
        elif _is_ours(found, job) and not _is_being_deleted(found):
            await self._delete(job.namespace, replace(ref, uid=_uid(found)))

    async def _found(self, job: JobView, ref: ObjectRef) -> Manifest | None:
        """Return the object that has the name now."""
        try:
            return await self._state.kube.get(resource_of(ref.api_version, ref.kind), job.namespace, ref.name)
        except NotFoundError:
            return None

    async def _existing(self, job: JobView, ref: ObjectRef) -> Manifest:
        """Return the object that has the name now. ConflictError while that is being deleted."""
        name = f"{ref.kind} {ref.name}"
        try:
            found = await self._state.kube.get(resource_of(ref.api_version, ref.kind), job.namespace, ref.name)
        except NotFoundError as error:
            raise ConflictError(name, 409, "Conflict", "it existed a moment ago") from error
        if _is_being_deleted(found):
            raise ConflictError(name, 409, "Conflict", "an object of that name is still being deleted")
        if _is_of_earlier_job(found, job):
            raise ConflictError(
                name, 409, "Conflict", "it belongs to a deleted job of this name and will be garbage-collected"
            )
        return found

    # -------------------------------------------------------------------------------------------------------- status

    async def _write_status(
        self, key: JobKey, job: JobView, version: str, decision: Decision, memory: JobMemory
    ) -> Outcome:
        if decision.status == job.status:
            return "done"
        wait = memory.progress_written + self._state.settings.progress.status_seconds - time.monotonic()
        if wait > 0 and only_progress_differs(decision.status, job.status):
            self._state.queue.add_after(key, wait)
            return "done"
        try:
            written = await self._state.kube.apply_status(
                key.namespace, key.name, job.uid, version, status_body(decision.status)
            )
        except ConflictError:
            await self._read_again(key)
            self._state.queue.add_after(key, CONFLICT_SECONDS)
            return "conflict"
        except NotFoundError:
            self._state.store.mark_deleted(FINETUNE_JOB.group_kind, key.namespace, key.name, job.uid)
            self.forget(key)
            return "gone"
        memory.progress_written = time.monotonic()
        await self._state.put(written)
        if not only_progress_differs(decision.status, job.status):
            # Steps that wait for the stored status (deleting a failed attempt's pods) can be done now, and no event
            # would trigger them: the watch brings nothing that the store does not have already.
            self._state.queue.add(key)
        self._state.measurements.status_written(job, decision.status)
        _log_transition(key, job.status, decision.status)
        return "done"

    async def _read_again(self, key: JobKey) -> None:
        try:
            await self._state.put(await self._state.kube.get(FINETUNE_JOB, key.namespace, key.name))
        except NotFoundError:
            self._state.store.mark_deleted(FINETUNE_JOB.group_kind, key.namespace, key.name)

    def _queue_events(
        self, key: JobKey, job: JobView, version: str, notes: tuple[EventNote, ...], memory: JobMemory
    ) -> None:
        """Queue events. Jobs do not wait for them: three events a job are half of its requests."""
        memory.queued = {queued for queued in memory.queued if queued[0] == version}
        involved: Manifest = {
            "apiVersion": FINETUNE_JOB.api_version,
            "kind": FINETUNE_JOB.kind,
            "namespace": key.namespace,
            "name": key.name,
            "uid": job.uid,
        }
        for note in notes:
            mark = (version, note.reason, note.message)
            if mark not in memory.queued:
                memory.queued.add(mark)
                self._events.put_nowait((involved, version, note))

    async def write_events(self) -> None:
        """Create events in their order, for ever."""
        while True:
            involved, salt, note = await self._events.get()
            await self._state.queue.wait_for_new_jobs(YIELD_SECONDS)
            try:
                await self._state.kube.create_event(involved, note.type, note.reason, note.message, salt=salt)
            except ApiError as error:
                # The status has it all.
                log.warning(
                    "%s/%s: event %s was not created: %s", involved["namespace"], involved["name"], note.reason, error
                )
            finally:
                self._events.task_done()

    async def statuses_written(self) -> None:
        """Wait until the status records everything that was created."""
        await self._status_writes.join()

    async def events_written(self) -> None:
        """Wait until all events are created."""
        await self._events.join()

    # ------------------------------------------------------------------------------------------------ times to come

    def _wake_later(self, key: JobKey, job: JobView, decision: Decision, memory: JobMemory) -> None:
        if decision.requeue_at is not None:
            self._state.queue.add_after(key, (decision.requeue_at - self._state.now()).total_seconds())
        last_update = self._last_update(job.id)
        if self._underway(job.id) and memory.checked_update < last_update:
            self._state.queue.add_after(key, last_update + STALE_SECONDS - time.monotonic())

    def _underway(self, job: JobId) -> tuple[ObjectRef, ...]:
        children = self._state.store.children(job)
        return tuple(child.ref for child in children if child.state in ("Pending", "Running", "Suspended"))

    def _last_update(self, job: JobId) -> float:
        _, uid = job
        return max(self._state.store.last_change_at(job), self._state.progress.last_report_at(uid))

    async def _read_stale_attempt(self, key: JobKey, memory: JobMemory) -> None:
        """Read an attempt again, once, after a long time without updates: a watch may have lost its end."""
        job_id = (key.namespace, memory.uid)
        last_update = self._last_update(job_id)
        underway = self._underway(job_id)
        if not underway or last_update <= memory.checked_update or time.monotonic() < last_update + STALE_SECONDS:
            return
        memory.checked_update = last_update
        for ref in underway:
            try:
                child = await self._state.kube.get(resource_of(ref.api_version, ref.kind), key.namespace, ref.name)
            except NotFoundError:
                self._state.store.mark_deleted(ref.group_kind, key.namespace, ref.name, ref.uid)
            else:
                self._state.store.put(child)
        labels = f"{UID_LABEL}={memory.uid}"
        pods, version = await self._state.kube.list_objects(POD, key.namespace, labels)
        self._state.store.replace_of_job(POD.group_kind, job_id, pods, version)

    # -------------------------------------------------------------------------------------------------------- memory

    def _memory(self, key: JobKey, uid: str) -> JobMemory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            self.forget(key)
            memory = self._memories[key] = JobMemory(uid)
        return memory

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._state.queue.forget(key)
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._state.progress.forget(memory.uid)


def status_body(status: FineTuneJobStatus) -> dict[str, JsonValue]:
    """Return the status as it is written; unknown values are left out, and so removed by server-side apply."""
    body: dict[str, JsonValue] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body


def only_progress_differs(new: FineTuneJobStatus, old: FineTuneJobStatus) -> bool:
    """Return whether nothing but the progress differs."""
    return new.progress != old.progress and new.model_copy(update={"progress": old.progress}) == old


def _uid(found: Mapping[str, JsonValue]) -> str:
    metadata = found["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["uid"])


def _is_being_deleted(found: Mapping[str, JsonValue]) -> bool:
    metadata = found["metadata"]
    return isinstance(metadata, dict) and metadata.get("deletionTimestamp") is not None


def _is_ours(found: Mapping[str, JsonValue], job: JobView) -> bool:
    """Return whether the job controls it; a claim, which outlives its job with the results, needs its name label."""
    metadata = found.get("metadata")
    if not isinstance(metadata, dict):
        return False
    if found.get("kind") == CLAIM.kind:
        labels = metadata.get("labels")
        return isinstance(labels, dict) and labels.get(JOB_LABEL) == job.name
    owner = controller_of(metadata)
    return owner is not None and owner.uid == job.uid


def _involved(entry: Entry) -> Manifest:
    """Return the reference to an object that an event names."""
    version = entry.view.ref.api_version if isinstance(entry.view, ChildView | EndpointView) else POD.api_version
    return {
        "apiVersion": version,
        "kind": entry.kind.name,
        "namespace": entry.namespace,
        "name": entry.name,
        "uid": entry.uid,
    }


def _claim_note(key: JobKey, entry: Entry) -> EventNote:
    return EventNote(
        "Warning",
        "NotOfThisJob",
        f'The operator ignores this object: its labels name FineTuneJob "{key.name}" (uid '
        f"{shortened(entry.job_uid, 63)}), its owner references do not. If it is a copy, remove the labels that begin "
        "with finetune.dev/.",
    )


def _is_of_earlier_job(found: Mapping[str, JsonValue], job: JobView) -> bool:
    """Return whether it belongs to an earlier job of the same name: it is not garbage-collected yet."""
    metadata = found.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return isinstance(owners, list) and any(
        isinstance(owner, dict)
        and (owner.get("kind"), owner.get("name")) == (FINETUNE_JOB.kind, job.name)
        and owner.get("uid") != job.uid
        for owner in owners
    )


def _log_transition(key: JobKey, old: FineTuneJobStatus, new: FineTuneJobStatus) -> None:
    check = new.plan_check
    if check is not None and old.plan_check is None:
        log.info("%s: %s", key, " ".join(plan_check_of(check).sentences()))
    if new.phase != old.phase:
        detail = f": {new.failure.failure_class}: {new.failure.reason}" if new.failure and new.phase == "Failed" else ""
        log.info("%s: %s -> %s%s", key, old.phase or "new", new.phase, detail)
