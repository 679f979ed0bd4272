"""The stage that serves: no attempts, but an endpoint that is kept as the spec asks for, for as long as it asks.

It begins once every stage before it has succeeded, and never ends by itself. Its attempts are the revisions of the
endpoint (endpoint_rollout.py). A server that cannot start is reported by the condition Ready and an event, while
Kubernetes keeps trying; the job and its model stay as they are. Without `spec.endpoint`, and while the job is
suspended, everything of the endpoint is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from finetune_contract.choices import Stage
from finetune_operator.endpoints.decide.autoscaling import autoscaler_details, with_autoscaler
from finetune_operator.endpoints.decide.endpoint_problems import (
    WAITING,
    not_ready_reason,
    start_problem,
    view_of,
    volume_deadline,
)
from finetune_operator.endpoints.decide.endpoint_rollout import (
    CANARY_FAILED,
    DesiredEndpoint,
    Rollout,
    desired_endpoint,
    failed_revision,
    held_message,
    kept,
    rollout,
    stopped,
    with_rollout_events,
    with_rollout_problem,
)
from finetune_operator.endpoints.decide.idle_state import idle_details, idle_readiness, is_idle, with_idle
from finetune_operator.endpoints.decide.route_state import route_details, with_route
from finetune_operator.endpoints.render.endpoint_objects import (
    IDLE_SCALING,
    OPTIONAL_KINDS,
    ROUTE,
    RUNTIMES,
    SERVICE_KIND,
    SHARED_KINDS,
    EndpointObjects,
    canary_objects,
    endpoint_objects,
    endpoint_url,
    revision_digest,
)
from finetune_operator.jobs.outcomes.attempt_outcomes import delay_seconds
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.render.manifests import shared
from finetune_operator.jobs.render.render_types import Manifest, RenderContext
from finetune_operator.jobs.state.decision_state import Readiness, ReconcileState, Stalled, reference
from finetune_operator.jobs.state.decision_types import EndpointView, ObjectRef
from finetune_operator.jobs.state.planned import context, plan_now, plan_status, problems_text
from finetune_operator.jobs.state.results import with_report
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import JobPlan, PlanRefused
from finetune_operator.spec.types import ArtifactsStatus, EndpointStatus, StageStatus

SERVE = Stage.SERVE
LEAST_DELAY_SECONDS = 1.0
"""Least delay before a refused object is applied again, also where restarts have none."""


def reopened(state: ReconcileState) -> ReconcileState:
    """Reopen a job that has succeeded if it has got an endpoint since; not one whose endpoint another job took over
    while jobs could do that, as its Service is the other job's.
    """
    if state.end != "Succeeded" or state.job.job is None or state.spec.endpoint is None:
        return state
    if state.status.endpoint is not None and state.status.endpoint.taken_over_by is not None:
        return state
    return replace(state, end=None).with_status(completion_time=None)


def with_serve_stage(state: ReconcileState, stages: tuple[StageStatus, ...]) -> tuple[StageStatus, ...]:
    """Return the stages of a job that has begun, with the one that serves if the spec asks for an endpoint now."""
    others = tuple(one for one in stages if one.name != SERVE)
    if state.spec.endpoint is None:
        return others
    stored = state.stored(SERVE)
    return (*others, stored or StageStatus(name=SERVE, state="Pending", attempt=0))


def remove_endpoint(state: ReconcileState) -> ReconcileState:
    """Delete the endpoint that the job should not have: it is no longer requested, or the job is suspended."""
    requested = state.job.job is not None and state.spec.endpoint is not None
    if requested and state.end is None and not state.suspended:
        return state
    artifacts, history = state.status.artifacts, state.status.endpoint
    taken = requested and history is not None and history.taken_over_by is not None
    state = state.with_status(endpoint=stopped(history, state) if state.suspended or taken else None)
    if artifacts is not None and artifacts.endpoint_url is not None:
        state = state.with_status(artifacts=artifacts.model_copy(update={"endpoint_url": None}))
        reason = "runPolicy.suspend is true" if state.suspended else "spec.endpoint was removed"
        state = state.with_event("EndpointRemoved", f"The endpoint is deleted: {reason}.")
    servers = [one for one in state.observed.endpoints if not one.deleting]
    if not servers:
        return state
    # The servers' owners are deleted last: as long as they exist, the objects before them are looked for again.
    names = JobNames.of(state.job.name)
    beside = [ObjectRef(*kind, names.endpoint) for kind in SHARED_KINDS if kind != SERVICE_KIND]
    beside.extend((*_route(state), *_idle_scaling(state)))
    beside.append(ObjectRef(*SERVICE_KIND, names.endpoint_service(None if history is None else history.name)))
    return state.with_actions(remove=(*beside, *(ref for one in servers for ref in _revision_objects(state, one))))


def _revision_objects(state: ReconcileState, servers: EndpointView) -> tuple[ObjectRef, ...]:
    """Return the objects of one revision, the owner of its servers last; a Service if it may have been a canary by
    weight.
    """
    name, routes = servers.ref.name, state.observed.http_routes and servers.runtime == "deployment"
    service = (ObjectRef(*SERVICE_KIND, name),) if routes else ()
    return *service, ObjectRef("v1", "ConfigMap", name), servers.ref


def without_servers(state: ReconcileState) -> ReconcileState:
    """Plan again, once, for a job whose endpoint was removed: its plan names no servers any more."""
    if state.stored(SERVE) is None or state.spec.endpoint is not None:
        return state
    try:
        return state.with_status(plan=plan_status(plan_now(state)))
    except PlanRefused:
        return state


def suspended(state: ReconcileState, current: StageStatus) -> ReconcileState:
    """Suspend the stage while the job is suspended."""
    return state.with_stage(current.model_copy(update={"state": "Suspended", "next_attempt_time": None}))


def serve(state: ReconcileState) -> ReconcileState:
    """Keep the endpoint as the spec asks for it, and report its state."""
    current = state.current
    assert current is not None, "finish comes first"
    if state.suspended:
        return state
    try:
        wanted = _wanted(state)
        job_plan, surroundings, rolled = wanted.plan, wanted.context, wanted.rollout
        limit = None if rolled.canary is None else rolled.canary.servers
        objects = endpoint_objects(job_plan, surroundings, rolled.running, rolled.target, limit)
    except PlanRefused as refused:
        return _with_conditions(_with_stall(state, "PlanRefused", problems_text(refused.problems)))
    if (after := plan_status(job_plan)) != state.status.plan:
        state = state.with_status(plan=after)
    if state.observed.refusals:
        return _with_conditions(_refused(state, current))
    at = current.next_attempt_time
    if at is not None and state.now < at:
        before = condition(state.job.status, "Stalled")
        stalled = None if before is None or before.status != "True" else Stalled(before.reason, before.message)
        return _with_conditions(state.requeue(at).with_findings(stalled=stalled))
    if not state.started:
        state = state.with_actions(create=shared(job_plan, surroundings))
    state = with_rollout_events(state, rolled, wanted.desired).with_status(endpoint=rolled.status)
    state = _named(state.with_actions(remove=_unneeded(state, wanted)), rolled)
    # The plan of a kept revision is that of the one that is held back.
    state = (_running if wanted.kept else _applied)(state, current, rolled, objects)
    return _with_conditions(state.with_actions(apply=(*state.decision.apply, *_changed_by_canary(wanted))))


def _former_service(state: ReconcileState) -> str | None:
    """Return the name of the Service that the endpoint has had; None if it is to keep that name, or has none yet."""
    names, before, endpoint = JobNames.of(state.job.name), state.job.status.endpoint, state.spec.endpoint
    if before is None or endpoint is None:
        return None
    former = names.endpoint_service(before.name)
    return None if former == names.endpoint_service(endpoint.name) else former


def _named(state: ReconcileState, rolled: Rollout) -> ReconcileState:
    """Return the state with the endpoint's name, and without the Service of its former name: once the URL leads to the
    wanted revision, as its Service is applied then.
    """
    former, endpoint = _former_service(state), state.spec.endpoint
    assert endpoint is not None, "the job has an endpoint"
    if rolled.serving_revision != rolled.target:
        return state
    if former is not None:
        state = state.with_actions(remove=(*state.decision.remove, ObjectRef(*SERVICE_KIND, former)))
    return state.with_status(endpoint=rolled.status.model_copy(update={"name": endpoint.name}))


@dataclass(frozen=True)
class _Wanted:
    """Endpoint that is wanted now."""

    desired: DesiredEndpoint
    plan: JobPlan
    context: RenderContext
    rollout: Rollout
    kept: bool = False
    """True if the serving revision is kept as it is, without a plan of its own."""


def _wanted(state: ReconcileState) -> _Wanted:
    """Return the endpoint that spec and annotation ask for; PlanRefused as `plan` does."""
    desired = desired_endpoint(state)
    job_plan, surroundings, digest = _planned(state, desired)
    failed = None if desired.held_back is not None else failed_revision(state, digest)
    if failed is not None:
        held = DesiredEndpoint(desired.endpoint, failed.number, held_message(failed), automatic=True)
        if (rolled := kept(state, held)) is not None:
            return _Wanted(held, job_plan, surroundings, rolled, kept=True)
    assert job_plan.servers is not None, "a plan with the stage serve has servers"
    return _Wanted(desired, job_plan, surroundings, rollout(state, desired, digest, job_plan.servers))


def _planned(state: ReconcileState, desired: DesiredEndpoint) -> tuple[JobPlan, RenderContext, str]:
    """Return the plan of an endpoint, its surroundings, and the digest of its pods; PlanRefused as `plan` does."""
    desired_state = desired.of(state)
    job_plan, surroundings = plan_now(desired_state), context(desired_state)
    return job_plan, surroundings, revision_digest(job_plan, surroundings)


def _changed_by_canary(wanted: _Wanted) -> tuple[Manifest, ...]:
    """Return the Service, the HTTPRoute and what else a canary changes: when it begins or gets another share, and when
    it ends without taking over.
    """
    rolled = wanted.rollout
    before, now = rolled.before.canary, rolled.status.canary
    if rolled.serving is None or rolled.takes_over or now == before:
        return ()
    shares = (None, None) if now is None else (now.revision, now.weight)
    return canary_objects(wanted.plan, wanted.context, rolled.serving.revision, *shares)


def _unneeded(state: ReconcileState, wanted: _Wanted) -> tuple[ObjectRef, ...]:
    """Return the objects to delete. Revisions wait while an HTTPRoute may still lead to one: objects are deleted before
    others are applied.
    """
    rolled, before = wanted.rollout, wanted.rollout.before.canary
    if before is None or before.weight is None or before == rolled.status.canary:
        return tuple(ref for one in rolled.unneeded for ref in _revision_objects(state, one))
    return () if wanted.context.spec.routed_traffic is not None else _route(state)


def _route(state: ReconcileState) -> tuple[ObjectRef, ...]:
    """Return the HTTPRoute that the endpoint may have; nothing where that kind is not served."""
    return (ObjectRef(*ROUTE, JobNames.of(state.job.name).endpoint),) if state.observed.http_routes else ()


def _idle_scaling(state: ReconcileState) -> tuple[ObjectRef, ...]:
    """Return the HTTPScaledObject that the endpoint may have; nothing where that kind is not served."""
    served = state.observed.http_scaled_objects
    return (ObjectRef(*IDLE_SCALING, JobNames.of(state.job.name).endpoint),) if served else ()


def _with_stall(state: ReconcileState, reason: str, message: str) -> ReconcileState:
    before = condition(state.job.status, "Stalled")
    if before is None or (before.reason, before.message) != (reason, message):
        state = state.with_event(reason, message, warning=True)
    return state.with_findings(stalled=Stalled(reason, message))


def _refused(state: ReconcileState, current: StageStatus) -> ReconcileState:
    """Retry with growing delay after a refusal of an object of the endpoint, as others can fix it."""
    refusal = state.observed.refusals[0]
    in_row = current.failures_in_row + 1
    seconds = max(LEAST_DELAY_SECONDS, delay_seconds(state.settings.limits, in_row))
    at = state.now + timedelta(seconds=seconds)
    held = current.model_copy(update={"next_attempt_time": at, "failures_in_row": in_row})
    reason = "NameTaken" if refusal.code == 409 else "Refused"
    message = f"The API server refuses {refusal.ref.kind} {refusal.ref.name} of the endpoint: {refusal.message}"
    if reason == "NameTaken":
        message = f"{message}. Delete or rename that object."
    return _with_stall(state.with_stage(held).requeue(at), reason, message)


def _applied(state: ReconcileState, current: StageStatus, rolled: Rollout, objects: EndpointObjects) -> ReconcileState:
    """Create or change the objects of the wanted revision; all of the endpoint once the URL leads to it."""
    servers = rolled.target_view
    scaled = servers is not None and _scaled(servers, objects)
    # A Service of the new name may be missing although the servers are up to date.
    changed = scaled or _former_service(state) is not None
    if rolled.serving_revision != rolled.target:
        # Until it takes over, the objects that all revisions share are those of the one that serves.
        state = state.with_actions(apply=objects.servers if servers is None or scaled else ())
        return _running(state, current, rolled, objects)
    if servers is not None and not rolled.takes_over and servers.digest == objects.digest and not changed:
        return _running(state, current, rolled, objects)
    names, kinds = JobNames.of(state.job.name), {(one["apiVersion"], one["kind"]) for one in objects.manifests}
    unwanted = tuple(ObjectRef(*kind, names.endpoint) for kind in OPTIONAL_KINDS if kind not in kinds)
    unwanted = unwanted if ROUTE in kinds else (*unwanted, *_route(state))
    unwanted = unwanted if IDLE_SCALING in kinds else (*unwanted, *_idle_scaling(state))
    name = f"{RUNTIMES[objects.runtime][1]} {names.servers(rolled.target)}"
    if rolled.serving is None and servers is None:
        state, unwanted = state.with_event("StageStarted", f"Stage serve runs as {name}."), ()
    elif servers is not None and not rolled.takes_over and servers.digest == objects.digest:
        state = state.with_event(
            "EndpointUpdated", f"{name} is scaled to {objects.replicas} server{'s' * (objects.replicas > 1)}."
        )
    elif not rolled.takes_over:
        state = state.with_event("EndpointUpdated", f"{name} is updated to the changed spec or settings.")
    state = state.with_actions(remove=(*state.decision.remove, *unwanted), apply=objects.manifests)
    return _running(state, current, rolled, objects)


def _scaled(servers: EndpointView, objects: EndpointObjects) -> bool:
    """Return whether the requested number of servers differs from that of their owner."""
    if objects.runtime == "kserve":
        return (servers.replicas, servers.most) != (objects.replicas, objects.most)
    return servers.replicas != objects.replicas


def _running(state: ReconcileState, current: StageStatus, rolled: Rollout, objects: EndpointObjects) -> ReconcileState:
    """Return the state with the stage that runs the wanted revision."""
    runtime = objects.runtime if rolled.target_view is None else rolled.target_view.runtime
    new = current.state != "Running" or current.attempt != rolled.target or current.start_time is None
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": rolled.target,
            "start_time": state.now if new else current.start_time,
            "completion_time": None,
            "next_attempt_time": None,
            "failures_in_row": 0,
            "child": reference(ObjectRef(*RUNTIMES[runtime], JobNames.of(state.job.name).servers(rolled.target))),
        }
    )
    state = state.with_stage(running).with_status(start_time=state.status.start_time or state.now)
    if len(state.status.stages) > 1:
        state = state.with_status(artifacts=with_report(state.status.artifacts, state.spec, state.job.name))
    return state


# ------------------------------------------------------------------------------------------------------ how it is


def _with_conditions(state: ReconcileState) -> ReconcileState:
    """Return the state with the endpoint's state, and events when it became ready or stopped being so."""
    status = state.status.endpoint
    url = endpoint_url(state.job.name, state.job.namespace, None if status is None else status.name)
    target = None if status is None else view_of(state, status.target)
    readiness = _readiness(state, url)
    serving = None if status is None else view_of(state, status.revision)
    state = with_idle(with_route(with_autoscaler(state, serving), serving), serving)
    state = state.requeue(volume_deadline(state)).with_findings(readiness=readiness)
    if not readiness.ready:
        state = state.with_findings(waiting=readiness.message, waiting_reason=readiness.reason)
    elif state.findings.stalled is None and target is not None and target.stuck is not None:
        message = (
            f"The newest revision is not available, and the previous one keeps serving: {not_ready_reason(state)[1]}"
        )
        state = _with_stall(state, "RolloutStuck", message)
    if readiness.ready and status is not None and status.target != status.revision:
        reason, message = not_ready_reason(state)
        if reason != WAITING:
            state = with_rollout_problem(state, reason, message)
    if not readiness.ready and state.findings.stalled is None and target is not None and target.stuck is not None:
        state = state.with_findings(stalled=Stalled(readiness.reason, readiness.message))
    before = condition(state.job.status, "Ready")
    was = before is not None and before.status == "True" and before.reason == readiness.reason
    if readiness.ready:
        artifacts = (state.status.artifacts or ArtifactsStatus()).model_copy(update={"endpoint_url": url})
        state = state.with_status(artifacts=artifacts)
        return state if was else state.with_event(readiness.reason, readiness.message)
    if before is not None and before.status == "True" and before.reason == "EndpointReady":
        return state.with_event("EndpointNotReady", readiness.message, warning=True)
    previous = (None, "") if before is None else (before.reason, before.message)
    if readiness.reason not in (WAITING, "WaitingForKServe", previous[0]) and state.findings.stalled is None:
        state = state.with_event("EndpointNotReady", readiness.message, warning=True)
    return state


