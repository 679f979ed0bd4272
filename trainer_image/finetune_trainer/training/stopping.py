"""Early stopping on a validation metric, and the weights of the best evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune_contract.job import EarlyStopping
from finetune_contract.layout import FailureClass
from finetune_trainer.distributed import ProcessWorld
from finetune_trainer.failures import StageError

if TYPE_CHECKING:
    from finetune_trainer.training.loop import TrainingLoop


class NeverStop:
    """Trains to the last step."""

    def should_stop(self, step: int, metrics: Mapping[str, float], loop: TrainingLoop) -> bool:
        """No."""
        return False

    def best_weights(self) -> Path | None:
        """The last weights are the result."""
        return None

    def state(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class EarlyStopper:
    """Stops after `patience` evaluations without improvement and keeps the weights of the best one.

    A smaller `loss` is better, of any other metric a greater value.
    """

    def __init__(self, settings: EarlyStopping, folder: Path, world: ProcessWorld) -> None:
        self._settings = settings
        self._folder = folder
        self._world = world
        self._best: float | None = None
        self._best_step = 0
        self._without_improvement = 0

    def should_stop(self, step: int, metrics: Mapping[str, float], loop: TrainingLoop) -> bool:
        """Every rank decides from the same figures; rank 0 writes the weights."""
        name = self._settings.metric
        if name not in metrics:
            raise StageError(
                FailureClass.CONFIG,
                "UnknownMetric",
                f"training.earlyStopping.metric is {name!r}, which is not measured.",
                f"Choose one of {', '.join(sorted(metrics))}.",
            )
        better = self._best is None or (metrics[name] < self._best if name == "loss" else metrics[name] > self._best)
        if not better:
            self._without_improvement += 1
            return self._without_improvement >= self._settings.patience
        self._best, self._best_step, self._without_improvement = metrics[name], step, 0
        state = loop.parts.strategy.model_state(loop.placed)
        if self._world.is_main:
            self._write(state)
        return False

    def _write(self, state: dict[str, Any]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        torch.save(state, self._path(self._best_step))

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}.pt"

    def best_weights(self) -> Path | None:
        """The file with the best weights; None when it is gone."""
        path = self._path(self._best_step)
        return path if path.exists() else None

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"best": self._best, "best_step": self._best_step, "without_improvement": self._without_improvement}

    def restore(self, state: dict[str, Any]) -> None:
        """From `state`."""
        self._best, self._best_step = state["best"], state["best_step"]
        self._without_improvement = state["without_improvement"]
