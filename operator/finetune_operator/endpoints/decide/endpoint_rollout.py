"""Revisions of an endpoint: which one is wanted, which one the URL leads to, and their history.

A revision is the configuration of the servers' pods. A new one starts beside the one that serves, and takes over once
all of its servers are ready; until then, and for ever if they do not become ready, the one before answers. A rollback
is an annotation that names two revisions: as long as spec.endpoint asks for the first, the second is served. A change
of spec.endpoint ends it, so that tools which apply manifests again and again neither undo a rollback nor are stopped by
an old one.

With a Gateway and `canaryPercent`, a new revision is a canary (endpoint_canary.py) before it takes over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import EndpointView
from finetune_operator.plan.types.plan_types import Servers
from finetune_operator.spec.types import CanaryStatus, EndpointSpec, EndpointStatus, RevisionStatus, TrafficSpec

MAX_HISTORY = 5
"""Revisions kept in the history, beside those that a rollback names and those that run."""
MESSAGE_LIMIT = 1024
_OF_ALL_REVISIONS = {"replicas", "max_replicas", "target_requests_in_flight", "traffic", "name", "takes_over", "idle"}
"""Fields of spec.endpoint that set the number of servers, their URL and rollout; the others define a revision."""
CANARY_FAILED = "CanaryFailed"
"""Reason in the history of a revision that an operator held back which judged canaries: it does not start again by
itself, but once spec.endpoint changes.
"""
_REQUEST = re.compile(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class DesiredEndpoint:
    """Endpoint that is to be served."""

    endpoint: EndpointSpec
    held_back: int | None = None
    """Revision of spec.endpoint that a rollback holds back."""
    message: str | None = None
    """Message on the outcome of the annotation, or on a revision that is held back."""
    automatic: bool = False
    """True if CANARY_FAILED holds that revision back, and no annotation."""

    def of(self, state: ReconcileState) -> ReconcileState:
        """Return the state of a job whose spec asks for this."""
        spec = state.spec.model_copy(update={"endpoint": self.endpoint})
        job = replace(state.job, job=state.accepted.model_copy(update={"spec": spec}))
        return replace(state, inputs=replace(state.inputs, job=job))


@dataclass(frozen=True)
class Rollout:
    """Revisions in one reconcile."""

    before: EndpointStatus
    status: EndpointStatus
    """Status after this reconcile."""
    target: int
    """Wanted revision."""
    target_view: EndpointView | None
    """Its Deployment."""
    serving: EndpointView | None
    """Deployment that the URL leads to before this reconcile; None: there is none."""
    serving_revision: int
    """Revision that the URL leads to after this reconcile."""
    unneeded: tuple[EndpointView, ...]
    """Deployments that are no longer needed."""
    canary: Canary | None = None
    """Canary of the wanted revision; None: it has none, or has taken over."""

    @property
    def takes_over(self) -> bool:
        """True if the URL switches to the wanted revision."""
        return self.serving_revision == self.target != self.before.revision

    @property
    def running(self) -> int | None:
        """Number of running servers, which an autoscaler may have chosen; also of the revision that serves, as the
        wanted one takes over all of its requests at once. A revision that does not serve yet has at least one server,
        so that it is known to start, also beside one that has none for lack of requests.
        """
        counts = [one.replicas for one in (self.target_view, self.serving) if one is not None]
        least = 0 if self.serving_revision == self.target else 1
        return max((least, *counts)) if counts else None


def content(endpoint: EndpointSpec) -> dict[str, JsonValue]:
    """Return the fields of spec.endpoint that define a revision: all but the number of servers and their rollout."""
    kept: dict[str, JsonValue] = endpoint.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude=_OF_ALL_REVISIONS
    )
    return kept


def desired_endpoint(state: ReconcileState) -> DesiredEndpoint:
    """Return the endpoint that spec.endpoint and the annotation ask for together."""
    endpoint, text = state.spec.endpoint, state.job.rollback
    assert endpoint is not None, "the job has an endpoint"
    if text is None:
        return DesiredEndpoint(endpoint)
    match = _REQUEST.fullmatch(text)
    if match is None:
        return DesiredEndpoint(
            endpoint,
            message=f'Annotation {ROLLBACK_ANNOTATION} has the value "{text}": write two revision numbers as FROM:TO, '
            f"e.g. 5:4, or run `finetune rollback {state.job.name}`.",
        )
    from_number, to_number = (int(one) for one in match.groups())
    history = {} if state.status.endpoint is None else {one.number: one for one in state.status.endpoint.revisions}
    if from_number == to_number or from_number not in history or history[from_number].endpoint != content(endpoint):
        return DesiredEndpoint(endpoint)
    return _rolled_back(endpoint, from_number, to_number, history)


def _rolled_back(
    endpoint: EndpointSpec, from_number: int, to_number: int, history: Mapping[int, RevisionStatus]
) -> DesiredEndpoint:
    choices = ", ".join(str(number) for number in sorted(history) if number != from_number)
    if to_number not in history:
        target_view = f"choose one of {choices}" if choices else "there is no other revision"
        return DesiredEndpoint(
            endpoint,
            message=f"Revision {to_number} of annotation {ROLLBACK_ANNOTATION} is not in the history: {target_view}.",
        )
    numbers = endpoint.model_dump(mode="json", by_alias=True, include=_OF_ALL_REVISIONS)
    try:
        earlier = EndpointSpec.model_validate_json(json.dumps({**history[to_number].endpoint, **numbers}))
    except ValidationError:
        return DesiredEndpoint(
            endpoint,
            message=f"Revision {to_number} has fields that this operator does not support: choose one of {choices}.",
        )
    return DesiredEndpoint(
        earlier,
        from_number,
        f"Revision {to_number} is served in place of {from_number}, until spec.endpoint changes or annotation "
        f"{ROLLBACK_ANNOTATION} is removed.",
    )


def failed_revision(state: ReconcileState, revision_digest: str) -> RevisionStatus | None:
    """Return the revision of that digest if it is held back, because its canary had failed."""
    revisions = () if state.status.endpoint is None else state.status.endpoint.revisions
    # An earlier one of the same digest was tried again since.
    newest = next((one for one in reversed(revisions) if one.digest == revision_digest), None)
    return newest if newest is not None and newest.reason == CANARY_FAILED else None


def held_message(failed: RevisionStatus) -> str:
    """Return the message on a revision that is held back."""
    return f"Revision {failed.number} is held back: {failed.message} Change spec.endpoint."


def rollout(state: ReconcileState, desired: DesiredEndpoint, revision_digest: str, servers: Servers) -> Rollout:
    """Return the revisions after this reconcile. `revision_digest`: digest of the wanted servers' pods; `servers`:
    their planned number.
    """
    before = state.status.endpoint or EndpointStatus()
    live = {one.revision: one for one in state.observed.endpoints if not one.deleting}
    serving = _serving(before, live)
    target = _number(before, state.observed.endpoints, revision_digest)
    target_view = live.get(target)
    canary = _canary(state, desired, target, target_view, serving)
    history = _History(state, before, desired, revision_digest)
    over = serving is None or _takes_over(target_view, serving, canary, servers)
    serving_revision = target if serving is None or over else serving.revision
    canary = None if over else canary
    needed = {target, serving_revision} | ({serving.revision} if serving is not None else set())
    revisions = history.after(target, serving_revision, target_view)
    status = history.status(target, serving_revision, revisions, None if canary is None else canary.status)
    unneeded = tuple(one for number, one in live.items() if number not in needed)
    return Rollout(before, status, target, target_view, serving, serving_revision, unneeded, canary)


def _canary(
    state: ReconcileState,
    desired: DesiredEndpoint,
    target: int,
    target_view: EndpointView | None,
    serving: EndpointView | None,
) -> Canary | None:
    """Return the canary of the wanted revision; None if it has none: a rollback is urgent, and where nothing answers,
    all requests need the new one.
    """
    traffic = state.spec.routed_traffic
    percent = None if traffic is None else traffic.canary_percent
    if traffic is None or percent is None or desired.held_back is not None:
        return None
    if serving is None or serving.revision == target or not serving.available:
        return None
    return next_canary(state, traffic, percent, target_view, serving)


def kept(state: ReconcileState, desired: DesiredEndpoint) -> Rollout | None:
    """Return the serving revision as the wanted one, in place of one that is held back; None if there is none."""
    before = state.status.endpoint or EndpointStatus()
    live = {one.revision: one for one in state.observed.endpoints if not one.deleting}
    serving = _serving(before, live)
    if serving is None:
        return None
    number = serving.revision
    history = _History(state, before, desired, "")
    revisions = history.after(number, number, serving, known_digest=True)
    unneeded = tuple(one for other, one in live.items() if other != number)
    return Rollout(before, history.status(number, number, revisions, None), number, serving, serving, number, unneeded)


def _serving(before: EndpointStatus, live: Mapping[int, EndpointView]) -> EndpointView | None:
    """Return the Deployment that the URL leads to; if the status does not know, or it is deleted, one that answers."""
    if before.revision is not None and before.revision in live:
        return live[before.revision]
    return max((one for one in live.values() if one.available), key=lambda one: one.revision, default=None)


def _takes_over(
    target_view: EndpointView | None, serving: EndpointView, canary: Canary | None, servers: Servers
) -> bool:
    """Return whether the URL leads to the wanted revision from now on: all of its servers answer, and it is no canary,
    or the first does where nothing else answers.
    """
    if target_view is None:
        return False
    if target_view.revision == serving.revision or (target_view.available > 0 and not serving.available):
        return True
    return canary is None and target_view.ready and target_view.replicas >= servers.replicas


def _number(before: EndpointStatus, target_view: tuple[EndpointView, ...], revision_digest: str) -> int:
    """Return the number of the wanted revision: of one that exists, of the last one if it was the same, or a new one.
    Numbers are never reused for another revision.
    """
    same = [one.revision for one in target_view if not one.deleting and one.revision_digest == revision_digest]
    if same:
        return before.target if before.target in same else max(same)
    taken = [one.revision for one in target_view]
    known = {one.number: one for one in before.revisions}
    for number in (before.revision, max(known, default=None)):
        if number in known and known[number].digest == revision_digest and number not in taken:
            return number
    return max([*known, *taken], default=0) + 1


@dataclass(frozen=True)
class _History:
    """History of the revisions in the status."""

    state: ReconcileState
    before: EndpointStatus
    desired: DesiredEndpoint
    revision_digest: str

    def status(
        self, target: int, serving_revision: int, revisions: tuple[RevisionStatus, ...], canary: CanaryStatus | None
    ) -> EndpointStatus:
        """Return the endpoint's status after this reconcile."""
        return self.before.model_copy(
            update={
                "taken_over_by": None,
                "revision": serving_revision,
                "target": target,
                "rolled_back_from": self.desired.held_back,
                "observed_rollback": self.state.job.rollback,
                "rollback": None if self.desired.message is None else self.desired.message[:MESSAGE_LIMIT],
                "canary": canary,
                "revisions": revisions,
            }
        )

    def after(
        self,
        target: int,
        serving_revision: int,
        target_view: EndpointView | None,
        known_digest: bool = False,
    ) -> tuple[RevisionStatus, ...]:
        """Return the history after this reconcile. `known_digest`: the wanted revision exists, and `revision_digest` is
        of another one.
        """
        entries = {one.number: self._ended(one, target, serving_revision) for one in self.before.revisions}
        if not known_digest:
            entries[target] = self._wanted(entries.get(target), target, serving_revision, target_view)
        keep = {*sorted(entries)[-MAX_HISTORY:], target, serving_revision, *self._named()}
        return tuple(one for number, one in sorted(entries.items()) if number in keep)

    def _named(self) -> tuple[int, ...]:
        """Return the revisions that the annotation names, without which it could not be followed, and one that is held
        back.
        """
        match = _REQUEST.fullmatch(self.state.job.rollback or "")
        named = () if match is None else tuple(int(one) for one in match.groups())
        return named if self.desired.held_back is None else (*named, self.desired.held_back)

    def _wanted(
        self, known: RevisionStatus | None, target: int, serving_revision: int, target_view: EndpointView | None
    ) -> RevisionStatus:
        now, artifacts = self.state.now, self.state.status.artifacts
        model = None if artifacts is None else artifacts.model
        if known is None or known.digest != self.revision_digest:
            known = RevisionStatus(
                number=target,
                state="Starting",
                digest=self.revision_digest,
                model=model or self.state.spec.model.uri,
                endpoint=content(self.desired.endpoint),
                start_time=now,
            )
        elif known.state == "Ended":
            again: dict[str, Any] = {"state": "Starting", "end_time": None, "reason": None, "message": None}
            known = known.model_copy(
                update={**again, "start_time": known.start_time if target_view is not None else now}
            )
        if serving_revision != target or target_view is None or not target_view.available:
            return known
        serving = {"state": "Serving", "ready_time": known.ready_time or now, "reason": None, "message": None}
        return known.model_copy(update=serving)

    def _ended(self, one: RevisionStatus, target: int, serving_revision: int) -> RevisionStatus:
        if one.state == "Ended" or one.number in (target, serving_revision):
            return one
        served = one.state == "Serving"
        reason: Literal["RolledBack", "Superseded", "NeverReady"] = "Superseded" if served else "NeverReady"
        if self.desired.held_back is not None:
            reason = "RolledBack"
        then = f"Revision {target} took over." if served else f"Revision {target} replaced it before it was ready."
        ended = {"state": "Ended", "end_time": self.state.now, "reason": reason, "message": then}
        return one.model_copy(update=ended)


