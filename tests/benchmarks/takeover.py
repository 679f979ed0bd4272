"""Time without an acting operator when the acting replica goes away.

    python tests/benchmarks/takeover.py [--rounds 5]

Baseline: the duration of the Lease, before whose end no other replica may act. Arms, in turn: the acting replica is
killed, and it is stopped by SIGTERM, when it releases its Lease. Both replicas run on one machine against one real API
server. Time counts from the signal to the moment at which the other replica holds the Lease. Checked: a job that was
stored meanwhile has one child once the other replica acts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_support.api_access import Api, path_of, wait_until
from cluster_support.control_plane import Cluster, running_cluster
from cluster_support.operator_process import NAMESPACE, OperatorProcess, install
from cluster_support.world import BASE, SETTINGS, install_kinds, namespace_for_pods
from finetune_operator.controller.cluster.leader import LEASE_NAME, LEASE_SECONDS
from finetune_operator.jobs.render.render_types import JOB_LABEL
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

ARMS = {"killed": OperatorProcess.kill, "stopped": OperatorProcess.terminate}


def holder(api: Api) -> str:
    """Return the name of the replica that holds the Lease."""
    lease = api.get(path_of("coordination.k8s.io/v1", "leases", NAMESPACE, LEASE_NAME)) or {}
    return str(lease.get("spec", {}).get("holderIdentity") or "").partition("_")[0]


def takeover(api: Api, replicas: dict[str, OperatorProcess], arm: str, namespace: str, job: str) -> float:
    """End the active replica, wait for the other one, restart the first; return the seconds without a holder."""
    acting = wait_until(lambda: holder(api), "a replica acts")
    began = time.monotonic()
    ARMS[arm](replicas[acting])
    api.create(
        path_of(API_VERSION, PLURAL, namespace),
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job}, "spec": BASE},
    )
    while holder(api) in ("", acting):
        time.sleep(0.05)
    seconds = time.monotonic() - began
    children = path_of("batch/v1", "jobs", namespace)
    wait_until(lambda: api.items(children, labelSelector=f"{JOB_LABEL}={job}"), "the job has a child")
    assert len(api.items(children, labelSelector=f"{JOB_LABEL}={job}")) == 1
    replicas[acting].start()
    return seconds


def measure(cluster: Cluster, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each arm, by round."""
    install_kinds(cluster)
    install(cluster)
    api = Api(cluster.access)
    replicas = {name: OperatorProcess(cluster, folder, SETTINGS, name=name) for name in ("operator-0", "operator-1")}
    seen: dict[str, list[float]] = {arm: [] for arm in ARMS}
    try:
        for replica in replicas.values():
            replica.start()
        with namespace_for_pods(cluster) as namespace:
            for number in range(rounds):
                for index, arm in enumerate(ARMS):
                    seen[arm].append(takeover(api, replicas, arm, namespace, f"job-{number}-{index}"))
    finally:
        for replica in replicas.values():
            replica.kill()
    return seen


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as cluster:
        seen = measure(cluster, Path(name), rounds)
    print(f"baseline, duration of the Lease: {LEASE_SECONDS} s")
    for arm, seconds in seen.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        print(f"{arm}: {median:.1f} s ({spread}), {median / LEASE_SECONDS:.2f} of the baseline")


if __name__ == "__main__":
    main(sys.argv[1:])
