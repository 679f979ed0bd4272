"""Metrics on the validation split during training, by the sharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.core.distributed import gathered
from finetune_trainer.tasks.task_protocol import Answer
from finetune_trainer.training.rank_shards import RankShards
from finetune_trainer.training.reference_answers import ReferenceAnswers

if TYPE_CHECKING:
    import torch

ROLE = "validation"


class Validation:
    """The validation split, distributed over the ranks."""

    def __init__(self, shards: RankShards, reference: ReferenceAnswers) -> None:
        self._shards = shards
        self._split = shards.split(ROLE)
        self._reference = reference

    def metrics(
        self, model: torch.nn.Module, device: torch.device, on_batch: Callable[[int], None]
    ) -> dict[str, float]:  # fmt: skip
        """Return the loss (without label smoothing) and the task's metrics, the same on every rank. Keeps the mode;
        `on_batch` is called with the number of each batch.
        """
        self._split = self._split.fitted(model, device)
        mine = []
        for number, answered in enumerate(self._split.answers(model, device), start=1):
            mine.append(answered)
            on_batch(number)
        split = self._shards.prepared.of(ROLE)
        answers: list[Answer] = [{}] * len(split.position)
        everyone, slices = gathered(mine), self._shards.tokens.count
        # Neighbouring ranks have slices of the same features, in order.
        for first in range(0, len(everyone), slices):
            for batch in zip(*everyone[first : first + slices], strict=True):
                wanted, _ = batch[0]
                for at, *parts in zip(wanted.tolist(), *(part for _, part in batch), strict=True):
                    answers[at] = {**_joined(parts), **self._reference.of(ROLE, at)}
        return self._shards.task.scoring.score(answers, split)


def _joined(parts: Sequence[Answer]) -> Answer:
    """Join the answers to a feature's slices."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
