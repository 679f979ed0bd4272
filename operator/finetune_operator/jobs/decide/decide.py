"""One decision: from the state of the job, its children and its pods to the next actions.

`decide` is level-based: it looks at the whole world each time and remembers nothing; everything that has to survive is
in the status. One reconcile deletes, creates, writes the status and records events, in this order; so the status may
lag behind the world, and never the reverse. Read `decide` for the order of the phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_contract.metrics import metrics_of
from finetune_operator.endpoints.decide.endpoint_phase import (
    SERVE,
    remove_endpoint,
    reopened,
    suspended,
    with_serve_stage,
    without_servers,
)
from finetune_operator.jobs.decide.attempts import settle
from finetune_operator.jobs.decide.next_attempt import following_attempt, proceed
from finetune_operator.jobs.launchers.launcher_registry import stage
from finetune_operator.jobs.outcomes.attempt_outcomes import delay_seconds, give_up, refusal_cause
from finetune_operator.jobs.outcomes.remedies import Cause, OperatorCause
from finetune_operator.jobs.outcomes.spot import (
    WAITING,
    exceeded_limit,
    stop_spot_clock,
)
from finetune_operator.jobs.outcomes.stalls import REFUSED, waiting
from finetune_operator.jobs.outcomes.status import complete, condition, ended
from finetune_operator.jobs.outcomes.wait_ends import QUOTA, WaitEnd, refusal_end
from finetune_operator.jobs.render.render_types import ProgressEndpoint
from finetune_operator.jobs.state.decision_state import Inputs, ReconcileState
from finetune_operator.jobs.state.decision_types import (
    Decision,
    EventNote,
    JobView,
    ObjectRef,
    Observed,
    Refusal,
)
from finetune_operator.jobs.state.plan_table import FindPlan, NotPlannedError, planning_at_once
from finetune_operator.jobs.state.planned import (
    context,
    plan_now,
    plan_sentence,
    plan_status,
    with_learned,
    with_nodes,
)
from finetune_operator.jobs.state.results import CHECKPOINT_BYTES, with_report
from finetune_operator.jobs.state.usage import count_usage
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import Condition, ConditionType, FineTuneJobStatus, StageStatus

MANAGER = "finetune.dev/operator"
"""Value of `runPolicy.managedBy` in jobs that are ours; without it, they are ours too."""

MOST_FIGURES = 4
"""Metrics in the event of a success; the status has all."""
_HOUR = timedelta(hours=1)
PLANNING_SHOWN = timedelta(seconds=5)
"""Wait for a plan that the status mentions; mostly it is shorter."""
PLANNING = "Waiting to be planned: other jobs of this namespace are planned first."
LEAST_REFUSED_SECONDS = 1.0
"""Least delay before a refused object is tried again, also where restarts have none: a refusal comes back at once."""


def decide(
    job: JobView,
    observed: Observed,
    now: datetime,
    settings: Settings,
    progress: ProgressEndpoint | None = None,
    find_plan: FindPlan | None = None,
) -> Decision:
    """Decide about `job` now. Equal values give an equal decision; once it is carried out, the next changes nothing.

    `find_plan`: lookup of the plans; None computes them now. NotPlannedError where a plan has to be computed first.
    """
    if job.deleting or job.managed_by not in (None, "", MANAGER):
        return Decision(status=job.status)
    inputs = Inputs(job, observed, now, settings, progress, find_plan or planning_at_once(settings))
    state = reopened(ReconcileState(inputs, Decision(job.status), end=ended(job.status)))
    if state.end is not None:
        return clean_up_ended(state).decision
    for phase in (
        accept,
        plan_ahead,
        settle,
        handle_refusals,
        enforce_deadline,
        enforce_spot_limits,
        enforce_cost_limit,
        apply_suspension,
        remove_endpoint,
        finish,
        proceed,
    ):
        state = phase(state)
        if state.done or state.end is not None:
            break
    return conclude(state).decision


# ------------------------------------------------------------------------------------------------------------ the end


def clean_up_ended(state: ReconcileState) -> ReconcileState:
    """Delete all of an ended job that still runs; finished children stay for their logs. It never creates anything."""
    running = [child for child in state.observed.children if child.state not in ("Succeeded", "Failed")]
    state = remove_endpoint(state.with_deletions(*running))
    if state.status.observed_generation != state.job.generation:
        generation = state.job.generation
        conditions = tuple(
            one.model_copy(update={"observed_generation": generation}) for one in state.status.conditions
        )
        state = state.with_status(observed_generation=generation, conditions=conditions)
    finished, job = state.status.completion_time, state.job.job
    if finished is None or job is None:
        return state
    requested = job.spec.run_policy.ttl_seconds_after_finished
    seconds = state.settings.defaults.ttl_seconds_after_finished if requested is None else requested
    if seconds is None:
        return state
    until = finished + timedelta(seconds=seconds)
    return state.with_actions(delete_job=True) if until <= state.now else state.requeue(until)


def conclude(state: ReconcileState) -> ReconcileState:
    """Complete the status, and add events for changed conditions of the spec and the plan."""
    after = complete(state)
    accepted, refusal = _changed_condition(state, after, "Accepted"), _changed_condition(state, after, "Planned")
    if accepted is not None and accepted.status == "False":
        state = state.with_event("InvalidSpec", accepted.message, warning=True)
    elif accepted is not None:
        note = EventNote("Normal", "JobAccepted", accepted.message)
        state = state.with_actions(events=(note, *state.decision.events))
    if refusal is not None and refusal.status == "False":
        state = state.with_event("PlanRefused", refusal.message, warning=True)
    runs, ran = condition(after, "Running"), condition(state.job.status, "Running")
    if runs is not None and runs.reason == WAITING and (ran is None or ran.reason != WAITING):
        state = state.with_event(WAITING, runs.message)
    return state.with_actions(status=after)


def _changed_condition(state: ReconcileState, after: FineTuneJobStatus, kind: ConditionType) -> Condition | None:
    """Return the condition if its status or message has changed."""
    was, now = condition(state.job.status, kind), condition(after, kind)
    if was is not None and now is not None and (was.status, was.message) == (now.status, now.message):
        return None
    return now


# -------------------------------------------------------------------------------------------------------- before stages


def accept(state: ReconcileState) -> ReconcileState:
    """Stop at a spec that cannot be run. A running attempt is left alone: settings may have become stricter."""
    if state.job.job is not None:
        return state
    if not state.started:
        state = state.with_status(plan=None, stages=())
    return replace(state, done=True, suspended=state.started and state.job.status.phase == "Suspended")


def plan_ahead(state: ReconcileState) -> ReconcileState:
    """Plan a job of which nothing has started, again in each reconcile: the spec or the cluster may have changed."""
    if state.started and state.status.plan is not None:
        # Stages run in this order, whatever order is stored.
        order = list(Stage)
        stages = tuple(sorted(state.status.stages, key=lambda one: order.index(one.name)))
        return without_servers(state.with_status(stages=with_serve_stage(state, stages)))
    if not state.started:
        state = with_learned(with_nodes(state))
    try:
        job_plan = plan_now(state)
    except NotPlannedError:
        since = state.observed.plan_wanted_since
        if state.started or since is None or state.now < since + PLANNING_SHOWN:
            raise
        return replace(state.with_status(plan=None, stages=()).with_findings(waiting=PLANNING), done=True)
    except PlanRefused as problems:
        # Not kept: the plan of an earlier spec is not this one's.
        plan = state.status.plan if state.started else None
        return replace(state.with_status(plan=plan).with_findings(plan_problems=problems.problems), done=True)
    after = plan_status(job_plan)
    if after != state.status.plan:
        state = state.with_event("Planned", f"Planned {plan_sentence(job_plan)}")
    stages = tuple(
        _stage_status(state, name, job_plan.stages[place:]) for place, name in enumerate(job_plan.stages, start=1)
    )
    return state.with_status(plan=after, stages=stages)


def _stage_status(state: ReconcileState, name: Stage, later: Sequence[Stage]) -> StageStatus:
    """Return the stored stage, which may hold a refusal of the API server, or one before its first attempt.

    If the status was lost, a child of a later stage proves that this one succeeded, whose own child may be cleaned up.
    """
    stored = state.stored(name)
    if stored is not None:
        return stored
    if not state.children(name) and any(state.children(after) for after in later):
        return StageStatus(name=name, state="Succeeded", attempt=1)
    return StageStatus(name=name, state="Pending", attempt=0)


def handle_refusals(state: ReconcileState) -> ReconcileState:
    """Handle the API server's refusal of the next attempt: it is final, or tried again."""
    current = state.current
    if current is None or current.state == "Running" or not state.observed.refusals or current.name == SERVE:
        return state
    refusal = state.observed.refusals[0]
    cause: Cause | None = None
    if refusal.code == 409:
        cause = refusal_cause(OperatorCause.NAME_TAKEN, refusal.ref, refusal.message)
    elif refusal.code in (400, 405, 406, 413, 415, 422):
        cause = refusal_cause(OperatorCause.REFUSED, refusal.ref, refusal.message)
    if cause is not None:
        return give_up(state, current, cause.to_failure_status(current.name, current.attempt + 1))
    return _retry_refused(state, current, refusal)


