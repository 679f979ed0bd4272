"""One TrainerReport from those of a pod's ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.causes import ECHOES, Cause, first_cause, of_exit, of_oom_kill
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_OK, FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_trainer.launching.child_supervisor import End

_SHOWN = 1500
"""Characters of the stderr of a process without a report that go into the message."""


def reports_in(folder: Path, stage: Stage) -> list[TrainerReport]:
    """Return reports by rank. Unreadable ones are skipped: a process killed while writing is reported by its signal."""
    reports = []
    for file in folder.glob(f"{stage}-*.json"):
        try:
            reports.append(TrainerReport.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError):
            continue
    return sorted(reports, key=lambda report: report.rank)


def killed_ranks(reports: Collection[TrainerReport], ends: Mapping[int, int]) -> set[int]:
    """Return the ranks that SIGKILL ended, or a process of theirs."""
    reported = {
        report.rank
        for report in reports
        if report.failure is not None and report.failure.failure_class is FailureClass.KILLED
    }
    return reported | {rank for rank, code in ends.items() if code == -signal.SIGKILL}


def verdict(
    job: str,
    stage: Stage,
    reports: Collection[TrainerReport],
    *,
    end: End,
    ends: Mapping[int, int],
    trouble: FailureReport | None,
    expected: int,
    world_size: int,
    seconds: float,
    first: int = 0,
    killed_for_memory: bool = False,
) -> TrainerReport:
    """Return the report of the pod as a whole.

    Success is rank 0's report, or that of the lowest rank here. If all `expected` ranks succeeded, their launcher's end
    does not matter: agents fail once the first pod has ended. Failure is the first cause; a peer lost after the request
    to stop is none, as it was most often requested to stop as well. `trouble` is the launcher's own failure, `first`
    the rank to report if there is no other. `killed_for_memory`: the kernel's out-of-memory killer ended a process.
    """
    well = [report for report in reports if report.outcome == "succeeded"]
    if len(well) == len(reports) and well and (len(well) >= expected or (end.code == EXIT_OK and not ends)):
        return min(well, key=lambda report: report.rank)
    cause = first_cause(reports, ends, time.time())
    failed = {report.rank for report in reports if report.failure is not None}
    if end.stop_requested_at is not None and (
        cause is None or cause.rank not in failed or _lost_peers(cause.failure, end.stop_requested_at)
    ):
        cause = Cause(None, _stopped(end.stop_requested_at))
    elif trouble is not None and (cause is None or cause.failure.failure_class in ECHOES):
        cause = Cause(None if cause is None else cause.rank, trouble)
    elif cause is None:
        cause = Cause(None, _silent(end))
    cause = _since_the_request(cause, end.stop_requested_at)
    if killed_for_memory and cause.failure.failure_class is FailureClass.KILLED:
        cause = Cause(cause.rank, of_oom_kill(cause.failure))
    return TrainerReport(
        job=job,
        stage=stage,
        rank=cause.rank if cause.rank is not None else min((report.rank for report in reports), default=first),
        world_size=world_size,
        outcome="failed",
        failure=cause.failure,
        devices=next((report.devices for report in reports if report.devices is not None), None),
        seconds=seconds,
    )


def _since_the_request(cause: Cause, stop_requested_at: float | None) -> Cause:
    """Return the cause with the time of the request to stop, if that ended the ranks: those of other pods end as early,
    because all agree on the step, and only the time tells which pod was requested to stop.
    """
    failure = cause.failure
    if stop_requested_at is None or failure.failure_class is not FailureClass.PREEMPTED:
        return cause
    return Cause(cause.rank, failure.model_copy(update={"time": min(failure.known_time, stop_requested_at)}))


def _lost_peers(failure: FailureReport, since: float) -> bool:
    return failure.failure_class is FailureClass.COLLECTIVE and failure.known_time >= since


def _stopped(stop_requested_at: float) -> FailureReport:
    """Return the failure of a pod whose ranks could not save after the request to stop: they had just started, the
    grace period was too short, or the ranks of another pod had ended before.
    """
    return FailureReport(
        failure_class=FailureClass.PREEMPTED,
        reason="Terminated",
        message="The pod was stopped, and its processes ended before they could save.",
        hint="Run the job again; it resumes from its last checkpoint. If this repeats, give the pods a longer grace "
        "period.",
        time=stop_requested_at,
    )


def _silent(end: End) -> FailureReport:
    output = f" Last output: {end.last_output[-_SHOWN:]}" if end.last_output else ""
    failure = of_exit(end.code, time.time())
    return failure.model_copy(update={"message": failure.message + output})
