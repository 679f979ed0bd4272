"""Time that a training stands still between steps: to save checkpoints, and to validate.

The counts follow the trainer (`finetune_trainer.training.saving`, `TrainingLoop._validate_and_save`). Validation is
known once the data are prepared. Not counted: loading, the trained model's own files, and the evaluation after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_contract.trainer_job import MOST_SAVING, CheckpointSchedule, Strategy
from finetune_operator.api.quantities import human_seconds
from finetune_operator.planning.adapter_sizes import trained_parameters
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.memory import optimizer_state_bytes, weight_bytes

DIGEST_BYTES = 1e9
"""Bytes that a process reads in a second for their sha256: 0.4 GB/s without the CPU's instructions for it, 1 to 2 with
them (`openssl speed sha256`).
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

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the seconds of each kind of pause that there is."""
        found = {
            CHECKPOINTS: self.checkpoints * self.checkpoint_seconds,
            VALIDATION: (self.validations or 0) * self.validation_seconds,
        }
        return {name: seconds for name, seconds in found.items() if seconds}

    @property
    def words(self) -> str:
        """Describe the pauses: `4 checkpoints take 2 min, 2 validations 8 s`."""
        parts = self.parts
        texts = []
        if CHECKPOINTS in parts:
            one = self.checkpoints == 1
            texts.append(f"{self.checkpoints} checkpoint{'s' * (not one)} of {_short(self.checkpoint_seconds)}")
        if VALIDATION in parts and self.validations is not None:
            one = self.validations == 1
            texts.append(f"{self.validations} validation{'s' * (not one)} of {_short(self.validation_seconds)}")
        left_out = "loading and the final evaluation are not counted"
        if self.validations is None:
            left_out = "loading, validation of data that are not prepared yet and the final evaluation are not counted"
        return "; ".join((*((f"with {' and '.join(texts)}",) if texts else ()), left_out))


def _short(seconds: float) -> str:
    return human_seconds(seconds) if seconds >= 1 else "less than 1 s"


def checkpoint_bytes(draft: Draft, strategy: Strategy) -> int:
    """Return the bytes of a checkpoint: trained weights and optimizer state of all processes, with DeepSpeed also the
    fp32 copies of the weights that it steps.
    """
    trained = trained_parameters(draft.model, draft.adapter).trained
    state = optimizer_state_bytes(draft.training.optimizer, draft.model.hidden_size)
    master = 4 if strategy.name == "deepspeed" else 0
    return int((weight_bytes(strategy, decided(draft.precision)) + master + state) * trained)


def _save_seconds(draft: Draft, strategy: Strategy) -> float:
    """Return the time of one checkpoint: all processes write their parts at once, and read them for their sha256."""
    size, world = checkpoint_bytes(draft, strategy), decided(draft.world)
    rate = draft.settings.planning.save_megabytes_per_second * 1e6
    return size / (rate * world.nodes) + size / (DIGEST_BYTES * world.size)


def checkpoint_count(schedule: CheckpointSchedule, steps: int, step_seconds: float, save_seconds: float) -> int:
    """Return the checkpoints of a run of `steps` steps."""
    if schedule.every_minutes is not None:
        return int(steps * step_seconds // (60 * schedule.every_minutes))
    by_steps, left = divmod(steps, schedule.every_steps)
    if schedule.within_minutes is None:
        return by_steps
    # One by the clock after as much work without one, or later where saving takes longer than allowed.
    pause = max(60 * schedule.within_minutes, save_seconds / MOST_SAVING)
    between, after = (int(count * step_seconds // pause) for count in (schedule.every_steps, left))
    return by_steps * (1 + between) + after


def pauses(draft: Draft, step_seconds: float, token_seconds: float) -> Pauses:
    """Return the pauses of a finished draft; `token_seconds`: time of a forward pass of all processes for a token."""
    steps, strategy = decided(draft.steps), decided(draft.strategy)
    saving = _save_seconds(draft, strategy)
    count = checkpoint_count(decided(draft.checkpoints), steps.total, step_seconds, saving)
    if draft.data is None:
        return Pauses(count, saving, None)
    split = draft.data.splits.get("validation")
    if split is None:
        return Pauses(count, saving, 0)
    return Pauses(count, saving, math.ceil(steps.total / steps.per_epoch), split.tokens * token_seconds)
