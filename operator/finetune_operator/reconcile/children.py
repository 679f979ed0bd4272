"""What runs an attempt, seen the same way whatever its kind: a Job, a PyTorchJob, an MPIJob, a SparkApplication.

Each kind has its own way to say that it is over, and each way its trap: a PyTorchJob's `Failed` stays for ever beside
later conditions, an MPIJob says `Failed` before it is over when a pod is evicted, a Job says `FailureTarget` while its
pods still end. The traps are taken here, so that nobody above has to know the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.api.types import Capacity
from finetune_operator.reconcile.raw import Meta, RawChild, RawCondition
from finetune_operator.reconcile.types import ChildState, ChildView, ObjectRef
from finetune_operator.rendering.types import ATTEMPT_LABEL, CAPACITY_LABEL, HASH_ANNOTATION, STAGE_LABEL


@dataclass(frozen=True)
class Verdict:
    """How far a child is, in the words of its own controller."""

    state: ChildState
    said: RawCondition | None = None
    """The condition that says so."""
    finished: datetime | None = None


def child_view(value: Mapping[str, JsonValue]) -> ChildView | None:
    """The child, or None for what is none of ours: another kind, or without the labels of an attempt."""
    try:
        raw = RawChild.model_validate(value)
    except ValidationError:
        return None
    read = _READERS.get((raw.api_version, raw.kind))
    attempt = attempt_of(raw.metadata)
    if read is None or attempt is None:
        return None
    verdict = read(raw)
    said = verdict.said
    return ChildView(
        ref=ObjectRef(raw.api_version, raw.kind, raw.metadata.name, raw.metadata.uid or None),
        stage=attempt[0],
        attempt=attempt[1],
        created=raw.metadata.creation_timestamp,
        state=verdict.state,
        reason=said.reason if said else "",
        message=said.message if said else "",
        started=raw.status.start_time or raw.status.last_submission_attempt_time,
        finished=verdict.finished,
        deleting=raw.metadata.deletion_timestamp is not None,
        configuration=_configuration(raw),
        capacity=_capacity(raw.metadata),
    )


def _configuration(raw: RawChild) -> str | None:
    templates = (raw.spec.template, raw.spec.driver.template)
    return next((found for one in templates if (found := one.metadata.annotations.get(HASH_ANNOTATION))), None)


def _capacity(metadata: Meta) -> Capacity | None:
    known: tuple[Capacity, ...] = get_args(Capacity)
    return next((one for one in known if one == metadata.labels.get(CAPACITY_LABEL)), None)


def attempt_of(metadata: Meta) -> tuple[Stage, int] | None:
    """Stage and attempt from our labels; None when they are missing or no words of ours."""
    stage, attempt = metadata.labels.get(STAGE_LABEL, ""), metadata.labels.get(ATTEMPT_LABEL, "")
    if stage not in list(Stage) or not (attempt.isascii() and attempt.isdecimal()):
        return None
    return Stage(stage), int(attempt)


def _job(raw: RawChild) -> Verdict:
    """batch/v1. `FailureTarget` comes before `Failed`, and `SuccessCriteriaMet` before `Complete`: pods still end then.

    Of a failure they may tell the cause, and it is waited for. A success stays one, however the pods end that are not
    needed any more (KEP-3998 of kubernetes/enhancements), and one on a node that is gone may never end.

    A Job counts pods that only wait as active, so it is running when one of them is ready.
    """
    if done := raw.condition("Complete") or raw.condition("SuccessCriteriaMet"):
        return Verdict("Succeeded", done, raw.status.completion_time or done.last_transition_time)
    if failed := raw.condition("Failed"):
        return Verdict("Failed", failed, failed.last_transition_time)
    if raw.spec.suspend:
        return Verdict("Suspended", raw.condition("Suspended"))
    target = raw.condition("FailureTarget")
    return Verdict("Running" if raw.status.ready else "Pending", target)


def _pytorch_job(raw: RawChild) -> Verdict:
    """kubeflow.org/v1. `Failed` is sticky and may come without a completion time; the first word of an end counts."""
    if failed := raw.condition("Failed"):
        return Verdict("Failed", failed, raw.status.completion_time or failed.last_transition_time)
    if done := raw.condition("Succeeded"):
        return Verdict("Succeeded", done, raw.status.completion_time or done.last_transition_time)
    return _kubeflow_underway(raw)


def _mpi_job(raw: RawChild) -> Verdict:
    """kubeflow.org/v2beta1. It is over when it says so and has a completion time: an eviction sets `Failed` alone, and
    the launcher may still be tried again.
    """
    over = raw.status.completion_time
    if over is not None and (done := raw.condition("Succeeded")):
        return Verdict("Succeeded", done, over)
    if over is not None and (failed := raw.condition("Failed")):
        return Verdict("Failed", failed, over)
    return _kubeflow_underway(raw)


def _kubeflow_underway(raw: RawChild) -> Verdict:
    if raw.spec.run_policy.suspend:
        return Verdict("Suspended", raw.condition("Suspended"))
    running = raw.condition("Running")
    return Verdict("Running" if running else "Pending", running)


def _spark_application(raw: RawChild) -> Verdict:
    """sparkoperator.k8s.io/v1beta2, as `api/v1beta2/sparkapplication_types.go` of the Spark Operator has the states.

    Two are an end. Those that say so in other words are on the way to them: SUBMISSION_FAILED becomes FAILED where
    nothing is tried again, and SUCCEEDING and FAILING come before the driver is looked at for the last time.
    """
    told = raw.status.application_state
    said = RawCondition(type=told.state, status="True", reason=told.state, message=told.error_message)
    match told.state:
        case "COMPLETED":
            return Verdict("Succeeded", said, raw.status.termination_time)
        case "FAILED":
            return Verdict("Failed", said, raw.status.termination_time)
        case "RUNNING" | "SUCCEEDING" | "FAILING":
            return Verdict("Running", said)
        case "SUSPENDING" | "SUSPENDED":
            return Verdict("Suspended", said)
        case _:
            return Verdict("Pending", said if told.state else None)


_READERS: Mapping[tuple[str, str], Callable[[RawChild], Verdict]] = {
    ("batch/v1", "Job"): _job,
    ("kubeflow.org/v1", "PyTorchJob"): _pytorch_job,
    ("kubeflow.org/v2beta1", "MPIJob"): _mpi_job,
    ("sparkoperator.k8s.io/v1beta2", "SparkApplication"): _spark_application,
}
