"""Consequences of an attempt's end: the next stage, another attempt after a delay, or the end of the job.

The status records a failure before anything of the attempt is deleted: only its pods hold the cause. This module only
records; `proceed` acts in a later reconcile.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import TrainerReport, shortened
from finetune_operator.jobs.outcomes.remedies import Cause, CauseClass, OperatorCause, Remedy
from finetune_operator.jobs.outcomes.spot import with_preemption
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import ObjectRef
from finetune_operator.jobs.state.plan_checks import PLAN_INACCURATE, inaccuracy, plan_check
from finetune_operator.jobs.state.planned import (
    NoReasonToReplan,
    NothingLeftToAdapt,
    adapt,
    measured_status,
    plan_now,
    plan_sentence,
    plan_status,
    problems_text,
    replan,
    with_findings,
)
from finetune_operator.jobs.state.results import (
    artifacts,
    finished_progress,
    headline,
    metrics_of,
    with_report,
)
from finetune_operator.jobs.state.usage import count_usage
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.settings.settings import Limits
from finetune_operator.spec.status_times import seconds_since, stamp
from finetune_operator.spec.types import FailureStatus, StageStatus

STEADY_SECONDS = 600
"""An attempt that ran this long was no quick failure: the back-off before the next one starts over."""
MAX_AVOIDED_NODES = 16
EVENT_MESSAGE_CHARS = 512
"""Characters of a failure's message in an event, which holds 1,024 bytes, so that its hint is not cut."""


def stage_succeeded(state: ReconcileState, stage: StageStatus, report: TrainerReport, at: datetime) -> ReconcileState:
    """Record the success of the stage; after prepare, plan again with its measurements."""
    kind = stage.name
    done = stage.model_copy(update={"state": "Succeeded", "completion_time": at, "next_attempt_time": None})
    failure = state.status.failure
    before = state.status.progress
    state = with_findings(count_usage(state, stage, at), report)
    state = state.with_stage(done).with_status(
        artifacts=artifacts(state.status, state.spec, state.job.name, kind, report),
        progress=finished_progress(before),
        failure=None if failure is not None and failure.stage == stage.name else failure,
    )
    figure = headline(metrics_of(report), state.spec.task)
    duration = f" in {human_seconds(seconds_since(stage.start_time, at))}"
    state = state.with_event(
        "StageSucceeded", f"Stage {stage.name} succeeded{duration}{f': {figure}' if figure else ''}."
    )
    if kind is Stage.TRAIN:
        state = _with_plan_check(state, stage, report)
    if report.measured is None:
        return state
    return _replanned(state.with_status(measured=measured_status(report.measured, state.status.measured)), done)


def _with_plan_check(state: ReconcileState, stage: StageStatus, report: TrainerReport) -> ReconcileState:
    """Compare the plan with the measurements of its training, and add an event if an estimate was far off."""
    check = plan_check(state.status.plan, stage, report)
    state = state.with_status(plan_check=check)
    far_off = "" if check is None else inaccuracy(check, report)
    return state.with_event(PLAN_INACCURATE, far_off) if far_off else state


def _replanned(state: ReconcileState, stage: StageStatus) -> ReconcileState:
    try:
        job_plan = plan_now(state)
    except PlanRefused as refusal:
        # Neither the spec nor the measurements can change any more.
        cause = Cause(
            OperatorCause.PLAN_REFUSED,
            "DoesNotFit",
            f"Planning with the measurements of prepare failed: {problems_text(refusal.problems)}",
            "Create a new job with that change.",
        )
        return give_up(state, stage, cause.to_failure_status(stage.name, stage.attempt))
    after = plan_status(job_plan)
    if after == state.status.plan:
        return state
    return state.with_status(plan=after).with_event(
        "Planned", f"Replanned with measured facts: {plan_sentence(job_plan)}"
    )


def attempt_failed(
    state: ReconcileState, stage: StageStatus, cause: Cause, at: datetime | None = None
) -> ReconcileState:
    """Record the failure of the stage's attempt and its consequences."""
    ended = at or state.now
    before, step = stage.furthest_step or 0, _step(state)
    stage = stage.model_copy(update={"furthest_step": max(before, step) or None})
    failure = cause.to_failure_status(stage.name, stage.attempt, state.observed.log_tails)
    state = with_findings(state, cause.report)
    if cause.rank is None:
        failure = failure.model_copy(update={"rank": _only_rank(state, stage, cause)})
    state = with_preemption(count_usage(state.with_status(failure=failure), stage, ended), stage, cause)
    node = "" if failure.node is None else f" on {failure.node}"
    place = "" if failure.pod is None else f" (pod {failure.pod}{node})"
    state = state.with_event(
        "StageFailed",
        f"Stage {stage.name}, attempt {stage.attempt}, failed{place}: {failure.message}",
        warning=True,
    )
    if cause.cause is FailureClass.GATE_NOT_MET:
        state = state.with_status(artifacts=with_report(state.status.artifacts, state.spec, state.job.name))
        failure = _with_reevaluation_hint(state, failure)
    match _remedy(state, stage, cause):
        case Remedy.FAIL:
            return give_up(state, stage, failure)
        case Remedy.FREE:
            return _restart_uncounted(state, stage, cause, failure, further=step > before)
        case Remedy.COUNTED:
            return _restart_counted(state, stage, cause, failure)
        case Remedy.REPLAN:
            return _restart_replanned(state, stage, cause, failure)
        case Remedy.ADAPT:
            return _restart_adapted(state, stage, cause, failure)


