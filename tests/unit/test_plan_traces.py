"""The plan's memory compared with kept traces of the trainer on fake GPUs (`make trace-memory` traces again)."""

from __future__ import annotations

import json
import statistics

import pytest

from each_case import each_case
from finetune_operator.plan.memory.process_memory import ALLOCATOR_SHARE, CUDA_CONTEXT_BYTES
from finetune_operator.plan.models.architectures import ARCHITECTURES, model_facts
from finetune_operator.spec.settings.settings import Planning
from tracing_support.memory_table import KEPT, TRACED, KeptTrace, allocated, kept_traces, planned
from tracing_support.traced_cases import Case

LOW, HIGH = 0.88, 1.12
"""Bounds of the plan's terms, without the allocator's losses and the process, divided by a trace's peak."""
MEDIAN_ERROR = {"fitted": 0.02, "held": 0.04}
LEAST_HELD = 60

TRACES = kept_traces()
FITTED, HELD = ([case for case in TRACED if case.held is held] for held in (False, True))
COUNTED = (
    "parameters",
    "block_parameters",
    "layers",
    "hidden_size",
    "intermediate_size",
    "attention_heads",
    "key_value_heads",
    "vocabulary_size",
    "idle_parameters",
    "linear_layers",
)
"""Facts that both the formulas and the trainer count. The trainer has tables of positions and token types among the
embeddings besides, some thousand weights.
"""


def errors(cases: list[Case]) -> list[float]:
    return [abs(allocated(planned(case, TRACES[case.name])) / TRACES[case.name].peak - 1) for case in cases]


@each_case("case", TRACED, ids=lambda case: case.name)
def test_plan_counts_the_memory_that_a_trace_finds(case: Case):
    trace = TRACES[case.name]
    made = planned(case, trace)
    ratio = allocated(made) / trace.peak
    terms = {term.name: f"{term.bytes / (1 << 30):.2f}" for term in made.terms}
    held = {kind: f"{size / (1 << 30):.2f}" for kind, size in trace.held.items()}
    assert LOW <= ratio <= HIGH, f"{ratio:.3f} of the peak in {trace.phase}: planned {terms}, traced {held}"


@each_case("case", TRACED, ids=lambda case: case.name)
def test_plan_accepts_nothing_that_a_trace_refutes(case: Case):
    trace = TRACES[case.name]
    # The context is what a GPU holds beside the trainer's tensors: this card lacks one byte.
    card = trace.peak + CUDA_CONTEXT_BYTES - 1
    made = planned(case, trace, card)
    assert made.total_bytes > made.capacity_bytes == card


MARGIN = Planning().memory_margin
"""Share of a card's memory that a choice leaves free."""


def stated_overhead(trace: KeptTrace) -> int:
    """Return the bytes that a GPU holds beside a trace's, as docs/memory.md states them: CUDA's context with NCCL, and
    the allocator's losses over all that is not allocated once.
    """
    resident = trace.held.get("parameters", 0)
    if trace.phase != "start":  # where weights are converted before the optimizer has any state
        resident += trace.held.get("optimizer", 0)
    return CUDA_CONTEXT_BYTES + int(ALLOCATOR_SHARE * (trace.peak - resident))


def is_accepted(case: Case, trace: KeptTrace, card: int) -> bool:
    made = planned(case, trace, card)
    return made.total_bytes <= (1 - MARGIN) * made.capacity_bytes


@each_case("case", TRACED, ids=lambda case: case.name)
def test_plan_accepts_cards_with_room_for_trace_and_overhead(case: Case):
    trace = TRACES[case.name]
    needed = (trace.peak + stated_overhead(trace)) / (1 - MARGIN)
    assert is_accepted(case, trace, int(HIGH * needed) + 1), "the card has the plan's stated error of room"
    assert not is_accepted(case, trace, int(LOW * needed) - 1), "the card lacks more than the plan's stated error"


@pytest.mark.parametrize(("column", "cases"), [("fitted", FITTED), ("held", HELD)])
def test_half_of_the_plans_are_closer_to_their_traces(column: str, cases: list[Case]):
    assert statistics.median(errors(cases)) <= MEDIAN_ERROR[column]


def test_held_traces_are_many_and_of_families_that_have_no_fitted_one():
    families = [{case.config["model_type"] for case in cases} for cases in (FITTED, HELD)]
    assert len(HELD) >= LEAST_HELD
    assert len(families[1] - families[0]) >= 10


def test_longformer_and_qlora_are_among_the_held_traces():
    assert sum(case.config["model_type"] == "longformer" for case in HELD) >= 3
    packed = [case for case in HELD if case.adapter is not None and case.adapter.method == "qlora"]
    assert {case.strategy.name for case in packed} == {"single", "ddp", "fsdp"}


# transformers 5.23 ties the head of every T5, whatever its config says, and its first block has the positions' table.
COMPARED = set(ARCHITECTURES) - {"t5"}


@each_case("case", [case for case in TRACED if case.config["model_type"] in COMPARED], ids=lambda case: case.name)
def test_formulas_count_the_model_that_the_trainer_measures(case: Case):
    counted, measured = model_facts(case.model_config, case.task), TRACES[case.name].facts
    assert {name: getattr(counted, name) for name in COUNTED} == {name: getattr(measured, name) for name in COUNTED}


def test_kept_traces_are_those_of_the_cases():
    values = json.loads(KEPT.read_text(encoding="utf-8"))
    assert list(values) == [case.name for case in TRACED]
    for case in TRACED:
        kept = values[case.name]
        assert kept["config"] == json.loads(json.dumps(case.model_config)), case.name
        assert (kept["recipe"]["rows"], kept["recipe"]["tokens"]) == (case.rows, case.tokens)
        assert kept["recipe"]["strategy"] == case.strategy.model_dump(mode="json", exclude_defaults=True)
        assert kept["fitted"] != case.held, case.name
