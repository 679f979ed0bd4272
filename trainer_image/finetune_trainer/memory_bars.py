"""Bars of report.html that show the memory of the fullest device by term: as planned, and as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_contract.byte_text import human_bytes
from finetune_contract.plan_check import MeasuredTraining, PlannedTraining, memory_groups

_MOST_FREE = 4
"""Ratio of the device's memory to the plan's from which bars are drawn against the plan: others would be too short."""


@dataclass(frozen=True)
class MemoryBar:
    """A term, with its place in percent of the whole width."""

    name: str
    planned: str
    measured: str
    """Empty for a term that cannot be measured apart."""
    start: float
    width: float
    found: float
    """Width of what was measured."""


@dataclass(frozen=True)
class MemoryPicture:
    """Bars of all terms, of their sums that were measured, and of the total."""

    bars: tuple[MemoryBar, ...]
    scale: str
    """Sentence about the whole width."""

    @property
    def measured(self) -> bool:
        """Return whether any term was measured."""
        return any(bar.measured for bar in self.bars)


def memory_picture(train: Mapping[str, Any], memory: Mapping[str, Any]) -> MemoryPicture | None:
    """Return the picture; None if no plan's terms are known. Each term begins where the one before ends.

    `train`: that section of metrics.json. `memory`: that of plan.json, which only a local run has; it knows the
    device's memory, and the terms of trainings by older versions.
    """
    planned = PlannedTraining.model_validate(train["planned"]) if "planned" in train else _by_plan(memory)
    if planned is None or not planned.memory_bytes or not planned.memory_terms:
        return None
    found = MeasuredTraining.model_validate(train["measured"]) if "measured" in train else None
    peak, measured = (found.memory_bytes, found.memory_terms) if found is not None else (0, {})
    total, capacity = planned.memory_bytes, memory.get("capacityBytes", 0)
    against_device = max(total, peak) <= capacity <= _MOST_FREE * total
    scale = capacity if against_device else max(total, peak)

    def bar(name: str, begin: float, size: float, measure: int | None) -> MemoryBar:
        text = "" if measure is None else human_bytes(measure)
        widths = (round(100 * each / scale, 2) for each in (begin, size, measure or 0))
        return MemoryBar(name, human_bytes(size), text, *widths)

    bars, begin = [], 0
    for name, size in planned.memory_terms.items():
        bars.append(bar(name, begin, size, measured.get(name)))
        begin += size
    groups = memory_groups(planned)
    sums = [name for name in measured if name in groups and name not in planned.memory_terms]
    bars += [bar(name, 0, groups[name], measured[name]) for name in sums]
    bars.append(bar("total", 0, total, peak if found is not None else None))
    whole = f"{human_bytes(scale)}, {'the memory of the device' if against_device else 'the larger total'}"
    return MemoryPicture(tuple(bars), f"The whole width is {whole}.")


def _by_plan(memory: Mapping[str, Any]) -> PlannedTraining | None:
    if not memory:
        return None
    terms = {str(term["name"]): int(term["bytes"]) for term in memory["terms"]}
    return PlannedTraining(memory_bytes=memory["totalBytes"], memory_terms=terms)
