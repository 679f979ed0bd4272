"""The stage that serves: no attempts, but an endpoint that is kept as the spec asks for, for as long as it asks.

It begins once every stage before it has succeeded, and never ends by itself. Its attempts are the revisions of the
endpoint (endpoint_rollout.py). A server that cannot start is reported by the condition Ready and an event, while
Kubernetes keeps trying; the job and its model stay as they are. Without `spec.endpoint`, and while the job is
suspended, everything of the endpoint is deleted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from finetune_contract.choices import Stage
from finetune_operator.api.types import ArtifactsStatus, EndpointStatus, StageStatus
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.plan_types import PlanRefused
from finetune_operator.reconcile.attempt_outcomes import delay_seconds
from finetune_operator.reconcile.endpoint_problems import (
    WAITING,
    start_trouble,
    view_of,
    volume_deadline,
    why_not_ready,
)
from finetune_operator.reconcile.endpoint_rollout import Rollout, asked, rollout, stopped, told, with_trouble
from finetune_operator.reconcile.planned import context, plan_now, plan_status, problems_text
from finetune_operator.reconcile.reconcile_state import Course, Serves, Stalled, reference
from finetune_operator.reconcile.reconcile_types import EndpointView, ObjectRef
from finetune_operator.reconcile.results import with_report
from finetune_operator.reconcile.status import condition
from finetune_operator.reconcile.status_times import moment, stamp
from finetune_operator.rendering.endpoint_objects import (
    OPTIONAL_KINDS,
    RUNTIMES,
    SHARED_KINDS,
    EndpointObjects,
    endpoint_objects,
    endpoint_url,
    revision_digest,
)
from finetune_operator.rendering.manifests import shared

SERVE = Stage.SERVE.value
LEAST_DELAY_SECONDS = 1.0
"""Least delay before a refused object is applied again, also where restarts have none."""


def reopened(course: Course) -> Course:
    """Reopen a job that has succeeded if it has got an endpoint since."""
    if course.end != "Succeeded" or course.job.job is None or course.spec.endpoint is None:
        return course
    return replace(course, end=None).with_status(completion_time=None)


def with_serve_stage(course: Course, stages: tuple[StageStatus, ...]) -> tuple[StageStatus, ...]:
    """Return the stages of a job that has begun, with the one that serves if the spec asks for an endpoint now."""
    others = tuple(one for one in stages if one.name != SERVE)
    if course.spec.endpoint is None:
        return others
    stored = course.stored(SERVE)
    return (*others, stored or StageStatus(name="serve", state="Pending", attempt=0))


def withdraw(course: Course) -> Course:
    """Delete the endpoint that the job should not have: it is no longer requested, or the job is suspended."""
    wanted = course.job.job is not None and course.spec.endpoint is not None and course.end is None
    if wanted and not course.suspended:
        return course
    artifacts, history = course.status.artifacts, course.status.endpoint
    course = course.with_status(endpoint=stopped(history, course) if course.suspended else None)
    if artifacts is not None and artifacts.endpoint_url is not None:
        course = course.with_status(artifacts=artifacts.model_copy(update={"endpoint_url": None}))
        why = "runPolicy.suspend is true" if course.suspended else "spec.endpoint is not there any more"
        course = course.tell("EndpointRemoved", f"The endpoint is removed: {why}.")
    there = [one for one in course.observed.endpoints if not one.deleting]
    if not there:
        return course
    # The servers' owners are deleted last: as long as they exist, the objects before them are looked for again.
    name = JobNames.of(course.job.name).endpoint
    beside = tuple(ObjectRef(*kind, name) for kind in SHARED_KINDS)
    return replace(course, remove=(*beside, *(ref for one in there for ref in _own(one))))


def _own(there: EndpointView) -> tuple[ObjectRef, ...]:
    """Return the objects of one revision, the owner of its servers last."""
    return ObjectRef("v1", "ConfigMap", there.ref.name), there.ref


def without_servers(course: Course) -> Course:
    """Plan again, once, for a job whose endpoint was removed: its plan names no servers any more."""
    if course.stored(SERVE) is None or course.spec.endpoint is not None:
        return course
    try:
        return course.with_status(plan=plan_status(plan_now(course)))
    except PlanRefused:
        return course


def suspended(course: Course, current: StageStatus) -> Course:
    """Suspend the stage while the job is suspended."""
    return course.with_stage(current.model_copy(update={"state": "Suspended", "next_attempt_time": None}))


def serve(course: Course) -> Course:
    """Keep the endpoint as the spec asks for it, and report its state."""
    current = course.current
    assert current is not None, "finish comes first"
    if course.suspended:
        return course
    want = asked(course)
    asking = want.of(course)
    try:
        made, surroundings = plan_now(asking), context(asking)
        rolled = rollout(course, want, revision_digest(made, surroundings))
        wanted = endpoint_objects(made, surroundings, rolled.running, rolled.target)
    except PlanRefused as refused:
        return _said(_held_back(course, "PlanRefused", problems_text(refused.problems)))
    if (after := plan_status(made)) != course.status.plan:
        course = course.with_status(plan=after)
    if course.observed.refusals:
        return _said(_refused(course, current))
    at = moment(current.next_attempt_time)
    if at is not None and course.now < at:
        before = condition(course.job.status, "Stalled")
        stalled = None if before is None or before.status != "True" else Stalled(before.reason, before.message)
        return _said(replace(course.wake(at), stalled=stalled))
    if not course.started:
        course = replace(course, create=shared(made, surroundings))
    course = told(course, rolled, want).with_status(endpoint=rolled.status)
    course = replace(course, remove=tuple(ref for one in rolled.leaving for ref in _own(one)))
    return _said(_applied(course, current, rolled, wanted))


def _held_back(course: Course, reason: str, message: str) -> Course:
    before = condition(course.job.status, "Stalled")
    if before is None or (before.reason, before.message) != (reason, message):
        course = course.tell(reason, message, warning=True)
    return replace(course, stalled=Stalled(reason, message))


def _refused(course: Course, current: StageStatus) -> Course:
    """Retry with growing delay after a refusal of an object of the endpoint, as others can fix it."""
    refusal = course.observed.refusals[0]
    in_row = current.failures_in_row + 1
    seconds = max(LEAST_DELAY_SECONDS, delay_seconds(course.settings.limits, in_row))
    at = course.now + timedelta(seconds=seconds)
    held = current.model_copy(update={"next_attempt_time": stamp(at), "failures_in_row": in_row})
    reason = "NameTaken" if refusal.code == 409 else "Refused"
    message = f"The API server refuses {refusal.ref.kind} {refusal.ref.name} of the endpoint: {refusal.message}"
    if reason == "NameTaken":
        message = f"{message}. Delete or rename that object."
    return _held_back(course.with_stage(held).wake(at), reason, message)


def _applied(course: Course, current: StageStatus, rolled: Rollout, wanted: EndpointObjects) -> Course:
    """Create or change the objects of the wanted revision; all of the endpoint once the URL leads to it."""
    there = rolled.there
    scaled = there is not None and _scaled(there, wanted)
    if rolled.leads != rolled.target:
        # Until it takes over, the objects that all revisions share are those of the one that serves.
        course = replace(course, apply=wanted.servers if there is None or scaled else ())
        return _running(course, current, rolled, wanted)
    if there is not None and not rolled.takes_over and there.digest == wanted.digest and not scaled:
        return _running(course, current, rolled, wanted)
    names, kinds = JobNames.of(course.job.name), {(one["apiVersion"], one["kind"]) for one in wanted.manifests}
    unwanted = tuple(ObjectRef(*kind, names.endpoint) for kind in OPTIONAL_KINDS if kind not in kinds)
    what = f"{RUNTIMES[wanted.runtime][1]} {names.servers(rolled.target)}"
    if rolled.serving is None and there is None:
        course, unwanted = course.tell("StageStarted", f"Stage serve runs as {what}."), ()
    elif there is not None and not rolled.takes_over and there.digest == wanted.digest:
        course = course.tell("EndpointUpdated", f"{what} is scaled to {wanted.replicas} as spec asks.")
    elif not rolled.takes_over:
        course = course.tell("EndpointUpdated", f"{what} follows the changed spec or settings.")
    course = replace(course, remove=(*course.remove, *unwanted), apply=wanted.manifests)
    return _running(course, current, rolled, wanted)


def _scaled(there: EndpointView, wanted: EndpointObjects) -> bool:
    """Return whether the requested number of servers differs from that of their owner."""
    if wanted.runtime == "kserve":
        return (there.replicas, there.most) != (wanted.replicas, wanted.most)
    return there.replicas != wanted.replicas


def _running(course: Course, current: StageStatus, rolled: Rollout, wanted: EndpointObjects) -> Course:
    """Return the course with the stage that runs the wanted revision."""
    new = current.state != "Running" or current.attempt != rolled.target or current.start_time is None
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": rolled.target,
            "start_time": stamp(course.now) if new else current.start_time,
            "completion_time": None,
            "next_attempt_time": None,
            "failures_in_row": 0,
            "child": reference(
                ObjectRef(*RUNTIMES[wanted.runtime], JobNames.of(course.job.name).servers(rolled.target))
            ),
        }
    )
    course = course.with_stage(running).with_status(start_time=course.status.start_time or stamp(course.now))
    if len(course.status.stages) > 1:
        course = course.with_status(artifacts=with_report(course.status.artifacts, course.spec, course.job.name))
    return course


# ------------------------------------------------------------------------------------------------------ how it is


def _said(course: Course) -> Course:
    """Return the course with the endpoint's state, and events when it became ready or stopped being so."""
    status, url = course.status.endpoint, endpoint_url(course.job.name, course.job.namespace)
    target = None if status is None else view_of(course, status.target)
    serves = _serves(course, url)
    course = replace(course.wake(volume_deadline(course)), serves=serves)
    if not serves.ready:
        course = replace(course, waiting=serves.message, waiting_reason=serves.reason)
    elif course.stalled is None and target is not None and target.stuck is not None:
        message = (
            f"The newest revision does not become available, and the one before answers: {why_not_ready(course)[1]}"
        )
        course = _held_back(course, "RolloutStuck", message)
    if serves.ready and status is not None and status.target != status.revision:
        reason, message = why_not_ready(course)
        if reason != WAITING:
            course = with_trouble(course, reason, message)
    if not serves.ready and course.stalled is None and target is not None and target.stuck is not None:
        course = replace(course, stalled=Stalled(serves.reason, serves.message))
    before = condition(course.job.status, "Ready")
    was = before is not None and before.status == "True" and before.reason == "EndpointReady"
    if serves.ready:
        artifacts = (course.status.artifacts or ArtifactsStatus()).model_copy(update={"endpoint_url": url})
        course = course.with_status(artifacts=artifacts)
        return course if was else course.tell("EndpointReady", serves.message)
    if was:
        return course.tell("EndpointNotReady", serves.message, warning=True)
    said = (None, "") if before is None else (before.reason, before.message)
    if serves.reason not in (WAITING, "WaitingForKServe", said[0]) and course.stalled is None:
        course = course.tell("EndpointNotReady", serves.message, warning=True)
    return course


