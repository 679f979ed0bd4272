"""Twenty minutes of a busy fleet: the real operator on a real API server, scraped every few seconds as by Prometheus.

API server, scheduler, Job controller and operator are real, and so are their figures. Nodes have no machines: they are
the stand-ins of the cluster tests, and their pods replay earlier trainings (`replay.py`). The metrics of
kube-state-metrics are computed from the current FineTuneJobs (`monitoring.state`).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import requests
from prometheus_client.parser import text_string_to_metric_families

from cluster_support.api_access import Api, AsyncApi, Object, path_of, wait_until
from cluster_support.background import Background
from cluster_support.control_plane import needs_controllers, running_cluster
from cluster_support.gangs import Gangs
from cluster_support.kubelet import NODE_MARK, Kubelet
from cluster_support.operator_process import NAMESPACE, OperatorProcess, install
from cluster_support.plays import OUT_OF_MEMORY, PREEMPTED, WRONG_COLUMN, Playbook, fails
from cluster_support.world import World, condition, install_kinds
from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, Progress
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, JOB_LABEL, STAGE_LABEL
from finetune_operator.spec.tables.machine_types import NVIDIA_LABEL as PRODUCT_LABEL
from finetune_operator.spec.types import API_VERSION, PLURAL
from finetune_trainer.core.progress import kubeflow_update
from monitoring import names, state, state_config
from picture_support.replay import Attempt, Run, attempt, cut
from picture_support.samples import Samples, notation

SOURCE = """\
The metrics of a real operator, on a real API server with its scheduler and controllers, while it ran a fleet of jobs.
Nodes had no machines: their pods played trainings again that had taken place on a CPU, at their own pace.
Written by `python tests/dashboard_picture.py record`."""
"""Comment at the head of the file."""
MINUTES = 20.0
TEAM = "ml-team"
OPERATOR = "finetune-operator-0"
SHOWN = "reviews"
"""Job in the picture of one job: it waits, loses its spot node, resumes, and misses its gate in the end."""
GPU = "NVIDIA-L4"
SPOT_LABEL = "cloud.google.com/gke-spot"
SETTINGS: Object = {
    "currency": "EUR",
    "prices": [
        {"product": "cpu", "gpus": 0, "perHour": 0.8, "spotPerHour": 0.3},
        {"product": GPU, "gpus": 1, "perHour": 1.2, "spotPerHour": 0.5},
    ],
}
"""Settings that differ from the defaults of an installation."""
NODES: tuple[tuple[int, int, bool], ...] = ((4, 0, False), (4, 0, False), (2, 0, True), (4, 2, False), (2, 1, True))
"""Cores, GPUs, and True for a spot node. An attempt takes two cores, so jobs have to wait for each other."""

_REVIEWS_DATA = "hf://cornell-movie-review-data/rotten_tomatoes"
_PARALLELISM: dict[str, Object] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "deepspeed-zero2": {"strategy": "deepspeed", "zeroStage": 2},
}
Fate = Literal["", "spot, taken away, gate", "spot", "spot, taken away", "memory", "column", "hub"]


@dataclass(frozen=True)
class Act:
    """A job, its start, and its fate."""

    at: float
    """Seconds from the first scrape."""
    name: str
    run: int
    """Index of the given run that it replays."""
    fate: Fate = ""
    gpus: int = 0


ACTS: tuple[Act, ...] = (
    Act(5, "products-1", 3, "spot"),
    Act(10, SHOWN, 2, "spot, taken away, gate"),
    Act(20, "tickets-1", 0),
    Act(40, "tickets-2", 1),
    Act(55, "products-2", 3),
    Act(70, "vision-notes", 0, "memory", gpus=1),
    Act(100, "tickets-3", 2),
    Act(130, "triage-1", 0, "spot, taken away", gpus=1),
    Act(150, "tickets-4", 0),
    Act(160, "products-3", 3, "hub"),
    Act(240, "triage-2", 1, "column", gpus=1),
    Act(300, "tickets-5", 1),
    Act(360, "products-4", 3),
    Act(480, "tickets-6", 2),
    Act(500, "products-5", 3),
    Act(560, "tickets-7", 0),
    Act(600, "products-6", 3, "spot"),
    Act(660, "tickets-8", 1),
    Act(700, "triage-3", 0, gpus=1),
    Act(720, "products-7", 3, "column"),
    Act(800, "products-8", 3),
    Act(840, "triage-4", 1, "spot", gpus=1),
    Act(870, "tickets-9", 0),
    Act(900, "tickets-10", 2),
    Act(960, "products-9", 3),
    Act(1040, "tickets-11", 0),
    Act(1080, "products-10", 3),
    Act(1120, "tickets-12", 1),
)
_GATE = {"metric": "accuracy", "minimum": 0.85}
_TAKEN_AFTER, _NO_MEMORY_AFTER = 200.0, 75.0
"""Seconds of training."""
HUB_AWAY = fails(FailureClass.HUB_UNAVAILABLE, "HubTimeout", "huggingface.co did not answer within 60 s", lasts=8.0)


@dataclass
class Stagehand:
    """Applies jobs, and lets their pods report the progress of their runs."""

    world: World
    runs: list[Run]
    attempts: dict[tuple[str, str, int], Attempt] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    reported: dict[str, Progress] = field(default_factory=dict)

    def apply(self, act: Act) -> None:
        run = self.runs[act.run]
        spot, gate = "spot" in act.fate, "gate" in act.fate
        self._rehearse(act, run)
        training = {"epochs": 2, "globalBatchSize": 32} if act.run < 3 else {"epochs": 4, "globalBatchSize": 16}
        self.world.apply(
            act.name,
            {
                "model": {"uri": "hf://sentence-transformers/all-MiniLM-L6-v2"},
                "dataset": {"uri": _REVIEWS_DATA if act.run < 3 else "hf://acme/product-reviews"},
                "training": training,
                "parallelism": {} if act.gpus else _PARALLELISM[run.strategy],
                "resources": {"cpu": "2", "memory": "16Gi", "gpusPerNode": act.gpus}
                | ({"accelerator": {"product": GPU}} if act.gpus else {"processesPerNode": 2}),
                "evaluation": {"gate": _GATE} if gate else {},
                "predict": None,
                "spot": {"enabled": spot},
            },
        )

    def _rehearse(self, act: Act, run: Run) -> None:
        train = attempt(run, act.name, Stage.TRAIN)
        first, step = train, 0
        if "taken away" in act.fate:
            first, step = cut(train, _TAKEN_AFTER, PREEMPTED)
        elif act.fate == "memory":
            first, _ = cut(train, _NO_MEMORY_AFTER, OUT_OF_MEMORY)
        elif act.fate == "column":
            first, _ = cut(train, 12.0, WRONG_COLUMN)
        prepare, evaluate = (attempt(run, act.name, stage) for stage in (Stage.PREPARE, Stage.EVALUATE))
        if "gate" in act.fate:
            evaluate = attempt(run, act.name, Stage.EVALUATE, failure=_gate_failure(run))
        self._set(act.name, Stage.PREPARE, 1, Attempt(HUB_AWAY) if act.fate == "hub" else prepare)
        self._set(act.name, Stage.PREPARE, 2, prepare)
        self._set(act.name, Stage.TRAIN, 1, first)
        # A trainer writes a checkpoint before it stops on request; one that ran out of memory had none yet.
        self._set(act.name, Stage.TRAIN, 2, attempt(run, act.name, Stage.TRAIN, after_step=step))
        self._set(act.name, Stage.EVALUATE, 1, evaluate)

    def _set(self, job: str, stage: Stage, number: int, made: Attempt) -> None:
        book: Playbook = self.world.kubelet.playbook
        book.set(job, stage.value, made.play, attempt=number)
        self.attempts[job, stage.value, number] = made

    def report_progress(self) -> None:
        """Post the running pods' progress since the last call, like their trainers."""
        for pod in self.world.api.items(self.world.path("v1", "pods"), fieldSelector="status.phase=Running"):
            meta = pod["metadata"]
            labels, uid = meta["labels"], meta["uid"]
            if meta.get("deletionTimestamp") or JOB_LABEL not in labels:
                continue
            there = self.attempts.get((labels[JOB_LABEL], labels[STAGE_LABEL], int(labels[ATTEMPT_LABEL])))
            since = datetime.fromisoformat(pod["status"]["startTime"]).timestamp()
            newest = None if there is None else there.newest(time.time() - since)
            if newest is not None and self.reported.get(uid) != newest:
                if uid not in self.tokens:
                    self.tokens[uid] = self.world.token(pod)
                update = kubeflow_update(newest.model_copy(update={"time": time.time()}))
                answer = self.world.post(labels[JOB_LABEL], pod, update, self.tokens[uid])
                if answer.status_code == 200:
                    self.reported[uid] = newest


