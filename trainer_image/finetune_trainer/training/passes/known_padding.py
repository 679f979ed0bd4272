"""Passes transformers the fact whether the rows of a micro-batch are padded, known to the host before the transfer.

Without padding the masks are left out, for faster attention kernels. transformers inspects the mask on the device to
find out, in each forward pass, and on a GPU the host then waits for all queued work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.masking_utils import sdpa_mask

from finetune_trainer.core.library_patches import masks_by_known_padding

MASK = "attention_mask"


@dataclass(frozen=True)
class KnownPadding:
    """Facts about the mask of a micro-batch."""

    shape: tuple[int, ...]
    padded: bool

    current: ClassVar[KnownPadding | None] = None
    """Facts for the current forward pass; None: unknown."""

    @staticmethod
    def of(batch: Mapping[str, torch.Tensor]) -> KnownPadding | None:
        """Inspect a batch in host memory; None: it has no mask of tokens."""
        mask = batch.get(MASK)
        if mask is None or mask.ndim != 2:
            return None
        return KnownPadding(tuple(mask.shape), not bool(mask.all()))

    def of_each(self, parts: int) -> KnownPadding:
        """Return the facts for each of the `parts` into which the rows are divided."""
        return KnownPadding((self.shape[0] // parts, *self.shape[1:]), self.padded)


@contextmanager
def known_padding(known: KnownPadding | None) -> Iterator[None]:
    """Make `known` the facts for forward passes inside the context. None: nothing is known."""
    if known is None:
        yield
        return
    with masks_by_known_padding(_mask):
        KnownPadding.current = known
        try:
            yield
        finally:
            KnownPadding.current = None


def _mask(**arguments: Any) -> torch.Tensor | None:
    """Return the mask of transformers for fused attention; None: no mask, attention is causal or complete."""
    known, mask = KnownPadding.current, arguments.get(MASK)
    # A compiled graph is for both cases, and must not inspect values.
    if (
        known is not None
        and mask is not None
        and tuple(mask.shape) == known.shape
        and not torch.compiler.is_compiling()
    ):
        if known.padded:
            arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        else:
            arguments[MASK] = None
    made: torch.Tensor | None = sdpa_mask(**arguments)
    return made
