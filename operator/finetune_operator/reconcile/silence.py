"""Attempts that have told how far they are, and then tell nothing new: one rank hangs, and the others wait for it.

Only silence that the operator has listened to counts: from the last report that showed movement, and never from before
the moment since which it cannot have missed one. An attempt that has told nothing at all is left alone; it may be a
user's program, or have no way to the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_operator.api.quantities import human_seconds
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import ProgressStatus
from finetune_operator.reconcile.reconcile_types import JobView, Observed, PodView
from finetune_operator.reconcile.remedies import MOST_LOGS, Cause, OperatorCause
from finetune_operator.reconcile.status_times import stamp


@dataclass(frozen=True)
class Silence:
    """How long an attempt may go on without anything new."""

    since: datetime
    seconds: int
    last: ProgressStatus

    @property
    def told_at(self) -> datetime:
        """When people are told, before anything is done: after half of the time."""
        return self.since + timedelta(seconds=self.seconds / 2)

    @property
    def until(self) -> datetime:
        """When the attempt is stopped."""
        return self.since + timedelta(seconds=self.seconds)

    @property
    def words(self) -> str:
        """For the condition."""
        return f"No progress since {stamp(self.since)}{_where(self.last)}: it is stopped at {stamp(self.until)}."


def _where(last: ProgressStatus) -> str:
    if last.step is None:
        return "" if last.percent is None else f" ({last.percent} %)"
    return f" (step {last.step}{'' if last.total_steps is None else f' of {last.total_steps}'})"


def silence(job: JobView, observed: Observed, settings: Settings, stage: str, attempt: int) -> Silence | None:
    """The silence of an attempt that runs; None where it does not count."""
    told = any((one.name, one.state, one.attempt) == (stage, "Running", attempt) for one in job.status.stages)
    if job.job is None or not told or observed.heard_since is None:
        return None
    seconds = settings.progress_deadline(job.job.spec.run_policy)
    # What is stored was told by this attempt: the beginning of each takes away what the one before has told.
    last = observed.progress or job.status.progress
    if not seconds or last is None:
        return None
    since = observed.heard_since if observed.moved is None else max(observed.moved, observed.heard_since)
    return Silence(since, seconds, last)


def witnesses(pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Pods whose logs may show where an attempt hangs: the launcher of an MPIJob has the words of all ranks."""
    launchers = [pod for pod in pods if pod.index is None]
    ranked = sorted(pods, key=lambda pod: (pod.index or 0, pod.name))
    return tuple(launchers[:1] or ranked[:MOST_LOGS])


def no_progress(quiet: Silence, stage: Stage, pods: Sequence[PodView], processes: int) -> Cause:
    """The cause; `pods` are those of the attempt, `processes` its ranks. Which rank hangs is told only where there is
    one: what the others report looks the same whichever it is.
    """
    step = _where(quiet.last)
    alone = pods[0] if len(pods) == 1 else None
    which = "" if processes == 1 else " Which of its ranks hangs cannot be seen from outside."
    return Cause(
        OperatorCause.NO_PROGRESS,
        "Hung",
        f"Stage {stage} has shown no progress for {human_seconds(quiet.seconds)}, since {stamp(quiet.since)}{step}, "
        f"and was stopped.{which}",
        "logTail shows where its processes stood: after half of that time the trainer's write their Python stacks into "
        "the log, and a rank that waits in no collective operation holds up the others. If it was at work all the "
        "time, set runPolicy.progressDeadlineSeconds higher.",
        alone,
        rank=0 if processes == 1 else None,
        witnesses=witnesses(pods),
    )
