"""Host memory for copies of a GPU's state: page-locked, so that copies have the full rate of PCIe and run one after the
other without a wait, and kept from one checkpoint to the next, as it takes longer to lock pages than to fill them.

torch's own allocator of page-locked memory is not used: it rounds sizes up to powers of two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

_ALIGNED_BYTES = 64
"""Multiple at which each copy begins: more than any element has."""


class StagingMemory:
    """One block of host memory, as large as the largest state so far."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of `tensors` in this memory, complete when it returns; they are valid until the next call."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors]
        self._provide(sum(sizes), locked=any(tensor.is_cuda for tensor in tensors))
        made, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            place = self._block[start : start + tensor.numel() * tensor.element_size()]
            made.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=self._locked))
            start += size
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return made

    def _provide(self, size: int, *, locked: bool) -> None:
        if self._block.numel() >= size:
            return
        if self._locked:
            unlock_pages(self._block)
            self._locked = False
        self._block = torch.empty(0, dtype=torch.uint8)  # before there are two
        self._block = torch.empty(size, dtype=torch.uint8)
        if locked:
            self._locked = lock_pages(self._block)


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock the pages of `memory`, so that GPUs copy from and to it by themselves. Return False, and log a warning, if
    CUDA refuses: copies are slower then.
    """
    size, runtime = memory.numel() * memory.element_size(), _runtime()
    error = runtime.cudaHostRegister(memory.data_ptr(), size, 1)
    if int(error) != 0:
        log.warning(
            "CUDA cannot lock %d bytes of host memory (%s): checkpoints are copied slowly.", memory.numel(), error
        )
    return int(error) == 0


def unlock_pages(memory: torch.Tensor) -> None:
    """Undo `lock_pages`."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    functions: Any = torch.cuda
    return functions.cudart()
