"""Reasons that an attempt does not run yet: reported at once, and a failure only beyond the limits in the settings.

A missing image or Secret, or a full cluster, may resolve by itself; nobody should have to look at pods to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.jobs.outcomes.remedies import Cause, CauseClass, OperatorCause
from finetune_operator.jobs.outcomes.start_events import QUIET_SECONDS
from finetune_operator.jobs.outcomes.wait_ends import CLAIM, WaitEnd, mounting_end, refusal_end, scheduling_end
from finetune_operator.jobs.state.decision_types import ChildView, PodView, StartEvent
from finetune_operator.spec.settings.settings import Limits

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "ImageInspectError",
        "SignatureValidationFailed",
    }
)
NO_PODS_SECONDS = QUIET_SECONDS
"""A controller that can create pods does so within seconds."""
PODS_GONE_SECONDS = 300
"""Maximum time without any pod for an attempt whose pods have had nodes. After an outage of the API server, controllers
retry at least once a minute.
"""
_RETURN_SECONDS = 900
"""The same for a Job that replaces its pods: its controller delays that by up to 10 minutes (kubernetes
`pkg/controller/job/job_controller.go`, MaxJobPodFailureBackOff).
"""
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_HINTS: dict[CauseClass, str] = {
    OperatorCause.IMAGE_PULL: "Check the name of the image (spec.image, or defaults.image in the operator's settings) "
    "and the pull secrets (template.imagePullSecrets).",
    OperatorCause.CONTAINER_CONFIG: "Create that Secret or ConfigMap, with that key, in the job's namespace, and "
    "recreate the job.",
    OperatorCause.CONTAINER_CREATING: "Look at the pod's node and the component that the message names: a storage or "
    "network driver, or the node. A ReadWriteOnce claim serves one node at a time.",
    OperatorCause.UNSCHEDULABLE: "Request less under resources, relax template.nodeSelector and tolerations, or add "
    "nodes to the cluster.",
}


@dataclass(frozen=True)
class PodWait:
    """Wait of an attempt whose pods do not all run."""

    message: str
    cause: Cause | None = None
    """Cause of the failure if it has lasted too long."""
    until: datetime | None = None
    """Time when it will have lasted too long, or when the message changes."""
    blocked_since: datetime | None = None
    """Time since which a container cannot start; a long pull of its image before that does not count."""
    idle: bool = True
    """True if no work is done meanwhile."""
    end: WaitEnd | None = None
    """Reason, and who ends it; None if it goes on by itself."""
    since: datetime | None = None
    """Time since which that is so; None: it has just been seen."""


def pod_wait(
    child: ChildView,
    pods: Sequence[PodView],
    now: datetime,
    limits: Limits,
    blocked_since: datetime | None = None,
    *,
    placed: bool = False,
    events: Sequence[StartEvent] = (),
) -> PodWait | None:
    """Return the wait of the attempt; None if its pods run. `blocked_since` is that of the previous reconcile, `placed`
    says whether pods of the attempt have had nodes, `events` are those of `wanted_events`.
    """
    name = child.ref.name
    pending = sorted((pod for pod in pods if pod.phase == "Pending"), key=lambda pod: pod.optional)
    if not pods and placed and child.state != "Suspended":
        return _wait_for_return(child, now, blocked_since or now)
    if not pods and child.state in ("Pending", "Suspended"):
        return _wait_for_creation(child, now, events)
    if not pending:
        return None
    count = f"{len(pending)} pod{'s' * (len(pending) > 1)} of {name}"
    since, idle = blocked_since or now, not pending[0].optional
    spot = child.capacity == "spot"
    waits = (_blocked(pod, now, limits, since, events, spot=spot) for pod in pending)
    blocked_pods = [one for one in waits if one is not None]
    if not blocked_pods:
        events_at = min(pod.scheduled or pod.created for pod in pending) + timedelta(seconds=QUIET_SECONDS)
        return PodWait(f"Waiting for {count} to start.", until=events_at if now < events_at else None, idle=idle)
    overdue = next((one for one in blocked_pods if one.cause is not None), None)
    of_person = next((one for one in blocked_pods if one.end is not None and one.end.waits_for == "Person"), None)
    first = overdue or of_person or blocked_pods[0]
    limits_at = [one.until for one in blocked_pods if one.until is not None]
    blocked = next((one.blocked_since for one in blocked_pods if one.blocked_since is not None), None)
    until = min(limits_at, default=None)
    return PodWait(
        f"Waiting for {count}: {first.message}", first.cause, until, blocked, idle, first.end, first.since
    )  # fmt: skip


def _wait_for_creation(child: ChildView, now: datetime, events: Sequence[StartEvent]) -> PodWait:
    """Return the wait for pods; after a while with the reason that the child's events give."""
    kind, name = child.ref.kind, child.ref.name
    detail = f" {child.message}" if child.message else ""
    until = child.created + timedelta(seconds=NO_PODS_SECONDS)
    if child.state == "Suspended" or now < until:
        return PodWait(
            f"Waiting for the pods of {name} to be created.{detail}", until=until if child.state == "Pending" else None
        )
    refused = next((one for one in events if one.warning and (one.kind, one.name) == (kind, name)), None)
    since = f"No pod of {kind} {name} has been created in {NO_PODS_SECONDS} s: "
    if refused is not None:
        end = refusal_end(refused.message)
        return PodWait(f"{since}{refused.message}{detail}", end=end, since=child.created)
    return PodWait(
        f"{since}its controller may not run, or a policy may prevent it. See kubectl describe {kind.lower()} "
        f"{name}.{detail}",
        end=WaitEnd("PodsNotCreated", "Controller", f"Look at the controller of {kind} objects and its log."),
        since=child.created,
    )


