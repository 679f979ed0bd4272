"""`finetune suspend`, `resume`, `restart` and `cancel`: a job's control from outside.

Each returns a Change: the action taken, or the reason why none was needed. An impossible action is a ClusterError. With
`dry_run` the API server checks the change without making it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from finetune_operator.cli.cluster.awaiting import Goal, wait_for
from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob
from finetune_operator.cli.cluster.jobview import phase_of
from finetune_operator.cli.cluster.watching import JobDeletedError, versions
from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION

STOP_SECONDS = 600.0
"""Seconds that an attempt may take to save its checkpoint and end; `template`'s grace period is far below that."""
LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True)
class Change:
    """Change made to one job."""

    job: ClusterJob
    verb: str
    """`suspended`, `resumed`, `restarted`, `cancelled`; `unchanged` if there was nothing to do."""
    text: str

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`."""
        return {
            "name": self.job.name,
            "namespace": self.job.metadata.namespace,
            "uid": self.job.metadata.uid,
            "change": self.verb,
            "message": self.text,
        }


class NotRecreatedError(ClusterError):
    """Error of a job that was deleted and could not be created again; it is in `manifest`."""

    def __init__(self, text: str, manifest: dict[str, Any]) -> None:
        super().__init__(text)
        self.manifest = manifest


async def suspend(cluster: Cluster, name: str, dry_run: bool = False) -> Change:
    """Stop the running attempt, which saves a checkpoint, and start no other."""
    job = await _active_job(cluster, name, "suspended")
    if job.spec.run_policy.suspend:
        return Change(job, "unchanged", "is already suspended")
    changed = await cluster.set_suspended(job, True, dry_run)
    return Change(changed, "suspended", "is suspended: a running attempt saves a checkpoint and stops")


async def resume(cluster: Cluster, name: str, dry_run: bool = False) -> Change:
    """Let a suspended job continue."""
    job = await _active_job(cluster, name, "resumed")
    if not job.spec.run_policy.suspend:
        return Change(job, "unchanged", "is not suspended")
    changed = await cluster.set_suspended(job, False, dry_run)
    return Change(changed, "resumed", "is resumed")


async def restart(cluster: Cluster, name: str, dry_run: bool = False) -> Change:
    """Start a new attempt of a running job from its last checkpoint; start an ended job again from its beginning.

    Raise NotRecreatedError if the ended job is deleted and the API server refuses to create it again.
    """
    job = await cluster.job(name)
    if job.metadata.deletion_timestamp is not None:
        raise ClusterError(f"FineTuneJob {name} is being deleted; apply its file again once it is deleted")
    if job.outcome is not None:
        return await _recreate(cluster, job, dry_run)
    if job.spec.run_policy.suspend:
        raise ClusterError(f"FineTuneJob {name} is suspended; resume it instead: finetune resume {name}")
    if job.status.start_time is None:
        return Change(job, "unchanged", "has not started yet")
    suspended = await cluster.set_suspended(job, True, dry_run)
    if not dry_run:
        try:
            await _wait_until_stopped(cluster, name)
        finally:
            suspended = await cluster.set_suspended(suspended, False)
    return Change(suspended, "restarted", "starts another attempt from its last checkpoint")


async def cancel(cluster: Cluster, name: str, dry_run: bool = False) -> Change:
    """Delete a job that has not ended. Its claim stays, with checkpoints and results, unless `storage.retain` is
    `delete`.
    """
    job = await cluster.job(name)
    if job.outcome is not None:
        return Change(job, "unchanged", f"has already ended ({job.outcome})")
    await cluster.delete(job, dry_run)
    results = "its results stay on its claim" if job.keeps_results else "its claim and results are deleted with it"
    return Change(job, "cancelled", f"is deleted; {results}")


async def _active_job(cluster: Cluster, name: str, action: str) -> ClusterJob:
    job = await cluster.job(name)
    if job.outcome is not None:
        raise ClusterError(
            f"FineTuneJob {name} has ended ({phase_of(job)}) and cannot be {action}; "
            f"finetune restart {name} runs it from the beginning"
        )
    return job


async def _recreate(cluster: Cluster, job: ClusterJob, dry_run: bool) -> Change:
    manifest = manifest_of(job)
    # Under another name, as this one is taken: the spec may have been admitted by rules that have changed since.
    metadata = {**manifest["metadata"], "name": f"{job.name[:40]}-check"}
    await cluster.create({**manifest, "metadata": metadata}, dry_run=True)
    await cluster.delete(job, dry_run)
    results = "moved aside, not deleted" if job.keeps_results else "deleted with its claim (storage.retain)"
    if dry_run:
        return Change(job, "restarted", f"would be deleted and recreated; earlier results would be {results}")
    try:
        await _wait_until_deleted(cluster, job)
        created = await cluster.create(manifest)
    except ClusterError as error:
        raise NotRecreatedError(f"FineTuneJob {job.name} was deleted and not recreated: {error}", manifest) from error
    return Change(created, "restarted", f"runs from the beginning; earlier results are {results}")


def manifest_of(job: ClusterJob) -> dict[str, Any]:
    """Return the job as its owner would apply it: without additions of the API server and the operator."""
    raw = job.raw
    stored = raw["metadata"].get("annotations", {})
    # Revisions of an endpoint restart with the job.
    annotations = {k: v for k, v in stored.items() if k not in (LAST_APPLIED_ANNOTATION, ROLLBACK_ANNOTATION)}
    metadata = {"name": job.name, "namespace": job.metadata.namespace}
    labels = raw["metadata"].get("labels", {})
    return {
        "apiVersion": raw["apiVersion"],
        "kind": raw["kind"],
        "metadata": {
            **metadata,
            **({"labels": labels} if labels else {}),
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": raw["spec"],
    }


async def _wait_until_deleted(cluster: Cluster, job: ClusterJob) -> None:
    """Wait until the job is deleted, even if another one has its name by then."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            async for current in versions(cluster, job.name):
                if current.metadata.uid != job.metadata.uid:
                    return
    except JobDeletedError:
        return
    except TimeoutError as error:
        raise ClusterError(f"it still existed after {STOP_SECONDS:.0f} s") from error
    except ClusterError as error:
        if error.code != 404:
            raise


async def _wait_until_stopped(cluster: Cluster, name: str) -> None:
    """Wait until nothing of the job runs, or it has ended."""
    (wait,) = await wait_for(cluster, [name], Goal.SUSPENDED, STOP_SECONDS, lambda wait: None)
    if wait.timed_out:
        raise ClusterError(f"FineTuneJob {name} did not stop within {STOP_SECONDS:.0f} s")
    if wait.job is None or (wait.job.outcome is None and not wait.reached):
        raise ClusterError(f"FineTuneJob {name} {wait.text}")


Steer = Callable[[Cluster, str, bool], Awaitable[Change]]