def stopped(status: EndpointStatus | None, state: ReconcileState) -> EndpointStatus | None:
    """Return the history of an endpoint whose servers are deleted, because the job is suspended."""
    if status is None or all(one.state == "Ended" for one in status.revisions):
        return status
    why = {"reason": "Suspended", "message": "runPolicy.suspend is true.", "end_time": state.now}
    revisions = tuple(
        one if one.state == "Ended" else one.model_copy(update={"state": "Ended", **why}) for one in status.revisions
    )
    return status.model_copy(update={"revisions": revisions, "canary": None})


def with_rollout_events(state: ReconcileState, rolled: Rollout, desired: DesiredEndpoint) -> ReconcileState:
    """Return the state with the events of this reconcile."""
    reported = desired.message is None or desired.message[:MESSAGE_LIMIT] == rolled.before.rollback
    if desired.message is not None and not reported and not desired.automatic:
        state = state.with_event(
            "RollbackIgnored" if desired.held_back is None else "RolledBack",
            desired.message,
            warning=desired.held_back is None,
        )
    serving = rolled.serving
    if serving is None or serving.revision == rolled.target:
        return state
    if rolled.target_view is None:
        count = "" if rolled.canary is None else f" with {_servers(rolled.canary.servers)} as a canary"
        return state.with_event(
            "RevisionStarted",
            f"Revision {rolled.target} of the endpoint starts{count}; revision {serving.revision} serves until it is "
            "ready.",
        )
    if rolled.takes_over:
        return state.with_event(
            "RevisionServes", f"Revision {rolled.target} of the endpoint has taken over from {serving.revision}."
        )
    now, before = rolled.status.canary, rolled.before.canary
    if now is None or now == before:
        return state
    share = f"{now.weight} % of the Gateway's requests on {_servers(now.servers)}"
    message = f"with {share} beside {serving.replicas} of revision {serving.revision}"
    return state.with_event("CanaryStarted", f"Revision {now.revision} answers requests as a canary, {message}.")


