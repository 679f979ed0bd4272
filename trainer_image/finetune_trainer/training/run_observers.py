"""Reports of a run: history, progress, log lines."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from finetune_contract.report import TimePart
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.report.history import History
from finetune_trainer.training.loop_parts import StepReport
from finetune_trainer.training.timing import rounded

log = logging.getLogger(__name__)

RECENT_STEPS = 20
"""Steps whose mean loss and rates are the progress."""
_LOG_INTERVAL_SECONDS = 10.0


@dataclass
class SilentObserver:
    """Observer of all ranks but the first: it only updates the progress, for monitoring of this process."""

    progress: ProgressSink
    total_steps: int

    def on_step(self, report: StepReport) -> None:
        """Update the progress."""
        self.progress.update(report.step, self.total_steps)

    def on_validation_batch(self, step: int, done: int) -> None:
        """Update the progress."""
        self.progress.update(step, self.total_steps)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def on_pause(self, step: int, parts: Mapping[TimePart, float]) -> None:
        """Do nothing."""


@dataclass
class RunObserver:
    """Observer of rank 0."""

    history: History
    progress: ProgressSink
    total_steps: int
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    _logged_at: float = float("-inf")
    _recent: deque[StepReport] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _figures: dict[str, float] = field(default_factory=dict)
    """Figures for the progress, means over the recent steps: those of a single step go up and down."""

    def on_step(self, report: StepReport) -> None:
        """Write a history line, update the progress, and log a line every ten seconds."""
        rates = report.rates
        self.history.add(
            {
                "step": report.step,
                "epoch": round(report.epoch, 6),
                "loss": report.loss,
                "learning_rate": report.learning_rate,
                "grad_norm": report.grad_norm,
                **{name: round(rate, 3) for name, rate in rates.items()},
                "tokens": report.tokens,
                "computed_tokens": report.computed_tokens,
                "seconds": rounded(report.parts),
            }
        )
        self._recent.append(report)
        seconds = sum(step.seconds for step in self._recent)
        self._figures = {
            "epoch": report.epoch,
            "loss": fmean(step.loss for step in self._recent),
            "samples_per_second": sum(step.samples for step in self._recent) / seconds,
            "tokens_per_second": sum(step.tokens for step in self._recent) / seconds,
        }
        self.progress.update(report.step, self.total_steps, **self._figures, **self.validation)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_SECONDS or report.step == self.total_steps:
            self._logged_at = now
            rate = rates["samples_per_second"]
            log.info("step %d/%d  loss %.4f  %.1f samples/s", report.step, self.total_steps, report.loss, rate)

    def on_validation_batch(self, step: int, done: int) -> None:
        """Update the progress: a long evaluation is no standstill."""
        self.progress.update(step, self.total_steps, **self._figures, **self.validation, validation_batches=done)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics, to report them with the progress from now on."""
        self.validation = {f"eval_{name}": value for name, value in metrics.items()}
        self.history.add({"step": step, **self.validation})
        log.info("step %d  %s", step, "  ".join(f"{name} {value:.4f}" for name, value in self.validation.items()))

    def on_pause(self, step: int, parts: Mapping[TimePart, float]) -> None:
        """Write a history line."""
        self.history.add({"step": step, "seconds": rounded(parts)})
