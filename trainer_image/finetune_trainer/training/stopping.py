"""Early stopping on a validation metric, and the weights of the best evaluation."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_contract.layout import FailureClass
from finetune_contract.metrics import LOWER_IS_BETTER
from finetune_contract.trainer_job import EarlyStopping
from finetune_trainer.core.distributed import ProcessWorld, barrier
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import sha256_of
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.strategies.strategy_protocol import Placed, Strategy

log = logging.getLogger(__name__)


class NeverStop:
    """Never stops before the last step."""

    def should_stop(self, step: int, metrics: Mapping[str, float], placed: Placed) -> bool:
        """Return False."""
        return False

    @property
    def stopped(self) -> bool:
        """Return False."""
        return False

    @property
    def best_step(self) -> int | None:
        """Return None: the last weights are the result."""
        return None

    def best_weights(self) -> Path | None:
        """Return None: the last weights are the result."""
        return None

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class EarlyStopper:
    """Stops after `patience` evaluations without improvement and keeps the weights of the best one.

    A smaller value is better for metrics in LOWER_IS_BETTER, a greater one for all others.
    """

    def __init__(self, settings: EarlyStopping, folder: Path, world: ProcessWorld, strategy: Strategy) -> None:
        self._settings = settings
        self._folder = folder
        self._world = world
        self._strategy = strategy
        self._best: float | None = None
        self._best_step = 0
        self._best_sha256: str | None = None
        self._without_improvement = 0

    def should_stop(self, step: int, metrics: Mapping[str, float], placed: Placed) -> bool:
        """Decide, on every rank from the same figures; rank 0 writes the weights."""
        name = self._settings.metric
        better = self._best is None or (
            metrics[name] < self._best if name in LOWER_IS_BETTER else metrics[name] > self._best
        )
        if not better:
            self._without_improvement += 1
            return self.stopped
        self._best, self._best_step, self._without_improvement = metrics[name], step, 0
        self._write(placed)
        barrier()
        return False

    @property
    def stopped(self) -> bool:
        """Return whether the patience is used up."""
        return self._without_improvement >= self._settings.patience

    def _write(self, placed: Placed) -> None:
        """Write the new weights, then delete the others: a run that is killed here still has its best weights."""
        path = self._folder / f"step-{self._best_step}.safetensors"
        partial = path.with_suffix(".partial")
        if self._world.is_main:
            self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with storage_errors_named(partial, "keeping the best weights"):
                entry = self._strategy.write_weights(placed, partial)
            if entry is None:
                return
            self._best_sha256 = entry.sha256
            os.replace(partial, path)
        finally:
            if self._world.is_main:
                partial.unlink(missing_ok=True)
        for other in self._folder.iterdir():
            if other != path:
                other.unlink()

    @property
    def best_step(self) -> int | None:
        """Return the step whose weights are the result; None when nothing was evaluated."""
        return None if self._best is None else self._best_step

    def _path(self, step: int) -> Path:
        """Return the file with the weights of `step`; earlier releases wrote torch's."""
        earlier = self._folder / f"step-{step}.pt"
        return earlier if earlier.exists() else self._folder / f"step-{step}.safetensors"

    def best_weights(self) -> Path | None:
        """Return the file with the best weights; None when nothing was evaluated. For rank 0, as the others keep no
        hash. Raise StageError CHECKPOINT when the file was changed since it was written.
        """
        if self._best is None:
            return None
        path = self._path(self._best_step)
        if self._best_sha256 is not None and (path.is_symlink() or sha256_of(path) != self._best_sha256):
            raise StageError(
                FailureClass.CHECKPOINT,
                "BestWeightsChanged",
                f"{path} has changed since it was written.",
                "Delete it and start the job again: the weights of the last step are then the result.",
            )
        return path

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, with the hash of the weights, which are not in the checkpoint."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "best_sha256": self._best_sha256,
            "without_improvement": self._without_improvement,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. When the best weights are missing (those of a later step may have replaced them
        after the checkpoint was written), the next evaluation counts as the best.
        """
        if state["best"] is not None and not self._path(state["best_step"]).exists():
            log.warning("The best weights, of step %d, are missing; early stopping restarts.", state["best_step"])
            return
        self._best, self._best_step = state["best"], state["best_step"]
        self._best_sha256 = state.get("best_sha256")  # earlier releases kept none
        self._without_improvement = state["without_improvement"]
