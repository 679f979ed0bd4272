"""Copies of activations to host memory and back, beside the computation of a GPU.

Each direction has a stream of its own, so that kernels and copies run at the same time; a few copies are under way at
once. A tensor that leaves is held until it is copied. On the way back the copies are started in the reverse order,
ahead of their use, into memory of the computing stream: it is free again as soon as the backward pass has used it.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

IN_FLIGHT = 2
"""Copies that are under way at once in one direction: while one is used, the next ones come."""


class Copies(Protocol):
    """Transfers that run beside the computation."""

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to copy a tensor to host memory. Return the copy, and an event to wait for."""

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        """Start to copy a result of `out` to the device. Return the copy, and an event to wait for."""

    def wait(self, event: Any) -> None:
        """Let what is computed from now on begin after `event`."""


class StreamCopies:
    """Transfers on two streams of a GPU, by page-locked memory, for which the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        made: Any = torch.cuda.Stream
        self._leaving, self._coming = made(device), made(device)

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy it after what has been computed so far."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._leaving.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._leaving):
            host.copy_(tensor, non_blocking=True)
        return host, self._leaving.record_event()

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        """Copy it after what has been computed so far, whose memory it may get."""
        tensor = torch.empty_like(host, device=device)
        self._coming.wait_stream(torch.cuda.current_stream(self._device))
        self._coming.wait_stream(self._leaving)
        with torch.cuda.stream(self._coming):
            tensor.copy_(host, non_blocking=True)
        return tensor, self._coming.record_event()

    def wait(self, event: Any) -> None:
        """Wait on the device."""
        torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(frozen=True)
class MovedActivation:
    """An activation in host memory."""

    number: int
    host: torch.Tensor
    device: torch.device
    before: weakref.ref[MovedActivation] | None
    """Activation that left before it in the same forward pass."""


class ActivationLane:
    """Way of one GPU's activations to host memory and back."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._number = 0
        self._last: weakref.ref[MovedActivation] | None = None
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        """Tensors that are being copied to the host, with the events of their ends."""
        self._coming: dict[int, tuple[torch.Tensor, Any]] = {}
        """Number of an activation -> its copy on the device, with the event of its end; the first came first."""

    def end_forward(self) -> None:
        """Release the device's memory of all activations of the forward pass."""
        self._last = None
        self._hold(0)

    def begin_forward(self) -> None:
        """Release what was brought back in an earlier pass and not used."""
        self._expect(0)

    def out(self, tensor: torch.Tensor) -> MovedActivation:
        """Start to move a tensor, which its owner does not change any more."""
        host, event = self._copies.out(tensor)
        self._leaving.append((tensor, event))
        self._hold(IN_FLIGHT)
        self._number += 1
        moved = MovedActivation(self._number, host, tensor.device, self._last)
        self._last = weakref.ref(moved)
        return moved

    def back(self, moved: MovedActivation) -> torch.Tensor:
        """Return the activation on its device, and start to bring the next ones."""
        self._fetch(moved)
        tensor, event = self._coming.pop(moved.number)
        self._copies.wait(event)
        before: MovedActivation | None = moved
        for _ in range(IN_FLIGHT):
            before = None if before is None or before.before is None else before.before()
            if before is None:
                break
            self._fetch(before)
        self._expect(IN_FLIGHT)
        return tensor

    def _fetch(self, moved: MovedActivation) -> None:
        if moved.number not in self._coming:
            self._coming[moved.number] = self._copies.back(moved.host, moved.device)

    def _hold(self, most: int) -> None:
        while len(self._leaving) > most:
            # Its memory is used again by what is computed after the copy.
            _, event = self._leaving.popleft()
            self._copies.wait(event)

    def _expect(self, most: int) -> None:
        while len(self._coming) > most:
            _, event = self._coming.pop(next(iter(self._coming)))
            self._copies.wait(event)
