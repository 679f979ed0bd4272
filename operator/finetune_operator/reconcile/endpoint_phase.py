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
from finetune_operator.planning.plan_types import PlanRefused
from finetune_operator.reconcile.course import Course, Serves, Stalled, reference
from finetune_operator.reconcile.endings import delay_seconds
from finetune_operator.reconcile.planned import context, plan_now, plan_status, problems_text
from finetune_operator.reconcile.reconcile_types import EndpointView, ObjectRef, PodView
from finetune_operator.reconcile.results import with_report
from finetune_operator.reconcile.status import condition
from finetune_operator.reconcile.status_times import moment, stamp
from finetune_operator.rendering.endpoint_objects import (
    KINDS,
    OPTIONAL_KINDS,
    EndpointObjects,
    endpoint_objects,
    endpoint_url,
)
from finetune_operator.rendering.manifests import shared

SERVE = Stage.SERVE.value
LEAST_DELAY_SECONDS = 1.0
"""Before something that was refused is applied again, also where restarts have no delay."""
MOST_TOLD = 1024
"""Characters of a server's own word on its end."""


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
    there = course.observed.endpoint
    if there is None or there.deleting:
        return course
    # The Deployment last: as long as it is there, what was before it is looked for again.
    return replace(course, remove=tuple(_ref(course, one, there) for one in KINDS))


def _ref(course: Course, kind: tuple[str, str], there: EndpointView | None = None) -> ObjectRef:
    uid = there.ref.uid if there is not None and there.ref.kind == kind[1] else None
    return ObjectRef(*kind, JobNames.of(course.job.name).endpoint, uid)


def suspended(course: Course, current: StageStatus) -> Course:
    """The stage as it is while the job is suspended."""
    return course.with_stage(current.model_copy(update={"state": "Suspended", "next_attempt_time": None}))


def serve(course: Course) -> Course:
    """Keep the endpoint as the spec asks for it, and say how it is."""
    current, there = course.current, course.observed.endpoint
    assert current is not None, "finish comes first"
    if course.suspended:
        return course
    try:
        made = plan_now(course)
        wanted = endpoint_objects(made, context(course), None if there is None else there.replicas)
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
    if there is not None and there.deleting:
        return _said(course)
    if there is None or there.digest != wanted.digest or (not wanted.scales and there.replicas != wanted.replicas):
        if not course.started:
            course = replace(course, create=shared(made, context(course)))
        course = _applied(course, current, wanted)
    return _said(course)


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


def _applied(course: Course, current: StageStatus, wanted: EndpointObjects) -> Course:
    """Create the endpoint, or change it."""
    kinds = {(one["apiVersion"], one["kind"]) for one in wanted.manifests}
    unwanted = tuple(_ref(course, kind) for kind in OPTIONAL_KINDS if kind not in kinds)
    name = JobNames.of(course.job.name).endpoint
    new = course.observed.endpoint is None
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": 1,
            "start_time": stamp(course.now) if new or current.start_time is None else current.start_time,
            "completion_time": None,
            "next_attempt_time": None,
            "failures_in_row": 0,
            "child": reference(ObjectRef("apps/v1", "Deployment", name)),
        }
    )
    course = course.with_stage(running).with_status(start_time=course.status.start_time or stamp(course.now))
    if len(course.status.stages) > 1:
        course = course.with_status(artifacts=with_report(course.status.artifacts, course.spec, course.job.name))
    if new:
        course = course.tell("StageStarted", f"Stage serve runs as Deployment {name}.")
    elif course.observed.endpoint is not None and course.observed.endpoint.digest == wanted.digest:
        course = course.tell("EndpointUpdated", f"Deployment {name} is scaled back to {wanted.replicas} as spec asks.")
    else:
        course = course.tell("EndpointUpdated", f"Deployment {name} follows the changed spec or settings.")
    return replace(course, remove=unwanted if not new else (), apply=wanted.manifests)


# ------------------------------------------------------------------------------------------------------ how it is


def _said(course: Course) -> Course:
    """The course with what is to be said of the endpoint, and events when it became ready or stopped being so."""
    there, url = course.observed.endpoint, endpoint_url(course.job.name, course.job.namespace)
    serves = _serves(course, there, url)
    course = replace(course, serves=serves)
    if not serves.ready:
        course = replace(course, waiting=serves.message, waiting_reason=serves.reason)
    elif course.stalled is None and there is not None and there.stuck is not None:
        message = f"The newest revision does not become available, and the one before answers: {_trouble(course)}"
        course = _held_back(course, "RolloutStuck", message)
    if not serves.ready and course.stalled is None and there is not None and there.stuck is not None:
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
    if serves.reason not in ("WaitingForPods", told[0]) and course.stalled is None:
        course = course.tell("EndpointNotReady", serves.message, warning=True)
    return course


def _serves(course: Course, there: EndpointView | None, url: str) -> Serves:
    if there is not None and not there.deleting and there.available > 0:
        some = f"{there.available} of {there.replicas} server{'s' * (there.replicas > 1)}"
        return Serves(True, "EndpointReady", f"The endpoint answers at {url}: {some} available.")
    if course.stalled is not None:
        return Serves(False, course.stalled.reason, course.stalled.message)
    reason, message = _why(course)
    return Serves(False, reason, message)


def _trouble(course: Course) -> str:
    return _why(course)[1]


def _why(course: Course) -> tuple[str, str]:
    """Why no server answers: by the pods, the newest first, else by the Deployment."""
    pods = sorted(course.pods(SERVE, 1), key=lambda pod: (pod.created, pod.name), reverse=True)
    for pod in pods:
        if not pod.gone and pod.deleting_until is None and (found := _pod_trouble(pod)) is not None:
            return found
    there = course.observed.endpoint
    if there is not None and there.stuck is not None:
        return "ProgressDeadlineExceeded", there.stuck
    name = JobNames.of(course.job.name).endpoint
    return "WaitingForPods", f"Waiting for a server of Deployment {name} to be ready."


def _pod_trouble(pod: PodView) -> tuple[str, str] | None:
    if pod.unschedulable is not None:
        return "Unschedulable", f"Pod {pod.name} gets no node: {pod.unschedulable}"
    ended = pod.ended
    if ended is not None:
        own = ended.report.failure.message if ended.report and ended.report.failure else ended.message.strip()
        last = own[-MOST_TOLD:] or ended.reason
        reason = pod.waiting.reason if pod.waiting is not None else "ServerEnded"
        return reason, f"The server in pod {pod.name} ended with exit code {ended.exit_code}: {last}"
    if pod.waiting is not None:
        return pod.waiting.reason, f"Pod {pod.name} cannot start: {pod.waiting.reason}: {pod.waiting.message}"
    return None
