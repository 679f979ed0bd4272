"""Loss that a training minimises: the model's own, the same with smoothed labels, or the task's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers.trainer_pt_utils import LabelSmoother

from finetune_trainer.tasks.task_protocol import Objective


class ModelLoss:
    """Loss that the model computes from its labels."""

    compares: tuple[str, ...] = ()

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch."""
        loss: torch.Tensor = model(**batch).loss
        return loss


class SmoothedLoss:
    """Cross-entropy with smoothed labels, for models whose logits and labels are at the same places."""

    compares: tuple[str, ...] = ()

    def __init__(self, smoothing: float) -> None:
        self._smoother = LabelSmoother(epsilon=smoothing)

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch."""
        answer = model(**{name: value for name, value in batch.items() if name != "labels"})
        loss: torch.Tensor = self._smoother(answer, batch["labels"])
        return loss


def objective_of(own: Objective | None, smoothing: float) -> Objective:
    """Return the task's own objective, or the model's loss."""
    if own is not None:
        return own
    return SmoothedLoss(smoothing) if smoothing else ModelLoss()