def _wait_for_return(child: ChildView, now: datetime, gone_since: datetime) -> PodWait:
    """Return the wait of an attempt without pods whose child is not over: its controller may have lost sight of it."""
    kind, name = child.ref.kind, child.ref.name
    gone = f"All pods of {kind} {name} are gone, and its controller"
    seconds = _RETURN_SECONDS if child.replaces_pods else PODS_GONE_SECONDS
    until = gone_since + timedelta(seconds=seconds)
    if now < until:
        message = f"{gone} has neither created others nor ended it."
        return PodWait(message, until=until, blocked_since=gone_since)
    cause = Cause(
        OperatorCause.PODS_GONE,
        "PodsGone",
        f"{gone} neither created others nor ended it for {seconds} s.",
        "No action is needed: the stage resumes from its last checkpoint. If it happens again, check the log of that "
        "controller.",
    )
    return PodWait(cause.message, cause)


def _blocked(
    pod: PodView, now: datetime, limits: Limits, blocked_since: datetime, events: Sequence[StartEvent], *, spot: bool
) -> PodWait | None:
    if pod.waiting is not None:
        kind = _kind(pod.waiting.reason)
        message = f"{pod.waiting.reason}: {pod.waiting.message}" if pod.waiting.message else pod.waiting.reason
        if kind is None:
            return PodWait(message)
        seconds = limits.image_pull_seconds if kind is OperatorCause.IMAGE_PULL else limits.container_config_seconds
        wait = _bounded(pod, kind, pod.waiting.reason, message, blocked_since, seconds, now)
        end = WaitEnd(kind.value, "Person", _HINTS[kind])
        return replace(wait, blocked_since=blocked_since, end=end, since=blocked_since)
    if pod.unschedulable is not None:
        wait = _bounded(
            pod, OperatorCause.UNSCHEDULABLE, "Unschedulable", pod.unschedulable, pod.created,
            limits.unschedulable_seconds, now,
        )  # fmt: skip
        end = scheduling_end(pod.unschedulable, events, spot=spot)
        return replace(wait, end=end, since=pod.created, message=" ".join((wait.message, *_claim_faults(end, events))))
    event = next((one for one in events if one.warning and (one.kind, one.name) == ("Pod", pod.name)), None)
    if event is None or pod.node is None:
        return None
    end = mounting_end(event)
    absent = end.waits_for == "Person"
    kind = OperatorCause.CONTAINER_CONFIG if absent else OperatorCause.CONTAINER_CREATING
    seconds = limits.container_config_seconds if absent else limits.container_creating_seconds
    message = f"{end.reason} on node {pod.node}: {event.message}"
    since = pod.scheduled or pod.created
    return replace(_bounded(pod, kind, end.reason, message, since, seconds, now), end=end, since=since)


def _claim_faults(end: WaitEnd, events: Sequence[StartEvent]) -> list[str]:
    """Return what is known of the claims that a pod without a node waits for."""
    if end.reason != CLAIM:
        return []
    return [f"Claim {one.name}: {one.message}" for one in events if one.kind == "PersistentVolumeClaim"]


def _kind(reason: str) -> OperatorCause | None:
    if reason in IMAGE_REASONS:
        return OperatorCause.IMAGE_PULL
    return OperatorCause.CONTAINER_CONFIG if reason in CONFIG_REASONS else None


def _bounded(
    pod: PodView, kind: OperatorCause, reason: str, message: str, since: datetime, seconds: int | None, now: datetime
) -> PodWait:
    if seconds is None or pod.optional:
        return PodWait(message)
    until = since + timedelta(seconds=seconds)
    if now < until:
        return PodWait(message, until=until)
    cause = Cause(
        kind, reason, f"Pod {pod.name} could not start for {seconds} s: {message}", _HINTS[kind], pod
    )  # fmt: skip
    return PodWait(message, cause)
