"""Content of a job's status as it is written, and the interval between two writes for its progress alone.

A write costs the API server tens of milliseconds of CPU, as it evaluates every rule of the CustomResourceDefinition,
those on `spec` too. So progress has an interval, while everything else is written at once. No decision needs the stored
progress of a running attempt: the newest one is in the operator's memory.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import JsonValue

from finetune_operator.spec.status_times import seconds_since
from finetune_operator.spec.types import FineTuneJobStatus

LONGEST_SECONDS = 30.0
"""Longest interval of a single job, reached by attempts of half an hour."""
INTERVALS = 60
"""The interval grows with the time of the attempt: it is this fraction of it."""
WRITES_A_SECOND = 10.0
"""Writes for all running jobs together, less than half a core of the API server."""


def status_body(status: FineTuneJobStatus) -> dict[str, JsonValue]:
    """Return the status as it is written; unknown values are left out, and so removed by server-side apply."""
    body: dict[str, JsonValue] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body


def only_progress_differs(new: FineTuneJobStatus, old: FineTuneJobStatus) -> bool:
    """Return whether nothing but the progress differs."""
    return new.progress != old.progress and new.model_copy(update={"progress": old.progress}) == old


def attempt_seconds(status: FineTuneJobStatus, now: datetime) -> float:
    """Return for how long the running attempt has run; 0: none runs."""
    running = next((stage for stage in status.stages if stage.state == "Running"), None)
    return 0.0 if running is None else seconds_since(running.running_since or running.start_time, now)


def progress_interval(shortest_seconds: float, age_seconds: float, reporting: int) -> float:
    """Return the seconds between two writes of the progress of an attempt that has run for `age_seconds`, while so many
    jobs are `reporting`.
    """
    long = min(age_seconds / INTERVALS, LONGEST_SECONDS)
    return max(shortest_seconds, long, reporting / WRITES_A_SECOND)
