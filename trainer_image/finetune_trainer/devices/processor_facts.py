"""Facts of the processor, as Linux lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def processor_facts(read: Callable[[], str] = Path("/proc/cpuinfo").read_text) -> dict[str, str]:
    """Return the facts of the first processor by their names, such as `model name`; none if the kernel lists none."""
    try:
        lines = read().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def instructions(facts: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the sets of instructions that the processor has: `flags` of x86, `Features` of Arm."""
    return frozenset(facts.get("flags", facts.get("Features", "")).split())
