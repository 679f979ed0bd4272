"""Delay of 20 honest jobs while the operator has a thousand valid jobs of another namespace to plan.

    python tests/benchmarks/planning_flood.py [--jobs 1000] [--rounds 1]

Baseline: the same 20 jobs without the flood. All arms run in turn in one go, against one real API server with its Job
controller, each with an operator of its own. The jobs of the flood differ in model, GPUs, nodes and length, so that no
plan serves two of them, and most are large. 16 clients store them as fast as the API server takes them: in one arm
before the honest jobs, so that the operator alone can delay them; in the other meanwhile, so that the API server, whose
processors the flood fills, delays them as well. The honest jobs are stored half a second apart. Times are those of the
API server's audit log, from the receipt of the job to the answer to its child's creation. Checked: every honest job has
exactly one child, with the spec of the other arms; most of the flood is not planned yet when the last one has it; the
operator leads throughout, and answers /healthz.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from operator_load import LEADS, Arm, apply_jobs, job_of, measured, wait_until_deleted

from cluster_support.api_access import Api, new_session, path_of, wait_until
from cluster_support.control_plane import Cluster, needs_controllers, running_cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.world import fresh_namespace, install_kinds
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

HONEST = 20
MODELS = (
    "meta-llama/Llama-2-70b-hf",
    "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-2-7b-hf",
    "mistralai/Mistral-7B-v0.1",
    "EleutherAI/gpt-neox-20b",
)
PRODUCTS = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-40GB")


def flood_jobs(count: int) -> list[dict[str, Any]]:
    """Return valid jobs of which no two have the same plan."""
    forms = itertools.product(range(512, 4096, 32), MODELS, PRODUCTS, (8, 4))
    jobs = []
    for number, (length, model, product, gpus) in enumerate(itertools.islice(forms, count)):
        spec = {
            "task": "text-generation",
            "model": {"uri": f"hf://{model}"},
            "dataset": {"uri": "hf://tatsu-lab/alpaca", "maxLength": length},
            "training": {"maxSteps": 1000},
            "resources": {"nodes": 1 + number % 2, "gpusPerNode": gpus, "accelerator": {"product": product}},
        }
        metadata = {"name": f"flood-{number:04d}"}
        jobs.append({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})
    assert len(jobs) == count
    return jobs


def run(cluster: Cluster, process: OperatorProcess, name: str, flood: int, stored_before: bool = False) -> Arm:
    """Run one arm."""
    begun = process.logs().count(LEADS)
    process.start()
    wait_until(lambda: process.logs().count(LEADS) > begun, "the operator leads")
    stop, answers = threading.Event(), list[float]()

    def probe() -> None:
        session = new_session()
        while not stop.wait(0.2):
            sent = time.monotonic()
            assert session.get(f"http://127.0.0.1:{process.http_port}/healthz", timeout=60).ok
            answers.append(time.monotonic() - sent)

    with fresh_namespace(cluster) as noise, fresh_namespace(cluster) as team:
        mark, api, path = cluster.audit_mark(), Api(cluster.access), path_of(API_VERSION, PLURAL, team)
        storing = threading.Thread(target=lambda: asyncio.run(apply_jobs(cluster, noise, flood_jobs(flood))))
        probing = threading.Thread(target=probe)
        for one in (storing, probing):
            one.start()
        if stored_before:
            storing.join()
        time.sleep(2)
        for number in range(HONEST):
            api.create(path, job_of(number))
            time.sleep(0.5)
        children, in_flood = path_of("batch/v1", "jobs", team), path_of(API_VERSION, PLURAL, noise)
        wait_until(lambda: len(api.items(children)) == HONEST, "every honest job has a child", 1800, poll_seconds=0.5)
        phases = Counter(job.get("status", {}).get("phase", "none yet") for job in api.items(in_flood))
        storing.join()
        stop.set()
        probing.join()
        arm = measured(cluster, name, team, mark)
        assert process.logs().count(LEADS) == begun + 1, "the operator has lost its Lease"
        operator = psutil.Process(process.pid)
        mebibytes = [one.memory_info().rss >> 20 for one in (operator, *operator.children())]
        print(f"{name}: /healthz {max(answers):.2f} s at most; MiB of the operator and its processes: {mebibytes}")
        print(f"{name}: phases of the flood when the last honest job had its child: {dict(phases)}")
    process.kill()
    wait_until_deleted(cluster)
    return arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="size of the flood")
    parser.add_argument("--rounds", type=int, default=1, help="each arm this often, in turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        needs_controllers(cluster)
        install_kinds(cluster)
        install(cluster)
        process = OperatorProcess(cluster, Path(folder), {"progress": {"enabled": False}})
        arms = {
            "alone": (0, False),
            "flood stored before": (arguments.jobs, True),
            "meanwhile": (arguments.jobs, False),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        children: list[dict[str, Any]] = []
        try:
            for _ in range(arguments.rounds):
                for name, (flood, stored_before) in arms.items():
                    arm = run(cluster, process, name, flood, stored_before)
                    seconds[name] += arm.seconds
                    children.append(arm.children)
                    assert arm.children == children[0], "the arms made different children"
        finally:
            if process.running:
                process.kill()
        base = statistics.median(seconds["alone"])
        for name, times in seconds.items():
            median = statistics.median(times)
            text = f"median {median:.3f} s, longest {max(times):.3f} s to the child"
            print(f"{name:<20} {text}; median / alone {median / base:.2f}")


if __name__ == "__main__":
    main()
