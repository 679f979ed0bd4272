"""State of the endpoint's HorizontalPodAutoscaler, which does nothing without metrics and reports that only itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.api.objects import Conditions, Raw
from finetune_operator.reconcile.reconcile_state import ReconcileState
from finetune_operator.reconcile.reconcile_types import AutoscalerView, EndpointView, JobView
from finetune_operator.reconcile.status import condition

INACTIVE_SECONDS = 180
"""Time without metrics after which it is reported: those of a new server take up to two minutes to arrive."""
READ_SECONDS = 60
"""Interval of reading an autoscaler whose state is unknown or that has no metrics."""
READ_AGAIN_SECONDS = 600
"""Interval of reading one that has metrics."""
_INACTIVE = " Servers are not added under load: "
"""Beginning of a sentence in the message of condition Ready."""


class _Status(Raw):
    conditions: Conditions = ()


class _Autoscaler(Raw):
    status: _Status = _Status()


def autoscaler_view(value: Mapping[str, JsonValue]) -> AutoscalerView | None:
    """Return the state of a HorizontalPodAutoscaler; None before its controller has reported any."""
    try:
        raw = _Autoscaler.model_validate(value)
    except ValidationError:
        return None
    found = next((one for one in raw.status.conditions if one.type == "ScalingActive"), None)
    if found is None:
        return None
    return AutoscalerView(found.status != "False", found.last_transition_time, found.message or found.reason)


def has_autoscaler(job: JobView) -> bool:
    """Return whether servers run whose number an autoscaler sets."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    serving = any((one.name, one.state) == (Stage.SERVE, "Running") for one in job.status.stages)
    return endpoint is not None and (endpoint.max_replicas or 0) > endpoint.replicas and serving


def with_autoscaler(state: ReconcileState, servers: EndpointView | None) -> ReconcileState:
    """Return the state with the next reading of the autoscaler, and with an event once it has had no metrics for
    INACTIVE_SECONDS while servers answer.
    """
    if not has_autoscaler(state.job):
        return state
    view = state.observed.autoscaler
    seconds = READ_AGAIN_SECONDS if view is not None and view.active else READ_SECONDS
    state = state.requeue(state.now + timedelta(seconds=seconds))
    before = condition(state.job.status, "Ready")
    sentence = autoscaler_details(state, servers)
    if not sentence or (before is not None and _INACTIVE in before.message):
        return state
    return state.with_event("AutoscalerInactive", sentence.strip(), warning=True)


def autoscaler_details(state: ReconcileState, servers: EndpointView | None) -> str:
    """Return a sentence on an autoscaler without metrics, for the message of condition Ready; empty if it has them."""
    view = state.observed.autoscaler
    if view is None or view.active or view.since is None or servers is None or servers.available == 0:
        return ""
    if not has_autoscaler(state.job) or state.now < view.since + timedelta(seconds=INACTIVE_SECONDS):
        return ""
    text = view.message.rstrip(".")
    return f"{_INACTIVE}{text}. See kubectl describe hpa -n {state.job.namespace}."


def is_due(age_seconds: float, works: bool) -> bool:
    """Return whether an object that was read `age_seconds` ago is read again. `works`: its state was good then."""
    return age_seconds >= (READ_AGAIN_SECONDS if works else READ_SECONDS) - 1
