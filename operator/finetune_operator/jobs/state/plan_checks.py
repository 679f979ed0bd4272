"""Comparison of the plan in the status with the report of a finished training."""

from __future__ import annotations

from pydantic import ValidationError

from finetune_contract.plan_check import Comparison, MeasuredTraining, PlanCheck, PlannedTraining, check_plan
from finetune_contract.report import TrainerReport
from finetune_operator.spec.types import ComparisonStatus, PlanCheckStatus, PlanStatus, StageStatus

TOTAL = "total"
"""Entry of `PlanStatus.memory_per_device` with the sum of all others."""
PLAN_INACCURATE = "PlanInaccurate"
"""Reason of the event about estimates that were far off."""
SHARED = "Its processors were shared with other programs, or limited."
"""Sentence after the time of a step on such a machine."""


def plan_check(plan: PlanStatus | None, stage: StageStatus, report: TrainerReport) -> PlanCheckStatus | None:
    """Compare the plan that the attempt ran with its report; None if either has no figures, as of a program or an older
    image.
    """
    measured = measured_training(report)
    if plan is None or measured is None:
        return None
    check = check_plan(_planned(plan), measured)
    if check.memory is None and check.step_time is None:
        return None
    return PlanCheckStatus(
        strategy=plan.strategy,
        attempt=stage.attempt,
        device=plan.product,
        memory=_status(check.memory),
        step_time=_status(check.step_time),
        message=" ".join([*check.off(), *([SHARED] if _slowed(check, measured) else [])]),
    )


def inaccuracy(check: PlanCheckStatus, report: TrainerReport) -> str:
    """Return the sentences of an event: on estimates that were far off, and on the time of a step only if the training
    had its processors to itself.
    """
    comparison, measured = plan_check_of(check), measured_training(report)
    if measured is not None and measured.machine_shared:
        comparison = comparison.model_copy(update={"step_time": None})
    return " ".join(comparison.far_off())


def _slowed(check: PlanCheck, measured: MeasuredTraining) -> bool:
    return measured.machine_shared and check.step_time is not None and check.step_time.off and check.step_time.ratio > 1


def plan_check_of(status: PlanCheckStatus) -> PlanCheck:
    """Return the comparison as the contract has it."""
    return PlanCheck.model_validate(status.model_dump(include={"memory", "step_time"}))


def measured_training(report: TrainerReport) -> MeasuredTraining | None:
    """Return the measurements in the report of a training; None if it has none that can be read."""
    section = report.metrics.get(report.stage.value)
    if not isinstance(section, dict) or "measured" not in section:
        return None
    try:
        return MeasuredTraining.model_validate(section["measured"])
    except ValidationError:
        return None


def _planned(plan: PlanStatus) -> PlannedTraining:
    terms = dict(plan.memory_per_device)
    return PlannedTraining(
        memory_bytes=terms.pop(TOTAL, None),
        memory_terms=terms,
        step_seconds=plan.estimated.step_seconds,
        step_parts=plan.estimated.step_parts,
    )


def _status(comparison: Comparison | None) -> ComparisonStatus | None:
    return None if comparison is None else ComparisonStatus(**comparison.model_dump())
