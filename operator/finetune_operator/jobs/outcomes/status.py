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
from finetune_operator.jobs.outcomes.spot import words
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.planned import problems_text
from finetune_operator.spec.quantities import short_duration
from finetune_operator.spec.types import (
    Condition,
    ConditionType,
    FineTuneJobStatus,
    Phase,
    ProgressStatus,
    StageStatus,
)

MESSAGE_LIMIT = 32_768
"""Limit of metav1.Condition."""
WAITING_FOR_PODS = "WaitingForPods"
"""Reason of the condition Running while pods are about to start."""
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
class ConditionContent:
    """Content of a condition."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def complete(state: ReconcileState) -> FineTuneJobStatus:
    """Return the status with all fields that derive from the others."""
    contents = {kind: build(state) for kind, build in _CONDITIONS.items()}
    before = {one.type: one for one in state.job.status.conditions}
    conditions = tuple(
        _condition(state, kind, content, before.get(kind)) for kind, content in contents.items() if content is not None
    )
    return state.status.model_copy(
        update={
            "observed_generation": state.job.generation,
            "phase": phase(state),
            "stage": _stage(state),
            "progress": _shown_progress(state),
            "conditions": conditions,
        }
    )


def _shown_progress(state: ReconcileState) -> ProgressStatus | None:
    """Return the progress that was reported last, without time left for a job that has ended or is suspended; with the
    text of kubectl's columns, which cannot add a unit.
    """
    progress = state.status.progress
    if progress is None:
        return None
    left = progress.remaining_seconds if state.end is None and not state.suspended else None
    return progress.model_copy(
        update={
            "remaining_seconds": left,
            "complete": None if progress.percent is None else f"{progress.percent}%",
            "remaining": None if left is None else short_duration(left),
        }
    )


def _condition(
    state: ReconcileState, kind: ConditionType, content: ConditionContent, before: Condition | None
) -> Condition:
    same = before is not None and before.status == content.status
    return Condition(
        type=kind,
        status=content.status,
        reason=content.reason,
        message=content.message[:MESSAGE_LIMIT],
        last_transition_time=before.last_transition_time if before is not None and same else state.now,
        observed_generation=state.job.generation,
    )


def phase(state: ReconcileState) -> Phase:
    """Return the job's phase."""
    if state.end is not None:
        return state.end
    if state.suspended:
        return "Suspended"
    current = state.current
    if current is None or not state.started:
        return "Pending"
    queue = admitted(state)
    if current.state == "Running" and queue is not None and queue.status == "False":
        return "Queued"
    return _PHASES[current.name]


def _stage(state: ReconcileState) -> Stage | None:
    """Return the last of the stages that have begun."""
    started = [stage.name for stage in state.status.stages if stage.attempt > 0]
    return started[-1] if started else None


# ----------------------------------------------------------------------------------------------------------- conditions


def accepted(state: ReconcileState) -> ConditionContent:
    """Return condition Accepted: True if the spec can be read and is valid."""
    if state.job.job is None:
        return ConditionContent("False", "InvalidSpec", problems_text(state.job.problems))
    return ConditionContent("True", "Accepted", "The spec is valid.")


def planned(state: ReconcileState) -> ConditionContent:
    """Return condition Planned: True if there is a plan."""
    if state.findings.plan_problems:
        return ConditionContent("False", "PlanRefused", problems_text(state.findings.plan_problems))
    plan = state.status.plan
    if plan is None:
        waiting = state.findings.waiting or "There is no plan yet: the spec has to be accepted first."
        return ConditionContent("Unknown", "NotPlanned", waiting)
    if plan.strategy == "none":
        return ConditionContent("True", "Planned", "Nothing is trained.")
    processes = f"{plan.world_size} process{'es' * (plan.world_size > 1)}"
    micro, steps = plan.micro_batch_size, plan.gradient_accumulation
    if micro is None:
        return ConditionContent("True", "Planned", f"Runs your program by {plan.launcher} on {processes}.")
    return ConditionContent(
        "True", "Planned", f"Trains with {plan.strategy} by {plan.launcher} on {processes}, micro-batch {micro}, "
        f"gradient accumulation {steps}{f', for {plan.device}' if plan.device else ''}.",
    )  # fmt: skip


def admitted(state: ReconcileState) -> ConditionContent | None:
    """Return condition Admitted: True if the queue has let the job run; None for jobs without a queue."""
    if state.job.job is None or state.spec.run_policy.queue is None:
        return None
    current = state.current
    child = None if current is None else next(iter(state.children(current.name)[-1:]), None)
    if child is None or child.state == "Suspended":
        message = child.message if child is not None and child.message else "The queue has not admitted the job yet."
        return ConditionContent("False", "Waiting", message)
    return ConditionContent("True", "Admitted", f"Queue {state.spec.run_policy.queue} has admitted {child.ref.name}.")


