"""Consequences of an attempt's end: the next stage, another attempt after a delay, or the end of the job.

The status records a failure before anything of the attempt is deleted: only its pods hold the cause. This module only
records; `proceed` acts in a later reconcile.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import TrainerReport
from finetune_operator.api.quantities import human_seconds
from finetune_operator.api.settings import Limits
from finetune_operator.api.types import FailureStatus, StageStatus
from finetune_operator.planning.plan_types import PlanRefused
from finetune_operator.reconcile.planned import (
    NothingLeftToAdapt,
    adapt,
    measured_status,
    plan_now,
    plan_sentence,
    plan_status,
    problems_text,
)
from finetune_operator.reconcile.reconcile_state import Course
from finetune_operator.reconcile.remedies import Cause, CauseClass, OperatorCause, Remedy
from finetune_operator.reconcile.results import (
    artifacts,
    finished_progress,
    headline,
    metrics_of,
    with_report,
)
from finetune_operator.reconcile.spot import taken_away
from finetune_operator.reconcile.status_times import seconds_since, stamp
from finetune_operator.reconcile.usage import attempt_over

STEADY_SECONDS = 600
"""An attempt that ran this long was no quick failure: the back-off before the next one starts over."""
MOST_AVOIDED = 16


def stage_succeeded(course: Course, stage: StageStatus, report: TrainerReport, at: datetime) -> Course:
    """Record the success of the stage; after prepare, plan again with its measurements."""
    kind = Stage(stage.name)
    done = stage.model_copy(update={"state": "Succeeded", "completion_time": stamp(at), "next_attempt_time": None})
    failure = course.status.failure
    before = course.status.progress
    course = attempt_over(course, stage, at)
    course = course.with_stage(done).with_status(
        artifacts=artifacts(course.status, course.spec, course.job.name, kind, report),
        progress=finished_progress(before),
        failure=None if failure is not None and failure.stage == stage.name else failure,
    )
    figure = headline(metrics_of(report))
    took = f" in {human_seconds(seconds_since(stage.start_time, at))}"
    course = course.tell("StageSucceeded", f"Stage {stage.name} succeeded{took}{f': {figure}' if figure else ''}.")
    if report.measured is None:
        return course
    return _replanned(course.with_status(measured=measured_status(report.measured, course.status.measured)), done)


def _replanned(course: Course, stage: StageStatus) -> Course:
    try:
        made = plan_now(course)
    except PlanRefused as refused:
        # Neither the spec nor the measurements can change any more.
        cause = Cause(
            OperatorCause.PLAN_REFUSED,
            "DoesNotFit",
            f"What prepare measured cannot be planned as asked: {problems_text(refused.problems)}",
            "Create a new job with the change that the message names.",
        )
        return give_up(course, stage, cause.told(Stage(stage.name), stage.attempt))
    after = plan_status(made)
    if after == course.status.plan:
        return course
    return course.with_status(plan=after).tell("Planned", f"Planned anew on measured facts: {plan_sentence(made)}")


def attempt_failed(course: Course, stage: StageStatus, cause: Cause, at: datetime | None = None) -> Course:
    """Record the failure of the stage's attempt and its consequences."""
    ended = at or course.now
    before, step = stage.furthest_step or 0, _step(course)
    stage = stage.model_copy(update={"furthest_step": max(before, step) or None})
    failure = cause.told(Stage(stage.name), stage.attempt, course.observed.ends)
    if cause.rank is None:
        failure = failure.model_copy(update={"rank": _only_rank(course, stage, cause)})
    course = taken_away(attempt_over(course.with_status(failure=failure), stage, ended), stage, cause)
    on = "" if failure.node is None else f" on {failure.node}"
    where = "" if failure.pod is None else f" (pod {failure.pod}{on})"
    course = course.tell(
        "StageFailed",
        f"Stage {stage.name}, attempt {stage.attempt}, failed{where}: {failure.message}",
        warning=True,
    )
    if cause.cause is FailureClass.GATE_NOT_MET:
        course = course.with_status(artifacts=with_report(course.status.artifacts, course.spec, course.job.name))
        failure = _with_second_trial(course, failure)
    match _remedy(course, stage, cause):
        case Remedy.FAIL:
            return give_up(course, stage, failure)
        case Remedy.FREE:
            return _free(course, stage, cause, failure, further=step > before)
        case Remedy.COUNTED:
            return _counted(course, stage, cause, failure)
        case Remedy.ADAPT:
            return _adapted(course, stage, cause, failure)


def _with_second_trial(course: Course, failure: FailureStatus) -> FailureStatus:
    """Add to the hint how to judge the trained model again: the spec of this job cannot change any more."""
    model = course.status.artifacts.model if course.status.artifacts else None
    if model is None:
        return failure
    again = (
        "To judge the trained model again without training it, apply this job with another metadata.name, spec.model "
        f"{{uri: {model}}}, the gate that you want, and without spec.training."
    )
    return failure.model_copy(update={"hint": f"{failure.hint} {again}" if failure.hint else again})


def _only_rank(course: Course, stage: StageStatus, cause: Cause) -> int | None:
    """Return the rank in the pod that failed, if that ran and has only one."""
    plan, pod = course.status.plan, cause.pod
    if pod is None or pod.ended is None or pod.index is None or plan is None:
        return None
    alone = stage.name != Stage.TRAIN.value or plan.world_size == course.spec.resources.nodes
    return pod.index if alone else None