def _retry_refused(state: ReconcileState, current: StageStatus, refusal: Refusal) -> ReconcileState:
    """Retry with growing delay: others can fix a quota, rights, or a kind that is not served."""
    in_row = current.failures_in_row + 1
    seconds = max(LEAST_REFUSED_SECONDS, delay_seconds(state.settings.limits, in_row))
    delayed = current.model_copy(
        update={
            "next_attempt_time": state.now + timedelta(seconds=seconds),
            "failures_in_row": in_row,
        }
    )
    name = f"{refusal.ref.kind} {refusal.ref.name}"
    message = f"The API server refuses {name}, and the operator retries: {refusal.message}"
    end = refusal_end(refusal.message)
    if end.reason != QUOTA:
        end = WaitEnd(REFUSED, end.waits_for)
    state, delayed = waiting(state, delayed, end, message, refused=True)
    state = state.with_stage(delayed).with_findings(waiting=message, waiting_reason=end.reason)
    return state.with_actions(delete=(*state.decision.delete, *_created_before(state, current, refusal.ref)))


def _created_before(state: ReconcileState, current: StageStatus, ref: ObjectRef) -> tuple[ObjectRef, ...]:
    """Return the objects of the refused attempt that were created: they are recreated, as the spec may change."""
    try:
        manifests = stage(plan_now(state), context(state), following_attempt(state, current))
    except PlanRefused:
        return ()
    refs = [ObjectRef.of(manifest) for manifest in manifests]
    names = [(one.kind, one.name) for one in refs]
    return tuple(refs[: names.index((ref.kind, ref.name))]) if (ref.kind, ref.name) in names else ()


