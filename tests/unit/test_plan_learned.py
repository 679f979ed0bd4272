"""Estimates that finished jobs of the same namespace correct."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.controller.reconcile.reconciler import Reconciler
from finetune_operator.controller.store.store import Store
from finetune_operator.jobs.outcomes.learning import learned_from
from finetune_operator.plan.hardware.assumed_hardware import UNKNOWN_GPU, parse_hardware
from finetune_operator.plan.models.assumed_models import assumed_model
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan, LearnedRatios
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Planning, Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobStatus
from reconcile_world import World

MODEL, _ = assumed_model("hf://meta-llama/Llama-3.2-1B", "text-generation")
ROWS = DataFacts(
    fingerprint="f00d", splits={"train": SplitFacts(rows=6400, tokens=6400 * 512, longest=512)}, max_length=512
)
HARDWARE = parse_hardware("gpu=H100,gpus=8,hostMemory=1Ti", CLUSTER_SETTINGS.hardware)


def ratios(**fields: Any) -> LearnedRatios:
    given = {
        "model_type": MODEL.model_type,
        "parameters": MODEL.parameters,
        "strategy": "ddp",
        "device": "H100",
        "jobs": 4,
        "step_time": 1.23,
    }
    return LearnedRatios.model_validate({**given, **fields})


def planned(*learned: LearnedRatios, strategy: str = "ddp", hardware: Any = HARDWARE) -> JobPlan:
    spec = {
        "task": "text-generation",
        "model": {"uri": "hf://meta-llama/Llama-3.2-1B"},
        "dataset": {"uri": "hf://org/texts"},
        "training": {"epochs": 2, "globalBatchSize": 64},
        "preparation": {"maxLength": 512, "packing": "never"},
        "parallelism": {"strategy": strategy},
        "resources": {"gpusPerNode": 8},
    }
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "a"}, "spec": spec}
    facts = Facts(model=MODEL, data=ROWS, hardware=hardware, learned=learned)
    return plan(FineTuneJob.model_validate(document), facts, CLUSTER_SETTINGS)


# ---------------------------------------------------------------------------------------------------------------- plan


def test_time_is_corrected_by_finished_jobs_and_the_plan_shows_it():
    plain, learned = planned().estimate, planned(ratios())
    assert plain.step_seconds is not None
    assert learned.estimate.time_factor == 1.23
    assert learned.estimate.step_seconds == pytest.approx(1.23 * plain.step_seconds)
    assert sum(learned.estimate.step_parts.values()) == pytest.approx(1.23 * plain.step_seconds)
    assert learned.estimate.seconds == pytest.approx(
        200 * 1.23 * plain.step_seconds + sum(learned.estimate.pauses.values())
    )
    assert (
        "time corrected by 1.23 from 4 finished jobs of this namespace with this model, strategy and device"
        in learned.reasons
    )
    assert "; times 1.23, from finished jobs; " in learned.estimate.basis
    assert learned.memory == planned().memory


OTHERS = {
    "too few jobs": {"jobs": 2},
    "another strategy": {"strategy": "fsdp"},
    "another device": {"device": "A100-80GB"},
    "another kind of model": {"model_type": "qwen3"},
    "a larger model": {"parameters": round(1.03 * MODEL.parameters)},
    "no time measured": {"step_time": None},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_jobs_correct_nothing(case: str):
    assert planned(ratios(**OTHERS[case])) == planned()


@pytest.mark.parametrize(("measured", "factor"), [(0.1, 0.5), (0.7, 0.7), (9.0, 2.0)])
def test_correction_of_the_time_is_bounded(measured: float, factor: float):
    assert planned(ratios(step_time=measured)).estimate.time_factor == factor


def test_memory_is_corrected_upwards():
    plain, learned = planned().memory, planned(ratios(memory=1.25))
    assert plain is not None
    assert learned.memory is not None
    assert learned.memory.total_bytes == pytest.approx(1.25 * plain.total_bytes, abs=1)
    assert learned.memory.terms[-1].name == "correction"
    assert learned.memory.terms[-1].formula == "x 1.25, the median of 4 finished jobs"
    assert sum(term.bytes for term in learned.memory.terms) == learned.memory.total_bytes
    assert "memory corrected by x 1.25 from 4 finished jobs of this namespace with this strategy and device" in (
        learned.reasons
    )


def test_memory_is_never_corrected_downwards():
    assert planned(ratios(memory=0.6)).memory == planned().memory


def test_forms_fit_with_their_corrected_memory():
    hardware = parse_hardware("gpu=H100,gpus=8,memory=40Gi,hostMemory=1Ti", CLUSTER_SETTINGS.hardware)
    plain = planned(hardware=hardware)
    learned = planned(ratios(memory=2.0), hardware=hardware)
    assert plain.memory is not None
    assert learned.memory is not None
    assert 2 * plain.memory.total_bytes > plain.memory.capacity_bytes
    assert learned.memory.total_bytes <= learned.memory.capacity_bytes
    assert (plain.strategy, learned.strategy) == ("ddp", "ddp+selective-activation-checkpointing")


# ------------------------------------------------------------------------------------------------------- finished jobs


def finished(step: float, memory: float = 1.0, **changes: Any) -> FineTuneJobStatus:
    """Return the status of a job that succeeded, with these ratios of measured to planned values."""
    plan_fields = {
        "strategy": "ddp",
        "launcher": "job",
        "worldSize": 8,
        "product": "H100",
        "memoryPerDevice": {"parameters": 1000, "total": 1000},
        **changes.pop("plan", {}),
    }
    status = {
        "conditions": [
            {"type": "Succeeded", "status": "True", "reason": "Succeeded", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ],
        "plan": plan_fields,
        "planCheck": {
            "strategy": "ddp",
            "attempt": 1,
            "device": "H100",
            "memory": {"planned": 1000, "measured": 1000 * memory, "ratio": memory},
            "stepTime": {"planned": 1, "measured": step, "ratio": step},
        },
        "measured": {"model": json.loads(MODEL.model_dump_json(by_alias=True))},
        "phase": "Succeeded",
        **changes,
    }
    return FineTuneJobStatus.model_validate(status)


def test_ratios_are_medians_of_three_jobs_or_more():
    three = [finished(1.1), finished(1.3, 1.2), finished(4.0, 0.5)]
    assert learned_from(three) == (ratios(jobs=3, step_time=1.3, memory=1.0),)
    assert learned_from(three[:2]) == ()


def test_jobs_on_unknown_gpus_teach_nothing():
    check = finished(2.0).plan_check
    assert check is not None
    unknown = check.model_copy(update={"device": UNKNOWN_GPU})
    assert learned_from([finished(2.0).model_copy(update={"plan_check": unknown})] * 4) == ()


def test_jobs_of_another_kind_are_groups_of_their_own():
    other = finished(2.0).plan_check
    assert other is not None
    elsewhere = finished(2.0).model_copy(update={"plan_check": other.model_copy(update={"device": "T4"})})
    found = learned_from([finished(1.0)] * 4 + [elsewhere] * 3)
    assert [(one.device, one.jobs, one.step_time) for one in found] == [("H100", 4, 1.0), ("T4", 3, 2.0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"planCheck": None},
        {"measured": None},
        {"conditions": [], "phase": "Training"},
        {"measured": {"model": {"parameters": 1}}},
    ],
    ids=["not compared", "not measured", "still running", "facts of an older operator"],
)
def test_jobs_without_measurements_are_left_out(changes: dict[str, Any]):
    assert learned_from([finished(1.0, **changes)] * 4) == ()


def test_a_correction_is_not_corrected_again():
    """Jobs whose plans were corrected, and then right, teach the same correction."""
    corrected = {
        "estimated": {"timeFactor": 1.5, "stepSeconds": 1.0},
        "memoryPerDevice": {"parameters": 1000, "correction": 250, "total": 1250},
    }
    (found,) = learned_from([finished(1.0, plan=corrected)] * 3)
    assert (found.step_time, found.memory) == (1.5, 1.25)


def test_ratios_that_round_to_zero_teach_nothing():
    (found,) = learned_from([finished(0.0, memory=0.001)] * 3)
    assert (found.step_time, found.memory, found.jobs) == (None, None, 3)


# ------------------------------------------------------------------------------------------------------------ operator


def test_plan_keeps_its_corrections_once_the_job_has_started():
    world = World()
    world.settle()
    first = world.job().status.plan
    assert first is not None
    assert first.estimated.time_factor is None
    assert (first.strategy, first.product) == ("single", "cpu")

    taught = World(learned=())
    model, _ = assumed_model("hf://org/encoder", "text-classification")
    fields = {"model_type": model.model_type, "parameters": model.parameters, "strategy": "single", "device": "cpu"}
    taught.learned = (ratios(**fields, step_time=1.5),)
    taught.settle()
    started = taught.job().status
    assert started.plan is not None
    assert started.plan.estimated.time_factor == 1.5
    assert started.measured is not None
    assert len(started.measured.learned) == 1
    taught.learned = ()
    taught.succeed()
    taught.settle()
    after = taught.job().status
    assert after.measured is not None
    assert after.measured.model is not None
    assert after.measured.learned == started.measured.learned


@pytest.mark.parametrize(("learns", "jobs"), [(True, 3), (False, 0)])
def test_operator_reads_finished_jobs_of_the_namespace_if_it_may(learns: bool, jobs: int):
    settings = CLUSTER_SETTINGS.model_copy(update={"planning": Planning(learnFromJobs=learns)})
    store = filled(settings)
    reconciler = Reconciler(cast(Any, SimpleNamespace(settings=settings, store=store)), *[cast(Any, None)] * 3)
    world = World(settings=settings)
    found = reconciler._learned(world.job())
    assert sum(one.jobs for one in found) == jobs
    world.settle()
    assert reconciler._learned(world.job()) == ()  # it has started


def filled(settings: Settings) -> Store:
    """Return a store with three finished jobs of the namespace `team`, and three of another."""
    store = Store(settings)
    status = finished(1.5).model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = World().spec
    for number in range(6):
        metadata = {
            "name": f"job-{number}",
            "namespace": "team" if number < 3 else "other",
            "uid": f"uid-{number}",
            "generation": 1,
            "resourceVersion": str(number + 1),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata}
        store.put(document | {"spec": spec, "status": status})
    return store


def test_learning_is_off_by_default():
    assert CLUSTER_SETTINGS.planning.learn_from_jobs is False
    assert replace(Facts(), local=True).learned == ()
