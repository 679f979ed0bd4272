"""`finetune wait`: waits until jobs have reached a state, or can no longer reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterJob
from finetune_operator.cli.cluster.jobview import phase_of
from finetune_operator.cli.cluster.watching import JobDeletedError, versions
from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION


class Goal(StrEnum):
    """State that is waited for."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"
    PLANNED = "planned"
    RUNNING = "running"
    READY = "ready"
    SUSPENDED = "suspended"
    DELETED = "deleted"


@dataclass(frozen=True)
class Wait:
    """Result of waiting for one job."""

    name: str
    reached: bool
    text: str
    job: ClusterJob | None = None
    timed_out: bool = False

    def data(self, goal: Goal) -> dict[str, Any]:
        """Return the data for `-o json`."""
        return {
            "name": self.name,
            "for": goal.value,
            "reached": self.reached,
            "timedOut": self.timed_out,
            "phase": None if self.job is None else phase_of(self.job),
            "message": self.text,
        }


def _holds(job: ClusterJob, kind: str) -> bool:
    return any(one.type == kind and one.status == "True" for one in job.status.conditions)


def _rolls_out(job: ClusterJob) -> bool:
    """Return True if another revision of the endpoint is to take over, or may be: the operator has not seen the
    annotation yet. A canary that gets its requests takes over only once the spec lets it, so nobody waits for that.
    """
    status, requested = job.status.endpoint, job.metadata.annotations.get(ROLLBACK_ANNOTATION)
    if status is None:
        return False
    return (status.canary is None and status.revision != status.target) or status.observed_rollback != requested


_REACHED: dict[Goal, Callable[[ClusterJob], bool]] = {
    Goal.SUCCEEDED: lambda job: job.outcome == "Succeeded",
    Goal.FAILED: lambda job: job.outcome == "Failed",
    Goal.ENDED: lambda job: job.outcome is not None,
    Goal.PLANNED: lambda job: _holds(job, "Planned"),
    Goal.RUNNING: lambda job: _holds(job, "Running"),
    Goal.READY: lambda job: _holds(job, "Ready") and not _rolls_out(job),
    Goal.SUSPENDED: lambda job: job.status.phase == "Suspended",
    Goal.DELETED: lambda job: False,
}


def has_reached(job: ClusterJob, goal: Goal) -> bool:
    """Return True if the job has reached the goal."""
    return _REACHED[goal](job)


async def wait_for(
    cluster: Cluster, names: Sequence[str], goal: Goal, timeout: float | None, report: Callable[[Wait], None]
) -> tuple[Wait, ...]:
    """Return the result for each job, in the order of `names`; each is passed to `report` as soon as it is known.

    Raise ClusterError if a job does not exist, unless its deletion is waited for.
    """

    async def one(name: str) -> Wait:
        try:
            async with asyncio.timeout(timeout):
                result = await _until(cluster, name, goal)
        except TimeoutError:
            result = Wait(name, False, f"is not {goal} after {timeout:.0f} s", timed_out=True)
        report(result)
        return result

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(one(name)) for name in names]
    return tuple(wait.result() for wait in waits)


async def _until(cluster: Cluster, name: str, goal: Goal) -> Wait:
    if goal is Goal.DELETED and name not in {job.name for job in await cluster.jobs()}:
        return Wait(name, True, "does not exist")
    last: ClusterJob | None = None
    try:
        async for job in versions(cluster, name):
            last = job
            # A status of the previous spec does not count.
            if (job.status.observed_generation or 0) < job.metadata.generation:
                continue
            if has_reached(job, goal):
                return Wait(name, True, f"is {goal}", job)
            if job.outcome is not None and goal is not Goal.DELETED:
                return Wait(name, False, f"has {job.outcome.lower()} and can no longer be {goal}", job)
    except JobDeletedError as error:
        return Wait(name, goal is Goal.DELETED, str(error).removeprefix(f"FineTuneJob {name} "), last)
    raise AssertionError("a job's versions end only with its deletion")
