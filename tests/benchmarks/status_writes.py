"""CPU time of the API server for the progress of running jobs: of one write, and of many jobs in their rhythm.

    python tests/benchmarks/status_writes.py [--writes 60] [--rounds 3] [--crd OTHER.yaml]
    python tests/benchmarks/status_writes.py --running 500 --seconds 120

Baselines of the first form, in the same run: the status of a batch Job and of a PyTorchJob, replaced as their
controllers do. Our arm writes, with the operator's own client, the status that the operator gave to a planned job, with
another step each time. `--crd` adds an arm under another CustomResourceDefinition, such as that of an earlier version.

Baseline of the second form: the same jobs, each written every 5 s, computed from the cost of a write. Each job is
written as often as the operator does when so many of them run. Shown beside it: how old the progress in a status got.

CPU time is that of the API server's process, less its idle share of the time. Two watches are open, as two replicas of
the operator have them. Checked: the API server has each status as it was written last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from kubernetes.aio import client

sys.path.insert(0, str(Path(__file__).parents[1]))

from operator_load import apply_jobs, job_of

from cluster_support.api_access import Api, AsyncApi, path_of, wait_until
from cluster_support.background import Background
from cluster_support.control_plane import Cluster, needs_controllers, running_cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.world import fresh_namespace, install_kinds
from finetune_contract.choices import Stage
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.reconcile.status_writing import progress_interval, status_body
from finetune_operator.kubernetes_api.configuration import configure
from finetune_operator.spec.schema.crd import crd_yaml
from finetune_operator.spec.types import API_VERSION, PLURAL, FineTuneJobStatus, ProgressStatus

REPLICAS = 2
WARM_UP = 10
"""Writes of an arm that do not count."""
IDLE_SECONDS = 10.0
LONG_SECONDS = 7200.0
"""Age of the trainings of the second form."""
TOTAL_STEPS = 1_000_000
POD: dict[str, Any] = {"spec": {"restartPolicy": "Never", "containers": [{"name": "pytorch", "image": "x"}]}}


@dataclass
class Trial:
    """A namespace with jobs, and the API server that is measured."""

    cluster: Cluster
    namespace: str
    api: Api
    server: psutil.Process
    idle: float = 0.0
    """CPU seconds a second of the API server while nothing is written."""

    @contextmanager
    def cpu_seconds(self, into: list[float]) -> Iterator[None]:
        """Append the CPU seconds of the API server for the block."""
        began, before = time.monotonic(), sum(self.server.cpu_times()[:2])
        yield
        passed = time.monotonic() - began
        into.append(sum(self.server.cpu_times()[:2]) - before - self.idle * passed)

    def measure_idle(self) -> None:
        used: list[float] = []
        self.idle = 0.0
        with self.cpu_seconds(used):
            time.sleep(IDLE_SECONDS)
        self.idle = used[0] / IDLE_SECONDS

    def job(self, name: str) -> dict[str, Any]:
        found = self.api.get(path_of(API_VERSION, PLURAL, self.namespace, name))
        assert found is not None, f"{name} is gone"
        return found


def in_training(status: FineTuneJobStatus) -> FineTuneJobStatus:
    """Return the status of the job once its training runs."""
    states = {"prepare": ("Succeeded", 1), "train": ("Running", 1)}
    stages = tuple(
        stage.model_copy(update={"state": states[stage.name][0], "attempt": states[stage.name][1]})
        if stage.name in states
        else stage
        for stage in status.stages
    )
    return status.model_copy(update={"phase": "Training", "stage": Stage.TRAIN, "stages": stages})


def progress(step: int) -> ProgressStatus:
    """Return the progress at this step, as a pod's report gives it."""
    return ProgressStatus(
        step=step,
        total_steps=TOTAL_STEPS,
        epoch=step / 1000,
        percent=100 * step // TOTAL_STEPS,
        loss=2.0 / (1 + step),
        samples_per_second=113.1 + step % 7,
        tokens_per_second=4012.5 + step % 7,
        remaining_seconds=60.0 * (TOTAL_STEPS - step),
        last_update_time=datetime.now(UTC).replace(microsecond=0),
    )


