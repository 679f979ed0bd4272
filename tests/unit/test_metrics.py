"""Metrics for Prometheus: their names, when each counts, and labels from closed sets."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_operator.controller.cluster.kube import RequestCounter
from finetune_operator.controller.reconcile.operator_state import Measurements
from finetune_operator.controller.servers.operator_metrics import OTHER, Metrics
from finetune_operator.jobs.fleet_metrics import Fleet, fleet
from finetune_operator.jobs.outcomes.remedies import OperatorCause
from finetune_operator.jobs.state.decision_types import Decision, JobView
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import FailureStatus, FineTuneJobStatus, Phase, ProgressStatus
from reconcile_world import NOON, SPEC, World

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA-H100-80GB-HBM3"
PRICED = Settings.model_validate(
    {
        "currency": "EUR",
        "prices": (
            {"product": "cpu", "gpus": 0, "perHour": 3.6, "spotPerHour": 1.2},
            {"product": GPU, "gpus": 2, "perHour": 36.0, "spotPerHour": 7.2},
        ),
    }
)


def samples(metrics: Metrics, *, zeros: bool = False) -> dict[str, float]:
    """Return own samples as `name{label="value"}`, without buckets."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if not sample.name.startswith("finetune_") or sample.name.endswith("_bucket"):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            if sample.value or zeros:
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def series(metrics: Metrics) -> int:
    """Return the number of own series, buckets included."""
    lines = metrics.exposition().decode().splitlines()
    return sum(line.startswith("finetune_") for line in lines)


@dataclass
class Measured(World):
    """A world whose operator counts its writes."""

    metrics: Metrics = field(default_factory=lambda: Metrics("EUR"))
    settings: Settings = PRICED
    history: list[tuple[JobView, FineTuneJobStatus]] = field(default_factory=list)

    def step(self, crash_after: int | None = None) -> Decision:
        before = self.job()
        decision = super().step(crash_after)
        if self.job().status != before.status:
            self.history.append((before, decision.status))
            self.metrics.status_written(before, decision.status)
        return decision

    def pass_(self, seconds: float) -> None:
        """Let time pass without a reconcile."""
        self.now += timedelta(seconds=seconds)

    def run(self, wait: float, seconds: float, end: Callable[[World], object] = World.succeed) -> None:
        """Give the newest child its pods after `wait`, and end it `seconds` later."""
        self.wait(wait)
        self.start()
        self.settle()
        self.pass_(seconds)
        end(self)
        self.settle()


def counted(world: Measured, *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in samples(world.metrics).items() if name.startswith(prefixes)}


def test_every_measurement_is_exposed() -> None:
    metrics = Metrics()
    measurements: Measurements = metrics
    counter: RequestCounter = metrics
    now = Fleet({"Training": 2, "Failed": 1, "a word of its own": 1}, 1, 30.0, 7.5, {"train": 12.0}, {"train": 480.0})
    metrics.follow_jobs(lambda: replace(now, estimated_cost={"USD": 4.5, "EUR": 1.0, "CHF": 2.0}))
    metrics.follow_queue(lambda: 7)
    metrics.follow_leading(lambda: True)
    metrics.follow_event_loop(lambda: 0.5)
    metrics.progress_post(200)
    metrics.progress_post(429)
    measurements.reconcile_done(0.25, "done")
    measurements.reconcile_done(0.5, "failed")
    measurements.relisted("outage")
    measurements.claims_left_over([2**30, 2**20])
    counter.request_done("create", "pytorchjobs", 200, 0.5)
    counter.request_done("list", "pods", 0, 1.5)
    assert samples(metrics) == {
        'finetune_jobs{phase="Training"}': 2,
        'finetune_jobs{phase="Failed"}': 1,
        'finetune_jobs{phase="other"}': 1,
        "finetune_jobs_waiting": 1,
        "finetune_oldest_waiting_seconds": 30,
        "finetune_progress_age_seconds": 7.5,
        'finetune_samples_per_second{stage="train"}': 12,
        'finetune_tokens_per_second{stage="train"}': 480,
        'finetune_estimated_cost{currency="USD"}': 4.5,
        'finetune_estimated_cost{currency="other"}': 3,
        "finetune_queue_depth": 7,
        "finetune_leftover_claims": 2,
        "finetune_leftover_claim_bytes": 2**30 + 2**20,
        "finetune_leading": 1,
        "finetune_event_loop_lag_seconds": 0.5,
        'finetune_progress_posts_total{code="200"}': 1,
        'finetune_progress_posts_total{code="429"}': 1,
        "finetune_reconcile_seconds_count": 2,
        "finetune_reconcile_seconds_sum": 0.75,
        "finetune_reconcile_errors_total": 1,
        'finetune_resyncs_total{reason="outage"}': 1,
        'finetune_api_requests_total{code="200",resource="pytorchjobs",verb="create"}': 1,
        'finetune_api_requests_total{code="0",resource="pods",verb="list"}': 1,
        'finetune_api_request_seconds_count{verb="create"}': 1,
        'finetune_api_request_seconds_sum{verb="create"}': 0.5,
        'finetune_api_request_seconds_count{verb="list"}': 1,
        'finetune_api_request_seconds_sum{verb="list"}': 1.5,
    }


