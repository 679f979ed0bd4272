"""Time that a training stands still between steps: to save checkpoints, and to validate.

The counts follow the trainer (`finetune_trainer.training.saving`, `TrainingLoop._validate_and_save`). Validation is
known once the data are prepared. Not counted: loading, the trained model's own files, and the evaluation after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from finetune_contract.choices import Device
from finetune_contract.trainer_job import MOST_SAVING, CheckpointSchedule, Strategy
from finetune_operator.plan.memory.adapter_sizes import trained_parameters
from finetune_operator.plan.memory.memory_workload import weight_bytes
from finetune_operator.plan.memory.state_memory import optimizer_state_bytes
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.quantities import human_seconds

DIGEST_BYTES = 1e9
"""Bytes that a process reads in a second for their sha256: 0.4 GB/s without the CPU's instructions for it, 1 to 2 with
them (`openssl speed sha256`).
"""
COPY_BYTES: Mapping[Device, float] = {"cpu": 2e9, "cuda": 3e9}
"""Bytes that a process copies in a second into host memory that it has just been given: from there (2.6 GB/s measured
on one core, of which page faults take most), and from a GPU through pageable memory (assumed).
"""
CHECKPOINTS, VALIDATION = "checkpoints", "validation"


@dataclass(frozen=True)
class Pauses:
    """Pauses of a whole training."""

    checkpoints: int
    """Number of checkpoints."""
    checkpoint_seconds: float
    """Time of one of them."""
    validations: int | None
    """Number of validations; None: not known before the data are prepared."""
    validation_seconds: float = 0.0
    """Time of one of them."""
    last_seconds: float | None = None
    """Time of the last checkpoint, where the others are written beside the training; None: that of each."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the seconds of each kind of pause that there is."""
        parts = {
            CHECKPOINTS: self._of_checkpoints,
            VALIDATION: (self.validations or 0) * self.validation_seconds,
        }
        return {name: seconds for name, seconds in parts.items() if seconds}

    @property
    def _of_checkpoints(self) -> float:
        if self.last_seconds is None or not self.checkpoints:
            return self.checkpoints * self.checkpoint_seconds
        return (self.checkpoints - 1) * self.checkpoint_seconds + self.last_seconds

    @property
    def words(self) -> str:
        """Describe the pauses: `4 checkpoints take 2 min, 2 validations 8 s`."""
        parts = self.parts
        texts = []
        if CHECKPOINTS in parts:
            one = self.checkpoints == 1
            last = "" if self.last_seconds is None or one else f" (the last {short_seconds(self.last_seconds)})"
            seconds = self.last_seconds if one and self.last_seconds is not None else self.checkpoint_seconds
            texts.append(f"{self.checkpoints} checkpoint{'s' * (not one)} of {short_seconds(seconds)}{last}")
        if VALIDATION in parts and self.validations is not None:
            one = self.validations == 1
            texts.append(f"{self.validations} validation{'s' * (not one)} of {short_seconds(self.validation_seconds)}")
        left_out = "loading and the final evaluation are not counted"
        if self.validations is None:
            left_out = "loading, validation of data that are not prepared yet and the final evaluation are not counted"
        return "; ".join((*((f"with {' and '.join(texts)}",) if texts else ()), left_out))


def short_seconds(seconds: float) -> str:
    """Format a time that may be less than a second."""
    return human_seconds(seconds) if seconds >= 1 else "less than 1 s"


def checkpoint_bytes(draft: Draft, strategy: Strategy) -> int:
    """Return the bytes of a checkpoint: trained weights and optimizer state of all processes, with DeepSpeed also the
    fp32 copies of the weights that it steps.
    """
    trained = trained_parameters(draft.model, draft.adapter).trained
    state = optimizer_state_bytes(draft.training.optimizer, draft.model.hidden_size)
    master = 4 if strategy.name == "deepspeed" else 0
    return int((weight_bytes(strategy, decided(draft.precision)) + master + state) * trained)


