"""Start of the next attempt, once nothing of the previous one runs any more and its delay is over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from finetune_contract.choices import Stage
from finetune_operator.endpoints.decide.endpoint_phase import (
    SERVE,
    serve,
)
from finetune_operator.jobs.decide.attempts import counts_as_deleted_at
from finetune_operator.jobs.launchers.launcher_registry import stage
from finetune_operator.jobs.outcomes.attempt_outcomes import give_up
from finetune_operator.jobs.outcomes.remedies import Cause, OperatorCause
from finetune_operator.jobs.outcomes.spot import (
    next_capacity,
    start_spot_clock,
    words,
)
from finetune_operator.jobs.outcomes.stalls import REFUSED, still_stalled
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.outcomes.wait_ends import QUOTA
from finetune_operator.jobs.render.manifests import shared
from finetune_operator.jobs.render.render_types import Attempt
from finetune_operator.jobs.state.decision_state import ReconcileState, reference
from finetune_operator.jobs.state.decision_types import (
    ChildView,
    ObjectRef,
    PodView,
)
from finetune_operator.jobs.state.planned import (
    context,
    plan_now,
    plan_sentence,
    plan_status,
    problems_text,
)
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import StageStatus


def proceed(state: ReconcileState) -> ReconcileState:
    """Start the next attempt, once nothing of the previous one runs any more and its delay is over."""
    current = state.current
    assert current is not None, "finish comes first"
    state = state.with_deletions(*_leftovers(state, current))
    if current.name == SERVE:
        return serve(state)
    if current.state == "Running":
        return state
    state = _delete_recorded(state, current)
    if state.suspended:
        return state
    state = still_stalled(state, current)
    waiting = _wait_for_earlier_job(state) or _wait_for_earlier_attempt(state, current)
    if waiting is not None:
        return waiting.with_findings(stalled=state.findings.stalled)
    at = current.next_attempt_time
    if at is not None and state.now < at:
        return _wait_for_delay(state, current, at)
    return _start_attempt(state, current)


def _leftovers(state: ReconcileState, current: StageStatus) -> Sequence[ChildView]:
    """Return the children that should not run: of other stages, or older than the current attempt."""
    return [
        child
        for child in state.observed.children
        if child.state not in ("Succeeded", "Failed")
        and (child.stage is not current.name or child.attempt < current.attempt)
    ]


def _delete_recorded(state: ReconcileState, current: StageStatus) -> ReconcileState:
    """Delete the children of an attempt whose end the stored status records; until then their pods are needed."""
    stored = state.stored(current.name)
    if stored is None or (stored.state, stored.attempt) != (current.state, current.attempt):
        return state
    return state.with_deletions(*(child for child in state.children(current.name) if child.attempt <= current.attempt))


def _wait_for_earlier_job(state: ReconcileState) -> ReconcileState | None:
    """Wait for the end of a deleted job of this name, which writes to the same place; None if nothing of it runs."""
    running = [pod for pod in state.observed.pods_before if not pod.over and not _counts_as_deleted(state, pod)]
    if not running:
        return None
    for pod in running:
        state = state.requeue(counts_as_deleted_at(pod))
    names = ", ".join(pod.name for pod in running[:3])
    message = f"Waiting for pods of a deleted job of this name to end: {names}."
    return state.with_findings(waiting=message + _end_of_wait(running))


def _counts_as_deleted(state: ReconcileState, pod: PodView) -> bool:
    after = counts_as_deleted_at(pod)
    return after is not None and after <= state.now


def _wait_for_earlier_attempt(state: ReconcileState, current: StageStatus) -> ReconcileState | None:
    """Wait for the end of an earlier attempt, as two would write to one place; None if nothing of it runs."""
    pods = [
        pod
        for pod in state.observed.pods
        if pod.stage is current.name and not pod.over and not _counts_as_deleted(state, pod)
    ]
    children = [
        child
        for child in state.children(current.name)
        if child.state not in ("Succeeded", "Failed") and not child.deleting
    ]
    if not pods and not children:
        return None
    for pod in pods:
        state = state.requeue(counts_as_deleted_at(pod))
    left = [pod.name for pod in pods[:3]] or [child.ref.name for child in children]
    names = f"{', '.join(left)} still {'runs' if len(left) == 1 else 'run'}"
    message = f"Waiting for attempt {current.attempt} to end: {names}."
    return state.with_findings(waiting=message + _end_of_wait(pods))


def _end_of_wait(pods: Sequence[PodView]) -> str:
    """Return sentences on the nodes that do not respond, and on the time when pods that never end count as gone."""
    silent = {pod.node: pod.node_silent_since for pod in pods if pod.node_silent_since is not None}
    nodes = "".join(f" Node {node} has not responded since {stamp(since)}." for node, since in silent.items())
    times = [time for pod in pods if (time := counts_as_deleted_at(pod)) is not None]
    if not times or len(times) < len(pods):
        return nodes
    return f"{nodes} The wait ends at {stamp(max(times))} at the latest."


def _wait_for_delay(state: ReconcileState, current: StageStatus, at: datetime) -> ReconcileState:
    number = current.attempt + 1
    start = f"Attempt {number} of stage {current.name} starts at {stamp(at)}"
    failure = state.status.failure
    reason = f", after {failure.failure_class}: {failure.message}" if failure is not None else "."
    state, was = state.requeue(at), condition(state.job.status, "Running")
    if was is None or was.reason not in (REFUSED, QUOTA):
        return state.with_findings(waiting=f"{start}{reason}")
    if not state.findings.waiting:
        state = state.with_findings(waiting=was.message, waiting_reason=was.reason)
    return state


def following_attempt(state: ReconcileState, current: StageStatus) -> Attempt:
    return Attempt(current.name, current.attempt + 1, current.avoided_nodes, next_capacity(state, current))


def _start_attempt(state: ReconcileState, current: StageStatus) -> ReconcileState:
    """Create the next attempt. The claim is created once: it holds the results, and a new one would hide their loss."""
    attempt = following_attempt(state, current)
    number, capacity = attempt.number, attempt.capacity
    try:
        job_plan = plan_now(state)
        objects = stage(job_plan, context(state), attempt)
    except PlanRefused as problems:
        cause = Cause(
            OperatorCause.PLAN_REFUSED,
            "PlanRefused",
            f"Attempt {number} cannot be planned: {problems_text(problems.problems)}",
            "Create a new job with that change.",
        )
        return give_up(state, current, cause.to_failure_status(current.name, number))
    child = ObjectRef.of(objects[-1])
    if (after := plan_status(job_plan)) != state.status.plan:
        # Settings, prices or the operator may have changed since it was planned.
        state = state.with_status(plan=after).with_event("Planned", f"Replanned: {plan_sentence(job_plan)}")
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": number,
            "start_time": state.now,
            "completion_time": None,
            "next_attempt_time": None,
            "blocked_since": None,
            # A stopped gang goes on waiting for the same capacity.
            **({} if current.attempt else {"waiting_for": None, "waiting_since": None}),
            "capacity": capacity,
            "nodes_since": None,
            "running_since": None,
            "replaced_pods": 0,
            # Before the first attempt these count refusals of the API server, which are over.
            "failures_in_row": current.failures_in_row if current.attempt else 0,
            "child": reference(child),
        }
    )
    first = () if state.started else shared(job_plan, context(state))
    state = state.with_stage(running).with_status(start_time=state.status.start_time or state.now, progress=None)
    if current.name == Stage.TRAIN:
        state = state.with_status(note=None)
    state = start_spot_clock(state, capacity, state.now)
    return (
        state.with_actions(create=(*state.decision.create, *first, *objects))
        .with_findings(waiting=f"Waiting for the pods of {child.name} to be created.")
        .with_event(
            "StageStarted",
            f"Stage {current.name} runs as {child.kind} {child.name}, attempt {number}{words(capacity)}.",
        )
    )
