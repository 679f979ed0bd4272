"""Time and memory of work on the device that computes.

A GPU does its work after the host has queued it, so each time begins and ends when the queue is empty.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import psutil

from finetune_contract.choices import Device

T = TypeVar("T")


class DeviceMeter(Protocol):
    """Measures work on the device of this process."""

    @property
    def gpu(self) -> str:
        """Name of the GPU; empty for a CPU."""

    def wait(self) -> None:
        """Wait until the device has done all work that was queued."""

    def begin(self) -> None:
        """Begin to measure memory."""

    def taken(self) -> int:
        """Return the memory taken since `begin`, in bytes."""

    def release(self) -> None:
        """Return the memory of deleted tensors to the device."""


class HostMeter:
    """Meter of a CPU. Memory is the growth of the resident set of this process."""

    gpu = ""

    def __init__(self) -> None:
        self._held = 0

    def wait(self) -> None:
        """Return at once: nothing is queued."""

    def begin(self) -> None:
        """See `DeviceMeter.begin`."""
        self._held = psutil.Process().memory_info().rss

    def taken(self) -> int:
        """See `DeviceMeter.taken`."""
        return max(0, int(psutil.Process().memory_info().rss) - self._held)

    def release(self) -> None:
        """Do nothing: `allocator` returns freed memory to the kernel between the parts of a prediction."""


class CudaMeter:
    """Meter of the current GPU. Memory is the growth of the peak of torch's caching allocator."""

    def __init__(self) -> None:
        self._held = 0

    @property
    def gpu(self) -> str:
        """Name as the driver reports it, which for most products includes the memory."""
        import torch

        return str(torch.cuda.get_device_name())

    def wait(self) -> None:
        """See `DeviceMeter.wait`."""
        import torch

        torch.cuda.synchronize()

    def begin(self) -> None:
        """See `DeviceMeter.begin`."""
        import torch

        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()

    def taken(self) -> int:
        """See `DeviceMeter.taken`."""
        import torch

        return max(0, torch.cuda.max_memory_allocated() - self._held)

    def release(self) -> None:
        """See `DeviceMeter.release`. Copies of a model are in reference cycles, which the collector has to find."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def meter_of(device: Device) -> DeviceMeter:
    """Return the meter of a process that computes on `device`."""
    return CudaMeter() if device == "cuda" else HostMeter()


def timed(meter: DeviceMeter, work: Callable[[], T]) -> tuple[T, float]:
    """Do `work`; return its result, and the seconds until the device has done it, too."""
    meter.wait()
    began = time.perf_counter()
    result = work()
    meter.wait()
    return result, time.perf_counter() - began
