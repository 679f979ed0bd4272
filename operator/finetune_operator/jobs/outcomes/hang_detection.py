"""Attempts that have reported progress and then report nothing new: one rank hangs, and the others wait for it.

Only silence while the operator could receive reports counts: from the last report with progress, and never from before
the moment since which none can have been missed. An attempt that has reported nothing at all is left alone; it may be a
user's program, or unable to reach the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_operator.jobs.outcomes.remedies import MOST_LOGS, Cause, OperatorCause
from finetune_operator.jobs.state.decision_types import JobView, Observed, PodView
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import ProgressStatus


@dataclass(frozen=True)
class ProgressGap:
    """Silence of an attempt: its start, and the seconds that it may last."""

    since: datetime
    seconds: int
    last: ProgressStatus

    @property
    def warn_at(self) -> datetime:
        """Time of the warning, before anything is done: after half of the limit."""
        return self.since + timedelta(seconds=self.seconds / 2)

    @property
    def until(self) -> datetime:
        """Time when the attempt is stopped."""
        return self.since + timedelta(seconds=self.seconds)

    @property
    def message(self) -> str:
        """Message for the condition."""
        return (
            f"No progress since {stamp(self.since)}{_where(self.last)}; the attempt is stopped at {stamp(self.until)}."
        )


def _where(last: ProgressStatus) -> str:
    if last.step is None:
        return "" if last.percent is None else f" ({last.percent} %)"
    return f" (step {last.step}{'' if last.total_steps is None else f' of {last.total_steps}'})"


def progress_gap(
    job: JobView, observed: Observed, settings: Settings, stage: Stage, attempt: int
) -> ProgressGap | None:
    """Return the silence of a running attempt; None if it does not count."""
    recorded = any((one.name, one.state, one.attempt) == (stage, "Running", attempt) for one in job.status.stages)
    if job.job is None or not recorded or observed.reports_complete_since is None:
        return None
    seconds = settings.progress_deadline(job.job.spec.run_policy)
    # Stored progress is of this attempt: the start of each attempt removes that of the one before.
    last = observed.progress or job.status.progress
    if not seconds or last is None:
        return None
    since = (
        observed.reports_complete_since
        if observed.last_progress_at is None
        else max(observed.last_progress_at, observed.reports_complete_since)
    )
    return ProgressGap(since, seconds, last)


def pods_to_read_logs_from(pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Return the pods whose logs may show where an attempt hangs: an MPIJob's launcher has the output of all ranks."""
    launchers = [pod for pod in pods if pod.index is None]
    ranked = sorted(pods, key=lambda pod: (pod.index or 0, pod.name))
    return tuple(launchers[:1] or ranked[:MOST_LOGS])


def hang_cause(gap: ProgressGap, stage: Stage, pods: Sequence[PodView], processes: int) -> Cause:
    """Return the cause; `pods` are those of the attempt, `processes` its ranks. The rank that hangs is named only if
    there is just one: the reports of the others look the same whichever it is.
    """
    step = _where(gap.last)
    alone = pods[0] if len(pods) == 1 else None
    which = "" if processes == 1 else " The reports do not show which rank hangs."
    return Cause(
        OperatorCause.NO_PROGRESS,
        "Hung",
        f"Stage {stage} made no progress for {human_seconds(gap.seconds)}, since {stamp(gap.since)}{step}, "
        f"and was stopped.{which}",
        "logTail has the Python stacks that the trainer's processes log after half of that time: a rank outside of a "
        "collective operation blocks the others. If the stage was busy, raise runPolicy.progressDeadlineSeconds.",
        alone,
        rank=0 if processes == 1 else None,
        pods_to_read_logs_from=pods_to_read_logs_from(pods),
    )