# -------------------------------------------------------------------------------------------------------- whole lives


def test_a_job_on_gpus_is_counted_from_its_creation_to_its_end() -> None:
    accelerator = {"product": GPU, "memory": "80Gi"}
    world = Measured(spec={**SPEC, "resources": {"nodes": 2, "gpusPerNode": 2, "accelerator": accelerator}})
    world.settle()
    world.run(wait=40, seconds=60)
    world.run(wait=10, seconds=100)
    plan = world.job().status.plan
    assert plan is not None
    assert plan.estimated.duration_seconds is not None
    world.run(wait=0, seconds=20)
    world.run(wait=0, seconds=20)
    assert world.phase == "Succeeded"
    counts = counted(world, "finetune_")
    ratio = counts.pop("finetune_estimate_ratio_sum")
    assert ratio == pytest.approx(100 / plan.estimated.duration_seconds)
    assert counts == {
        'finetune_job_ends_total{cause="none",outcome="succeeded"}': 1,
        "finetune_job_wait_seconds_count": 1,
        "finetune_job_wait_seconds_sum": 40,
        'finetune_stage_seconds_count{outcome="succeeded",stage="prepare"}': 1,
        'finetune_stage_seconds_sum{outcome="succeeded",stage="prepare"}': 100,
        'finetune_stage_seconds_count{outcome="succeeded",stage="train"}': 1,
        'finetune_stage_seconds_sum{outcome="succeeded",stage="train"}': 110,
        'finetune_stage_seconds_count{outcome="succeeded",stage="evaluate"}': 1,
        'finetune_stage_seconds_sum{outcome="succeeded",stage="evaluate"}': 20,
        'finetune_stage_seconds_count{outcome="succeeded",stage="predict"}': 1,
        'finetune_stage_seconds_sum{outcome="succeeded",stage="predict"}': 20,
        'finetune_node_seconds_total{capacity="any",stage="prepare"}': 60,
        'finetune_node_seconds_total{capacity="any",stage="train"}': 200,
        'finetune_node_seconds_total{capacity="any",stage="evaluate"}': 20,
        'finetune_node_seconds_total{capacity="any",stage="predict"}': 20,
        'finetune_running_node_seconds_total{capacity="any",stage="prepare"}': 60,
        'finetune_running_node_seconds_total{capacity="any",stage="train"}': 200,
        'finetune_running_node_seconds_total{capacity="any",stage="evaluate"}': 20,
        'finetune_running_node_seconds_total{capacity="any",stage="predict"}': 20,
        'finetune_gpu_seconds_total{capacity="any",stage="train"}': 400,
        'finetune_gpu_seconds_total{capacity="any",stage="evaluate"}': 40,
        'finetune_gpu_seconds_total{capacity="any",stage="predict"}': 40,
        # 60 s of a CPU node, and 240 of GPU nodes.
        'finetune_cost_total{currency="EUR"}': pytest.approx(0.06 + 2.0 + 0.4),
        "finetune_estimate_ratio_count": 1,
    }


def take_away(world: World) -> None:
    name = world.newest()
    for pod in world.pods_of(name):
        world.end_pod(pod, 143)
        world.pods[pod]["status"]["conditions"] = [world.condition("DisruptionTarget", "DeletionByTaintManager")]
    world.end_child(name, succeeded=False)


