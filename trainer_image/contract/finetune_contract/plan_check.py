"""Comparison of a plan's estimates with the measurements of the training that it planned.

The trainer compares for its report, the operator for the job's status and metrics, and the `finetune` command for its
output; all with `check_plan`. A ratio is measured / planned: above 1 the plan was too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from finetune_contract.byte_text import human_bytes
from finetune_contract.contract_models import Count, Message, Seconds
from finetune_contract.report import TimePart

OFF_SHARE = 0.15
"""Difference between measured and planned, as a fraction of planned, above which an estimate counts as off."""
FAR_OFF = 2.0
"""Factor between measured and planned above which an estimate is an event."""
PROCESS, ALLOCATOR = "process", "allocator"
"""Terms of a plan's memory that are no tensors: what a process takes before it has any, and losses of the allocator."""
TENSORS, TRAINING = "tensors", "training"
"""Sums of a plan's memory terms that can be measured: all but `PROCESS` and `ALLOCATOR`, and all but `PROCESS`."""
OPTIMIZER: Literal["optimizer"] = "optimizer"
PASSES = "passes"
"""Parts of a step that can be measured: the update of weights, and all else that a plan counts."""
_PASS_PARTS: tuple[TimePart, ...] = ("forward", "backward", "forward_backward", "communication")


class PlannedTraining(Message):
    """Estimates of the plan that an attempt runs; the content of `estimate.json`."""

    memory_bytes: int | None = Field(default=None, ge=0)
    """Memory of one device; of one process on CPU."""
    memory_terms: dict[str, int] = Field(default_factory=dict)
    """Bytes of each term of the memory."""
    step_seconds: float | None = Field(default=None, ge=0)
    """Time of an optimizer step."""
    step_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds of each part of a step; empty where the plan knows only the sum."""


class MeasuredTraining(Message):
    """Measurements of one attempt at a training, of all of its processes."""

    steps: Count = 0
    """Steps that the time is the median of; those of earlier attempts do not count."""
    memory_bytes: Count
    """Peak memory of the fullest device, of which torch reserves a part; on CPU the peak resident set of a process."""
    memory_terms: dict[str, Count] = Field(default_factory=dict)
    """Bytes of the parts of `memory_bytes` that can be measured apart; they overlap."""
    step_seconds: Seconds | None = None
    """Median time of an optimizer step on rank 0; without evaluation and checkpoints."""
    step_parts: dict[TimePart, Seconds] = Field(default_factory=dict)
    """Median seconds of each part of a step."""
    with_communication: tuple[TimePart, ...] = ()
    """Parts whose communication cannot be separated from their computation."""
    machine_shared: bool = False
    """True if a process's machine had more runnable processes than cores, or its CPU limit stopped it often."""


class Comparison(Message):
    """One estimate and its measurement."""

    planned: float = Field(gt=0)
    measured: float = Field(ge=0)
    ratio: float = Field(ge=0)
    """`measured` / `planned`."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Ratio of each term that is both planned and measured."""

    @property
    def off(self) -> bool:
        """True if the estimate was wrong by more than `OFF_SHARE`."""
        return abs(self.ratio - 1) > OFF_SHARE

    @property
    def far_off(self) -> bool:
        """True if the estimate was wrong by more than the factor `FAR_OFF`."""
        return not 1 / FAR_OFF <= self.ratio <= FAR_OFF


class PlanCheck(Message):
    """Estimates of a plan against what its training measured. None: not estimated, or not measured."""

    memory: Comparison | None = None
    """Bytes of one device."""
    step_time: Comparison | None = None
    """Seconds of one optimizer step."""

    def off(self) -> tuple[str, ...]:
        """Return a sentence for each estimate that was off."""
        return tuple(text for text, comparison in self._sentences() if comparison.off)

    def far_off(self) -> tuple[str, ...]:
        """Return a sentence for each estimate that was far off."""
        return tuple(text for text, comparison in self._sentences() if comparison.far_off)

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each estimate."""
        return tuple(text for text, _ in self._sentences())

    def _sentences(self) -> tuple[tuple[str, Comparison], ...]:
        sentences = []
        if (memory := self.memory) is not None:
            amounts = f"{human_bytes(memory.planned)} planned, {human_bytes(memory.measured)} measured per device"
            sentences.append((f"Plan's memory was {deviation(memory.ratio)}: {amounts}.", memory))
        if (step := self.step_time) is not None:
            amounts = f"{human_step(step.planned)} planned, {human_step(step.measured)} measured"
            sentences.append((f"Plan's time of a step was {deviation(step.ratio)}: {amounts}.", step))
        return tuple(sentences)


def deviation(ratio: float) -> str:
    """Describe an estimate by measured / planned: `24 % too low`; the percentage is that of the planned value."""
    percent = round(100 * abs(ratio - 1))
    if not percent:
        return "right to 1 %"
    if ratio >= 2:
        return f"too low by a factor of {_figure(ratio)}"
    return f"{percent} % too {'low' if ratio > 1 else 'high'}"


def check_plan(planned: PlannedTraining, measured: MeasuredTraining) -> PlanCheck:
    """Compare the estimates of a plan with the measurements of its training; nothing for an attempt without a step of
    its own, which only wrote the model of an earlier one.
    """
    if not measured.steps:
        return PlanCheck()
    return PlanCheck(
        memory=_compared(
            planned.memory_bytes, measured.memory_bytes, memory_groups(planned), dict(measured.memory_terms)
        ),
        step_time=_compared(
            planned.step_seconds, measured.step_seconds, _planned_parts(planned), _measured_parts(measured)
        ),
    )


def _compared(
    planned: float | None,
    measured: float | None,
    planned_terms: Mapping[str, float],
    measured_terms: Mapping[str, float],
) -> Comparison | None:
    if not planned or measured is None:
        return None
    terms = {
        name: round(value / planned_terms[name], 4) for name, value in measured_terms.items() if planned_terms.get(name)
    }
    return Comparison(planned=planned, measured=measured, ratio=round(measured / planned, 4), terms=terms)


def memory_groups(planned: PlannedTraining) -> dict[str, float]:
    """Return the plan's terms with their sums that can be measured."""
    terms, total = planned.memory_terms, planned.memory_bytes or 0
    process, allocator = terms.get(PROCESS, 0), terms.get(ALLOCATOR, 0)
    return {**terms, TENSORS: total - process - allocator, TRAINING: total - process}


def _planned_parts(planned: PlannedTraining) -> dict[str, float]:
    if not planned.step_parts:
        return {}
    stepping = planned.step_parts.get(OPTIMIZER, 0.0)
    return {PASSES: sum(planned.step_parts.values()) - stepping, OPTIMIZER: stepping}


def _measured_parts(measured: MeasuredTraining) -> dict[str, float]:
    """Return the parts by the plan's names; none where the optimizer's part holds communication, which a plan counts
    beside it.
    """
    parts = measured.step_parts
    if not parts or OPTIMIZER in measured.with_communication:
        return {}
    return {PASSES: sum(parts.get(name, 0.0) for name in _PASS_PARTS), OPTIMIZER: parts.get(OPTIMIZER, 0.0)}


def human_step(seconds: float) -> str:
    """Format the time of a step in seconds, below one in milliseconds."""
    return f"{_figure(seconds)} s" if seconds >= 1 else f"{_figure(1000 * seconds)} ms"


def _figure(value: float) -> str:
    """Format with three significant digits, never in powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