def _remedy(course: Course, stage: StageStatus, cause: Cause) -> Remedy:
    """Return the table's remedy; memory is adapted only in train by the built-in loop, if the job wants it."""
    if cause.remedy is not Remedy.ADAPT:
        return cause.remedy
    if course.spec.run_policy.on_out_of_memory == "fail":
        return Remedy.FAIL
    loops = stage.name == "train" and course.spec.script is None
    return Remedy.ADAPT if loops else Remedy.COUNTED


def _free(course: Course, stage: StageStatus, cause: Cause, failure: FailureStatus, *, further: bool) -> Course:
    """Restart without counting it if the infrastructure evidently caused the failure, or the attempt got further than
    any before; at most as often as the settings allow. A failure that repeats would otherwise restart for ever.
    """
    limits = course.settings.limits
    over = stage.free_since is None or seconds_since(stage.free_since, course.now) >= limits.free_restarts_seconds
    used = 0 if over else stage.free_restarts
    if not (cause.evident or further):
        why = "nothing shows that the infrastructure did it, and the attempt came no further than those before"
        return _counted(course, stage, cause, failure, f" ({why})")
    if used >= limits.free_restarts:
        why = f"{used} restarts were free of charge since {stage.free_since}, as many as limits.freeRestarts allows"
        return _counted(course, stage, cause, failure, f" ({why})")
    since = stamp(course.now) if over else stage.free_since
    stage = stage.model_copy(update={"free_restarts": used + 1, "free_since": since})
    return _again(course, stage, cause, "free of charge")


def _step(course: Course) -> int:
    """Return the last step that the attempt reported; 0: it reported nothing."""
    progress = course.status.progress
    return (progress.step or 0) if progress is not None else 0


def _counted(course: Course, stage: StageStatus, cause: Cause, failure: FailureStatus, why: str = "") -> Course:
    """Restart and count it, or give up. `why`: reason that an otherwise free failure counts."""
    used, most = course.status.counted_restarts, course.spec.run_policy.max_restarts
    if used >= most:
        return give_up(course, stage, failure, f"runPolicy.maxRestarts ({most}) restarts are used up{why}.")
    course = course.with_status(counted_restarts=used + 1)
    return _again(course, stage, cause, f"{used + 1} of {most} restarts that runPolicy.maxRestarts allows{why}")


def _adapted(course: Course, stage: StageStatus, cause: Cause, failure: FailureStatus) -> Course:
    try:
        course, reason = adapt(course, stage.attempt)
    except (NothingLeftToAdapt, PlanRefused) as nothing:
        why = problems_text(nothing.problems) if isinstance(nothing, PlanRefused) else str(nothing)
        return give_up(course, stage, failure, f"No plan that needs less memory is left: {why}")
    return _again(course.tell("MemoryAdapted", reason), stage, cause, "with less memory a process")


def _again(course: Course, stage: StageStatus, cause: Cause, how: str) -> Course:
    """Schedule another attempt after a delay that doubles with each failure in a row."""
    steady = seconds_since(stage.start_time, course.now) >= STEADY_SECONDS
    in_row = 1 if steady else stage.failures_in_row + 1
    seconds = delay_seconds(course.settings.limits, in_row)
    avoided = stage.avoided_nodes
    if cause.bad_node is not None and cause.bad_node not in avoided:
        avoided = (*avoided, cause.bad_node)[-MOST_AVOIDED:]
    waiting = stage.model_copy(
        update={
            "state": "Failed",
            "completion_time": stamp(course.now),
            "next_attempt_time": stamp(course.now + timedelta(seconds=seconds)),
            "failures_in_row": in_row,
            "avoided_nodes": avoided,
        }
    )
    keep_away = f" It keeps away from node {cause.bad_node}." if cause.bad_node is not None else ""
    return (
        course.with_stage(waiting)
        .with_status(restarts=course.status.restarts + 1)
        .tell(
            "Restarting",
            f"Stage {stage.name} starts again as attempt {stage.attempt + 1} in {human_seconds(seconds)}, {how}."
            f"{keep_away}",
        )
    )


def delay_seconds(limits: Limits, in_row: int) -> float:
    """Return the delay in seconds before the attempt that follows `in_row` failures in a row."""
    # 2^30 s are 34 years; the bound keeps the power a number.
    doubled: float = limits.restart_delay_seconds * 2 ** min(max(0, in_row - 1), 30)
    return min(limits.restart_delay_most_seconds, doubled)


def give_up(course: Course, stage: StageStatus | None, failure: FailureStatus, why: str = "") -> Course:
    """Record that the job has failed for good."""
    if why:
        hint = f"{why} {failure.hint}" if failure.hint else why
        failure = failure.model_copy(update={"hint": hint})
    now = stamp(course.now)
    if stage is not None and stage.state != "Succeeded":
        course = course.with_stage(
            stage.model_copy(update={"state": "Failed", "completion_time": now, "next_attempt_time": None})
        )
    hint = f" {failure.hint}" if failure.hint else ""
    return replace(
        course.with_status(failure=failure, completion_time=now).tell(
            "Failed", f"The job has failed ({failure.failure_class}): {failure.message}{hint}", warning=True
        ),
        end="Failed",
    )


def refused(kind: CauseClass, what: str, message: str) -> Cause:
    """Return the cause for an object that the API server refused."""
    if kind is OperatorCause.NAME_TAKEN:
        return Cause(
            kind,
            "NameTaken",
            f"{what} belongs to somebody else, and the job needs that name: {message}",
            "Delete or rename that object, or create the job under another name.",
        )
    return Cause(
        kind,
        "Refused",
        f"The API server refuses {what}: {message}",
        "Change what the message names (often something under template) in a new job.",
    )
