"""Ratios of measured to planned values over a namespace's finished jobs, by model, strategy and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from finetune_operator.jobs.outcomes.status import ended
from finetune_operator.jobs.state.plan_checks import TOTAL
from finetune_operator.plan.hardware.assumed_hardware import UNKNOWN_GPU
from finetune_operator.plan.time.learned import CORRECTION, LEAST_JOBS
from finetune_operator.plan.types.plan_types import LearnedRatios
from finetune_operator.spec.types import ComparisonStatus, FineTuneJobStatus

MOST_GROUPS = 64
"""Groups in a job's status; those of most jobs stay."""


def learned_from(statuses: Iterable[FineTuneJobStatus]) -> tuple[LearnedRatios, ...]:
    """Return the medians of each group of at least `LEAST_JOBS` jobs that succeeded, in a fixed order."""
    groups: dict[tuple[str, int, str, str], list[FineTuneJobStatus]] = defaultdict(list)
    for status in statuses:
        if (key := _key(status)) is not None:
            groups[key].append(status)
    ratios = [_ratios(key, group) for key, group in groups.items() if len(group) >= LEAST_JOBS]
    ratios.sort(key=lambda one: (-one.jobs, one.model_type, one.parameters, one.strategy, one.device))
    return tuple(ratios[:MOST_GROUPS])


def _key(status: FineTuneJobStatus) -> tuple[str, int, str, str] | None:
    """Return model type, parameters, strategy and device of a job that succeeded and was compared with its plan."""
    check, facts = status.plan_check, None if status.measured is None else status.measured.model
    if ended(status) != "Succeeded" or check is None or facts is None or check.device in (None, UNKNOWN_GPU):
        return None
    kind, parameters = facts.get("modelType"), facts.get("parameters")
    if not isinstance(kind, str) or not isinstance(parameters, int):
        return None
    return kind, parameters, check.strategy, str(check.device)


def _ratios(key: tuple[str, int, str, str], group: list[FineTuneJobStatus]) -> LearnedRatios:
    model_type, parameters, strategy, device = key
    times = [ratio for status in group if (ratio := _step_ratio(status)) is not None]
    memory = [ratio for status in group if (ratio := _memory_ratio(status)) is not None]
    return LearnedRatios(
        model_type=model_type,
        parameters=parameters,
        strategy=strategy,
        device=device,
        jobs=len(group),
        # A ratio of 0.00 is no measurement.
        step_time=round(median(times), 2) or None if len(times) >= LEAST_JOBS else None,
        memory=round(median(memory), 2) or None if len(memory) >= LEAST_JOBS else None,
    )


def _step_ratio(status: FineTuneJobStatus) -> float | None:
    """Return the ratio to the plan's own estimate: without the correction that it had learned already."""
    comparison = _of(status, "step_time")
    learned = None if status.plan is None else status.plan.estimated.time_factor
    return None if comparison is None else comparison.ratio * (learned or 1.0)


def _memory_ratio(status: FineTuneJobStatus) -> float | None:
    comparison = _of(status, "memory")
    terms = {} if status.plan is None else status.plan.memory_per_device
    if comparison is None or not terms.get(TOTAL):
        return None
    return comparison.ratio * terms[TOTAL] / (terms[TOTAL] - terms.get(CORRECTION, 0))


def _of(status: FineTuneJobStatus, name: str) -> ComparisonStatus | None:
    comparison: ComparisonStatus | None = getattr(status.plan_check, name, None)
    return comparison