def _with_reevaluation_hint(state: ReconcileState, failure: FailureStatus) -> FailureStatus:
    """Add to the hint how to judge the trained model again: the spec of this job cannot change any more."""
    model = state.status.artifacts.model if state.status.artifacts else None
    if model is None:
        return failure
    hint = (
        "To evaluate the trained model again without training, apply this job with another metadata.name, spec.model "
        f"{{uri: {model}}}, the new gate, and without spec.training."
    )
    return failure.model_copy(update={"hint": f"{failure.hint} {hint}" if failure.hint else hint})


def _only_rank(state: ReconcileState, stage: StageStatus, cause: Cause) -> int | None:
    """Return the rank in the pod that failed, if that ran and has only one."""
    plan, pod = state.status.plan, cause.pod
    if pod is None or pod.ended is None or pod.index is None or plan is None:
        return None
    has_one_rank = stage.name is not Stage.TRAIN or plan.world_size == state.spec.resources.nodes
    return pod.index if has_one_rank else None


def _remedy(state: ReconcileState, stage: StageStatus, cause: Cause) -> Remedy:
    """Return the table's remedy; memory is adapted only in train by the built-in loop, if the job wants it."""
    if cause.remedy is not Remedy.ADAPT:
        return cause.remedy
    if state.spec.run_policy.on_out_of_memory == "fail":
        return Remedy.FAIL
    loops = stage.name is Stage.TRAIN and state.spec.script is None
    return Remedy.ADAPT if loops else Remedy.COUNTED


def _restart_uncounted(
    state: ReconcileState, stage: StageStatus, cause: Cause, failure: FailureStatus, *, further: bool
) -> ReconcileState:
    """Restart without counting it if the infrastructure evidently caused the failure, or the attempt got further than
    any before; at most as often as the settings allow. A failure that repeats would otherwise restart for ever.
    """
    limits = state.settings.limits
    began = stage.free_since
    window_over = began is None or seconds_since(began, state.now) >= limits.free_restarts_seconds
    used = 0 if window_over else stage.free_restarts
    if not (cause.evident or further):
        reason = "no sign of an infrastructure failure, and no further progress than in earlier attempts"
        return _restart_counted(state, stage, cause, failure, f": {reason}")
    if used >= limits.free_restarts:
        since = "" if began is None else f" since {stamp(began)}"
        reason = f"{used} uncounted restarts{since}, the limit of limits.freeRestarts"
        return _restart_counted(state, stage, cause, failure, f": {reason}")
    stage = stage.model_copy(
        update={"free_restarts": used + 1, "free_since": state.now if window_over else stage.free_since}
    )
    return _schedule_restart(state, stage, cause, "which does not count towards runPolicy.maxRestarts")


def _step(state: ReconcileState) -> int:
    """Return the last step that the attempt reported; 0: it reported nothing."""
    progress = state.status.progress
    return (progress.step or 0) if progress is not None else 0


def _restart_counted(
    state: ReconcileState, stage: StageStatus, cause: Cause, failure: FailureStatus, reason: str = ""
) -> ReconcileState:
    """Restart and count it, or give up. `reason`: reason that an otherwise free failure counts."""
    used, limit = state.status.counted_restarts, state.spec.run_policy.max_restarts
    if used >= limit:
        return give_up(state, stage, failure, f"The limit runPolicy.maxRestarts ({limit}) is reached{reason}.")
    state = state.with_status(counted_restarts=used + 1)
    return _schedule_restart(
        state, stage, cause, f"as counted restart {used + 1} of {limit} (runPolicy.maxRestarts){reason}"
    )


def _restart_adapted(state: ReconcileState, stage: StageStatus, cause: Cause, failure: FailureStatus) -> ReconcileState:
    try:
        state, reason = adapt(state, stage.attempt)
    except (NothingLeftToAdapt, PlanRefused) as nothing:
        reason = problems_text(nothing.problems) if isinstance(nothing, PlanRefused) else str(nothing)
        return give_up(state, stage, failure, f"No plan that needs less memory is left: {reason}")
    return _schedule_restart(state.with_event("MemoryAdapted", reason), stage, cause, "with less memory per process")


