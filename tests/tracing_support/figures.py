"""Figures of a traced run, and their text in a golden file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_LIBRARIES = ("deepspeed/", "accelerate/optimizer.py")
"""Paths of code that waits by itself: DeepSpeed, and the loss scaling of fp16 with an optimizer that does not read on
the device whether gradients overflowed.
"""


@dataclass(frozen=True)
class Figures:
    """Figures of one process: of its second step, and the peak over both."""

    waits: Mapping[str, int]
    """Kind and place -> number of reads from the device, or of blocking copies to it."""
    stub_waits: int
    """Number of further waits for a stream, an event or the device."""
    sent: Mapping[str, int]
    """Collective operation and type -> bytes that this process sends."""
    peaks: Mapping[str, int]
    """Phase -> most bytes on the GPU."""
    kept: int
    """Bytes on the GPU that a forward pass keeps for its backward pass."""
    moved: int
    """Bytes of activations that were moved to host memory, over all steps."""
    held: Mapping[str, int]
    """Kind -> bytes on the GPU at the peak."""
    facts: Mapping[str, Any]
    """Measured facts of the model, as JSON."""

    @classmethod
    def read(cls, file: Path) -> Figures:
        """Read the figures that a run has written."""
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cls(**values)

    @property
    def waits_of_the_loop(self) -> int:
        """Total of `waits` without those of libraries."""
        return sum(count for place, count in self.waits.items() if not any(each in place for each in _LIBRARIES))

    def __str__(self) -> str:
        lines = ["host waits for the device, in a step"]
        lines += [f"  {count} x {place}" for place, count in sorted(self.waits.items())]
        lines += [f"  {self.stub_waits} x synchronize of streams, events or the device"] if self.stub_waits else []
        lines += ["MiB sent, in a step", *(f"  {_mib(size)} {kind}" for kind, size in sorted(self.sent.items()))]
        peak = max(self.peaks, key=lambda phase: self.peaks[phase])
        lines += ["MiB on the GPU", f"  {_mib(self.peaks[peak])} at the peak, in {peak}"]
        lines += [f"  {_mib(self.kept)} kept for the backward pass"] if self.kept else []
        lines += [f"MiB of activations moved, in all steps\n  {_mib(self.moved)}"] if self.moved else []
        return "\n".join(lines) + "\n"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.2f}"