def save_seconds(draft: Draft, strategy: Strategy) -> float:
    """Return the time of one checkpoint: all processes write their parts at once, and read them for their sha256."""
    size, world = checkpoint_bytes(draft, strategy), decided(draft.world)
    rate = draft.settings.planning.save_megabytes_per_second * 1e6
    return size / (rate * world.nodes) + size / (DIGEST_BYTES * world.size)


def copy_seconds(draft: Draft, strategy: Strategy) -> float:
    """Return the time in which all processes copy their parts of the state into host memory."""
    return checkpoint_bytes(draft, strategy) / (COPY_BYTES[decided(draft.world).device] * decided(draft.world).size)


def checkpoint_count(
    schedule: CheckpointSchedule, steps: int, step_seconds: float, pause_seconds: float, writing_seconds: float = 0.0
) -> int:
    """Return the checkpoints of a run of `steps` steps. `writing_seconds`: of one that is written beside the training,
    before whose end no further one by the clock begins.
    """
    if schedule.every_minutes is not None:
        return int(steps * step_seconds // (60 * schedule.every_minutes))
    by_steps, left = divmod(steps, schedule.every_steps)
    if schedule.within_minutes is None:
        return by_steps
    # One by the clock after as much work without one, or later where saving takes longer than allowed.
    apart = max(60 * schedule.within_minutes, pause_seconds / MOST_SAVING, writing_seconds)
    between, after = (int(count * step_seconds // apart) for count in (schedule.every_steps, left))
    return by_steps * (1 + between) + after


def pauses(draft: Draft, step_seconds: float, token_seconds: float) -> Pauses:
    """Return the pauses of a finished draft; `token_seconds`: time of a forward pass of all processes for a token."""
    steps = decided(draft.steps)
    saved = _saving(draft, step_seconds)
    if draft.data is None:
        return saved
    split = draft.data.splits.get("validation")
    if split is None:
        return replace(saved, validations=0)
    validations = math.ceil(steps.total / steps.per_epoch)
    return replace(saved, validations=validations, validation_seconds=split.tokens * token_seconds)


def _saving(draft: Draft, step_seconds: float) -> Pauses:
    """Return the pauses for checkpoints."""
    return Saving.of(draft, decided(draft.strategy), decided(draft.checkpoints).asynchronous).pauses(step_seconds)


@dataclass(frozen=True)
class Saving:
    """Checkpoints of one form of a training, whose number depends on the time of a step."""

    schedule: CheckpointSchedule
    steps: int
    """Optimizer steps of the training."""
    writing: float
    """Seconds in which one checkpoint is written."""
    copying: float | None
    """Seconds in which one is copied, where it is written beside the training; None: it is not."""

    @classmethod
    def of(cls, draft: Draft, strategy: Strategy, beside: bool) -> Saving:
        """Return the checkpoints of a draft with `strategy`; `beside`: they are written beside the training."""
        schedule, steps = decided(draft.checkpoints), decided(draft.steps).total
        copying = copy_seconds(draft, strategy) if beside else None
        return cls(schedule, steps, save_seconds(draft, strategy), copying)

    def pauses(self, step_seconds: float) -> Pauses:
        """Return the pauses for checkpoints; those for validations are unknown."""
        schedule, steps, writing = self.schedule, self.steps, self.writing
        if self.copying is None:
            return Pauses(checkpoint_count(schedule, steps, step_seconds, writing), writing, None)
        count = checkpoint_count(schedule, steps, step_seconds, self.copying, writing)
        # The next one waits for the last, and the end of the training for all.
        pause = self.copying + max(0.0, writing - steps * step_seconds / max(1, count))
        return Pauses(count, pause, None, last_seconds=writing)

    def seconds_of_step(self, step_seconds: float) -> float:
        """Return the time of a step with its share of all pauses for checkpoints."""
        return step_seconds + sum(self.pauses(step_seconds).parts.values()) / max(1, self.steps)
