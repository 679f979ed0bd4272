"""State of the endpoint's HTTPRoute, which leads no request unless a controller accepts it for the Gateway."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import JsonValue, ValidationError

from finetune_operator.endpoints.decide.endpoint_parts import are_serving, with_reading
from finetune_operator.endpoints.kinds import ROUTE_KIND
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import EndpointView, JobView, RouteView
from finetune_operator.plan.types.names import JobNames
from finetune_operator.spec.kubernetes_objects import Conditions, Meta, Raw

ACCEPT_SECONDS = 60
"""Time after its creation until a route that is not accepted is reported; controllers take seconds."""
_NOT_LED = " The Gateway does not lead requests to it: "
"""Beginning of a sentence in the message of condition Ready."""


class _Parent(Raw):
    conditions: Conditions = ()


class _Status(Raw):
    parents: tuple[_Parent, ...] = ()


class _Route(Raw):
    metadata: Meta
    status: _Status = _Status()


def route_view(value: Mapping[str, JsonValue]) -> RouteView | None:
    """Return the state of an HTTPRoute; None if it cannot be read. It has one Gateway, on which several controllers
    may report.
    """
    try:
        raw = _Route.model_validate(value)
    except ValidationError:
        return None
    since, problem = raw.metadata.creation_timestamp, "no controller of the Gateway has accepted it"
    for parent in raw.status.parents:
        conditions = {one.type: one for one in parent.conditions}
        bad = [one for name in ("Accepted", "ResolvedRefs") if (one := conditions.get(name)) and one.status == "False"]
        if not bad and "Accepted" in conditions and conditions["Accepted"].status == "True":
            return RouteView(True, since)
        problem = next((one.message or one.reason for one in bad), problem)
    return RouteView(False, since, problem)


def has_route(job: JobView) -> bool:
    """Return whether servers run to which an HTTPRoute leads."""
    return job.job is not None and job.job.spec.routed_traffic is not None and are_serving(job)


def with_route(state: ReconcileState, servers: EndpointView | None) -> ReconcileState:
    """Return the state with the next reading of the HTTPRoute, and with an event once it is not accepted for
    ACCEPT_SECONDS while servers answer.
    """
    if not has_route(state.job):
        return state
    view = state.observed.route
    works, trouble = view is not None and view.accepted, route_details(state, servers)
    return with_reading(state, works, trouble, _NOT_LED, "RouteNotAccepted")


def route_details(state: ReconcileState, servers: EndpointView | None) -> str:
    """Return a sentence on an HTTPRoute that is not accepted, for the message of condition Ready; empty if it is."""
    view = state.observed.route
    if view is None or view.accepted or servers is None or servers.available == 0 or not has_route(state.job):
        return ""
    if state.now < view.since + timedelta(seconds=ACCEPT_SECONDS):
        return ""
    name = JobNames.of(state.job.name).endpoint
    text = view.message.rstrip(".")
    return f"{_NOT_LED}{text}. See kubectl describe {ROUTE_KIND.lower()} -n {state.job.namespace} {name}."
