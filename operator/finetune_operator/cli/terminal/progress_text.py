"""Progress of a stage in one line, by the trainer's own report or by the status of a job."""

from __future__ import annotations

from typing import Protocol

from finetune_contract.choices import Stage
from finetune_operator.spec.quantities import human_seconds

STALE_SECONDS = 60
"""Seconds after which progress is shown with its age: processes report every few seconds."""


class StageProgress(Protocol):
    """Figures of `Progress` and `ProgressStatus`; None: unknown."""

    @property
    def step(self) -> int | None:
        """Optimizer step, or row."""

    @property
    def total_steps(self) -> int | None:
        """Total of `step`."""

    @property
    def percent(self) -> int | None:
        """Percentage done."""

    @property
    def loss(self) -> float | None:
        """Training loss."""

    @property
    def samples_per_second(self) -> float | None:
        """Rows per second over all processes."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all processes."""

    @property
    def remaining_seconds(self) -> float | None:
        """Expected seconds to the end of the stage."""


def figures(progress: StageProgress, stage: Stage | None) -> str:
    """Return step or row, loss, speed and time left, as far as known. `stage`: the running one."""
    trains = stage is None or stage is Stage.TRAIN
    parts = []
    if progress.step is not None:
        of = "" if progress.total_steps is None else f"/{progress.total_steps:,}"
        parts.append(f"{'step' if trains else 'row'} {progress.step:,}{of}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.samples_per_second:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.tokens_per_second and not trains:  # of generated texts
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.remaining_seconds is not None and (progress.percent or 0) < 100:
        parts.append(f"{human_seconds(progress.remaining_seconds)} left")
    return "  ".join(parts)


def figures_with_age(progress: StageProgress, stage: Stage | None, age: float | None) -> str:
    """Return the percentage, `figures`, and the age of the report in seconds if it is high. `age`: None for a stage
    that does not report any more.
    """
    parts = [] if progress.percent is None else [f"{progress.percent} %"]
    parts += [shown] if (shown := figures(progress, stage)) else []
    if age is not None and age > STALE_SECONDS:
        parts.append(f"(reported {human_seconds(age)} ago)")
    return "  ".join(parts)