def _servers(count: int) -> str:
    return f"{count} server{'s' * (count > 1)}"


def with_rollout_problem(state: ReconcileState, reason: str, message: str) -> ReconcileState:
    """Return the state with the reason why the wanted revision does not take over; an event reports it once."""
    status = state.status.endpoint
    assert status is not None, "a rollout goes on"
    (one,) = (one for one in status.revisions if one.number == status.target)
    if one.reason is None:
        state = state.with_event(
            "RevisionNotReady",
            f"Revision {one.number} is not ready; revision {status.revision} keeps serving: {message}",
            warning=True,
        )
    changed = one.model_copy(update={"reason": reason, "message": message[:MESSAGE_LIMIT]})
    revisions = tuple(changed if revision.number == one.number else revision for revision in status.revisions)
    return state.with_status(endpoint=status.model_copy(update={"revisions": revisions}))


# --------------------------------------------------------------------------------------------------------------- canary
# A canary is one revision of few servers with a Service of its own, to which the HTTPRoute gives the share of
# spec.endpoint.traffic.canaryPercent. Nothing judges it here: whoever watches it removes canaryPercent, and it takes
# over, or changes spec.endpoint back.


@dataclass(frozen=True)
class Canary:
    """Canary after one reconcile."""

    servers: int
    """Number of its servers."""
    status: CanaryStatus | None = None
    """None before all of its servers are ready, and once none answers any more: the Gateway leads nothing to it."""


def canary_servers(percent: int, running: int) -> int:
    """Return the number of servers that get `percent` of the requests beside `running` others, and no more requests
    each than those do.
    """
    return math.ceil(running * percent / (100 - percent))


def next_canary(
    state: ReconcileState, traffic: TrafficSpec, percent: int, target_view: EndpointView | None, serving: EndpointView
) -> Canary:
    """Return the canary of the wanted revision beside the one that serves, after this reconcile."""
    stored = None if state.status.endpoint is None else state.status.endpoint.canary
    servers = canary_servers(percent, serving.replicas)
    if target_view is None:
        return Canary(servers)
    same = stored is not None and (stored.revision, stored.weight) == (target_view.revision, percent)
    if stored is not None and same and target_view.available:
        led = stored.model_copy(update={"gateway": traffic.gateway, "hostnames": traffic.hostnames})
        return Canary(stored.servers, led)
    if not target_view.ready or target_view.replicas != servers:
        return Canary(servers)
    led = CanaryStatus(
        revision=target_view.revision,
        servers=servers,
        weight=percent,
        gateway=traffic.gateway,
        hostnames=traffic.hostnames,
        start_time=state.now,
    )
    return Canary(servers, led)