def _readiness(state: ReconcileState, url: str) -> Readiness:
    status = state.status.endpoint
    servers = None if status is None else view_of(state, status.revision)
    if status is not None and servers is not None and servers.available > 0:
        count = f"{servers.available} of {servers.replicas} server{'s' * (servers.replicas > 1)}"
        return Readiness(
            True,
            "EndpointReady",
            f"The endpoint answers at {url}: {count} of revision {servers.revision} available."
            f"{_serving_details(state, servers)}{_rollout_details(state, status)}",
        )
    if state.findings.stalled is None and servers is not None and is_idle(state, servers):
        return idle_readiness(state, servers)
    if state.findings.stalled is not None:
        return Readiness(False, state.findings.stalled.reason, state.findings.stalled.message)
    reason, message = not_ready_reason(state)
    return Readiness(False, reason, message)


def _serving_details(state: ReconcileState, servers: EndpointView) -> str:
    """Return sentences on KServe's own address, and on a server that does not start beside those that answer."""
    details = "" if servers.url is None else f" KServe exposes it at {servers.url}."
    details += autoscaler_details(state, servers) + route_details(state, servers) + idle_details(state, servers)
    problem = start_problem(state, servers.revision)
    return details if problem is None else f"{details} {problem}"


def _rollout_details(state: ReconcileState, status: EndpointStatus) -> str:
    """Return a sentence on the revision that is to take over."""
    if status.target == status.revision:
        back = next((one for one in status.revisions if one.number == status.rolled_back_from), None)
        if back is not None and back.reason == CANARY_FAILED:
            return f" {held_message(back)}"
        return "" if status.rolled_back_from is None else f" Revision {status.rolled_back_from} is rolled back."
    canary = status.canary
    reason, message = not_ready_reason(state)
    if canary is not None and reason == WAITING:
        return (
            f" Revision {canary.revision} is a canary with {canary.weight} % of the Gateway's requests on "
            f"{canary.servers} server{'s' * (canary.servers > 1)}, until spec.endpoint.traffic.canaryPercent is unset."
        )
    return f" Revision {status.target} is not ready: {message}" if reason != WAITING else f" {message}"
