"""Spot nodes in a plan, in a cluster and on this machine, and in `finetune status`."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from finetune_contract.facts import HardwareFacts
from finetune_operator.cli.cluster.cluster_jobs import ClusterJob
from finetune_operator.cli.cluster.jobview import Page, one_line, print_page
from finetune_operator.plan.hardware.capacity import patience
from finetune_operator.plan.plan import plan
from finetune_operator.plan.summary import Row, summarise
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.spec.types import FineTuneJob, SpotSpec


def planned(local: bool = False, settings: Settings = CLUSTER_SETTINGS, **fields: Any) -> JobPlan:
    spec = {
        "task": "text-classification",
        "model": {"uri": "hf://org/model"},
        "dataset": {"uri": "hf://org/data"},
        "training": {},
        **fields,
    }
    text = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "reviews"}, "spec": spec}
    hardware = HardwareFacts(cpu_cores=2, memory_bytes=1 << 36) if local else None
    job = FineTuneJob.model_validate_json(json.dumps(text))
    return plan(job, Facts(local=local, hardware=hardware), LOCAL_SETTINGS if local else settings)


def reasons(made: JobPlan, *about: str) -> list[str]:
    return [reason for reason in made.reasons if reason.startswith(about)]


SPOT = {"enabled": True}
REQUESTED = "capacity spot: as asked, for the training alone;"
REASONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "without a bound": (
        {"spot": SPOT},
        [f"{REQUESTED} it waits for them without a bound, which spot.maxWaitSeconds would set"],
    ),
    "with a bound": (
        {"spot": {**SPOT, "maxWaitSeconds": 7200}},
        [f"{REQUESTED} it takes 2 h at most, with waiting"],
    ),
    "with a fallback": (
        {"spot": {**SPOT, "fallbackToOnDemand": True}},
        [f"{REQUESTED} it goes to any nodes once a pod has waited 10 min for a spot node"],
    ),
    "with a fallback that has to come early": (
        {"spot": {**SPOT, "fallbackToOnDemand": True, "maxRunSeconds": 3600, "maxWaitSeconds": 3660}},
        [f"{REQUESTED} it goes to any nodes once a pod has waited 60 s for a spot node"],
    ),
    "without a checkpoint on the way out": (
        {"spot": SPOT, "checkpoints": {"onPreemption": False}},
        [f"{REQUESTED} it waits for them without a bound, which spot.maxWaitSeconds would set",
         "checkpoints.onPreemption is false: each time a spot node is taken away, what was done since the last "
         "checkpoint is done again"],
    ),
    "not asked for": ({}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_plan_gives_the_waiting_rule_of_the_training(case: str) -> None:
    fields, expected = REASONS[case]
    made = planned(**fields)
    assert reasons(made, "capacity", "checkpoints.onPreemption") == expected
    assert made.capacity == ("spot" if "spot" in fields else None)
    shown = Row("capacity", "spot", "nodes of the training")
    assert (shown in summarise(made)[0].rows) == ("spot" in fields)


def test_spot_request_is_ignored_on_this_machine_with_a_note() -> None:
    made = planned(local=True, spot=SPOT)
    assert made.capacity is None
    assert reasons(made, "capacity") == [
        "capacity: it trains on this machine, as there are no spot nodes without a cluster; spec.spot holds in one"
    ]
    assert made.trainer == planned(local=True).trainer


def test_checkpoints_on_spot_nodes_default_to_every_ten_minutes() -> None:
    def minutes(made: JobPlan) -> float | None:
        assert made.trainer.training is not None
        return made.trainer.training.checkpoints.every_minutes

    assert minutes(planned(spot=SPOT)) == 10
    assert minutes(planned(spot=SPOT, checkpoints={"every": {"steps": 50}})) is None
    assert minutes(planned(spot=SPOT, checkpoints={"every": {"minutes": 2}})) == 2
    assert minutes(planned()) is None


def test_the_estimate_names_both_prices() -> None:
    prices = Settings.model_validate({"prices": ({"product": "cpu", "gpus": 0, "perHour": 4.0, "spotPerHour": 1.0},)})
    on_demand, spot = planned(settings=prices), planned(settings=prices, spot=SPOT)
    assert on_demand.estimate.cost is not None
    # Spot nodes save more often.
    assert on_demand.estimate.seconds is not None
    assert spot.estimate.seconds is not None
    longer = spot.estimate.seconds / on_demand.estimate.seconds
    assert spot.estimate.cost == pytest.approx(longer * on_demand.estimate.cost / 4)
    assert spot.estimate.basis.endswith("1 node at 1 USD spot an hour instead of 4 on demand")


PATIENCE: dict[str, tuple[dict[str, Any], dict[str, float], float]] = {
    "no bound: as the settings say": ({}, {}, 600),
    "what the longest run leaves": ({"maxRunSeconds": 3600, "maxWaitSeconds": 3700}, {}, 100),
    "less when time is over already": (
        {"maxRunSeconds": 3600, "maxWaitSeconds": 3700}, {"waited": 60}, 40,
    ),
    "more when some of the run is done": (
        {"maxRunSeconds": 3600, "maxWaitSeconds": 3700}, {"waited": 60, "ran": 50}, 90,
    ),
    "half of the time is kept for a run without a bound": ({"maxWaitSeconds": 1000}, {"waited": 100}, 400),
    "nothing is left": ({"maxRunSeconds": 100, "maxWaitSeconds": 100}, {"waited": 50}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", PATIENCE)
def test_pods_wait_for_a_spot_node_while_the_training_can_end_in_time(case: str) -> None:
    bounds, over, seconds = PATIENCE[case]
    assert patience(SpotSpec(enabled=True, **bounds), CLUSTER_SETTINGS, **over) == seconds


# ------------------------------------------------------------------------------------------------------ finetune status

NOW = datetime(2026, 1, 1, 13, tzinfo=UTC)
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Training",
    "startTime": "2026-01-01T12:00:00Z",
    "restarts": 3,
    "stages": [
        {"name": "prepare", "state": "Succeeded", "attempt": 1},
        {"name": "train", "state": "Running", "attempt": 4, "capacity": "spot"},
        {"name": "evaluate", "state": "Pending", "attempt": 0},
    ],
    "plan": {
        "strategy": "ddp",
        "launcher": "job",
        "capacity": "spot",
        "worldSize": 2,
        "microBatchSize": 8,
        "gradientAccumulation": 1,
    },
    "spot": {"since": "2026-01-01T12:00:00Z", "preemptions": 2},
    "cost": {"nodeSeconds": 10, "billableSeconds": 12, "currency": "USD", "amount": 3.0, "saved": 7.0},
}


def shown(**status: Any) -> list[str]:
    metadata = {
        "name": "reviews",
        "namespace": "team",
        "uid": "1",
        "generation": 1,
        "creationTimestamp": "2026-01-01T12:00:00Z",
    }
    job = ClusterJob.model_validate({"metadata": metadata, "spec": {}, "status": {**STATUS, **status}})
    console = Console(file=io.StringIO(), width=120)
    print_page(console, Page(job, NOW))
    assert isinstance(console.file, io.StringIO)
    return [*console.file.getvalue().splitlines(), one_line(job, NOW)]


def test_status_shows_spot_nodes_preemptions_and_savings() -> None:
    lines = shown()
    assert lines[0] == "reviews  Training  namespace team, created 60 min ago, 3 restarts, 2 preemptions"
    assert "  plan  ddp by job, 2 processes on spot nodes, batch 16 = 8 x 1 x 2" in lines
    assert "  cost  3.00 USD, 7.00 (70%) saved by spot nodes" in lines
    assert any(line.split() == ["train", "Running", "attempt", "4", "on", "spot", "nodes"] for line in lines)
    assert lines[-1].startswith("Training  train running, attempt 4 on spot nodes")


def test_status_of_a_job_without_spot_nodes_does_not_mention_them() -> None:
    stages = [{name: value for name, value in stage.items() if name != "capacity"} for stage in STATUS["stages"]]
    plan_of = {name: value for name, value in STATUS["plan"].items() if name != "capacity"}
    cost = {"nodeSeconds": 10, "billableSeconds": 12, "currency": "USD", "amount": 3.0}
    lines = shown(stages=stages, plan=plan_of, spot=None, cost=cost)
    assert "  cost  3.00 USD" in lines
    assert not any("spot" in line or "preempt" in line for line in lines)