def _serves(course: Course, url: str) -> Serves:
    status = course.status.endpoint
    there = None if status is None else view_of(course, status.revision)
    if status is not None and there is not None and there.available > 0:
        some = f"{there.available} of {there.replicas} server{'s' * (there.replicas > 1)}"
        return Serves(
            True,
            "EndpointReady",
            f"The endpoint answers at {url}: {some} of revision {there.revision} available."
            f"{_beside(course, there)}{_next(course, status)}",
        )
    if course.stalled is not None:
        return Serves(False, course.stalled.reason, course.stalled.message)
    reason, message = why_not_ready(course)
    return Serves(False, reason, message)


def _beside(course: Course, there: EndpointView) -> str:
    """Return sentences on KServe's own address, and on a server that does not start beside those that answer."""
    own = "" if there.url is None else f" KServe gives it the address {there.url}."
    trouble = start_trouble(course, there.revision)
    return own if trouble is None else f"{own} {trouble}"


def _next(course: Course, status: EndpointStatus) -> str:
    """Return a sentence on the revision that is to take over."""
    if status.target == status.revision:
        return "" if status.rolled_back_from is None else f" Revision {status.rolled_back_from} is rolled back."
    reason, message = why_not_ready(course)
    return f" Revision {status.target} is not ready: {message}" if reason != WAITING else f" {message}"
