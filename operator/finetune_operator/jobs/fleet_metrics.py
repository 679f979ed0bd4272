"""Metrics of a fleet: amounts that one new status adds to sums over all jobs, and the state of all jobs now.

They hold no names of jobs, pods and nodes: people who may not read the jobs receive them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from finetune_contract.choices import Stage
from finetune_operator.jobs.decide.decide import MANAGER
from finetune_operator.jobs.outcomes.status import condition, ended
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.jobs.state.results import gpus
from finetune_operator.spec.status_times import seconds_since
from finetune_operator.spec.types import ComparisonStatus, CostStatus, FineTuneJobStatus, StageStatus

FRESH_SECONDS = 600.0
"""An older rate says nothing about now. Reports come every few seconds, and from an epoch of slow steps every few
minutes.
"""

CapacityLabel: TypeAlias = Literal["spot", "onDemand", "any"]
"""`any`: the job does not ask for spot nodes."""


PlanFigure: TypeAlias = Literal["memory", "step_time"]
"""Estimates of a plan that trainings measure."""


@dataclass(frozen=True)
class Usage:
    """Usage by attempts that are over."""

    stage: Stage
    capacity: CapacityLabel
    node_seconds: float
    """Time in which pods had nodes; it is paid."""
    running_node_seconds: float
    """Time in which all pods ran."""
    gpu_seconds: float
    """Node seconds times the GPUs taken on a node."""
    currency: str | None
    cost: float
    saved: float


@dataclass(frozen=True)
class Fleet:
    """State of all jobs at one moment."""

    phases: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    """Jobs that only capacity, a queue or the operator keeps from running their first pods."""
    oldest_waiting_seconds: float = 0.0
    progress_age_seconds: float = 0.0
    """Longest time since a running attempt with progress has reported anything new."""
    samples_per_second: Mapping[str, float] = field(default_factory=dict)
    """Rows per second of running attempts, by stage."""
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    estimated_cost: Mapping[str, float] = field(default_factory=dict)
    """Estimated cost of the trainings of jobs that are not over, by currency."""


# ------------------------------------------------------------------------------------------------------ one new status


def wait_seconds(job: JobView, after: FineTuneJobStatus) -> float | None:
    """Return the seconds that the job waited until its first pods ran, if this status is the first to record it."""
    if _has_run(job.status):
        return None
    first = next((stage for stage in after.stages if stage.running_since is not None), None)
    since, ran = _waiting_since(job, after), None if first is None else first.running_since
    return None if since is None or ran is None else max(0.0, (ran - since).total_seconds())


def usage_added(job: JobView, after: FineTuneJobStatus) -> Usage | None:
    """Return the usage that this status adds to the job's; it grows at ends of attempts only."""
    then, now = job.status.cost or CostStatus(), after.cost
    if now is None or now.billable_seconds <= then.billable_seconds:
        return None
    stage = _running(job.status) or next((one for one in after.stages if one.name == after.stage), None)
    if stage is None:
        return None
    kind, held = stage.name, now.billable_seconds - then.billable_seconds
    return Usage(
        stage=kind,
        capacity=stage.capacity or "any",
        node_seconds=held,
        running_node_seconds=max(0.0, now.node_seconds - then.node_seconds),
        gpu_seconds=0.0 if job.job is None else held * gpus(job.job.spec, job.status.plan, kind),
        currency=now.currency,
        cost=_increase(then.amount, now.amount),
        saved=_increase(then.saved, now.saved),
    )


def estimate_ratio(job: JobView, after: FineTuneJobStatus) -> float | None:
    """Return the seconds of a training over those that its plan expected, if this status records its success.

    Only for trainings in one attempt: resumed ones computed some steps twice and others in an attempt before.
    """
    done = _stage(after, Stage.TRAIN)
    then, plan = _stage(job.status, Stage.TRAIN), job.status.plan or after.plan
    if (
        done is None
        or done.state != "Succeeded"
        or done.attempt != 1
        or (then is not None and then.state == done.state)
    ):
        return None
    expected = None if plan is None else plan.estimated.duration_seconds
    began, over = done.running_since, done.completion_time
    if not expected or began is None or over is None:
        return None
    return max(0.0, (over - began).total_seconds()) / expected


