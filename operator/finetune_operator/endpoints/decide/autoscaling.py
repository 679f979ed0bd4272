"""State of the endpoint's HorizontalPodAutoscaler, which does nothing without metrics and reports that only itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import JsonValue, ValidationError

from finetune_operator.endpoints.decide.endpoint_parts import are_serving, with_reading
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import AutoscalerView, EndpointView, JobView
from finetune_operator.spec.kubernetes_objects import Conditions, Raw

INACTIVE_SECONDS = 180
"""Time without metrics after which it is reported: those of a new server take up to two minutes to arrive."""
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
    condition = next((one for one in raw.status.conditions if one.type == "ScalingActive"), None)
    if condition is None:
        return None
    return AutoscalerView(
        condition.status != "False", condition.last_transition_time, condition.message or condition.reason
    )


def has_autoscaler(job: JobView) -> bool:
    """Return whether servers run whose number an autoscaler sets."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    if endpoint is None or endpoint.idle is not None:
        return False
    return (endpoint.max_replicas or 0) > endpoint.replicas and are_serving(job)


def with_autoscaler(state: ReconcileState, servers: EndpointView | None) -> ReconcileState:
    """Return the state with the next reading of the autoscaler, and with an event once it has had no metrics for
    INACTIVE_SECONDS while servers answer.
    """
    if not has_autoscaler(state.job):
        return state
    view = state.observed.autoscaler
    works, trouble = view is not None and view.active, autoscaler_details(state, servers)
    return with_reading(state, works, trouble, _INACTIVE, "AutoscalerInactive")


def autoscaler_details(state: ReconcileState, servers: EndpointView | None) -> str:
    """Return a sentence on an autoscaler without metrics, for the message of condition Ready; empty if it has them."""
    view = state.observed.autoscaler
    if view is None or view.active or view.since is None or servers is None or servers.available == 0:
        return ""
    if not has_autoscaler(state.job) or state.now < view.since + timedelta(seconds=INACTIVE_SECONDS):
        return ""
    text = view.message.rstrip(".")
    return f"{_INACTIVE}{text}. See kubectl describe hpa -n {state.job.namespace}."
