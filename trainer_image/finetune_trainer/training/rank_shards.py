"""Distribution of a split's features over the ranks, and the sharded model's answers to them.

Every rank runs the same number of batches, because with FSDP and ZeRO-3 a forward pass gathers parameters from all of
them. So all halve their batches if one does not fit a GPU. Where ranks would wait for each other inside of the pass
that failed, they agree before the first batch on the largest that fits the memory of all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune_trainer.core.distributed import lowest, summed
from finetune_trainer.core.token_shards import WHOLE, TokenShard
from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.devices.pass_memory import PassMemory, fitted_tokens
from finetune_trainer.tasks.task_protocol import Answer, TaskParts

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

_LEAST_GROWTH = 1.5
"""Factor between the tokens of two probes below which a further one is not worth its time. A pass that gathers weights
takes much memory for any batch, so that few rows show little of what a full batch takes.
"""


@dataclass(frozen=True)
class RankShards:
    """Distribution of splits over the data-parallel ranks."""

    prepared: PreparedData
    task: TaskParts
    batch_tokens: int
    """Limit of padded tokens in a batch."""
    rank: int
    ranks: int
    tokens: TokenShard = WHOLE
    """Slice of each feature's tokens in this process."""
    halves: bool = False
    """True to halve the batches of all ranks if one does not fit a GPU; False: that ends the attempt."""
    memory: PassMemory | None = None
    """Memory of this process's device, for `ShardedSplit.fitted`; None: batches are not bounded by it."""

    def widths(self, role: str) -> NDArray[np.int64]:
        """Return the tokens that each feature of a split takes in a batch, over all slices."""
        widths = self.task.encoding.widths(self.prepared, role)
        return widths + -widths % self.tokens.count  # `TokenShard.of` pads rows to equal slices

    def split(self, role: str, wanted: NDArray[np.int64] | None = None) -> ShardedSplit:
        """Distribute the features of a split with the indices `wanted`, or all, in batches of similar widths."""
        widths = self.widths(role)
        wanted = np.arange(len(widths)) if wanted is None else wanted
        batches = [wanted[batch] for batch in inference_batches(widths[wanted], batch_tokens=self.batch_tokens)]
        rounds = -(-len(batches) // self.ranks)
        # Ranks without a batch of their own in the last round repeat the last one; equal answers overwrite equal
        # answers.
        mine = [batches[min(number * self.ranks + self.rank, len(batches) - 1)] for number in range(rounds)]
        return ShardedSplit(self, role, len(widths), wanted, mine)


@dataclass(frozen=True)
class ShardedSplit:
    """A rank's share of a split."""

    shards: RankShards
    role: str
    features: int
    """Number of features of the whole split."""
    wanted: NDArray[np.int64]
    """Indices of the distributed features, over all ranks."""
    mine: list[NDArray[np.int64]]
    """Batches of this rank."""

    def fitted(self, model: torch.nn.Module, device: torch.device) -> ShardedSplit:
        """Return the split in batches that fit the memory of all ranks as it is now; itself where that is not measured,
        or was. Keeps the model's mode. Every rank must call it.

        The first pass is that of the widest row, which is a batch by itself whatever fits.
        """
        memory, budget = self.shards.memory, self.shards.batch_tokens
        if memory is None:
            return self
        widths = self.shards.widths(self.role)[self.wanted]

        def share_of(rows: NDArray[np.int64]) -> float:
            memory.begin()
            self._answers_to(self.wanted[rows], model, device)
            return lowest([memory.share()])[0]

        with _evaluating(model):
            fits = fitted_tokens(share_of, widths, budget, first=int(widths.max()), least_growth=_LEAST_GROWTH)
        if fits < budget and self.shards.rank == 0:  # one line, not one a rank
            log.warning(
                "Batches of the %s split have at most %s padded tokens, and not %s: more do not fit the memory of all "
                "GPUs. %s rows are wider, and each is a batch.",
                self.role, f"{fits:,}", f"{budget:,}", f"{int((widths > fits).sum()):,}",
            )  # fmt: skip
        return replace(self.shards, batch_tokens=fits, memory=None).split(self.role, self.wanted)

    def answers(
        self, model: torch.nn.Module, device: torch.device
    ) -> Iterator[tuple[NDArray[np.int64], list[Answer]]]:  # fmt: skip
        """Yield for each of this rank's batches the indices of the features, and an answer for each, for this process's
        tokens. Keeps the model's mode.
        """
        with _evaluating(model):
            waiting = deque(self.mine)
            while waiting:
                wanted = waiting.popleft()
                answers = self._answers_to(wanted, model, device)
                if self.shards.halves and summed([answers is None])[0]:
                    # Only now, after the error, which holds the tensors of the pass, is released.
                    torch.cuda.empty_cache()
                    log.warning("%d rows at once do not fit a GPU's memory: halving this validation.", len(wanted))
                    waiting = deque(half for batch in (wanted, *waiting) for half in _halved(batch))
                    continue
                assert answers is not None
                yield wanted, answers

    def _answers_to(
        self, wanted: NDArray[np.int64], model: torch.nn.Module, device: torch.device
    ) -> list[Answer] | None:
        """Return the answers to the features; None if they do not fit the GPU and can be halved."""
        features = self.shards.prepared.features(self.role, wanted)
        whole = self.shards.task.encoding.collate(features, pad_token_id=self.shards.prepared.pad_token_id)
        batch = self.shards.tokens.of(whole)
        placed = {name: value.to(device) for name, value in batch.items()}
        try:
            with torch.no_grad():
                return self.shards.task.scoring.answer(model, placed, features)
        except torch.OutOfMemoryError:
            if not self.shards.halves or len(wanted) == 1:
                raise
            return None


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _halved(batch: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return two parts of a batch; a feature alone is answered twice, so that all ranks have as many batches."""
    return list(np.array_split(batch, 2)) if len(batch) > 1 else [batch, batch]
