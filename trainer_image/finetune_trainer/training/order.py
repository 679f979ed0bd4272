"""Rows of every step, for this process.

Derived from `training_order` alone, so the rows of a step are the same for any number of processes; accelerate's own
sharding of a data loader would distribute them in another order and pad the last batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Batch
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.token_shards import WHOLE, TokenShard
from finetune_trainer.data.batches import training_order
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.tasks.task_protocol import DRAW
from finetune_trainer.training.reference_answers import ReferenceAnswers

if TYPE_CHECKING:
    import torch

    from finetune_trainer.tasks.task_protocol import Encoding


@dataclass(frozen=True)
class Pick:
    """A row of the train split in one epoch."""

    row: int
    draw: tuple[int, ...]


class EpochOrder(Sampler[list[Pick]]):
    """Micro-batches of this data-parallel rank, epoch by epoch."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        batch: Batch,
        rank: int,
        seed: int,
        widths: NDArray[np.int64] | None = None,
        *,
        grouped: bool,
    ) -> None:
        """Create the order. `lengths`: tokens of each row; `widths`: tokens that it takes in a batch, where they are
        more; `grouped`: True if all rows of a step have similar lengths.
        """
        _check(batch)
        self._lengths = lengths
        self._widths = lengths if widths is None else widths
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._grouped = grouped
        self._epoch = 0
        self._first = 0
        self._order = self._draw(0)
        if not len(self._order):
            raise StageError(
                FailureClass.DATA,
                "FewerRowsThanBatch",
                f"The train split has {len(lengths)} rows and training.globalBatchSize is {batch.global_batch_size}.",
                f"Set training.globalBatchSize to {len(lengths)} or less.",
            )

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return training_order(
            self._widths,
            global_batch=self._batch.global_batch_size,
            micro_batch=self._batch.micro_batch_size,
            ranks=self._batch.data_parallel,
            seed=self._seed,
            epoch=epoch,
            grouped=self._grouped,
        )

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Draw the order of `epoch`; the next iteration starts with the micro-batches of `step`."""
        self._first = step
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._draw(epoch)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps in one epoch."""
        return len(self._order)

    @property
    def step_rows(self) -> int:
        """Return the number of rows in one step over all ranks."""
        return self._batch.global_batch_size

    def step_tokens(self, step: int) -> int:
        """Count the tokens of all rows of one step of the current epoch, over all ranks, without padding."""
        return int(self._lengths[self._order[step]].sum())

    def step_computed_tokens(self, step: int) -> int:
        """Count them with padding: each row of a micro-batch is as long as its longest."""
        return int(self._widths[self._order[step]].max(axis=-1).sum()) * self._batch.micro_batch_size

    def rows_of(self, steps: int) -> NDArray[np.int64]:
        """Return the rows that the first steps of a run read, over all ranks; ascending."""
        epochs = (self._draw(epoch)[: steps - epoch * self.steps] for epoch in range(-(-steps // self.steps)))
        return np.unique(np.concatenate([rows.ravel() for rows in epochs]))

    def __iter__(self) -> Iterator[list[Pick]]:
        draw = (self._seed, self._epoch)
        mine = (micro.tolist() for step in self._order[self._first :] for micro in step[:, self._rank])
        return ([Pick(row, draw) for row in micro] for micro in mine)

    def __len__(self) -> int:
        steps, accumulation, *_ = self._order.shape
        return int(steps) * int(accumulation)


def _check(batch: Batch) -> None:
    """Raise StageError CONFIG when the sizes do not multiply to the global batch."""
    rows = batch.micro_batch_size * batch.gradient_accumulation * batch.data_parallel
    if rows != batch.global_batch_size:
        raise StageError(
            FailureClass.CONFIG,
            "BatchArithmetic",
            f"training.globalBatchSize is {batch.global_batch_size}, and micro-batch {batch.micro_batch_size} x "
            f"accumulation {batch.gradient_accumulation} x {batch.data_parallel} ranks are {rows} rows.",
            "Plan again.",
        )


class TrainRows(Dataset[Any]):
    """Prepared rows of the train split, fetched a micro-batch at a time."""

    def __init__(self, prepared: PreparedData, reference: ReferenceAnswers | None = None) -> None:
        self._prepared = prepared
        self._reference = reference or ReferenceAnswers()
        self._rows = len(prepared.lengths("train"))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, pick: Pick) -> dict[str, Any]:
        return self.__getitems__([pick])[0]

    def __getitems__(self, picks: Sequence[Pick]) -> list[dict[str, Any]]:
        """Return a whole batch, in the one call that torch makes for a data set with this method."""
        features = self.without_reference(picks)
        for feature, pick in zip(features, picks, strict=True):
            feature |= self._reference.of("train", pick.row)
        return features

    def without_reference(self, picks: Sequence[Pick]) -> list[dict[str, Any]]:
        """Return the features of a batch as they are before the reference is measured."""
        features = self._prepared.features("train", [pick.row for pick in picks])
        for feature, pick in zip(features, picks, strict=True):
            feature[DRAW] = pick.draw
        return features


class Collate:
    """Collates features of a micro-batch to tensors; a class because worker processes must be able to unpickle it."""

    def __init__(self, encoding: Encoding, pad_token_id: int, tokens: TokenShard = WHOLE) -> None:
        self._encoding = encoding
        self._pad_token_id = pad_token_id
        self._tokens = tokens

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self._tokens.of(self._encoding.collate(features, pad_token_id=self._pad_token_id))

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the items over which the loss of the batch is the mean."""
        return self._encoding.items(batch)


def micro_batches(
    loader: DataLoader[Any], order: EpochOrder, first: int, accumulation: int
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the `accumulation` micro-batches of each step from `first` on, epoch after epoch without end. `loader`
    reads by `order`.
    """
    while True:
        epoch, step = divmod(first, order.steps)
        order.start_at(epoch, step)
        batches = iter(loader)
        for _ in range(step, order.steps):
            yield list(islice(batches, accumulation))
        first += order.steps - step
