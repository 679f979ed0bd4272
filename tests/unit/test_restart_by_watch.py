"""`finetune restart` against a cluster that reports changes by its watch alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob, parse_job
from finetune_operator.cli.cluster.steering import restart
from suite_plugins.patience import patient


def version(number: int, generation: int = 1, uid: str = "1", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": "reviews",
            "namespace": "team",
            "uid": uid,
            "resourceVersion": str(number),
            "generation": generation,
        },
        "spec": {"task": "text-classification", "model": {"uri": "hf://org/model"}, "evaluation": {}},
        "status": {"startTime": "2026-01-01T12:00:00Z", "observedGeneration": generation, **status},
    }


RUNNING = version(1, phase="Training")
SUSPENDING = version(2, 2, phase="Training") | {"status": RUNNING["status"]}
SUSPENDED = version(3, 2, phase="Suspended")
FAILED = version(1, phase="Failed", conditions=[{"type": "Failed", "status": "True", "reason": "R", "message": "m",
                                                 "lastTransitionTime": "2026-01-01T12:00:00Z"}])  # fmt: skip


class ChangingCluster(Cluster):
    """Answers every read with the first state, and a watch with the changes."""

    def __init__(self, first: dict[str, Any], *changes: tuple[str, dict[str, Any]]) -> None:
        self.first, self.changes = first, changes
        self.requests: list[str] = []

    async def job(self, name: str) -> ClusterJob:
        self.requests.append(f"get {name}")
        return parse_job(self.first)

    async def jobs(self, everywhere: bool = False) -> tuple[ClusterJob, ...]:
        self.requests.append("list")
        return (parse_job(self.first),)

    async def job_changes(self, job: ClusterJob) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.requests.append("watch")
        for change in self.changes:
            yield change
        await asyncio.Event().wait()

    async def set_suspended(self, job: ClusterJob, suspended: bool, dry_run: bool = False) -> ClusterJob:
        self.requests.append("suspend" if suspended else "resume")
        return job

    async def create(self, manifest: dict[str, Any], dry_run: bool = False) -> ClusterJob:
        self.requests.append("check" if dry_run else "create")
        return parse_job(version(9, uid="2"))

    async def delete(self, job: ClusterJob, dry_run: bool = False) -> None:
        self.requests.append("delete")


def restarted(cluster: ChangingCluster) -> str:
    return asyncio.run(asyncio.wait_for(restart(cluster, "reviews"), patient(60))).text


def test_job_is_resumed_once_the_watch_reports_that_it_stopped():
    cluster = ChangingCluster(RUNNING, ("changed", SUSPENDING), ("changed", SUSPENDED))
    assert restarted(cluster) == "starts another attempt from its last checkpoint"
    assert cluster.requests == ["get reviews", "suspend", "get reviews", "watch", "resume"]


def test_ended_job_is_recreated_once_the_watch_reports_its_deletion():
    cluster = ChangingCluster(FAILED, ("deleted", FAILED))
    assert restarted(cluster).startswith("runs from the beginning")
    assert cluster.requests == ["get reviews", "check", "delete", "get reviews", "watch", "create"]


def test_job_deleted_while_stopping_starts_no_other_attempt():
    cluster = ChangingCluster(RUNNING, ("deleted", RUNNING))
    with pytest.raises(ClusterError, match="FineTuneJob reviews was deleted"):
        restarted(cluster)
    assert cluster.requests[-1] == "resume"
