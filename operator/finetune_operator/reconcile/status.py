"""Status of a job: phase and conditions, each condition by a function of its own, from the result of a decision.

They follow kstatus: `Ready` is True at the end of a success and while an endpoint answers, `Stalled` is True when
nothing will move without somebody's help, and at most one of `Succeeded` and `Failed` is True. Messages are for people;
a condition keeps the time of its last transition for as long as its status is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from finetune_contract.choices import Stage
from finetune_operator.api.types import (
    Condition,
    ConditionType,
    FineTuneJobStatus,
    Phase,
    ProgressStatus,
    StageStatus,
)
from finetune_operator.reconcile.planned import problems_text
from finetune_operator.reconcile.reconcile_state import Course
from finetune_operator.reconcile.spot import words
from finetune_operator.reconcile.status_times import stamp

MESSAGE_LIMIT = 32_768
"""Limit of metav1.Condition."""
NO_PROGRESS = "NoProgress"
"""Reason of the condition Running while an attempt reports nothing new."""

_PHASES: Mapping[Stage, Phase] = {
    Stage.PREPARE: "Preparing",
    Stage.TRAIN: "Training",
    Stage.EVALUATE: "Evaluating",
    Stage.PREDICT: "Predicting",
    Stage.SERVE: "Serving",
}


@dataclass(frozen=True)
class Word:
    """Content of a condition."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def complete(course: Course) -> FineTuneJobStatus:
    """Return the status with all fields that derive from the others."""
    words = {kind: say(course) for kind, say in _CONDITIONS.items()}
    before = {one.type: one for one in course.job.status.conditions}
    conditions = tuple(
        _condition(course, kind, word, before.get(kind)) for kind, word in words.items() if word is not None
    )
    return course.status.model_copy(
        update={
            "observed_generation": course.job.generation,
            "phase": phase(course),
            "stage": _stage(course),
            "progress": _known_progress(course),
            "conditions": conditions,
        }
    )


def _known_progress(course: Course) -> ProgressStatus | None:
    """Return the progress that was reported last, without time left for a job that has ended or is suspended."""
    told = course.status.progress
    if told is None or (course.end is None and not course.suspended):
        return told
    return told.model_copy(update={"remaining_seconds": None})


def _condition(course: Course, kind: ConditionType, word: Word, before: Condition | None) -> Condition:
    same = before is not None and before.status == word.status
    return Condition(
        type=kind,
        status=word.status,
        reason=word.reason,
        message=word.message[:MESSAGE_LIMIT],
        last_transition_time=before.last_transition_time if before is not None and same else stamp(course.now),
        observed_generation=course.job.generation,
    )


def phase(course: Course) -> Phase:
    """Return the job's phase."""
    if course.end is not None:
        return course.end
    if course.suspended:
        return "Suspended"
    current = course.current
    if current is None or not course.started:
        return "Pending"
    queue = admitted(course)
    if current.state == "Running" and queue is not None and queue.status == "False":
        return "Queued"
    return _PHASES[Stage(current.name)]


def _stage(course: Course) -> Stage | None:
    """Return the last of the stages that have begun."""
    begun = [Stage(stage.name) for stage in course.status.stages if stage.attempt > 0]
    return begun[-1] if begun else None


# ----------------------------------------------------------------------------------------------------------- conditions


def accepted(course: Course) -> Word:
    """Return condition Accepted: True if the spec can be read and is valid."""
    if course.job.job is None:
        return Word("False", "InvalidSpec", problems_text(course.job.problems))
    return Word("True", "Accepted", "The spec is valid.")


def planned(course: Course) -> Word:
    """Return condition Planned: True if there is a plan."""
    if course.refused:
        return Word("False", "PlanRefused", problems_text(course.refused))
    plan = course.status.plan
    if plan is None:
        return Word("Unknown", "NotPlanned", "There is no plan yet: the spec has to be accepted first.")
    if plan.strategy == "none":
        return Word("True", "Planned", "Nothing is trained.")
    processes = f"{plan.world_size} process{'es' * (plan.world_size > 1)}"
    micro, steps = plan.micro_batch_size, plan.gradient_accumulation
    if micro is None:
        return Word("True", "Planned", f"Runs your program by {plan.launcher} on {processes}.")
    return Word(
        "True", "Planned", f"Trains with {plan.strategy} by {plan.launcher} on {processes}, each with {micro} "
        f"row{'s' * (micro > 1)} x {steps} accumulation a step.",
    )  # fmt: skip


