"""Figures of a plan that its training is measured by."""

from __future__ import annotations

from finetune_contract.plan_check import PlannedTraining
from finetune_operator.planning.plan_types import JobPlan


def planned_training(plan: JobPlan) -> PlannedTraining | None:
    """Return the estimates of the plan's training; None without the built-in loop, or without estimates."""
    memory, estimate = plan.memory, plan.estimate
    if plan.trainer.training is None or (memory is None and estimate.step_seconds is None):
        return None
    return PlannedTraining(
        memory_bytes=None if memory is None else memory.total_bytes,
        memory_terms={} if memory is None else {term.name: term.bytes for term in memory.terms},
        step_seconds=estimate.step_seconds,
        step_parts=estimate.step_parts,
    )