# --------------------------------------------------------------------------------------------------------- between them


def enforce_deadline(state: ReconcileState) -> ReconcileState:
    """End a job that has run longer than it may, counted as batch/v1 Job does: anew after each suspension.

    An endpoint has no deadline.
    """
    seconds, began = state.spec.run_policy.active_deadline_seconds, state.status.start_time
    current = state.current
    if seconds is None or began is None or current is None or current.name == SERVE:
        return state
    until = began + timedelta(seconds=seconds)
    if state.now < until:
        return state.requeue(until)
    cause = Cause(
        OperatorCause.DEADLINE_EXCEEDED,
        "DeadlineExceeded",
        f"The job has run for {seconds} s, the limit of runPolicy.activeDeadlineSeconds.",
        "Create a new job with a longer deadline; results in the workspace are kept.",
    )
    return _fail_running(state, current, cause)


def enforce_spot_limits(state: ReconcileState) -> ReconcileState:
    """End a training that has run, or waited for spot nodes, for as long as it may."""
    state, cause = exceeded_limit(state)
    current = state.current
    return state if cause is None or current is None else _fail_running(state, current, cause)


def enforce_cost_limit(state: ReconcileState) -> ReconcileState:
    """End a job that has cost as much as the settings allow, including the use of the running attempt so far."""
    limit, current = state.settings.allow.max_cost, state.current
    if limit is None or current is None or current.name == SERVE:
        return state
    spent, later = (
        _amount(count_usage(state, current, at) if current.state == "Running" else state)
        for at in (state.now, state.now + _HOUR)
    )
    if spent >= limit:
        cause = Cause(
            OperatorCause.COST_EXCEEDED,
            "CostExceeded",
            f"The job has cost {spent:.2f} {state.settings.currency}; allow.maxCost in the settings is {limit:g}.",
            "Ask the administrator for a higher allow.maxCost; checkpoints and results in the workspace are kept.",
        )
        return _fail_running(state, current, cause)
    return state.requeue(state.now + _HOUR * ((limit - spent) / (later - spent))) if later > spent else state


