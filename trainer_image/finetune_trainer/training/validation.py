"""Metrics on the validation split in mid-training, on the model as it is spread.

Every rank runs the same number of batches, because with FSDP and ZeRO-3 a forward pass gathers parameters from all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.tasks.base import Answer, TaskModule

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Validation:
    """The validation split, dealt out to the ranks."""

    def __init__(self, prepared: PreparedData, task: TaskModule, *, batch_tokens: int, rank: int, ranks: int) -> None:
        self._prepared = prepared
        self._task = task
        batches = inference_batches(prepared.lengths("validation"), batch_tokens=batch_tokens)
        rounds = -(-len(batches) // ranks)
        # Ranks without a batch of their own in the last round repeat the last one; equal answers overwrite equal
        # answers.
        self._mine = [batches[min(each * ranks + rank, len(batches) - 1)] for each in range(rounds)]

    def metrics(
        self, model: torch.nn.Module, device: torch.device, told: Callable[[int], None]
    ) -> dict[str, float]:  # fmt: skip
        """Loss (without label smoothing) and the task's metrics, the same on every rank. Keeps the mode; `told` hears
        of each batch by its number.
        """
        training = model.training
        model.eval()
        mine: list[tuple[NDArray[np.int64], list[Answer]]] = []
        with torch.no_grad():
            for number, wanted in enumerate(self._mine, start=1):
                features = self._prepared.features("validation", wanted)
                batch = self._task.collate(features, pad_token_id=self._prepared.pad_token_id)
                placed = {name: value.to(device) for name, value in batch.items()}
                mine.append((wanted, self._task.answer(model, placed, features)))
                told(number)
        model.train(training)
        return self._score(mine)

    def _score(self, mine: list[Any]) -> dict[str, float]:
        everyone: list[Any] = [mine]
        if torch.distributed.is_initialized():
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, mine)
        split = self._prepared.of("validation")
        answers: list[Answer] = [{}] * len(split.position)
        for rank in everyone:
            for wanted, said in rank:
                for at, answer in zip(wanted, said, strict=True):
                    answers[at] = answer
        return self._task.score(answers, split)
