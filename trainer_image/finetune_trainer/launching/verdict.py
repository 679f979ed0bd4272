"""One TrainerReport out of those of a pod's ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.causes import ECHOES, Cause, first_cause, of_exit
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_OK, FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_trainer.launching.below import End

_SHOWN = 1500
"""Characters of a silent process's last words that go into the message."""


def reports_in(folder: Path, stage: Stage) -> list[TrainerReport]:
    """By rank. What cannot be read is left out: a process that was killed while it wrote is told of by its signal."""
    found = []
    for file in folder.glob(f"{stage}-*.json"):
        try:
            found.append(TrainerReport.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError):
            continue
    return sorted(found, key=lambda report: report.rank)


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
) -> TrainerReport:
    """What the pod as a whole says.

    Success is rank 0's report, or that of the lowest rank here. When all `expected` ranks say so it does not matter how
    their launcher ended: after the first pod is gone, the others' agents complain of it. Failure is the first cause;
    a peer that is lost after the pod was told to stop is none, as the peers were most often told as well. `trouble` is
    what the launcher itself knows, `first` the rank that silence is told of.
    """
    well = [report for report in reports if report.outcome == "succeeded"]
    if len(well) == len(reports) and well and (len(well) >= expected or (end.code == EXIT_OK and not ends)):
        return min(well, key=lambda report: report.rank)
    cause = first_cause(reports, ends, time.time())
    failed = {report.rank for report in reports if report.failure is not None}
    if end.asked_at is not None and (
        cause is None or cause.rank not in failed or _lost_peers(cause.failure, end.asked_at)
    ):
        cause = Cause(None, _stopped(end.asked_at))
    elif trouble is not None and (cause is None or cause.failure.failure_class in ECHOES):
        cause = Cause(None if cause is None else cause.rank, trouble)
    elif cause is None:
        cause = Cause(None, _silent(end))
    return TrainerReport(
        job=job,
        stage=stage,
        rank=cause.rank if cause.rank is not None else min((report.rank for report in reports), default=first),
        world_size=world_size,
        outcome="failed",
        failure=cause.failure,
        seconds=seconds,
    )


def _lost_peers(failure: FailureReport, since: float) -> bool:
    return failure.failure_class is FailureClass.COLLECTIVE and failure.known_time >= since


def _stopped(asked_at: float) -> FailureReport:
    """No rank could save after it was told to stop: it had just started, the grace period was too short, or the ranks
    of another pod were gone before it.
    """
    return FailureReport(
        failure_class=FailureClass.PREEMPTED,
        reason="Terminated",
        message="The pod was told to stop, and its processes ended before they could save.",
        hint="Run the job again; it goes on from its last checkpoint. If this repeats, give the pods a longer grace "
        "period.",
        time=asked_at,
    )


def _silent(end: End) -> FailureReport:
    words = f" Its last words: {end.last_words[-_SHOWN:]}" if end.last_words else ""
    told = of_exit(end.code, time.time())
    return told.model_copy(update={"message": told.message + words})
