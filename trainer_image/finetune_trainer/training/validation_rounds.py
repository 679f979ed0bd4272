"""Metrics on the validation split in mid-training, on the model as it is spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.distributed import gathered
from finetune_trainer.tasks.task_protocol import Answer
from finetune_trainer.training.dealing import Deal
from finetune_trainer.training.reference_answers import Said

if TYPE_CHECKING:
    import torch

ROLE = "validation"


class Validation:
    """The validation split, dealt out to the ranks."""

    def __init__(self, deal: Deal, reference: Said) -> None:
        self._deal = deal
        self._dealt = deal.split(ROLE)
        self._reference = reference

    def metrics(
        self, model: torch.nn.Module, device: torch.device, told: Callable[[int], None]
    ) -> dict[str, float]:  # fmt: skip
        """Loss (without label smoothing) and the task's metrics, the same on every rank. Keeps the mode; `told` hears
        of each batch by its number.
        """
        mine = []
        for number, answered in enumerate(self._dealt.answers(model, device), start=1):
            mine.append(answered)
            told(number)
        split = self._deal.prepared.of(ROLE)
        answers: list[Answer] = [{}] * len(split.position)
        everyone, slices = gathered(mine), self._deal.tokens.count
        # Neighbours have slices of the same features, in their order.
        for first in range(0, len(everyone), slices):
            for batch in zip(*everyone[first : first + slices], strict=True):
                wanted, _ = batch[0]
                for at, *parts in zip(wanted.tolist(), *(said for _, said in batch), strict=True):
                    answers[at] = {**_joined(parts), **self._reference.of(ROLE, at)}
        return self._deal.task.score(answers, split)


def _joined(parts: Sequence[Answer]) -> Answer:
    """One answer of those for its slices."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