def test_lost_spot_node_counts_as_preemption_with_spot_node_seconds() -> None:
    world = Measured(spec={**SPEC, "spot": {"enabled": True}})
    world.settle()
    world.run(wait=0, seconds=10)
    world.run(wait=0, seconds=1000, end=take_away)
    world.wait(10)
    world.run(wait=0, seconds=500)
    assert counted(world, "finetune_preemptions", "finetune_restarts", "finetune_estimate", "finetune_cost_saved") == {
        "finetune_preemptions_total": 1,
        'finetune_restarts_total{cause="NodeLost"}': 1,
        'finetune_cost_saved_total{currency="EUR"}': pytest.approx(1.0),
    }
    assert counted(world, "finetune_node_seconds") == {
        'finetune_node_seconds_total{capacity="any",stage="prepare"}': 10,
        'finetune_node_seconds_total{capacity="spot",stage="train"}': 1500,
    }


def test_a_failure_for_good_is_an_end_with_its_class_and_a_restart_is_none() -> None:
    world = Measured()
    world.settle()
    world.run(wait=0, seconds=10)
    world.run(wait=0, seconds=10, end=lambda each: each.fail(FailureClass.COLLECTIVE))
    assert counted(world, "finetune_job_ends") == {}
    world.wait(60)
    world.run(wait=0, seconds=10, end=lambda each: each.fail(FailureClass.DATA))
    assert counted(world, "finetune_job_ends", "finetune_restarts") == {
        'finetune_job_ends_total{cause="DataError",outcome="failed"}': 1,
        'finetune_restarts_total{cause="CollectiveFailed"}': 1,
    }


def test_a_job_that_was_suspended_first_waits_from_its_first_child_on() -> None:
    world = Measured(spec={**SPEC, "runPolicy": {"suspend": True}})
    world.settle()
    world.wait(86_400)
    world.edit(suspend=False)
    world.settle()
    world.run(wait=25, seconds=10)
    assert counted(world, "finetune_job_wait") == {
        "finetune_job_wait_seconds_count": 1, "finetune_job_wait_seconds_sum": 25,
    }  # fmt: skip


def test_alternating_leaders_count_each_change_once() -> None:
    world = Measured(spec={**SPEC, "spot": {"enabled": True}})
    world.settle()
    world.run(wait=5, seconds=10)
    world.run(wait=5, seconds=100, end=take_away)
    world.wait(10)
    for _ in range(3):
        world.run(wait=5, seconds=100)
    assert world.phase == "Succeeded"
    replicas = Metrics("EUR"), Metrics("EUR")
    for number, (job, after) in enumerate(world.history):
        replicas[number % 2].status_written(job, after)
    one, other = (samples(replica, zeros=True) for replica in replicas)
    both = {name: one.get(name, 0) + other.get(name, 0) for name in {*one, *other}}
    assert {name: value for name, value in both.items() if value} == pytest.approx(counted(world, "finetune_"))


def test_new_leader_counts_no_earlier_change() -> None:
    world = Measured()
    world.settle()
    for _ in range(4):
        world.run(wait=5, seconds=10)
    assert world.phase == "Succeeded"
    world.metrics = Metrics("EUR")
    world.wait(3600)
    assert counted(world, "finetune_") == {}


# ------------------------------------------------------------------------------------------------------------ all jobs


def seen(**status: Any) -> JobView:
    """Return a job that was created at noon."""
    return replace(World().job(), status=FineTuneJobStatus.model_validate(status))


def training(seconds: float, **progress: Any) -> JobView:
    """Return a job that trains and reported its progress at that second."""
    stage = {"name": "train", "state": "Running", "attempt": 1, "runningSince": stamp(NOON)}
    progress_status = ProgressStatus(last_update_time=NOON + timedelta(seconds=seconds), **progress)
    return seen(phase="Training", stage="train", stages=(stage,), progress=progress_status)


STALLED = {"type": "Stalled", "status": "True", "reason": "PlanRefused", "lastTransitionTime": stamp(NOON)}
STARTED = {"name": "prepare", "state": "Running", "attempt": 1, "startTime": stamp(NOON)}