def _gate_failure(run: Run) -> FailureReport:
    """Return the failure of evaluate for a model below its gate."""
    section = run.reports[Stage.EVALUATE].metrics["evaluate"]
    assert isinstance(section, dict)
    return FailureReport(
        failure_class=FailureClass.GATE_NOT_MET,
        reason="GateNotMet",
        message=f"accuracy is {section['accuracy']:.4f} on the test split; evaluation.gate.minimum is 0.85.",
        hint="Train longer or on better data, or lower evaluation.gate.minimum. The model and the metrics are kept.",
    )


# ------------------------------------------------------------------------------------------------------------ the world


@contextmanager
def fleet() -> Iterator[World]:
    """Run an API server with controllers, nodes without machines, and the operator as a process."""
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as cluster:
        needs_controllers(cluster)
        install_kinds(cluster)
        install(cluster)
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        team = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM, "labels": labels}}
        cluster.must("create", "-f", "-", stdin=json.dumps(team))
        background, watching, api = Background(), AsyncApi(cluster.access), Api(cluster.access)
        background.run(watching.open())
        kubelet = Kubelet(watching, background, Path(name), nodes=len(NODES))
        kubelet.up()
        for number, kind in enumerate(NODES):
            _equip(api, number, *kind)
        gangs = Gangs(watching, background)
        gangs.up()
        account = path_of("v1", "serviceaccounts", TEAM, "default")
        wait_until(lambda: api.get(account), "the namespace has the service account that pods run under")
        operator = OperatorProcess(cluster, Path(name), SETTINGS, name=OPERATOR)
        operator.start()
        try:
            yield World(TEAM, cluster, api, kubelet, gangs, operator, background, watching)
        finally:
            operator.terminate()
            background.close(watching.close())


