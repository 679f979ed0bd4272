"""Takeover of an endpoint by another job of the namespace: its servers answer first, then one write moves the URL.

The job that takes over names the former one in spec.endpoint.takesOver. Its Service is the former job's: it changes the
owner and the selector of that object at once, so that no connection finds the URL without servers. The former job sees
the takeover in the other job's status, and is from then on a job without an endpoint: its servers finish their requests
and end. If the other job goes, so does the Service, and the former job serves again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto

from finetune_operator.api.types import FineTuneJobStatus
from finetune_operator.planning.names import JobNames
from finetune_operator.reconcile.endpoint_rollout import Rollout
from finetune_operator.reconcile.reconcile_state import Readiness, ReconcileState, Stalled
from finetune_operator.reconcile.reconcile_types import JobView, ObjectRef
from finetune_operator.rendering.endpoint_objects import SERVICE_KIND


class Takeover(Enum):
    """State of a takeover in one reconcile."""

    NONE = auto()
    """None is requested, or it is done."""
    WAITING = auto()
    """Not all servers answer yet, or the names do not match."""
    NOW = auto()


def service_of(job: JobView) -> str | None:
    """Return the name of the job's Service; None without an endpoint."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    return None if endpoint is None else JobNames.of(job.name).endpoint_service(endpoint.name)


def former_job(job: JobView) -> str | None:
    """Return the job whose endpoint this one takes over."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    return None if endpoint is None else endpoint.takes_over


def taken_by(job: JobView, others: Iterable[JobView]) -> str | None:
    """Return which of the namespace's other jobs has taken over the job's endpoint."""
    service = service_of(job)
    for other in others:
        endpoint = None if other.job is None else other.job.spec.endpoint
        if service is None or endpoint is None or other.deleting or service_of(other) != service:
            continue
        if endpoint.takes_over == job.name and _taken_from(other.status) == job.name:
            return other.name
    return None


def _taken_from(status: FineTuneJobStatus) -> str | None:
    return None if status.endpoint is None else status.endpoint.taken_over_from


def without_endpoint(job: JobView) -> JobView:
    """Return a job whose endpoint was taken over: as if it requested none."""
    if job.job is None:
        return job
    spec = job.job.spec.model_copy(update={"endpoint": None})
    return replace(job, job=job.job.model_copy(update={"spec": spec}))


def waits_to_take_over(state: ReconcileState) -> bool:
    """Return whether the URL leads to another job still."""
    wanted = former_job(state.job)
    return wanted is not None and _taken_from(state.status) != wanted


def _mismatch(state: ReconcileState) -> str | None:
    """Return why the named job's endpoint is another one than this job's."""
    former, own = state.observed.former_endpoint, service_of(state.job)
    if former is None or former == own:
        return None
    assert state.spec.endpoint is not None, "a takeover is requested"
    return (
        f"spec.endpoint.name is {state.spec.endpoint.name}, and the endpoint of FineTuneJob "
        f"{state.spec.endpoint.takes_over} has the Service {former}: set it to {former.removesuffix('-endpoint')}."
    )


def takeover_of(state: ReconcileState, rolled: Rollout) -> Takeover:
    """Return the state of the takeover: it happens once all servers of the revision that is to serve answer."""
    if not waits_to_take_over(state):
        return Takeover.NONE
    views = (rolled.target_view, rolled.serving)
    view = next((one for one in views if one is not None and one.revision == rolled.serving_revision), None)
    return Takeover.NOW if view is not None and view.ready and _mismatch(state) is None else Takeover.WAITING


def with_takeover(state: ReconcileState, takeover: Takeover, rolled: Rollout) -> ReconcileState:
    """Return the state with the endpoint's name, and with the record of a takeover."""
    endpoint, status = state.spec.endpoint, rolled.status
    assert endpoint is not None, "the job has an endpoint"
    names = JobNames.of(state.job.name)
    before = None if state.job.status.endpoint is None else names.endpoint_service(state.job.status.endpoint.name)
    if takeover is Takeover.WAITING:
        return state
    changes: dict[str, str | None] = {"name": endpoint.name}
    if endpoint.takes_over is None:
        changes["taken_over_from"] = None
    if takeover is Takeover.NOW:
        changes["taken_over_from"] = endpoint.takes_over
        service = names.endpoint_service(endpoint.name)
        message = f"Service {service} leads to this job's servers now, and no longer to those of {endpoint.takes_over}."
        state = state.with_event("EndpointTaken", message)
    if before not in (None, names.endpoint_service(endpoint.name)):
        state = state.with_actions(remove=(*state.decision.remove, ObjectRef(*SERVICE_KIND, str(before))))
    return state.with_status(endpoint=status.model_copy(update=changes))


def without_service(state: ReconcileState) -> ReconcileState:
    """Return the state without a write of the Service, which leads to the other job."""
    apply = tuple(one for one in state.decision.apply if one["kind"] != "Service")
    state = state.with_actions(apply=apply)
    mismatch = _mismatch(state)
    return state if mismatch is None else state.with_findings(stalled=Stalled("TakeoverMismatch", mismatch))


def takeover_readiness(state: ReconcileState) -> Readiness:
    """Return the readiness of an endpoint whose URL leads to another job still."""
    assert state.spec.endpoint is not None, "a takeover is requested"
    message = f"The endpoint is taken over from FineTuneJob {state.spec.endpoint.takes_over} once all servers answer."
    stalled = state.findings.stalled
    return (
        Readiness(False, "TakingOver", message)
        if stalled is None
        else Readiness(False, stalled.reason, stalled.message)
    )
