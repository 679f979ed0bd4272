"""Memory that a pass over a batch takes, measured while it runs, and the batches that fit it.

Processes that share a model cannot halve a batch after one of them has failed, as the others wait in the middle of the
pass. So they measure passes of growing batches before the first real one, and agree on the largest that fits all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError
from finetune_trainer.tasks.task_protocol import Answer
from finetune_trainer.tasks.writing import watch

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

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

    def __init__(self) -> None:
        self._held = self._room = 0

    def begin(self) -> None:
        """See `PassMemory.begin`."""
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()
        self._room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - self._held

    def share(self) -> float:
        """See `PassMemory.share`."""
        import torch

        return self._room / max(1, torch.cuda.max_memory_allocated() - self._held)


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


@dataclass(frozen=True)
class WholeTexts:
    """Observer of generation that has each text reach its longest length, as the longest text of a batch may."""

    max_new_tokens: int

    def arguments(self) -> Mapping[str, Any]:
        """Return the least number of tokens."""
        return {"min_new_tokens": self.max_new_tokens}

    def fields_of(self, tokens: torch.Tensor) -> Answer:
        """Return no fields."""
        return {}


@contextmanager
def whole_texts(max_new_tokens: int) -> Iterator[None]:
    """Generate texts of the longest length within the context."""
    token = watch.set(WholeTexts(max_new_tokens))
    try:
        yield
    finally:
        watch.reset(token)
