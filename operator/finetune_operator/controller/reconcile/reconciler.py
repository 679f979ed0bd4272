"""One reconcile of one job: known state -> `decide` -> carry it out.

Deletes come first, then creates, then the status that names the created objects, then the events about them. A
reconcile that stops in between leaves nothing half known: the next one finds the created objects, by name and label,
and goes on from there. So a reconcile may end at any point: by an error, a lost leadership, or the end of the process.

Nothing is ever overwritten by an older view. A create does not replace, a delete names the uid, and the status names
the version that it was computed from.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias

from finetune_operator.controller.cluster.discovery import Discovery
from finetune_operator.controller.cluster.node_reading import NodeReading
from finetune_operator.controller.reconcile.foreign_objects import ForeignObjects
from finetune_operator.controller.reconcile.job_events import YIELD_SECONDS, JobEvents
from finetune_operator.controller.reconcile.job_memory import JobMemory, Reading, View
from finetune_operator.controller.reconcile.job_objects import JobObjects
from finetune_operator.controller.reconcile.operator_state import OperatorState, is_new
from finetune_operator.controller.reconcile.planner import Planner
from finetune_operator.controller.reconcile.status_writing import (
    attempt_seconds,
    only_progress_differs,
    progress_interval,
    status_body,
)
from finetune_operator.controller.store.fair_queue import FairAsyncQueue
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.controller.store.store import JobId
from finetune_operator.endpoints.decide.autoscaling import autoscaler_view, has_autoscaler
from finetune_operator.endpoints.decide.endpoint_parts import is_due
from finetune_operator.endpoints.decide.idle_state import idle_scaling_view, scales_to_zero
from finetune_operator.endpoints.decide.route_state import has_route, route_view
from finetune_operator.jobs.decide.decide import PLANNING_SHOWN
from finetune_operator.jobs.decide.internal_error import after_internal_error
from finetune_operator.jobs.observed import pods_being_deleted, redacted_log, wanted_logs
from finetune_operator.jobs.outcomes.learning import learned_from
from finetune_operator.jobs.outcomes.start_events import QUIET_SECONDS, newest_event, wanted_events
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.jobs.render.render_types import UID_LABEL, Manifest, ProgressEndpoint
from finetune_operator.jobs.state.decision_state import has_started
from finetune_operator.jobs.state.decision_types import NO_FINDINGS, Decision, JobView, ObjectRef, Observed
from finetune_operator.jobs.state.plan_checks import plan_check_of
from finetune_operator.jobs.state.plan_table import Answer, FindPlan, NotPlannedError, PlannerLostError
from finetune_operator.kubernetes_api.errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    NamespaceTerminatingError,
    NotFoundError,
)
from finetune_operator.kubernetes_api.resources import (
    AUTOSCALER,
    FINETUNE_JOB,
    HTTP_ROUTE,
    HTTP_SCALED_OBJECT,
    POD,
    Resource,
    resource_of,
)
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import LearnedRatios, PlanRequest
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobStatus

log = logging.getLogger(__name__)

Decide: TypeAlias = Callable[[JobView, Observed, datetime, Settings, ProgressEndpoint | None, FindPlan], Decision]
Outcome: TypeAlias = Literal["done", "refused", "conflict", "gone", "failed", "waiting"]
"""End of a reconcile; waiting: for a plan."""

StatusWrite: TypeAlias = Callable[[], Coroutine[Any, Any, Outcome]]
"""Remainder of a reconcile."""

STALE_SECONDS = 300.0
"""After this long without an update of a running attempt, the API server is asked once whether one was lost."""
SILENT_SECONDS = 60.0
"""A job that has reported nothing for this long is not counted among those that report."""
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
WAITS_SHOWN_A_SECOND = 10
"""Statuses of a namespace that are written about waiting for a plan: a flood of them would delay the jobs of others."""
CONFLICT_SECONDS = 0.2
"""Delay before the next reconcile after a conflict, so that two writers do not race at full speed."""


class Reconciler:
    """Reconciles jobs, each one once at a time."""

    def __init__(self, state: OperatorState, discovery: Discovery, nodes: NodeReading, decide: Decide) -> None:
        self._state = state
        self._discovery = discovery
        self._nodes = nodes
        self._decide = decide
        self._objects = JobObjects(state, discovery)
        self._memories: dict[JobKey, JobMemory] = {}
        self._status_writes: FairAsyncQueue[tuple[JobKey, StatusWrite]] = FairAsyncQueue()
        self.planner = Planner(state.settings, self._planned)
        self.events = JobEvents(state)
        self._foreign = ForeignObjects(state, self.events.add)

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
                self._status_writes.put_nowait((key.namespace, (key, status_write)))

    async def write_statuses(self) -> None:
        """Write statuses after creations, for ever. The key stays in progress until then: no reconcile overlaps."""
        while True:
            _, (key, status_write) = await self._status_writes.get()
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
        except NamespaceTerminatingError:
            self._state.namespace_ends(key.namespace)
            outcome = "gone"
        except (ApiError, PlannerLostError) as error:
            outcome = self._failed(key, str(error), None)
        except Exception as error:
            outcome = self._failed(key, f"{type(error).__name__}: {error}", error)
            await self._record_internal_error(key, type(error).__name__)
        else:
            if not isinstance(result, str):
                return result
            outcome = result
            if outcome != "waiting" and (memory := self._memories.get(key)) is not None:
                memory.failures = memory.internal_errors = 0
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

    async def _record_internal_error(self, key: JobKey, name: str) -> None:
        """Count an error of the operator's own, and record it in the status of the job that triggered it."""
        memory = self._memories.get(key)
        job, version = self._state.store.job(key), self._state.store.job_version(key)
        if memory is None or job is None or version is None or job.uid != memory.uid:
            return
        memory.internal_errors += 1
        try:
            observed, now = self._observed(job, memory), self._state.now()
            decision = after_internal_error(job, observed, now, self._state.settings, name, memory.internal_errors)
            if await self._write_status(key, job, version, decision, memory) == "done":
                self.events.add_of_job(key, job, version, decision.events, memory)
        except Exception as error:
            log.warning("%s: the error cannot be recorded in the status: %s", key, error)

    # ------------------------------------------------------------------------------------------------- one reconcile

    async def _reconcile(self, key: JobKey) -> Outcome | StatusWrite:
        job = self._state.store.job(key)
        if job is None:
            self.forget(key)
            self._foreign.report(key)
            return "gone"
        memory = self._memory(key, job.uid)
        if job.uid in self._state.ending:
            return "gone"
        await self._foreign.resolve_owners(job.id)
        self._foreign.report(key)
        if job.job is not None and (job.status.plan is None or self._state.store.lacks_servers(key)):
            await self._discovery.refresh()
        if job.job is not None and job.job.spec.resources.gpus_per_node != 0 and not has_started(job.status):
            await self._nodes.refresh()
        await self._read_logs(key, memory)
        await self._read_stale_attempt(key, memory)
        await self._read_start_events(key, memory)
        await self._read_autoscaler(key, memory)
        await self._read_route(key, memory)
        await self._read_idle_scaling(key, memory)
        # Read without awaiting in between: a view and the version that belongs to it.
        job, version = self._state.store.job(key), self._state.store.job_version(key)
        if job is None or version is None or job.uid != memory.uid:
            self._state.queue.add(key)
            return "conflict"
        observed = self._observed(job, memory)
        decision = await self._decision(key, job, observed, memory)
        if decision is None:
            return "waiting"
        for ref in decision.delete:
            await self._objects.delete(key.namespace, ref)
        for ref in decision.remove:
            await self._objects.remove(job, ref)
        if not await self._create_and_apply(key, job, decision, memory):
            return "refused"
        status_write = partial(self._record, key, job, version, observed, decision, memory)
        return status_write if decision.create or decision.apply else await status_write()

    async def _decision(self, key: JobKey, job: JobView, observed: Observed, memory: JobMemory) -> Decision | None:
        """Decide; None if the job has to be planned first, which is asked for then."""
        state, plans, now = self._state, memory.plans, self._state.now()
        plans.missing = None
        try:
            decision = self._decide(job, observed, now, state.settings, state.progress_endpoint, plans.find)
        except NotPlannedError:
            decision = None
        if plans.missing is None:
            memory.plan_wanted_since = None
            return decision
        memory.plan_wanted_since = memory.plan_wanted_since or now
        waiting = await self.planner.ask(key, plans.missing)
        if decision is None:
            state.queue.add_after(key, max(PLANNING_SHOWN.total_seconds(), waiting / WAITS_SHOWN_A_SECOND))
        return decision

    def _planned(self, key: JobKey, request: PlanRequest, answer: Answer) -> None:
        """Keep the plan of a job, which is decided again."""
        memory = self._memories.get(key)
        if memory is not None:
            memory.plans.put(request, answer)
            job = self._state.store.job(key)
            self._state.queue.add(key, new=is_new(job))

    async def _record(
        self, key: JobKey, job: JobView, version: str, observed: Observed, decision: Decision, memory: JobMemory
    ) -> Outcome:
        """Write the status, then queue events, and schedule the next reconcile."""
        if any(note.type == "Warning" for note in decision.events):
            # A namespace that is being deleted takes the pods before the jobs: that is no failure of theirs.
            await self.events.check(key, job)
        outcome = await self._write_status(key, job, version, decision, memory)
        if outcome != "done":
            return outcome
        self.events.add_of_job(key, job, version, decision.events, memory)
        if decision.delete_job:
            await self._objects.delete(
                key.namespace, ObjectRef(FINETUNE_JOB.api_version, FINETUNE_JOB.kind, key.name, job.uid)
            )
        if memory.refusals == observed.refusals:
            memory.refusals = ()
        self._wake_later(key, job, decision, memory)
        return outcome

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
            http_routes=self._discovery.http_routes,
            route=memory.route.view,
            http_scaled_objects=self._discovery.http_scaled_objects,
            idle_scaling=memory.idle_scaling.view,
            autoscaler=memory.autoscaler.view,
            pods_before=self._state.store.pods_before(JobKey(job.namespace, job.name), job.uid),
            progress=None if attempt is None else progress.of(*attempt),
            findings=NO_FINDINGS if attempt is None else progress.findings_of(*attempt),
            start_events=memory.start_events.view or (),
            logs=tuple(sorted(memory.logs.items())),
            last_logs=tuple(sorted(memory.last_logs.items())),
            served=self._discovery.served,
            nodes=self._nodes.answer,
            learned=self._learned(job),
            refusals=memory.refusals,
            last_progress_at=None if attempt is None else progress.last_progress_at(*attempt),
            plan_wanted_since=memory.plan_wanted_since,
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

    async def _read_start_events(self, key: JobKey, memory: JobMemory) -> None:
        """Read the events of the objects that keep an attempt from starting, if the wait is long, and at intervals."""
        store, last, now = self._state.store, memory.start_events, time.monotonic()
        job = store.job(key)
        if job is None:
            return
        wanted = wanted_events(job, store.children(job.id), store.pods(job.id), self._state.now())
        if not wanted:
            last.view, last.time = None, float("-inf")
        elif now >= last.time + QUIET_SECONDS:
            last.time = now
            try:
                events = [
                    newest_event(job, await self._state.kube.events_of(key.namespace, one.kind, one.name, one.uid))
                    for one in wanted
                ]
            except ForbiddenError as error:
                log.info("%s: the events of what it waits for cannot be read: %s", key, error)
                events = []
            last.view = tuple(event for event in events if event is not None)

    async def _read_autoscaler(self, key: JobKey, memory: JobMemory) -> None:
        job, last = self._state.store.job(key), memory.autoscaler
        wanted, works = job is not None and has_autoscaler(job), last.view is not None and last.view.active
        await self._read(AUTOSCALER, key, last, autoscaler_view, wanted=wanted, works=works)

    async def _read_route(self, key: JobKey, memory: JobMemory) -> None:
        job, last = self._state.store.job(key), memory.route
        wanted = job is not None and has_route(job) and self._discovery.http_routes
        works = last.view is not None and last.view.accepted
        await self._read(HTTP_ROUTE, key, last, route_view, wanted=wanted, works=works)

    async def _read_idle_scaling(self, key: JobKey, memory: JobMemory) -> None:
        job, last = self._state.store.job(key), memory.idle_scaling
        wanted = job is not None and scales_to_zero(job) and self._discovery.http_scaled_objects
        works = last.view is not None and last.view.ready
        await self._read(HTTP_SCALED_OBJECT, key, last, idle_scaling_view, wanted=wanted, works=works)

    async def _read(
        self,
        kind: Resource,
        key: JobKey,
        last: Reading[View],
        view_of: Callable[[Manifest], View | None],
        *,
        wanted: bool,
        works: bool,
    ) -> None:
        """Read an object of the endpoint into `last`, if it is `wanted` and due; `works`: its state was good."""
        now = time.monotonic()
        if not wanted:
            last.view, last.time = None, float("-inf")
        elif is_due(now - last.time, works):
            last.time = now
            try:
                manifest = await self._state.kube.get(kind, key.namespace, JobNames.of(key.name).endpoint)
            except NotFoundError:
                last.view = None
            else:
                last.view = view_of(manifest)

    async def _log_end(self, job: JobView, pod: str) -> str:
        return redacted_log(job, await self._state.kube.pod_log(job.namespace, pod, CONTAINER_NAME))

    async def _create_and_apply(self, key: JobKey, job: JobView, decision: Decision, memory: JobMemory) -> bool:
        """Create and apply the objects of the decision; return False if one of them was refused."""
        steps = [
            *((self._objects.create, one) for one in decision.create),
            *((self._objects.apply, one) for one in decision.apply),
        ]
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

    # -------------------------------------------------------------------------------------------------------- status

    async def _write_status(
        self, key: JobKey, job: JobView, version: str, decision: Decision, memory: JobMemory
    ) -> Outcome:
        if decision.status == job.status:
            return "done"
        wait = memory.progress_due - time.monotonic()
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
        memory.progress_due = time.monotonic() + self._progress_interval(decision.status)
        await self._state.put(written)
        if not only_progress_differs(decision.status, job.status):
            # Steps that wait for the stored status (deleting a failed attempt's pods) can be done now, and no event
            # would trigger them: the watch brings nothing that the store does not have already.
            self._state.queue.add(key)
        self._state.measurements.status_written(job, decision.status)
        _log_transition(key, job.status, decision.status)
        return "done"

    def _progress_interval(self, status: FineTuneJobStatus) -> float:
        """Return the seconds until progress alone is written again, with jitter: else jobs that start together are
        written together for ever.
        """
        shortest, age = self._state.settings.progress.status_seconds, attempt_seconds(status, self._state.now())
        reporting = self._state.progress.reporting(time.monotonic() - SILENT_SECONDS)
        return progress_interval(shortest, age, reporting) * (1 + random.random() / 4)

    async def _read_again(self, key: JobKey) -> None:
        try:
            await self._state.put(await self._state.kube.get(FINETUNE_JOB, key.namespace, key.name))
        except NotFoundError:
            self._state.store.mark_deleted(FINETUNE_JOB.group_kind, key.namespace, key.name)

    async def statuses_written(self) -> None:
        """Wait until the status records everything that was created."""
        await self._status_writes.join()

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
        self.planner.forget(key)
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._state.progress.forget(memory.uid)
            self._state.ending.discard(memory.uid)


def _log_transition(key: JobKey, old: FineTuneJobStatus, new: FineTuneJobStatus) -> None:
    check = new.plan_check
    if check is not None and old.plan_check is None:
        log.info("%s: %s", key, " ".join(plan_check_of(check).sentences()))
    if new.phase != old.phase:
        detail = f": {new.failure.failure_class}: {new.failure.reason}" if new.failure and new.phase == "Failed" else ""
        log.info("%s: %s -> %s%s", key, old.phase or "new", new.phase, detail)
