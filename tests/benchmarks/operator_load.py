"""Time from `kubectl apply` to the first child when many jobs come at once, and the cost of the operator.

    python tests/benchmarks/operator_load.py [--jobs 300] [--idle-minutes 10]

Baseline: a bare asyncio client that posts the very same objects (claim, ConfigMap, Job) for each job as soon as the job
is stored, over as many connections as the operator has workers, and does nothing else: no watch, no plan, no status, no
event. Both arms run in one go against one real API server with its Job controller and scheduler, with the same
generator of jobs; an arm begins once the objects of the one before are gone, and the operator leads. Times are those of
the API server's audit log, from the receipt of the job to the answer to its child's creation. Checked: every job has
exactly one child, and the specs of the children are equal in both arms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_support.api_access import Api, AsyncApi, path_of, wait_until
from cluster_support.control_plane import Cluster, needs_controllers, running_cluster
from cluster_support.operator_process import NAMESPACE, USER, OperatorProcess, install
from cluster_support.world import fresh_namespace, install_kinds
from finetune_operator.jobs.launchers.launcher_registry import stage
from finetune_operator.jobs.render.manifests import shared
from finetune_operator.jobs.render.render_types import Attempt, Owner, RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

GENERATORS = 16
"""Connections over which jobs are applied, like several users and pipelines."""
CONNECTIONS = 16
"""Connections of the bare client; the operator has as many workers."""
LEADS = "this replica leads now"
"""Line of its log."""
PLURALS = {
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "ConfigMap": "configmaps",
    "NetworkPolicy": "networkpolicies",
    "Job": "jobs",
}
SPEC: dict[str, Any] = {
    "task": "text-classification",
    "model": {"uri": "hf://microsoft/deberta-v3-base"},
    "dataset": {"uri": "hf://cornell-movie-review-data/rotten_tomatoes"},
    "training": {"globalBatchSize": 32},
    "launcher": "job",
}


@dataclass(frozen=True)
class Arm:
    """Measurements of one arm."""

    name: str
    seconds: list[float]
    """Times from a job to its child, one per job."""
    total: float
    """Time from the first job to the last child."""
    children: dict[str, Any]
    """Spec of each job's child."""


def job_of(number: int) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": f"job-{number:04d}"}, "spec": SPEC}