WAITING: dict[str, tuple[JobView, bool]] = {
    "nothing is known of it yet": (seen(), True),
    "its first pods have no nodes": (seen(phase="Preparing", stages=(STARTED,)), True),
    "its queue holds it": (seen(phase="Queued", stages=(STARTED,)), True),
    "its first attempt found no node and another is made": (
        seen(phase="Preparing", stages=({**STARTED, "state": "Failed"},)),
        True,
    ),
    "its pods run": (seen(phase="Preparing", stages=({**STARTED, "runningSince": stamp(NOON)},)), False),
    "its pods ran and run no more": (
        seen(phase="Training", stages=({**STARTED, "state": "Failed"},), cost={"nodeSeconds": 5.0}),
        False,
    ),
    "it is suspended": (seen(phase="Suspended"), False),
    "its plan is refused": (seen(phase="Pending", conditions=(STALLED,)), False),
    "its spec cannot be read": (replace(seen(), job=None), False),
    "it is somebody else's": (replace(seen(), managed_by="kueue.x-k8s.io/multikueue"), False),
    "it is being deleted": (replace(seen(), deleting=True), False),
    "it is over": (seen(phase="Failed"), False),
}


@pytest.mark.parametrize("case", WAITING)
def test_job_waits_only_while_capacity_delays_its_first_pods(case: str) -> None:
    job, waits = WAITING[case]
    now = fleet([job], NOON + timedelta(seconds=50), lambda job: None)
    assert (now.waiting, now.oldest_waiting_seconds) == ((1, 50.0) if waits else (0, 0.0))


def test_the_fleet_is_the_sum_of_its_jobs_and_the_age_of_its_worst() -> None:
    planned = {"strategy": "ddp", "launcher": "job", "worldSize": 2, "estimated": {"cost": 3.0, "currency": "EUR"}}
    jobs = [
        training(900, samples_per_second=40.0, tokens_per_second=2000.0),
        training(990, samples_per_second=10.0),
        training(100, samples_per_second=1000.0),
        seen(phase="Training", plan=planned),
        seen(phase="Succeeded", plan=planned),
        seen(),
    ]
    assert fleet(jobs, NOON + timedelta(seconds=1000), lambda job: None) == Fleet(
        phases={"Training": 4, "Succeeded": 1, "Pending": 1},
        waiting=2,
        oldest_waiting_seconds=1000,
        progress_age_seconds=900,
        # The rate of a job that was silent for longer than ten minutes does not count.
        samples_per_second={"train": 50},
        tokens_per_second={"train": 2000},
        estimated_cost={"EUR": 3},
    )


def test_reports_without_anything_new_are_no_progress() -> None:
    now = NOON + timedelta(seconds=1000)
    assert fleet([training(995)], now, lambda job: NOON).progress_age_seconds == 1000
    assert fleet([training(995)], now, lambda job: None).progress_age_seconds == 5
    unreported = replace(training(0), status=training(0).status.model_copy(update={"progress": None}))
    assert fleet([unreported], now, lambda job: None).progress_age_seconds == 0


# -------------------------------------------------------------------------------------------------------------- bounds


def random_status(rng: random.Random, number: int) -> FineTuneJobStatus:
    """Return any possible status, with values outside of every known set."""
    classes = [*FailureClass, *OperatorCause, f"Class{number}"]
    name = rng.choice(["prepare", "train", "evaluate", "predict", "serve"])
    state = rng.choice(["Pending", "Running", "Succeeded", "Failed", "Suspended"])
    capacity = rng.choice([None, "spot", "onDemand"])
    stage = {
        "name": name, "state": state, "attempt": rng.randrange(4), "capacity": capacity,
        "startTime": stamp(NOON), "runningSince": rng.choice([None, stamp(NOON)]),
        "completionTime": stamp(NOON + timedelta(seconds=rng.randrange(10**6))),
        "child": {"apiVersion": "batch/v1", "kind": "Job", "name": f"secret-{number}-train-1"},
        "avoidedNodes": (f"secret-node-{number}",),
    }  # fmt: skip
    currency = rng.choice(["EUR", "USD", f"X{chr(65 + number % 26)}{chr(65 + number // 26 % 26)}"])
    failure = {
        "class": rng.choice(classes), "reason": f"Reason{number}", "message": f"secret {number}",
        "pod": f"secret-pod-{number}", "node": f"secret-node-{number}",
    }  # fmt: skip
    seconds = rng.random() * 10**6
    plan = {
        "strategy": f"secret-{number}", "launcher": f"secret-{number}", "worldSize": 8,
        "estimated": {"durationSeconds": rng.random() * 10**5, "cost": rng.random() * 100, "currency": currency},
    }  # fmt: skip
    return FineTuneJobStatus.model_validate(
        {
            "phase": rng.choice(get_args(Phase)), "stage": name, "stages": (stage,), "plan": plan,
            "failure": rng.choice([None, failure]), "restarts": rng.randrange(5),
            "spot": {"preemptions": rng.randrange(5)},
            "cost": {
                "nodeSeconds": seconds / 2, "billableSeconds": seconds, "amount": seconds / 100, "saved": seconds / 500,
                "currency": currency,
            },
            "progress": {"samplesPerSecond": rng.random(), "lastUpdateTime": stamp(NOON)},
        }
    )  # fmt: skip


