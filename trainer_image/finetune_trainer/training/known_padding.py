"""Tells transformers whether the rows of a micro-batch are padded, which the host knows before they go to the device.

Without padding its masks are left out, for the faster kernels of attention. transformers looks at the mask on the
device to find out, in each forward pass, and on a GPU the host waits there for all that was asked of it before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

MASK = "attention_mask"


@dataclass(frozen=True)
class KnownPadding:
    """What is known of the mask of a micro-batch."""

    shape: tuple[int, ...]
    padded: bool

    current: ClassVar[KnownPadding | None] = None
    """Of the forward pass under way; None: nothing."""

    @staticmethod
    def of(batch: Mapping[str, torch.Tensor]) -> KnownPadding | None:
        """Look at a batch in host memory; None: it has no mask of tokens."""
        mask = batch.get(MASK)
        if mask is None or mask.ndim != 2:
            return None
        return KnownPadding(tuple(mask.shape), not bool(mask.all()))

    def of_each(self, parts: int) -> KnownPadding:
        """The same of each of the `parts` that the rows are divided into."""
        return KnownPadding((self.shape[0] // parts, *self.shape[1:]), self.padded)


@contextmanager
def known_padding(known: KnownPadding | None) -> Iterator[None]:
    """Forward passes within it are of a batch of which `known` is known."""
    AttentionMaskInterface.register("sdpa", _mask)
    KnownPadding.current = known
    try:
        yield
    finally:
        KnownPadding.current = None


def _mask(**asked: Any) -> torch.Tensor | None:
    """The mask of transformers for fused attention; None: causal, or all see all, without one."""
    known, mask = KnownPadding.current, asked.get(MASK)
    # A compiled graph holds for both, and looks at no values.
    if (
        known is not None
        and mask is not None
        and tuple(mask.shape) == known.shape
        and not torch.compiler.is_compiling()
    ):
        if known.padded:
            asked |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        else:
            asked[MASK] = None
    made: torch.Tensor | None = sdpa_mask(**asked)
    return made
