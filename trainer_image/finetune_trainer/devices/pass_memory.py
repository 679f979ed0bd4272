"""Memory that a pass over a batch takes, measured while it runs, and the batches that fit it.

Processes that share a model cannot halve a batch after one of them has failed, as the others wait in the middle of the
pass. So they measure passes of growing batches before the first real one, and agree on the largest that fits all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from finetune_contract.choices import Device

MARGIN = 0.8
"""Share of the free memory that a batch may take: the rest is for fragments and for what the probe did not show."""
GROWTH = 4
"""Factor between the tokens of two probes. A pass takes a constant and a linear part, so the memory for more tokens is
overestimated from fewer; attention without a fused kernel is quadratic in the length, which the widest row shows.
"""


class PassMemory(Protocol):
    """Memory of the device of this process."""

    def begin(self) -> None:
        """Begin to measure a pass."""

    def share(self) -> float:
        """Return the memory for a pass, in units of what the pass since `begin` took: below 1 it would not fit."""


class CudaMemory:
    """Memory of the current GPU, by the caching allocator of torch."""

    _before: ClassVar[tuple[int, int]] = (0, 0)
    """Peaks before `begin` reset torch's counts, which are those of the whole process."""

    def __init__(self) -> None:
        self._held = self._room = 0

    @classmethod
    def peaks(cls) -> tuple[int, int]:
        """Return the most bytes of tensors and of reserved memory that this process had, whatever `begin` reset."""
        import torch

        allocated, reserved = cls._before
        return max(allocated, torch.cuda.max_memory_allocated()), max(reserved, torch.cuda.max_memory_reserved())

    def begin(self) -> None:
        """See `PassMemory.begin`."""
        import torch

        torch.cuda.empty_cache()
        CudaMemory._before = self.peaks()
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()
        self._room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - self._held

    def share(self) -> float:
        """See `PassMemory.share`."""
        import torch

        return self._room / max(1, torch.cuda.max_memory_allocated() - self._held)


def device_memory(device: Device) -> PassMemory | None:
    """Return the memory of this process's device; None on a CPU, whose batches are not bounded by it."""
    return CudaMemory() if device == "cuda" else None


def probe(widths: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Return a batch of at most so many padded tokens, but at least one row: the widest row that fits, repeated."""
    import numpy as np

    fitting = np.flatnonzero(widths <= max(tokens, int(widths.min())))
    at = fitting[np.argmax(widths[fitting])]
    return np.full(max(1, tokens // max(1, int(widths[at]))), at)


def row_too_long(tokens: int, error: Exception) -> StageError:
    """Return the error for a row of `tokens` tokens that does not fit the memory alone."""
    return StageError(
        FailureClass.OUT_OF_MEMORY,
        "RowTooLong",
        f"A single row of {tokens} tokens does not fit the GPU's memory beside the model: {error}",
        "Lower preparation.maxLength, use a GPU with more memory, or leave the stage out. A trained model is kept.",
    )


def fitted_tokens(
    share_of: Callable[[NDArray[np.int64]], float],
    widths: NDArray[np.int64],
    budget: int,
    *,
    first: int,
    least_growth: float = GROWTH,
) -> int:
    """Return the padded tokens of a batch, at most `budget`, that fit by passes of growing batches. Each is within the
    estimate of the one before.

    `share_of`: computes a batch of rows, given by their places in `widths`, and returns the lowest `PassMemory.share`
    of the processes that compute together.
    `widths`: padded tokens of each row alone.
    `first`: padded tokens of the first batch.
    `least_growth`: factor between the tokens of two passes below which a further pass is not worth its time.
    """
    import numpy as np

    wanted = probe(widths, first)
    while True:
        tokens = len(wanted) * int(widths[wanted[0]])
        fits = int(MARGIN * tokens * share_of(wanted))
        larger = probe(widths, min(budget, GROWTH * tokens, max(1, fits)))
        if tokens >= budget or fits < least_growth * tokens or np.array_equal(larger, wanted):
            return max(1, min(budget, fits))
        wanted = larger
