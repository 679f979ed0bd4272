"""Times in the format of the status: RFC 3339 in whole seconds, UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(time: datetime) -> str:
    """Return the time as `2026-01-31T12:00:00Z`, rounded down, so that a wait is never longer than its limit."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> datetime | None:
    """Parse a time; None also for text that is no time, as an old status may hold anything."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def seconds_since(text: str | None, now: datetime) -> float:
    """Return the seconds from that time until now; 0 if there is none, or it lies ahead."""
    began = moment(text)
    return 0.0 if began is None else max(0.0, (now - began).total_seconds())


def earliest(*times: datetime | None) -> datetime | None:
    """Return the earliest of the times that are given; None if there is none."""
    return min((time for time in times if time is not None), default=None)