@dataclass
class Writer:
    """Writes the progress of jobs as the operator does."""

    kube: Kube
    namespace: str
    jobs: dict[str, dict[str, Any]]
    """Each job as it was stored last."""
    written: dict[str, FineTuneJobStatus]

    async def write(self, name: str, step: int) -> None:
        before = self.jobs[name]["metadata"]
        status = self.written[name].model_copy(update={"progress": progress(step)})
        self.jobs[name] = await self.kube.apply_status(
            self.namespace, name, before["uid"], before["resourceVersion"], status_body(status)
        )
        self.written[name] = status

    async def keep_writing(self, name: str, interval: float, offset: float, seconds: float) -> list[float]:
        """Write each `interval` seconds, first after `offset`; return the age of the stored progress at each write."""
        ages = []
        await asyncio.sleep(offset)
        end, step = time.monotonic() + seconds - offset, 1
        last = None
        while time.monotonic() < end:
            due = time.monotonic() + interval
            await self.write(name, step := step + 1)
            ages += [] if last is None else [time.monotonic() - last]
            last = time.monotonic()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        return ages


@contextmanager
def watched(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Watch the jobs as the operator's replicas do."""
    background, api = Background(), AsyncApi(cluster.access)
    background.run(api.open())

    async def follow() -> None:
        async for _ in api.follow(path_of(API_VERSION, PLURAL, namespace)):
            pass

    for _ in range(REPLICAS):
        background.start(follow())
    try:
        yield
    finally:
        background.close(api.close())


def with_writer(trial: Trial, names: list[str], work: Callable[[Writer], Any]) -> Any:
    """Return the result of a coroutine of `work` with a writer of these jobs; check what the API server has then."""

    async def run() -> Any:
        configuration = client.Configuration()
        await configure(configuration, trial.cluster.kubeconfig, None)
        async with client.ApiClient(configuration) as api:
            jobs = {name: trial.job(name) for name in names}
            planned = FineTuneJobStatus.model_validate(jobs[names[0]]["status"])
            writer = Writer(Kube(api), trial.namespace, jobs, dict.fromkeys(names, in_training(planned)))
            result = await work(writer)
            for name in names:
                stored = FineTuneJobStatus.model_validate(trial.job(name)["status"])
                assert stored == writer.written[name], f"{name} is stored otherwise than it was written"
            return result

    return asyncio.run(run())


def write_ours(trial: Trial, name: str, count: int) -> float:
    """Return CPU milliseconds a write of progress."""

    async def work(writer: Writer) -> float:
        used: list[float] = []
        for step in range(WARM_UP):
            await writer.write(name, step)
        with trial.cpu_seconds(used):
            for step in range(WARM_UP, WARM_UP + count):
                await writer.write(name, step)
        return 1000 * used[0] / count

    milliseconds: float = with_writer(trial, [name], work)
    return milliseconds


def write_other(trial: Trial, path: str, change: Callable[[dict[str, Any], int], None], count: int) -> float:
    """Return CPU milliseconds for the replacement of the status of the object at `path`."""
    stored = trial.api.call("GET", path)
    used: list[float] = []

    def write(steps: range) -> None:
        nonlocal stored
        for step in steps:
            change(stored, step)
            stored = trial.api.call("PUT", f"{path}/status", stored)

    write(range(1, WARM_UP))
    with trial.cpu_seconds(used):
        write(range(WARM_UP, WARM_UP + count))
    return 1000 * used[0] / count


def change_job(job: dict[str, Any], step: int) -> None:
    job["status"] = {"active": 0, "ready": 0, "terminating": step}


def change_pytorchjob(job: dict[str, Any], step: int) -> None:
    now = "2026-01-05T10:00:00Z"
    condition = {"type": "Running", "status": "True", "reason": "Running", "message": f"step {step}"}
    job["status"] = {
        "conditions": [{**condition, "lastTransitionTime": now, "lastUpdateTime": now}],
        "replicaStatuses": {"Master": {"active": 1}, "Worker": {"active": 1 + step % 2}},
        "startTime": now,
    }


def others(trial: Trial) -> Mapping[str, Callable[[int], float]]:
    """Create an object of each other kind; return what measures each."""
    job = {"metadata": {"name": "plain"}, "spec": {"suspend": True, "template": POD}}
    replicas = {"replicas": 1, "template": POD}
    gang = {
        "metadata": {"name": "gang"},
        "spec": {"pytorchReplicaSpecs": {"Master": replicas, "Worker": replicas}},
    }
    jobs, gangs = (
        path_of("batch/v1", "jobs", trial.namespace),
        path_of("kubeflow.org/v1", "pytorchjobs", trial.namespace),
    )
    trial.api.create(jobs, {"apiVersion": "batch/v1", "kind": "Job", **job})
    trial.api.create(gangs, {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", **gang})
    return {
        "Job (baseline)": lambda count: write_other(trial, f"{jobs}/plain", change_job, count),
        "PyTorchJob (baseline)": lambda count: write_other(trial, f"{gangs}/gang", change_pytorchjob, count),
    }


def install_crd(cluster: Cluster, text: str) -> None:
    cluster.must("replace", "-f", "-", stdin=text)
    cluster.wait_served(f"{PLURAL}.finetune.dev")
    time.sleep(2)  # The API server replaces the schema a moment after it has stored it.


def compare(trial: Trial, crds: Mapping[str, str], writes: int, rounds: int) -> None:
    """Print CPU milliseconds a write of each arm, in turns."""
    arms: dict[str, list[float]] = {}
    other = others(trial)
    for _ in range(rounds):
        for name, measure in other.items():
            arms.setdefault(name, []).append(measure(writes))
        for name, text in crds.items():
            if len(crds) > 1:
                install_crd(trial.cluster, text)
            arms.setdefault(name, []).append(write_ours(trial, "job-0000", writes))
    print(f"\n{'arm':<34}{'ms of CPU a write':>20}  lowest to highest")
    for name, figures in arms.items():
        print(f"{name:<34}{statistics.median(figures):>20.1f}  {min(figures):.1f} to {max(figures):.1f}")


def run_many(trial: Trial, names: list[str], seconds: float) -> None:
    """Print the cores that the API server needs while these jobs run."""
    one = write_ours(trial, names[0], 60)
    interval = progress_interval(5.0, LONG_SECONDS, len(names))

    async def work(writer: Writer) -> tuple[float, list[list[float]]]:
        used: list[float] = []
        for name in names:
            await writer.write(name, 1)
        with trial.cpu_seconds(used):
            offsets = {name: interval * number / len(names) for number, name in enumerate(names)}
            ages = await asyncio.gather(
                *(writer.keep_writing(name, interval, offset, seconds) for name, offset in offsets.items())
            )
        return used[0], ages

    cpu, ages = with_writer(trial, names, work)
    print(
        f"{len(names)} running jobs, each written every {interval:.0f} s: {cpu / seconds:.2f} cores of the API server"
    )
    print(f"computed for a write every 5 s (baseline): {len(names) / 5 * one / 1000:.2f} cores; {one:.1f} ms a write")
    print(f"a status is replaced after {max(max(each, default=0.0) for each in ages):.0f} s at most")


def stored_jobs(trial: Trial, folder: Path, count: int) -> list[str]:
    """Return the names of stored jobs, of which the operator has planned and started the first; it runs no more."""
    process = OperatorProcess(trial.cluster, folder, {"progress": {"enabled": False}})
    process.start()
    names = [f"job-{number:04d}" for number in range(count)]
    try:
        asyncio.run(apply_jobs(trial.cluster, trial.namespace, [job_of(0)]))
        wait_until(lambda: trial.job(names[0]).get("status", {}).get("phase") == "Preparing", "the job is preparing")
    finally:
        process.terminate()
    asyncio.run(apply_jobs(trial.cluster, trial.namespace, map(job_of, range(1, count))))
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="each arm this often, in turn")
    parser.add_argument("--crd", type=Path, action="append", default=[], help="another definition to compare with")
    parser.add_argument("--running", type=int, default=0, help="jobs that run at once")
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    crds = {"FineTuneJob": crd_yaml()} | {f"FineTuneJob, {path.name}": path.read_text() for path in arguments.crd}
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        needs_controllers(cluster)
        install_kinds(cluster)
        install(cluster)
        with fresh_namespace(cluster) as namespace:
            server = psutil.Process(int((cluster.own("the measurement") / "kube-apiserver.pid").read_text()))
            trial = Trial(cluster, namespace, Api(cluster.access), server)
            names = stored_jobs(trial, Path(folder), max(1, arguments.running))
            with watched(cluster, namespace):
                trial.measure_idle()
                print(f"idle: {trial.idle:.3f} cores")
                if arguments.running:
                    run_many(trial, names, arguments.seconds)
                else:
                    compare(trial, crds, arguments.writes, arguments.rounds)


if __name__ == "__main__":
    main()