async def bare_client(cluster: Cluster, namespace: str, count: int) -> None:
    """Apply the jobs, and post the children of each as soon as it is stored."""
    api = AsyncApi(cluster.access)
    await api.open()
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    numbers = iter(range(count))

    async def generate() -> None:
        for number in numbers:
            queue.put_nowait(await api.call("POST", path_of(API_VERSION, PLURAL, namespace), job_of(number)))

    async def create() -> None:
        while True:
            stored = await queue.get()
            for manifest in children_of(stored, namespace):
                path = path_of(manifest["apiVersion"], PLURALS[manifest["kind"]], namespace)
                await api.call("POST", path, manifest)
            queue.task_done()

    workers = [asyncio.create_task(create()) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(generate() for _ in range(GENERATORS)))
    posted = asyncio.create_task(queue.join())
    await asyncio.wait([posted, *workers], return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        if worker.done():
            worker.result()
        worker.cancel()
    await api.close()


def children_of(stored: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """Return the objects that the operator creates first for a job."""
    name, uid = stored["metadata"]["name"], stored["metadata"]["uid"]
    job, problems = validate_job({**job_of(0), "metadata": {"name": name}}, CLUSTER_SETTINGS)
    assert job is not None, problems
    planned = plan(job, Facts(), CLUSTER_SETTINGS)
    context = RenderContext(namespace, job.spec, CLUSTER_SETTINGS, Owner(name, uid))
    first = Attempt(planned.stages[0])
    manifests: list[dict[str, Any]] = [*shared(planned, context), *stage(planned, context, first)]
    return manifests


async def apply_jobs(cluster: Cluster, namespace: str, jobs: Iterable[dict[str, Any]]) -> None:
    """Store the jobs as fast as possible."""
    api = AsyncApi(cluster.access)
    await api.open()
    left = iter(jobs)

    async def generate() -> None:
        for job in left:
            await api.call("POST", path_of(API_VERSION, PLURAL, namespace), job)

    await asyncio.gather(*(generate() for _ in range(GENERATORS)))
    await api.close()


def measured(cluster: Cluster, name: str, namespace: str, mark: int) -> Arm:
    """Read times from the audit log."""
    begun: dict[str, float] = {}
    ended: dict[str, list[float]] = {}
    for entry in cluster.audit(mark):
        about = entry.get("objectRef", {})
        if entry["verb"] != "create" or about.get("namespace") != namespace or "subresource" in about:
            continue
        if entry["responseStatus"]["code"] != 201:
            continue
        if about["resource"] == PLURAL:
            begun[_name(entry)] = _time(entry["requestReceivedTimestamp"])
        elif about["resource"] == "jobs":
            ended.setdefault(_name(entry), []).append(_time(entry["stageTimestamp"]))
    jobs = Api(cluster.access).items(path_of("batch/v1", "jobs", namespace))
    owners = {job["metadata"]["name"]: job["metadata"]["ownerReferences"][0]["name"] for job in jobs}
    assert Counter(owners.values()) == Counter(dict.fromkeys(begun, 1)), "a job has no child, or more than one"
    seconds = {job: ended[child][0] - begun[job] for child, job in owners.items()}
    specs = {owners[job["metadata"]["name"]]: _spec(job) for job in jobs}
    total = max(ended[child][0] for child in owners) - min(begun.values())
    return Arm(name, sorted(seconds.values()), total, specs)


def _name(entry: dict[str, Any]) -> str:
    name: str = entry["objectRef"]["name"]
    return name


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _spec(job: dict[str, Any]) -> Any:
    """Return the child's containers and volumes, without the differences between jobs."""
    spec = job["spec"]["template"]["spec"]
    text = json.dumps({"containers": spec["containers"], "volumes": spec["volumes"]}, sort_keys=True)
    return text.replace(job["metadata"]["ownerReferences"][0]["name"], "NAME")


def run_bare(cluster: Cluster, count: int) -> Arm:
    with fresh_namespace(cluster) as namespace:
        mark = cluster.audit_mark()
        asyncio.run(bare_client(cluster, namespace, count))
        return measured(cluster, "bare client", namespace, mark)


def run_operator(cluster: Cluster, process: OperatorProcess, count: int) -> Arm:
    with fresh_namespace(cluster) as namespace:
        mark = cluster.audit_mark()
        seen = psutil.Process(process.pid)
        before = sum(seen.cpu_times()[:2])
        asyncio.run(apply_jobs(cluster, namespace, map(job_of, range(count))))
        api, path = Api(cluster.access), path_of(API_VERSION, PLURAL, namespace)

        def made() -> bool:
            # No list of all of them: the API server has to answer the operator meanwhile.
            page = api.call("GET", f"{path_of('batch/v1', 'jobs', namespace)}?limit=1")
            return len(page["items"]) + page["metadata"].get("remainingItemCount", 0) == count

        def settled() -> bool:
            jobs = api.items(path)
            return len(jobs) == count and all(job.get("status", {}).get("phase") == "Preparing" for job in jobs)

        wait_until(made, "every job has a child", 300, poll_seconds=0.5)
        wait_until(settled, "every job is preparing", 300)
        quiet(cluster, mark)
        arm = measured(cluster, "operator", namespace, mark)
        requests = [entry for entry in cluster.audit(mark, USER) if entry["verb"] not in ("watch",)]
        requests = [entry for entry in requests if entry.get("objectRef", {}).get("namespace") == namespace]
        kinds = Counter(f"{e['verb']} {e['objectRef']['resource']}" for e in requests)
        cpu, memory = sum(seen.cpu_times()[:2]) - before, seen.memory_info().rss / 2**20
        print(f"operator: {len(requests) / count:.2f} requests a job: {dict(kinds)}")
        print(f"operator: {1000 * cpu / count:.1f} ms of CPU a job, {memory:.0f} MiB resident with {count} jobs")
        return arm


def quiet(cluster: Cluster, mark: int) -> None:
    """Wait until the operator has sent nothing for two seconds."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 2:
        now = len([e for e in cluster.audit(mark, USER) if e.get("objectRef", {}).get("resource") != "leases"])
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(0.2)


def table(arms: list[Arm]) -> None:
    base = arms[0]
    print(f"\n{'arm':<14}{'median s':>10}{'p99 s':>10}{'last child s':>14}{'median / bare':>15}{'last / bare':>13}")
    for arm in arms:
        median, p99 = statistics.median(arm.seconds), arm.seconds[int(0.99 * (len(arm.seconds) - 1))]
        ratio = median / statistics.median(base.seconds)
        print(
            f"{arm.name:<14}{median:>10.3f}{p99:>10.3f}{arm.total:>14.2f}{ratio:>15.2f}{arm.total / base.total:>13.2f}"
        )


def idle(cluster: Cluster, minutes: float) -> None:
    """Count the requests of an idle operator, after the namespaces of the jobs were deleted."""
    wait_until_deleted(cluster)
    time.sleep(5)
    mark = cluster.audit_mark()
    time.sleep(60 * minutes)
    entries = cluster.audit(mark, USER)
    kinds = Counter(f"{e['verb']} {e.get('objectRef', {}).get('resource', e['requestURI'])}" for e in entries)
    print(f"\n{minutes:g} idle minutes: {len(entries)} requests: {dict(kinds)}")


def wait_until_deleted(cluster: Cluster) -> None:
    namespaces = Api(cluster.access)
    wait_until(lambda: not _left(namespaces), "the jobs' namespaces are gone", 300)


def _left(api: Api) -> list[str]:
    names = [each["metadata"]["name"] for each in api.items("/api/v1/namespaces")]
    return [name for name in names if name.startswith("finetune-") and name != NAMESPACE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2, help="each arm this often, in turn")
    parser.add_argument("--idle-minutes", type=float, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        needs_controllers(cluster)
        install_kinds(cluster)
        install(cluster)
        process = OperatorProcess(cluster, Path(folder), {"progress": {"enabled": False}})
        arms: list[Arm] = []
        try:
            for _ in range(arguments.rounds):
                arms.append(run_bare(cluster, arguments.jobs))
                wait_until_deleted(cluster)
                begun = process.logs().count(LEADS)
                process.start()
                wait_until(lambda begun=begun: process.logs().count(LEADS) > begun, "the operator leads")
                arms.append(run_operator(cluster, process, arguments.jobs))
                assert arms[-1].children == arms[-2].children, "the arms made different children"
                table(arms[-2:])
                if arguments.idle_minutes and len(arms) == 2 * arguments.rounds:
                    idle(cluster, arguments.idle_minutes)
                wait_until_deleted(cluster)
                process.terminate()
        finally:
            if process.running:
                process.kill()


if __name__ == "__main__":
    main()
