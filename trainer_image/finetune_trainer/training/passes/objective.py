"""Loss that a training minimises: the task's own, the model's, or the model's with smoothed labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune_trainer.core.token_shards import FOLLOWING, LABELS, NOT_LEARNT
from finetune_trainer.tasks.task_protocol import Head, LabelPlace, Objective


class ModelLoss:
    """Loss that the model computes from its labels."""

    compares: tuple[str, ...] = ()
    of_rows: Objective | None = None

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch."""
        loss: torch.Tensor = model(**batch).loss
        return loss


@dataclass(frozen=True)
class SmoothedLoss:
    """Cross-entropy with smoothed labels, from all logits of a batch: that of transformers' `LabelSmoother`."""

    model: PreTrainedModel
    """The model without wrappers."""
    smoothing: float
    """Share of the target that is spread over all classes."""
    place: LabelPlace
    compares: tuple[str, ...] = ()
    of_rows: Objective | None = None

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch."""
        given = {name: value for name, value in batch.items() if name not in LABELS}
        labels = batch["labels"]
        if self.place == "decoder":
            # A model derives its decoder's inputs from the labels, and would compute its own loss, too.
            given["decoder_input_ids"] = cast(Any, self.model).prepare_decoder_input_ids_from_labels(labels=labels)
        if self.place == "next":
            labels = following(batch)
        answer = model(**given)
        loss = smoothed(answer.logits, labels, self.smoothing)
        if getattr(answer, "aux_loss", None) is not None:
            # A mixture's model adds it to the loss of its labels.
            loss = loss + self.model.config.router_aux_loss_coef * answer.aux_loss
        return loss


def following(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return for each token the label of the next one, shape (rows, tokens)."""
    if batch.get(FOLLOWING) is not None:
        shifted: torch.Tensor = batch[FOLLOWING]
        return shifted
    return nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NOT_LEARNT)


def smoothed(logits: torch.Tensor, labels: torch.Tensor, smoothing: float, reduction: str = "mean") -> torch.Tensor:
    """Return the cross-entropy of `logits`, shape (..., classes), with labels at the same places, in float32.

    The target is 1 - `smoothing` for the label, and `smoothing` / classes in addition for each class: Szegedy et al.,
    "Rethinking the Inception Architecture for Computer Vision", 2016, section 7.
    """
    return nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=NOT_LEARNT,
        reduction=reduction,
        label_smoothing=smoothing,
    )


def objective_of(head: Head, model: PreTrainedModel, smoothing: float, *, in_chunks: bool) -> Objective:
    """Return the loss that a training minimises. `in_chunks`: `model` computes it in chunks (`ChunkedLoss`),
    with smoothed labels, or that of each row for the task's own objective.
    """
    if head.objective is not None:
        return (in_chunks and head.objective.of_rows) or head.objective
    place = head.label_place
    return SmoothedLoss(model, smoothing, place) if smoothing and place and not in_chunks else ModelLoss()
