"""Division of a training's wall-clock time: at each moment exactly one part is active, so they add up to the whole.

On a GPU the host runs ahead of the device. There a part ends with a CUDA event, whose time is set when the device
reaches it; events are read once a step, right after the loop has waited for the step's loss in any case, so that
measuring adds no wait. The host has queued the next step by then, so that a lap is ended and read apart. A few events a
micro-batch cost microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from finetune_contract.choices import Device
from finetune_contract.report import TimePart, TimeSplit

if TYPE_CHECKING:
    from finetune_trainer.strategies.strategy_protocol import Strategy


class Moments(Protocol):
    """Marks moments, and measures the time between them."""

    name: Literal["host", "cuda-events"]

    def now(self) -> Any:
        """Return a mark."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks. Waits for the later one."""


class HostMoments:
    """Moments of the host's clock: no work on a CPU runs ahead."""

    name: Literal["host", "cuda-events"] = "host"

    def now(self) -> float:
        """Return seconds since an arbitrary time."""
        return time.perf_counter()

    def seconds(self, earlier: float, later: float) -> float:
        """Return the difference."""
        return later - earlier


class CudaMoments:
    """Moments of events on the current stream: the later of the host's and the device's time."""

    name: Literal["host", "cuda-events"] = "cuda-events"

    def now(self) -> Any:
        """Return an event that the device will reach."""
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time to half a microsecond (CUDA runtime API, `cudaEventElapsedTime`)."""
        if not later.query():
            later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000


def moments_of(device: Device) -> Moments:
    """Return the Moments for work on `device`."""
    return CudaMoments() if device == "cuda" else HostMoments()


Lap: TypeAlias = Sequence[tuple[TimePart, Any]]
"""Parts with the marks of their begins, and a mark of the end."""


@dataclass
class PartClock:
    """Divides time into parts. A lap is the time since the previous one."""

    moments: Moments = field(default_factory=HostMoments)
    part: TimePart = "start"
    """Active part."""

    def __post_init__(self) -> None:
        self._marks: list[tuple[TimePart, Any]] = [(self.part, self.moments.now())]
        self._read_at = time.perf_counter()
        self._surplus = 0.0
        """Seconds that the parts of earlier laps have more than the host's time: a device reached the end of a lap
        after the host had read the one before.
        """

    def enter(self, part: TimePart) -> None:
        """End the active part and begin `part`."""
        if part != self.part:
            self._marks.append((part, self.moments.now()))
            self.part = part

    def end_lap(self) -> Lap:
        """End the lap, to be read by `seconds` in the order of laps. The active part goes on in the next lap."""
        end = self.moments.now()
        lap = [*self._marks, (self.part, end)]
        self._marks = [(self.part, end)]
        return lap

    def seconds(self, lap: Lap) -> dict[TimePart, float]:
        """Return the seconds of each part of `lap`; waits for its end. Those of all laps add up to the host's time, to
        which the part `rest` is adjusted.
        """
        parts: dict[TimePart, float] = {}
        for (part, began), (_, ended) in pairwise(lap):
            parts[part] = parts.get(part, 0.0) + self.moments.seconds(began, ended)
        now = time.perf_counter()
        missing = now - self._read_at - sum(parts.values()) - self._surplus
        rest = parts.get("rest", 0.0) + missing
        parts["rest"], self._surplus, self._read_at = max(0.0, rest), max(0.0, -rest), now
        return parts

    def lap(self) -> dict[TimePart, float]:
        """End the lap, and return the seconds of each of its parts."""
        return self.seconds(self.end_lap())


def time_split(parts: Mapping[TimePart, float], strategy: Strategy, clock: PartClock) -> TimeSplit:
    """Return the parts of a training in the order of `TimePart`, to a millisecond; the total is their sum."""
    known = {part: round(parts[part], 3) for part in get_args(TimePart) if part in parts}
    mixed = tuple(part for part in strategy.communicates_in if part in known)
    total = round(sum(known.values()), 3)
    return TimeSplit(total_seconds=total, parts=known, with_communication=mixed, clock=clock.moments.name)


def rounded(parts: Mapping[TimePart, float]) -> dict[TimePart, float]:
    """Round for a file: to a microsecond, without parts of zero."""
    return {part: round(seconds, 6) for part, seconds in parts.items() if round(seconds, 6)}