def running(state: ReconcileState) -> ConditionContent:
    """Return condition Running: True if all pods of the current stage run."""
    if state.end is not None:
        return ConditionContent("False", state.end, "The job has ended.")
    if state.suspended:
        return ConditionContent("False", "Suspended", "runPolicy.suspend is true; set it to false to resume.")
    current = state.current
    if current is None or current.state == "Pending":
        usual = "Waiting" if state.started else "NotStarted"
        return ConditionContent(
            "False", state.findings.waiting_reason or usual, state.findings.waiting or "Nothing runs yet."
        )
    if current.state != "Running":
        return ConditionContent(
            "False", "Restarting", state.findings.waiting or f"Stage {current.name} is about to restart."
        )
    if state.findings.waiting:
        return ConditionContent("False", state.findings.waiting_reason or WAITING_FOR_PODS, state.findings.waiting)
    if state.findings.no_progress_message:
        return ConditionContent(
            "True",
            NO_PROGRESS,
            f"Stage {current.name} runs{_child_suffix(current)}. {state.findings.no_progress_message}",
        )
    return ConditionContent("True", "StageRunning", f"Stage {current.name} runs{_child_suffix(current)}.")


def _child_suffix(stage: StageStatus) -> str:
    if stage.child is None:
        return ""
    if stage.name is Stage.SERVE:
        return f" as {stage.child.kind} {stage.child.name}"
    return f" as {stage.child.kind} {stage.child.name}, attempt {stage.attempt}{words(stage.capacity)}"


def ready(state: ReconcileState) -> ConditionContent:
    """Return condition Ready: True if the job has succeeded, or its endpoint answers; else with the reason why not."""
    match state.end:
        case "Succeeded":
            return ConditionContent("True", "Succeeded", "All stages have succeeded.")
        case "Failed":
            return ConditionContent("False", _failure_reason(state), _failure(state))
        case None if state.findings.readiness is not None:
            return ConditionContent(
                "True" if state.findings.readiness.ready else "False",
                state.findings.readiness.reason,
                state.findings.readiness.message,
            )
        case None:
            return _not_ready(state)


def _not_ready(state: ReconcileState) -> ConditionContent:
    """Return why a job that goes on is not ready: what blocks it, else what it waits for, else its progress."""
    blocked = stalled(state)
    if blocked.status == "True":
        return ConditionContent("False", blocked.reason, blocked.message)
    if state.suspended:
        return ConditionContent("False", "Suspended", _progress(state))
    if state.findings.waiting and state.findings.waiting_reason:
        return ConditionContent("False", state.findings.waiting_reason, state.findings.waiting)
    return ConditionContent("False", "InProgress", _progress(state))


def _progress(state: ReconcileState) -> str:
    done = [stage.name for stage in state.status.stages if stage.state == "Succeeded"]
    total = len(state.status.stages)
    return f"{len(done)} of {total} stages have succeeded." if total else "The job has not started."


def stalled(state: ReconcileState) -> ConditionContent:
    """Return condition Stalled: True if nothing moves until somebody acts."""
    if state.end == "Failed":
        return ConditionContent("True", "Failed", _failure(state))
    if state.job.job is None:
        return ConditionContent("True", "InvalidSpec", "Correct the spec as condition Accepted describes.")
    if state.findings.plan_problems:
        return ConditionContent("True", "PlanRefused", "Change the spec as condition Planned describes.")
    if state.findings.stalled is not None:
        return ConditionContent("True", state.findings.stalled.reason, state.findings.stalled.message)
    return ConditionContent("False", "Progressing" if state.end is None else state.end, "Nothing blocks the job.")


def succeeded(state: ReconcileState) -> ConditionContent:
    """Return condition Succeeded: True if all stages have succeeded."""
    if state.end == "Succeeded":
        return ConditionContent("True", "Succeeded", "All stages have succeeded.")
    return ConditionContent("False", state.end or "InProgress", _progress(state))


def failed(state: ReconcileState) -> ConditionContent:
    """Return condition Failed: True if the job has failed for good."""
    if state.end == "Failed":
        return ConditionContent("True", _failure_reason(state), _failure(state))
    return ConditionContent("False", state.end or "InProgress", "The job has not failed.")


def _failure_reason(state: ReconcileState) -> str:
    return "Failed" if state.status.failure is None else state.status.failure.failure_class


def _failure(state: ReconcileState) -> str:
    failure = state.status.failure
    if failure is None:
        return "The job has failed."
    where = "" if failure.stage is None else f"Stage {failure.stage}, attempt {failure.attempt}: "
    hint = "" if failure.hint is None else f" {failure.hint}"
    return f"{where}{failure.message}{hint}"


_CONDITIONS: Mapping[ConditionType, Callable[[ReconcileState], ConditionContent | None]] = {
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
