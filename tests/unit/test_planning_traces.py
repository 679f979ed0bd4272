"""The plan's memory compared with kept traces of the trainer on fake GPUs (`make trace-memory` traces again)."""

from __future__ import annotations

import json
import statistics

import pytest

from tracing_support.memory_table import KEPT, TRACED, allocated, kept_traces, planned
from tracing_support.traced_cases import Case

LOW, HIGH = 0.94, 1.08
"""Bounds of the plan's terms, without the allocator's losses and the process, divided by a trace's peak."""
MEDIAN_ERROR = 0.02

TRACES = kept_traces()


@pytest.mark.parametrize("case", TRACED, ids=lambda case: case.name)
def test_plan_counts_the_memory_that_a_trace_finds(case: Case):
    made, trace = planned(case), TRACES[case.name]
    ratio = allocated(made) / trace.peak
    terms = {term.name: f"{term.bytes / (1 << 30):.2f}" for term in made.terms}
    held = {kind: f"{size / (1 << 30):.2f}" for kind, size in trace.held.items()}
    assert LOW <= ratio <= HIGH, f"{ratio:.3f} of the peak in {trace.phase}: planned {terms}, traced {held}"
    assert made.total_bytes > trace.peak


def test_half_of_the_plans_are_closer_to_their_traces():
    errors = [abs(allocated(planned(case)) / TRACES[case.name].peak - 1) for case in TRACED]
    assert statistics.median(errors) <= MEDIAN_ERROR


def test_kept_traces_are_those_of_the_cases():
    values = json.loads(KEPT.read_text(encoding="utf-8"))
    assert list(values) == [case.name for case in TRACED]
    for case in TRACED:
        kept = values[case.name]
        assert kept["config"] == json.loads(json.dumps(case.model_config)), case.name
        assert (kept["recipe"]["rows"], kept["recipe"]["tokens"]) == (case.rows, case.tokens)
        assert kept["recipe"]["strategy"] == case.strategy.model_dump(mode="json", exclude_defaults=True)