def test_series_of_a_thousand_jobs_stay_within_the_bound() -> None:
    rng, metrics = random.Random(7), Metrics("EUR")
    most = {row.name: row.max_series for row in metrics.families.rows}
    of_jobs = sum(number for name, number in most.items() if not name.startswith("finetune_api_requests"))
    base, jobs = World().job(), []
    counts = []
    for number in range(1000):
        statuses = [random_status(rng, number) for _ in range(4)]
        for before, after in pairwise([FineTuneJobStatus(), *statuses]):
            metrics.status_written(replace(base, status=before), after)
        jobs.append(replace(base, name=f"secret-{number}", namespace=f"secret-{number}", status=statuses[-1]))
        metrics.follow_jobs(lambda: fleet(jobs, NOON, lambda job: None))
        if number in (9, 99, 999):
            counts.append(series(metrics))
    print(f"series after 10, 100 and 1000 jobs: {counts}; bound without requests to the API server: {of_jobs}")
    assert counts[-1] <= of_jobs < 1000
    assert counts[-1] - counts[1] <= 30, "from some point on, jobs add no series"
    text = metrics.exposition().decode()
    assert "secret" not in text
    assert "Reason" not in text
    shown = samples(metrics)
    assert shown['finetune_cost_total{currency="other"}'] > 0
    assert shown['finetune_job_ends_total{cause="other",outcome="failed"}'] > 0


def test_foreign_values_become_no_labels() -> None:
    metrics = Metrics()
    before = len(samples(metrics, zeros=True))
    base = World().job()
    for number in range(50):
        metrics.request_done(f"verb-{number}", f"resource-{number}", 1000 + number, 0.0)
        metrics.relisted(f"reason-{number}")
        metrics.progress_post(700 + number)
        failure = FailureStatus.model_validate({"class": f"class-{number}", "reason": "A", "message": "b"})
        metrics.status_written(base, FineTuneJobStatus(restarts=1, failure=failure))
    shown = samples(metrics, zeros=True)
    assert shown['finetune_api_requests_total{code="other",resource="other",verb="other"}'] == 50
    assert shown['finetune_restarts_total{cause="other"}'] == 50
    assert len(shown) == before + 5


def test_counters_of_jobs_are_there_before_their_first_count() -> None:
    zeros = samples(Metrics("EUR"), zeros=True)
    for name in (
        'finetune_job_ends_total{cause="DataError",outcome="failed"}',
        'finetune_job_ends_total{cause="none",outcome="succeeded"}',
        'finetune_restarts_total{cause="NodeLost"}',
        'finetune_node_seconds_total{capacity="spot",stage="train"}',
        'finetune_cost_total{currency="EUR"}',
        "finetune_preemptions_total",
        'finetune_jobs{phase="Succeeded"}',
    ):
        assert zeros[name] == 0
    assert len([name for name in zeros if name.startswith("finetune_jobs{")]) == len(get_args(Phase)) + 1


def test_documented_metrics_match_the_exposed_ones() -> None:
    metrics = Metrics()
    exposed = metrics.exposition().decode()
    served = set(re.findall(r"^# TYPE (finetune_\S+) (\w+)$", exposed, re.MULTILINE))
    assert {(row.name, row.kind) for row in metrics.families.rows} == served
    for row in metrics.families.rows:
        assert row.meaning.endswith("."), row
        assert all(values[-1] == OTHER for values in row.labels.values())
        assert set(row.labels) <= {
            "phase", "stage", "capacity", "outcome", "cause", "currency", "verb", "resource", "code", "reason",
            "server", "strategy", "figure",
        }  # fmt: skip


def test_stages_and_currency_are_those_of_the_operator() -> None:
    labels = {row.name: row.labels for row in Metrics(CLUSTER_SETTINGS.currency).families.rows}
    assert labels["finetune_cost_total"]["currency"] == ("USD", OTHER)
    assert labels["finetune_stage_seconds"]["stage"] == (*(stage.value for stage in Stage), OTHER)
