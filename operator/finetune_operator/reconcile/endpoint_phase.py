"""The stage that serves: no attempts, but an endpoint that is kept as the spec asks for, for as long as it asks.

It begins once every stage before it has succeeded, and never ends by itself. A server that cannot start is reported by
the condition Ready and an event, while Kubernetes keeps trying; the job and its model stay as they are. Without
`spec.endpoint`, and while the job is suspended, everything of the endpoint is deleted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from finetune_contract.choices import Stage
from finetune_operator.api.types import ArtifactsStatus, StageStatus
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.plan_types import EndpointRuntime, PlanRefused
from finetune_operator.reconcile.course import Course, Serves, Stalled, reference
from finetune_operator.reconcile.endings import delay_seconds
from finetune_operator.reconcile.endpoint_trouble import start_trouble, unschedulable, volume_deadline, why_not_ready
from finetune_operator.reconcile.planned import context, plan_now, plan_status, problems_text
from finetune_operator.reconcile.reconcile_types import EndpointView, ObjectRef
from finetune_operator.reconcile.results import with_report
from finetune_operator.reconcile.status import condition
from finetune_operator.reconcile.status_times import moment, stamp
from finetune_operator.rendering.endpoint_objects import (
    BESIDE_KINDS,
    OPTIONAL_KINDS,
    RUNTIMES,
    EndpointObjects,
    endpoint_objects,
    endpoint_url,
)
from finetune_operator.rendering.manifests import shared

SERVE = Stage.SERVE.value
LEAST_DELAY_SECONDS = 1.0
"""Before something that was refused is applied again, also where restarts have no delay."""


def reopened(course: Course) -> Course:
    """The course of a job that has succeeded and got an endpoint since: it goes on."""
    if course.end != "Succeeded" or course.job.job is None or course.spec.endpoint is None:
        return course
    return replace(course, end=None).with_status(completion_time=None)


def with_serve_stage(course: Course, stages: tuple[StageStatus, ...]) -> tuple[StageStatus, ...]:
    """The stages of a job that has begun, with the one that serves if the spec asks for an endpoint now."""
    others = tuple(one for one in stages if one.name != SERVE)
    if course.spec.endpoint is None:
        return others
    stored = course.stored(SERVE)
    return (*others, stored or StageStatus(name="serve", state="Pending", attempt=0))


def withdraw(course: Course) -> Course:
    """Delete the endpoint that the job should not have: it is no longer asked for, or the job is suspended."""
    wanted = course.job.job is not None and course.spec.endpoint is not None and course.end is None
    if wanted and not course.suspended:
        return course
    artifacts = course.status.artifacts
    if artifacts is not None and artifacts.endpoint_url is not None:
        course = course.with_status(artifacts=artifacts.model_copy(update={"endpoint_url": None}))
        why = "runPolicy.suspend is true" if course.suspended else "spec.endpoint is not there any more"
        course = course.tell("EndpointRemoved", f"The endpoint is removed: {why}.")
    there = [one.ref for one in course.observed.endpoints if not one.deleting]
    if not there:
        return course
    # What runs the servers goes last: as long as it is there, what was before it is looked for again.
    return replace(course, remove=(*(_ref(course, one) for one in BESIDE_KINDS), *there))


def _ref(course: Course, kind: tuple[str, str]) -> ObjectRef:
    return ObjectRef(*kind, JobNames.of(course.job.name).endpoint)


def suspended(course: Course, current: StageStatus) -> Course:
    """The stage as it is while the job is suspended."""
    return course.with_stage(current.model_copy(update={"state": "Suspended", "next_attempt_time": None}))


def serve(course: Course) -> Course:
    """Keep the endpoint as the spec asks for it, and say how it is."""
    current = course.current
    assert current is not None, "finish comes first"
    if course.suspended:
        return course
    try:
        made = plan_now(course)
        autoscaled = course.observed.endpoint
        wanted = endpoint_objects(made, context(course), None if autoscaled is None else autoscaled.replicas)
    except PlanRefused as refused:
        held = _held_back(course, "PlanRefused", problems_text(refused.problems))
        return _said(held, next(iter(course.observed.endpoints), None))
    there = _of(course, wanted.runtime)
    if (after := plan_status(made)) != course.status.plan:
        course = course.with_status(plan=after)
    if course.observed.refusals:
        return _said(_refused(course, current), there)
    at = moment(current.next_attempt_time)
    if at is not None and course.now < at:
        before = condition(course.job.status, "Stalled")
        stalled = None if before is None or before.status != "True" else Stalled(before.reason, before.message)
        return _said(replace(course.wake(at), stalled=stalled), there)
    if there is not None and there.deleting:
        return _said(course, there)
    if there is None or _outdated(there, wanted):
        if not course.started:
            course = replace(course, create=shared(made, context(course)))
        course = _applied(course, current, there, wanted)
    else:
        course = _moved(course, there)
    return _said(course, there)


def _of(course: Course, runtime: EndpointRuntime) -> EndpointView | None:
    return next((one for one in course.observed.endpoints if one.runtime == runtime), None)


def _outdated(there: EndpointView, wanted: EndpointObjects) -> bool:
    """Return whether what runs the servers is not as the spec asks for it."""
    if there.digest != wanted.digest:
        return True
    if wanted.runtime == "kserve":
        return (there.replicas, there.most) != (wanted.replicas, wanted.most)
    return not wanted.scales and there.replicas != wanted.replicas


def _moved(course: Course, there: EndpointView) -> Course:
    """Delete what ran the servers before, once servers of the other runtime answer in its place: all of them, or one
    where the old ones take the nodes of the others.
    """
    other = next((one for one in course.observed.endpoints if one is not there), None)
    if other is None or other.deleting:
        return course
    enough = there.available >= there.replicas or (there.available > 0 and unschedulable(course))
    if not enough:
        return course
    course = course.tell(
        "EndpointMoved",
        f"Servers of {there.ref.kind} {there.ref.name} answer: {other.ref.kind} {other.ref.name} is deleted.",
    )
    return replace(course, remove=(*course.remove, other.ref))


def _held_back(course: Course, reason: str, message: str) -> Course:
    before = condition(course.job.status, "Stalled")
    if before is None or (before.reason, before.message) != (reason, message):
        course = course.tell(reason, message, warning=True)
    return replace(course, stalled=Stalled(reason, message))


def _refused(course: Course, current: StageStatus) -> Course:
    """Something of the endpoint was not taken: tried again with growing delay, as others can mend it."""
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


def _applied(course: Course, current: StageStatus, there: EndpointView | None, wanted: EndpointObjects) -> Course:
    """Create the endpoint, or change it."""
    kinds = {(one["apiVersion"], one["kind"]) for one in wanted.manifests}
    unwanted = tuple(_ref(course, kind) for kind in OPTIONAL_KINDS if kind not in kinds)
    runner = _ref(course, RUNTIMES[wanted.runtime])
    new = not course.observed.endpoints
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": 1,
            "start_time": stamp(course.now) if new or current.start_time is None else current.start_time,
            "completion_time": None,
            "next_attempt_time": None,
            "failures_in_row": 0,
            "child": reference(runner),
        }
    )
    course = course.with_stage(running).with_status(start_time=course.status.start_time or stamp(course.now))
    if len(course.status.stages) > 1:
        course = course.with_status(artifacts=with_report(course.status.artifacts, course.spec, course.job.name))
    what = f"{runner.kind} {runner.name}"
    if new:
        course = course.tell("StageStarted", f"Stage serve runs as {what}.")
    elif there is None:
        course = course.tell("EndpointUpdated", f"{what} takes the place of what serves now, once its servers answer.")
    elif there.digest == wanted.digest:
        course = course.tell("EndpointUpdated", f"{what} is scaled to {wanted.replicas} as spec asks.")
    else:
        course = course.tell("EndpointUpdated", f"{what} follows the changed spec or settings.")
    return replace(course, remove=unwanted if not new else (), apply=wanted.manifests)


# ------------------------------------------------------------------------------------------------------ how it is


def _said(course: Course, there: EndpointView | None) -> Course:
    """The course with what is to be said of the endpoint, and events when it became ready or stopped being so."""
    url = endpoint_url(course.job.name, course.job.namespace)
    serves = _serves(course, there, url)
    course = replace(course.wake(volume_deadline(course)), serves=serves)
    stuck = None if there is None else there.stuck
    if not serves.ready:
        course = replace(course, waiting=serves.message, waiting_reason=serves.reason)
    elif course.stalled is None and stuck is not None:
        why = why_not_ready(course, there)[1]
        message = f"The newest revision does not become available, and the one before answers: {why}"
        course = _held_back(course, "RolloutStuck", message)
    if not serves.ready and course.stalled is None and stuck is not None:
        course = replace(course, stalled=Stalled(serves.reason, serves.message))
    before = condition(course.job.status, "Ready")
    was = before is not None and before.status == "True" and before.reason == "EndpointReady"
    if serves.ready:
        artifacts = (course.status.artifacts or ArtifactsStatus()).model_copy(update={"endpoint_url": url})
        course = course.with_status(artifacts=artifacts)
        return course if was else course.tell("EndpointReady", serves.message)
    if was:
        return course.tell("EndpointNotReady", serves.message, warning=True)
    told = (None, "") if before is None else (before.reason, before.message)
    if serves.reason not in ("WaitingForPods", "WaitingForKServe", told[0]) and course.stalled is None:
        course = course.tell("EndpointNotReady", serves.message, warning=True)
    return course


def _serves(course: Course, there: EndpointView | None, url: str) -> Serves:
    answering = [one for one in course.observed.endpoints if one.available > 0 and not one.deleting]
    if answering:
        one = there if there in answering and there is not None else answering[0]
        some = f"{one.available} of {one.replicas} server{'s' * (one.replicas > 1)}"
        told = [f"The endpoint answers at {url}: {some} available."]
        if one.url is not None:
            told.append(f"KServe gives it the address {one.url}.")
        if (trouble := start_trouble(course)) is not None:
            told.append(trouble)
        return Serves(True, "EndpointReady", " ".join(told))
    if course.stalled is not None:
        return Serves(False, course.stalled.reason, course.stalled.message)
    reason, message = why_not_ready(course, there)
    return Serves(False, reason, message)
