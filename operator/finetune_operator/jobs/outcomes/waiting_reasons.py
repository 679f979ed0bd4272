"""Reasons that an attempt does not run yet: reported at once, and a failure only beyond the limits in the settings.

A missing image or Secret, or a full cluster, may resolve by itself; nobody should have to look at pods to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.jobs.outcomes.remedies import Cause, CauseClass, OperatorCause
from finetune_operator.jobs.state.decision_types import ChildView, PodView
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
NO_PODS_SECONDS = 60
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


def pod_wait(
    child: ChildView,
    pods: Sequence[PodView],
    now: datetime,
    limits: Limits,
    blocked_since: datetime | None = None,
    *,
    placed: bool = False,
) -> PodWait | None:
    """Return the wait of the attempt; None if its pods run. `blocked_since` is that of the previous reconcile, `placed`
    says whether pods of the attempt have had nodes.
    """
    name = child.ref.name
    pending = sorted((pod for pod in pods if pod.phase == "Pending"), key=lambda pod: pod.optional)
    if not pods and placed and child.state != "Suspended":
        return _wait_for_return(child, now, blocked_since or now)
    if not pods and child.state in ("Pending", "Suspended"):
        return _wait_for_creation(child, now)
    if not pending:
        return None
    count = f"{len(pending)} pod{'s' * (len(pending) > 1)} of {name}"
    since, idle = blocked_since or now, not pending[0].optional
    blocked_pods = [one for one in (_blocked(pod, now, limits, since) for pod in pending) if one is not None]
    if not blocked_pods:
        return PodWait(f"Waiting for {count} to start.", idle=idle)
    overdue = next((one for one in blocked_pods if one.cause is not None), None)
    first = overdue or blocked_pods[0]
    limits_at = [one.until for one in blocked_pods if one.until is not None]
    blocked = next((one.blocked_since for one in blocked_pods if one.blocked_since is not None), None)
    return PodWait(f"Waiting for {count}: {first.message}", first.cause, min(limits_at, default=None), blocked, idle)


def _wait_for_creation(child: ChildView, now: datetime) -> PodWait:
    """Return the wait for pods; after a while with the command that shows the child's events, which have the reason."""
    kind, name = child.ref.kind, child.ref.name
    detail = f" {child.message}" if child.message else ""
    until = child.created + timedelta(seconds=NO_PODS_SECONDS)
    if child.state == "Suspended" or now < until:
        return PodWait(
            f"Waiting for the pods of {name} to be created.{detail}", until=until if child.state == "Pending" else None
        )
    return PodWait(
        f"No pod of {kind} {name} has been created in {NO_PODS_SECONDS} s: a quota, a policy or a missing service "
        f"account may prevent it. See kubectl describe {kind.lower()} {name}.{detail}"
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


def _blocked(pod: PodView, now: datetime, limits: Limits, blocked_since: datetime) -> PodWait | None:
    if pod.waiting is not None:
        kind = _kind(pod.waiting.reason)
        message = f"{pod.waiting.reason}: {pod.waiting.message}" if pod.waiting.message else pod.waiting.reason
        if kind is None:
            return PodWait(message)
        seconds = limits.image_pull_seconds if kind is OperatorCause.IMAGE_PULL else limits.container_config_seconds
        wait = _bounded(pod, kind, pod.waiting.reason, message, blocked_since, seconds, now)
        return replace(wait, blocked_since=blocked_since)
    if pod.unschedulable is not None:
        return _bounded(
            pod, OperatorCause.UNSCHEDULABLE, "Unschedulable", pod.unschedulable, pod.created,
            limits.unschedulable_seconds, now,
        )  # fmt: skip
    return None


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