def _equip(api: Api, number: int, cores: int, gpus: int, spot: bool) -> None:
    """Give a stand-in node its size, and the labels and taints of its kind."""
    path = path_of("v1", "nodes", None, f"stand-in-{number}")
    labels = ({SPOT_LABEL: "true"} if spot else {}) | ({PRODUCT_LABEL: GPU} if gpus else {})
    taints = [{"key": NODE_MARK, "value": "true", "effect": "NoSchedule"}]
    taints += [{"key": SPOT_LABEL, "value": "true", "effect": "NoSchedule"}] if spot else []
    taints += [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpus else []
    api.patch(path, {"metadata": {"labels": labels}, "spec": {"taints": taints}})
    size = {"cpu": str(cores), "nvidia.com/gpu": str(gpus), "memory": "64Gi"}
    api.patch(f"{path}/status", {"status": {"capacity": size, "allocatable": size}})


# ---------------------------------------------------------------------------------------------------------- the scrapes


def scrape(world: World, wanted: Callable[[str], bool]) -> dict[str, float]:
    """Return the wanted current metrics of the operator and of kube-state-metrics, as in Prometheus."""
    found: dict[str, float] = {}
    target = {"namespace": NAMESPACE, "pod": OPERATOR, "instance": f"{OPERATOR}:8080"}
    for family in text_string_to_metric_families(world.operator.metrics()):
        for sample in family.samples:
            if wanted(sample.name):
                found[notation(sample.name, {**sample.labels, **target})] = float(sample.value)
    config = state_config()
    for job in world.api.items(world.path(API_VERSION, PLURAL)):
        # Each job has some dozens of series; those of one are enough for a picture of one.
        if job["metadata"]["name"] == SHOWN:
            for name, labels, value in state(job, config):
                if wanted(name):
                    found[notation(name, labels)] = value
    return found


def metrics_of(dashboards: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return all metrics that a panel or a variable queries."""
    metrics: set[str] = set()
    for dashboard in dashboards.values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                metrics |= names(target["expr"])
    return metrics


def record(
    runs: list[Run], out: Path, minutes: float, every: int, metrics: set[str], log_line: Callable[[str], None]
) -> Samples:
    """Play the acts, and write the scrapes to `out`."""
    with fleet() as world:
        hand, acts = Stagehand(world, runs), list(ACTS)
        samples = Samples(float(int(time.time()) + 1), every, SOURCE)
        for number in range(int(minutes * 60 / every) + 1):
            at = number * every
            late = time.time() - samples.start - at
            if late > every:
                continue  # A missed scrape, as Prometheus misses one that takes too long.
            time.sleep(max(0.0, -late))
            try:
                samples.add(number, scrape(world, metrics.__contains__))
                while acts and acts[0].at <= at:
                    hand.apply(acts.pop(0))
                hand.report_progress()
            except requests.RequestException as error:
                log_line(f"{at} s: {error}")
            if number % 12 == 0:
                jobs = world.api.items(world.path(API_VERSION, PLURAL))
                log_line(f"{datetime.now(UTC):%H:%M:%S} {at:>5} s  {_phases(jobs)}")
                samples.write(out)
        assert world.kubelet.complaints == []
        world.background.check()
    samples.write(out)
    return samples


def _phases(jobs: list[Object]) -> str:
    phases = {}
    for job in jobs:
        status = job.get("status", {})
        refused = condition(status, "Stalled").get("status") == "True" and "failure" not in status
        assert not refused, f"{job['metadata']['name']}: {condition(status, 'Stalled').get('message')}"
        phases[job["metadata"]["name"]] = status.get("phase", "-")
    by_phase: dict[str, list[str]] = {}
    for name, phase in phases.items():
        by_phase.setdefault(phase, []).append(name)
    return "; ".join(f"{phase}: {', '.join(found)}" for phase, found in sorted(by_phase.items()))
