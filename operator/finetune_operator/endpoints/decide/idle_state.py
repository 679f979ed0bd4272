"""State of an endpoint that scales to zero: whether it has servers, and its HTTPScaledObject, which scales nothing
unless KEDA's HTTP add-on accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import JsonValue, ValidationError

from finetune_operator.endpoints.decide.endpoint_parts import are_serving, with_reading
from finetune_operator.endpoints.kinds import IDLE_KIND
from finetune_operator.endpoints.render.endpoint_objects import endpoint_host
from finetune_operator.jobs.state.decision_state import Readiness, ReconcileState
from finetune_operator.jobs.state.decision_types import EndpointView, IdleScalingView, JobView
from finetune_operator.plan.types.names import JobNames
from finetune_operator.spec.kubernetes_objects import Conditions, Meta, Raw

IDLE = "EndpointIdle"
"""Reason of condition Ready while there is no server, for lack of requests."""
ACCEPT_SECONDS = 60
"""Time after its creation until an object that is not accepted is reported; the add-on takes seconds."""
_NOT_SCALED = " KEDA does not scale the servers: "
"""Beginning of a sentence in the message of condition Ready."""


class _Status(Raw):
    conditions: Conditions = ()


class _ScaledObject(Raw):
    metadata: Meta
    status: _Status = _Status()


def idle_scaling_view(value: Mapping[str, JsonValue]) -> IdleScalingView | None:
    """Return the state of an HTTPScaledObject; None if it cannot be read."""
    try:
        raw = _ScaledObject.model_validate(value)
    except ValidationError:
        return None
    # Before version 0.12 of the add-on there may be several; the last one is the newest.
    condition = next((one for one in reversed(raw.status.conditions) if one.type == "Ready"), None)
    since = raw.metadata.creation_timestamp
    if condition is None:
        return IdleScalingView(False, since, "the operator of the KEDA HTTP add-on has not reported on it")
    return IdleScalingView(condition.status == "True", since, condition.message or condition.reason)


def scales_to_zero(job: JobView) -> bool:
    """Return whether the endpoint scales to zero, and has begun."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    return endpoint is not None and endpoint.idle is not None and are_serving(job)


def is_idle(state: ReconcileState, servers: EndpointView | None) -> bool:
    """Return whether the endpoint has no server, as there were no requests."""
    endpoint = state.spec.endpoint
    if endpoint is None or endpoint.idle is None or servers is None:
        return False
    return servers.replicas == 0 and servers.available == 0


def idle_readiness(state: ReconcileState, servers: EndpointView) -> Readiness:
    """Return the readiness of an endpoint without servers: the next request starts one."""
    endpoint = state.status.endpoint
    host = endpoint_host(state.job.name, state.job.namespace, None if endpoint is None else endpoint.name)
    return Readiness(
        True,
        IDLE,
        f"Revision {servers.revision} of the endpoint has no server, as there were no requests. A request to the "
        f"interceptor of KEDA's HTTP add-on with the header Host: {host} starts one.{_details(state)}",
    )


def with_idle(state: ReconcileState, servers: EndpointView | None) -> ReconcileState:
    """Return the state with the time since which there is no server, the next reading of the HTTPScaledObject, and an
    event once it is not accepted for ACCEPT_SECONDS.
    """
    endpoint = state.status.endpoint
    if endpoint is not None:
        since = (endpoint.idle_since or state.now) if is_idle(state, servers) else None
        if since != endpoint.idle_since:
            state = state.with_status(endpoint=endpoint.model_copy(update={"idle_since": since}))
    if not scales_to_zero(state.job):
        return state
    view = state.observed.idle_scaling
    return with_reading(state, view is not None and view.ready, _details(state), _NOT_SCALED, "IdleScalingNotReady")


def idle_details(state: ReconcileState, servers: EndpointView | None) -> str:
    """Return a sentence on an HTTPScaledObject that scales nothing, for the message of condition Ready while servers
    answer; empty if it does.
    """
    return "" if servers is None or servers.available == 0 else _details(state)


def _details(state: ReconcileState) -> str:
    view = state.observed.idle_scaling
    if view is None or view.ready or not scales_to_zero(state.job):
        return ""
    if state.now < view.since + timedelta(seconds=ACCEPT_SECONDS):
        return ""
    name = JobNames.of(state.job.name).endpoint
    described = f"kubectl describe {IDLE_KIND.lower()} -n {state.job.namespace} {name}"
    return f"{_NOT_SCALED}{view.message.rstrip('.')}. See {described}."