def plan_ratios(job: JobView, after: FineTuneJobStatus) -> tuple[tuple[str, PlanFigure, float], ...]:
    """Return strategy, figure, and measured / planned of each estimate that this status is the first to compare."""
    check = after.plan_check
    if check is None or job.status.plan_check is not None:
        return ()
    strategy = check.strategy.partition("+")[0]
    if strategy.startswith("fsdp-"):
        strategy = "fsdp"  # in whatever way it shards
    comparisons: dict[PlanFigure, ComparisonStatus | None] = {"memory": check.memory, "step_time": check.step_time}
    return tuple(
        (strategy, name, comparison.ratio) for name, comparison in comparisons.items() if comparison is not None
    )


def _increase(then: float | None, now: float | None) -> float:
    """Return the increase; 0 if a part has no price."""
    return 0.0 if now is None else max(0.0, now - (then or 0.0))


# ------------------------------------------------------------------------------------------------------------ all jobs


def fleet(jobs: Iterable[JobView], now: datetime, last_progress_at: Callable[[JobView], datetime | None]) -> Fleet:
    """Return the state of all jobs at `now`; `last_progress_at`: last progress of a running attempt, if known."""
    phases = Counter[str]()
    costs, samples, tokens = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    waits, silent = [0.0], [0.0]
    waiting = 0
    for job in jobs:
        status = job.status
        phases[status.phase or "Pending"] += 1
        if ended(status) is not None:
            continue
        estimated = None if status.plan is None else status.plan.estimated
        if estimated is not None and estimated.cost is not None and estimated.currency is not None:
            costs[estimated.currency] += estimated.cost
        if _is_waiting(job):
            waiting += 1
            waits.append(_age(_waiting_since(job, status), now))
        stage, progress = _running(status), status.progress
        if stage is None or progress is None:
            continue
        silent.append(_age(last_progress_at(job) or progress.last_update_time, now))
        if seconds_since(progress.last_update_time, now) <= FRESH_SECONDS:
            samples[stage.name] += progress.samples_per_second or 0.0
            tokens[stage.name] += progress.tokens_per_second or 0.0
    return Fleet(phases, waiting, max(waits), max(silent), samples, tokens, costs)


def _is_waiting(job: JobView) -> bool:
    """Return whether its first pods are still to run, and the cluster can start them: a job that is refused or
    suspended waits for a person.
    """
    status, ours = job.status, job.managed_by in (None, "", MANAGER)
    stalled = condition(status, "Stalled")
    of_cluster = any(one.waiting_for in ("Capacity", "Controller") for one in status.stages)
    held = status.phase == "Suspended" or (stalled is not None and stalled.status == "True" and not of_cluster)
    return ours and not job.deleting and job.job is not None and not held and not _has_run(status)


def _waiting_since(job: JobView, status: FineTuneJobStatus) -> datetime | None:
    """Return its creation; the first child's start if the spec was changed since, as a job that was suspended or
    refused was in no queue until then.
    """
    return job.created if job.generation <= 1 else status.start_time


def _has_run(status: FineTuneJobStatus) -> bool:
    """Return whether any attempt had all of its pods running; one that found no nodes ends without it."""
    ran = status.cost is not None and status.cost.node_seconds > 0
    return ran or any(stage.running_since is not None or stage.state == "Succeeded" for stage in status.stages)


def _running(status: FineTuneJobStatus) -> StageStatus | None:
    return next((stage for stage in status.stages if stage.state == "Running"), None)


def _stage(status: FineTuneJobStatus, name: Stage) -> StageStatus | None:
    return next((stage for stage in status.stages if stage.name == name), None)


def _age(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())