def _amount(state: ReconcileState) -> float:
    """Return the job's cost; 0 if its nodes have no price, as when prices were removed from the settings."""
    cost = state.status.cost
    return 0.0 if cost is None or cost.amount is None else cost.amount


def _fail_running(state: ReconcileState, current: StageStatus, cause: Cause) -> ReconcileState:
    """Fail the job while an attempt may run: its use counts, and deleting it lets it save a checkpoint."""
    if current.state == "Running":
        state = count_usage(state, current, state.now)
    return give_up(state, current, cause.to_failure_status(current.name, current.attempt))


def apply_suspension(state: ReconcileState) -> ReconcileState:
    """Stop for as long as `runPolicy.suspend` holds; the running attempt saves a checkpoint when it is deleted.

    It is deleted in the next reconcile, when the stored status records it: else a job that is resumed in the same
    moment would find its child deleted without a record of it.
    """
    already_suspended = state.job.status.phase == "Suspended"
    current = state.current
    if not state.spec.run_policy.suspend:
        return state.with_event("Resumed", "The job resumes.") if already_suspended else state
    if current is None:
        return state
    state = replace(stop_spot_clock(state).with_status(start_time=None), suspended=True)
    if current.name == SERVE:
        state, message = suspended(state, current), "The endpoint is suspended: runPolicy.suspend is true."
    elif current.state == "Running":
        state = count_usage(state, current, state.now)
        stopped = current.model_copy(update={"state": "Suspended", "completion_time": state.now})
        state = state.with_stage(stopped)
        message = f"Stage {current.name}, attempt {current.attempt}, is stopped: runPolicy.suspend is true."
    else:
        message = "The job does not start: runPolicy.suspend is true."
    return state if already_suspended else state.with_event("Suspended", message)


def finish(state: ReconcileState) -> ReconcileState:
    """Record the success of the job once all stages have succeeded."""
    if state.current is not None:
        return state
    artifacts = with_report(state.status.artifacts, state.spec, state.job.name)
    test_metrics = [name for name in metrics_of(state.spec.task) if name in artifacts.metrics][:MOST_FIGURES]
    figures = ", ".join(f"{name} {artifacts.metrics[name]:.4g}" for name in test_metrics)
    parts = [f"model at {artifacts.model}"] if artifacts.model is not None else []
    parts += [figures] if figures else []
    state = state.with_status(completion_time=state.now, failure=None, artifacts=artifacts)
    size = artifacts.metrics.get(CHECKPOINT_BYTES)
    if artifacts.checkpoints is not None and size:
        state = state.with_event(
            "CheckpointsKept",
            f"Checkpoints take {human_bytes(size)} at {artifacts.checkpoints}. They are no longer needed, and the "
            "operator does not delete them.",
        )
    elif size:
        state = state.with_event(
            "CheckpointsDeleted",
            f"{human_bytes(size)} of checkpoints were deleted because all stages have succeeded; to keep them, set "
            "spec.checkpoints.afterSuccess to keep.",
        )
    return replace(
        state.with_event("Succeeded", f"All stages have succeeded{': ' if parts else ''}{'; '.join(parts)}."),
        end="Succeeded",
    )


# ------------------------------------------------------------------------------------------------------------- attempts
