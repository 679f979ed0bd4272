"""Rows of a batch: for training a seeded order, for inference a budget of padded tokens.

Pure functions of lengths. The rows of an optimizer step depend on the global batch, the seed and the epoch alone, never
on the number of processes that share them; so the losses of all strategies can be compared step by step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MEGABATCH_STEPS = 50
"""Global batches that are sorted by length together: as in transformers' length-grouped sampler, enough to keep padding
small.
"""
_MEGABATCHES_PER_EPOCH = 4
"""Least number of groups when the data are few; with one group the same rows would meet in every epoch."""


def training_order(
    lengths: NDArray[np.int64],
    *,
    global_batch: int,
    micro_batch: int,
    ranks: int,
    seed: int,
    epoch: int,
    grouped: bool,
) -> NDArray[np.int64]:
    """Return one epoch's row indices, shape (steps, accumulation, ranks, micro_batch); `lengths`: tokens of each row.

    Each step has exactly `global_batch` rows; the remainder at the end of the epoch is a random set of rows, another
    one in each epoch, and is dropped. Steps have rows of similar length when `grouped`, else any rows; their order is
    random. Inside a step, rows of similar length share a micro-batch, and the micro-batches that run at the same time
    on different ranks are neighbours in length.

    Raises ValueError when `micro_batch * ranks` does not divide `global_batch`.
    """
    if global_batch % (micro_batch * ranks):
        raise ValueError(f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x ranks {ranks}")
    steps = _step_rows(lengths, global_batch, seed, epoch, grouped)
    dealt = steps.reshape(len(steps), global_batch // (micro_batch * ranks), ranks, micro_batch)
    # Every other round is dealt backwards, so that no rank always gets the longest rows.
    backwards = np.indices(dealt.shape[:2]).sum(axis=0) % 2 == 1
    dealt[backwards] = dealt[backwards][:, ::-1]
    return dealt


def _step_rows(
    lengths: NDArray[np.int64], global_batch: int, seed: int, epoch: int, grouped: bool
) -> NDArray[np.int64]:
    """Return the rows, shape (steps, global_batch), longest row of a step first."""
    random = np.random.default_rng([seed, epoch])
    count = len(lengths) // global_batch
    rows = random.permutation(len(lengths))[: count * global_batch].astype(np.int64)
    together = max(1, min(_MEGABATCH_STEPS, count // _MEGABATCHES_PER_EPOCH)) if grouped else 1
    group = together * global_batch
    starts = range(0, len(rows), group)
    by_length = [
        part[np.argsort(-lengths[part], kind="stable")] for part in (rows[start : start + group] for start in starts)
    ]
    steps = np.concatenate([*by_length, np.empty(0, np.int64)]).reshape(count, global_batch)
    return steps[random.permutation(count)]


def inference_batches(lengths: NDArray[np.int64], *, batch_tokens: int) -> list[NDArray[np.int64]]:
    """Return batches of row indices, every row once, longest rows first: a lack of memory shows at once.

    A batch has at most `batch_tokens` padded tokens (longest row x rows), but at least one row.
    """
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    batches: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + rows])
        start += rows
    return batches