def admitted(course: Course) -> Word | None:
    """Return condition Admitted: True if the queue has let the job run; None for jobs without a queue."""
    if course.job.job is None or course.spec.run_policy.queue is None:
        return None
    current = course.current
    child = None if current is None else next(iter(course.children(current.name)[-1:]), None)
    if child is None or child.state == "Suspended":
        said = child.message if child is not None and child.message else "The queue has not admitted it yet."
        return Word("False", "Waiting", said)
    return Word("True", "Admitted", f"Queue {course.spec.run_policy.queue} has admitted {child.ref.name}.")


def running(course: Course) -> Word:
    """Return condition Running: True if all pods of the current stage run."""
    if course.end is not None:
        return Word("False", course.end, "The job is over.")
    if course.suspended:
        return Word("False", "Suspended", "runPolicy.suspend is true; set it to false to go on.")
    current = course.current
    if current is None or current.state == "Pending":
        return Word("False", "NotStarted" if not course.started else "Waiting", course.waiting or "Nothing runs yet.")
    if current.state != "Running":
        return Word("False", "Restarting", course.waiting or f"Stage {current.name} is about to start again.")
    if course.waiting:
        return Word("False", course.waiting_reason, course.waiting)
    if course.quiet:
        return Word("True", NO_PROGRESS, f"Stage {current.name} runs{_as(current)}. {course.quiet}")
    return Word("True", "StageRunning", f"Stage {current.name} runs{_as(current)}.")


def _as(stage: StageStatus) -> str:
    if stage.child is None:
        return ""
    if stage.name == Stage.SERVE.value:
        return f" as {stage.child.kind} {stage.child.name}"
    return f" as {stage.child.kind} {stage.child.name}, attempt {stage.attempt}{words(stage.capacity)}"


def ready(course: Course) -> Word:
    """Return condition Ready: True if the job has succeeded, or its endpoint answers."""
    match course.end:
        case "Succeeded":
            return Word("True", "Succeeded", "All stages have succeeded.")
        case "Failed":
            return Word("False", "Failed", _failure(course))
        case None if course.serves is not None:
            return Word("True" if course.serves.ready else "False", course.serves.reason, course.serves.message)
        case None:
            return Word("False", "InProgress", _progress(course))


def _progress(course: Course) -> str:
    done = [stage.name for stage in course.status.stages if stage.state == "Succeeded"]
    total = len(course.status.stages)
    return f"{len(done)} of {total} stages are done." if total else "The job has not begun."


def stalled(course: Course) -> Word:
    """Return condition Stalled: True if nothing moves until somebody acts."""
    if course.end == "Failed":
        return Word("True", "Failed", _failure(course))
    if course.job.job is None:
        return Word("True", "InvalidSpec", "The spec has to be corrected; condition Accepted tells how.")
    if course.refused:
        return Word("True", "PlanRefused", "The spec has to be changed; condition Planned tells how.")
    if course.stalled is not None:
        return Word("True", course.stalled.reason, course.stalled.message)
    return Word("False", "Progressing" if course.end is None else course.end, "Nothing is in the way.")


def succeeded(course: Course) -> Word:
    """Return condition Succeeded: True if all stages have succeeded."""
    if course.end == "Succeeded":
        return Word("True", "Succeeded", "All stages have succeeded.")
    return Word("False", course.end or "InProgress", _progress(course))


def failed(course: Course) -> Word:
    """Return condition Failed: True if the job has failed for good."""
    if course.end == "Failed":
        failure = course.status.failure
        return Word("True", "Failed" if failure is None else failure.failure_class, _failure(course))
    return Word("False", course.end or "InProgress", "The job has not failed.")


def _failure(course: Course) -> str:
    failure = course.status.failure
    if failure is None:
        return "The job has failed."
    where = "" if failure.stage is None else f"Stage {failure.stage}, attempt {failure.attempt}: "
    hint = "" if failure.hint is None else f" {failure.hint}"
    return f"{where}{failure.message}{hint}"


_CONDITIONS: Mapping[ConditionType, Callable[[Course], Word | None]] = {
    "Accepted": accepted,
    "Planned": planned,
    "Admitted": admitted,
    "Running": running,
    "Ready": ready,
    "Stalled": stalled,
    "Succeeded": succeeded,
    "Failed": failed,
}


def condition(status: FineTuneJobStatus, kind: ConditionType) -> Condition | None:
    """Return the condition of that type."""
    return next((one for one in status.conditions if one.type == kind), None)


def ended(status: FineTuneJobStatus) -> Literal["Succeeded", "Failed"] | None:
    """Return how the job has ended, by its status; None if it has not."""
    if status.phase == "Succeeded" or status.phase == "Failed":
        return status.phase
    return None
