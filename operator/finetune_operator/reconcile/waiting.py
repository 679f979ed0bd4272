"""Why an attempt does not run yet: told at once, and a failure only when it lasts longer than the settings allow.

A missing image or Secret, or a full cluster, may come right by itself; nobody should have to look at pods to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.settings import Limits
from finetune_operator.reconcile.remedies import Cause, CauseClass, OperatorCause
from finetune_operator.reconcile.types import ChildView, PodView

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
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_HINTS: dict[CauseClass, str] = {
    OperatorCause.IMAGE_PULL: "Check the name of the image (spec.image, or defaults.image in the operator's settings) "
    "and the pull secrets (template.imagePullSecrets).",
    OperatorCause.CONTAINER_CONFIG: "Create the Secret or ConfigMap that the message names, in the job's namespace and "
    "with that key, and apply the job anew.",
    OperatorCause.UNSCHEDULABLE: "Ask for less under resources, loosen template.nodeSelector and tolerations, or give "
    "the cluster more nodes.",
}


@dataclass(frozen=True)
class Waits:
    """An attempt that is not running whole."""

    message: str
    cause: Cause | None = None
    """When it has lasted too long."""
    until: datetime | None = None
    """When that will be."""


def waits(child: ChildView, pods: Sequence[PodView], now: datetime, limits: Limits) -> Waits | None:
    """What the attempt waits for; None when its pods run."""
    name = child.ref.name
    pending = [pod for pod in pods if pod.phase == "Pending"]
    if not pods and child.state in ("Pending", "Suspended"):
        said = f" {child.message}" if child.message else ""
        return Waits(f"Waiting for the pods of {name} to be created.{said}")
    if not pending:
        return None
    count = f"{len(pending)} pod{'s' * (len(pending) > 1)} of {name}"
    told = [one for one in (_held(pod, now, limits) for pod in pending) if one is not None]
    if not told:
        return Waits(f"Waiting for {count} to start.")
    overdue = next((one for one in told if one.cause is not None), None)
    first = overdue or told[0]
    ends = [one.until for one in told if one.until is not None]
    return Waits(f"Waiting for {count}: {first.message}", first.cause, min(ends, default=None))


def _held(pod: PodView, now: datetime, limits: Limits) -> Waits | None:
    if pod.waiting is not None:
        kind = _kind(pod.waiting.reason)
        message = f"{pod.waiting.reason}: {pod.waiting.message}" if pod.waiting.message else pod.waiting.reason
        if kind is None:
            return Waits(message)
        seconds = limits.image_pull_seconds if kind is OperatorCause.IMAGE_PULL else limits.container_config_seconds
        return _bounded(pod, kind, pod.waiting.reason, message, pod.scheduled or pod.created, seconds, now)
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
) -> Waits:
    if seconds is None:
        return Waits(message)
    until = since + timedelta(seconds=seconds)
    if now < until:
        return Waits(message, until=until)
    cause = Cause(
        kind, reason, f"Pod {pod.name} could not start for {seconds} s: {message}", _HINTS[kind], pod
    )  # fmt: skip
    return Waits(message, cause)
