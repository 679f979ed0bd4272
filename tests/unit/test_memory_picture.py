"""The memory of a plan as bars on a terminal."""

from __future__ import annotations

from finetune_operator.cli.terminal.result_tables import Bar, memory_bars
from finetune_operator.plan.types.plan_types import MemoryEstimate, MemoryTerm

GIB = 1 << 30


def estimate(capacity: int, **terms: int) -> MemoryEstimate:
    made = tuple(MemoryTerm(name=name, bytes=size * GIB, formula="") for name, size in terms.items())
    total = sum(term.bytes for term in made)
    return MemoryEstimate(terms=made, total_bytes=total, capacity_bytes=capacity * GIB, host_bytes=0)


def test_each_bar_begins_where_the_one_before_ends():
    assert memory_bars(estimate(16, parameters=4, gradients=0, activations=8), width=8) == (
        Bar("parameters", "4.0 GiB", "██"),
        Bar("gradients", "0 B", "  "),
        Bar("activations", "8.0 GiB", "  ████"),
        Bar("free", "4.0 GiB", "      ··"),
    )


def test_term_smaller_than_a_character_is_still_seen():
    assert memory_bars(estimate(80, parameters=40, process=1), width=8)[1].drawn == "    ▏"


def test_memory_above_that_of_the_device_is_drawn_lighter():
    assert memory_bars(estimate(8, parameters=6, activations=10), width=8) == (
        Bar("parameters", "6.0 GiB", "███"),
        Bar("activations", "10.0 GiB", "   █▒▒▒▒"),
        Bar("above the device", "8.0 GiB", "    ▒▒▒▒"),
    )