def _restart_replanned(
    state: ReconcileState, stage: StageStatus, cause: Cause, failure: FailureStatus
) -> ReconcileState:
    """Restart with a plan for the measured GPUs. It is free once for a kind of GPU: nothing was trained. Count a
    further end of that class, which the new plan should have prevented.
    """
    try:
        state, sentence = replan(state, cause.report)
    except NoReasonToReplan as reason:
        failure = failure.model_copy(update={"hint": _NAME_THE_GPU})
        return _restart_counted(state.with_status(failure=failure), stage, cause, failure, f": {reason}")
    except PlanRefused as refusal:
        refused = Cause(
            OperatorCause.PLAN_REFUSED,
            "DoesNotFit",
            f"Planning with the measured GPUs failed: {problems_text(refusal.problems)}",
            "Create a new job with that change.",
            cause.pod,
        )
        return give_up(state, stage, refused.to_failure_status(stage.name, stage.attempt))
    state = state.with_event("Replanned", sentence)
    return _schedule_restart(state, stage, cause, "which does not count towards runPolicy.maxRestarts")


_NAME_THE_GPU = (
    "Set resources.accelerator.product, or describe the GPU in hardware of the operator's settings, and create the "
    "job again."
)


def _schedule_restart(state: ReconcileState, stage: StageStatus, cause: Cause, how: str) -> ReconcileState:
    """Schedule another attempt after a delay that doubles with each failure in a row."""
    steady = seconds_since(stage.start_time, state.now) >= STEADY_SECONDS
    in_row = 1 if steady else stage.failures_in_row + 1
    seconds = delay_seconds(state.settings.limits, in_row)
    avoided = stage.avoided_nodes
    if cause.node_to_avoid is not None and cause.node_to_avoid not in avoided:
        avoided = (*avoided, cause.node_to_avoid)[-MAX_AVOIDED_NODES:]
    waiting = stage.model_copy(
        update={
            "state": "Failed",
            "completion_time": state.now,
            "next_attempt_time": state.now + timedelta(seconds=seconds),
            "failures_in_row": in_row,
            "avoided_nodes": avoided,
        }
    )
    avoidance = f" It avoids node {cause.node_to_avoid}." if cause.node_to_avoid is not None else ""
    return (
        state.with_stage(waiting)
        .with_status(restarts=state.status.restarts + 1)
        .with_event(
            "Restarting",
            f"Stage {stage.name} restarts as attempt {stage.attempt + 1} in {human_seconds(seconds)}, {how}."
            f"{avoidance}",
        )
    )


def delay_seconds(limits: Limits, in_row: int) -> float:
    """Return the delay in seconds before the attempt that follows `in_row` failures in a row."""
    # 2^30 s are 34 years; the bound keeps the power a number.
    doubled: float = limits.restart_delay_seconds * 2 ** min(max(0, in_row - 1), 30)
    return min(limits.restart_delay_most_seconds, doubled)


def give_up(
    state: ReconcileState, stage: StageStatus | None, failure: FailureStatus, reason: str = ""
) -> ReconcileState:
    """Record that the job has failed for good."""
    if reason:
        hint = f"{reason} {failure.hint}" if failure.hint else reason
        failure = failure.model_copy(update={"hint": hint})
    if stage is not None and stage.state != "Succeeded":
        state = state.with_stage(
            stage.model_copy(update={"state": "Failed", "completion_time": state.now, "next_attempt_time": None})
        )
    hint = f" {failure.hint}" if failure.hint else ""
    return replace(
        state.with_status(failure=failure, completion_time=state.now).with_event(
            "Failed",
            f"The job has failed ({failure.failure_class}): {shortened(failure.message, EVENT_MESSAGE_CHARS)}{hint}",
            warning=True,
        ),
        end="Failed",
    )


def refusal_cause(kind: CauseClass, ref: ObjectRef, message: str) -> Cause:
    """Return the cause for an object that the API server refused."""
    if kind is OperatorCause.NAME_TAKEN:
        hint = "Delete or rename that object, or create the job under another name."
        if ref.kind == "PersistentVolumeClaim":  # it may hold somebody's data
            hint = f"To use it, create a new job with storage.workspace: pvc://{ref.name}; or rename the job."
        return Cause(kind, "NameTaken", f"The name of {ref.kind} {ref.name} is taken: {message}", hint)
    return Cause(
        kind,
        "Refused",
        f"The API server refuses {ref.kind} {ref.name}: {message}",
        "Correct this in a new job; the cause is often a field under template.",
    )
