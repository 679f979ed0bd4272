"""Picture of a plan's memory for a terminal: a bar for each term, drawn against the memory of the device."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.byte_text import human_bytes
from finetune_operator.planning.plan_types import MemoryEstimate

PICTURE_WIDTH = 40
"""Characters of the whole device."""
_FULL, _THIN, _FREE, _ABOVE = "█", "▏", "·", "▒"


@dataclass(frozen=True)
class Bar:
    """Row of the picture."""

    name: str
    size: str
    drawn: str
    """Characters of the bar, from the left edge on."""


def memory_bars(memory: MemoryEstimate, width: int = PICTURE_WIDTH) -> tuple[Bar, ...]:
    """Return a bar for each term that begins where the one before ends, and the part that stays free. `width`
    characters are the device, or all terms if they need more; bytes above the device's are drawn lighter.
    """
    total, capacity = memory.total_bytes, memory.capacity_bytes
    scale = max(total, capacity, 1)
    edge = round(capacity * width / scale)
    bars, begin = [], 0
    for term in memory.terms:
        first, last = round(begin * width / scale), round((begin + term.bytes) * width / scale)
        inside = max(0, min(last, edge) - first)
        cells = _FULL * inside + _ABOVE * (last - first - inside)
        bars.append(Bar(term.name, human_bytes(term.bytes), " " * first + (cells or (_THIN if term.bytes else ""))))
        begin += term.bytes
    if total <= capacity:
        first = round(total * width / scale)
        bars.append(Bar("free", human_bytes(capacity - total), " " * first + _FREE * (width - first)))
    else:
        bars.append(Bar("above the device", human_bytes(total - capacity), " " * edge + _ABOVE * (width - edge)))
    return tuple(bars)
