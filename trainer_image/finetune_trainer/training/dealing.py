"""Distribution of a split's features over the ranks, and the sharded model's answers to them.

Every rank runs the same number of batches, because with FSDP and ZeRO-3 a forward pass gathers parameters from all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.slices import WHOLE, TokenSlice
from finetune_trainer.tasks.task_protocol import Answer, TaskModule

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Deal:
    """Distribution of splits over the data-parallel ranks."""

    prepared: PreparedData
    task: TaskModule
    batch_tokens: int
    """Limit of padded tokens in a batch."""
    rank: int
    ranks: int
    tokens: TokenSlice = WHOLE
    """Slice of each feature's tokens in this process."""

    def split(self, role: str, wanted: NDArray[np.int64] | None = None) -> DealtSplit:
        """Distribute the features of a split with the indices `wanted`, or all, in batches of similar widths."""
        widths = self.task.widths(self.prepared, role)
        wanted = np.arange(len(widths)) if wanted is None else wanted
        batches = [wanted[each] for each in inference_batches(widths[wanted], batch_tokens=self.batch_tokens)]
        rounds = -(-len(batches) // self.ranks)
        # Ranks without a batch of their own in the last round repeat the last one; equal answers overwrite equal
        # answers.
        mine = [batches[min(each * self.ranks + self.rank, len(batches) - 1)] for each in range(rounds)]
        return DealtSplit(self, role, len(widths), wanted, mine)


@dataclass(frozen=True)
class DealtSplit:
    """A rank's share of a split."""

    deal: Deal
    role: str
    features: int
    """Number of features of the whole split."""
    wanted: NDArray[np.int64]
    """Indices of the distributed features, over all ranks."""
    mine: list[NDArray[np.int64]]
    """Batches of this rank."""

    def answers(
        self, model: torch.nn.Module, device: torch.device
    ) -> Iterator[tuple[NDArray[np.int64], list[Answer]]]:  # fmt: skip
        """Yield for each of this rank's batches the indices of the features, and an answer for each, for this process's
        tokens. Keeps the model's mode.
        """
        training = model.training
        model.eval()
        try:
            for wanted in self.mine:
                features = self.deal.prepared.features(self.role, wanted)
                whole = self.deal.task.collate(features, pad_token_id=self.deal.prepared.pad_token_id)
                batch = self.deal.tokens.of(whole)
                placed = {name: value.to(device) for name, value in batch.items()}
                with torch.no_grad():
                    answers = self.deal.task.answer(model, placed, features)
                yield wanted, answers
        finally:
            model.train(training)
