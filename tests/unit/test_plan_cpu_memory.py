"""The plan's memory on CPUs compared with kept runs (`make measure-cpu-memory` measures again)."""

from __future__ import annotations

import statistics

import pytest

from finetune_contract.choices import StrategyName
from tracing_support.cpu_runs import CASES, LONG_CASES, KeptRun, kept_runs, runs

MEDIAN_ERROR = 0.10
LARGEST_ERROR = 0.25
RUNS = runs()
STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "fsdp", "deepspeed")


def error(run: KeptRun) -> float:
    return run.planned.total_bytes / run.peak - 1


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.name)
def test_plan_counts_the_memory_that_a_run_on_a_cpu_takes(run: KeptRun):
    terms = {term.name: term.bytes >> 20 for term in run.planned.terms}
    assert abs(error(run)) <= LARGEST_ERROR, f"measured {run.peak >> 20} MiB, planned {terms}"


@pytest.mark.parametrize("held", [False, True], ids=["fitted", "held"])
def test_half_of_the_runs_are_closer_to_their_plans(held: bool):
    assert statistics.median(abs(error(run)) for run in RUNS.values() if run.held is held) <= MEDIAN_ERROR


def test_kept_runs_are_those_of_the_cases_and_of_all_strategies():
    long = [case.name for case in LONG_CASES if case.name in RUNS]
    assert list(RUNS) == [*(case.name for case in CASES), *long]
    assert {run.training.strategy.name for run in RUNS.values()} == set(STRATEGIES)
    assert {run.training.strategy.zero_stage for run in RUNS.values()} >= {1, 2, 3}
    assert any(run.training.adapter is not None for run in RUNS.values())
    assert sum(run.held for run in RUNS.values()) * 2 >= len(RUNS)
    for each in kept_runs().values():
        assert each["date"]
        assert each["machine"]["processor"]
        assert each["libraries"]["torch"]
