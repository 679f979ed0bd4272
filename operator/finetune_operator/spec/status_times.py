"""Times of the status: aware datetimes in memory, RFC 3339 in whole seconds and UTC in the API server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, PlainSerializer


def stamp(time: datetime) -> str:
    """Return the time as `2026-01-31T12:00:00Z`, rounded down, so that a wait is never longer than its limit."""
    return f"{whole_seconds(time).replace(tzinfo=None).isoformat()}Z"


def whole_seconds(time: datetime) -> datetime:
    """Return the time in UTC, rounded down as `stamp` rounds it; one without a time zone is in UTC already."""
    aware = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return aware.replace(microsecond=0)


def _parsed(value: object) -> object:
    """Return the time in a text; None for text that is no time, as an old status may hold anything."""
    if not isinstance(value, str):
        return value
    try:
        return whole_seconds(datetime.fromisoformat(value))
    except (ValueError, OverflowError):
        return None


_Seconds: TypeAlias = Annotated[
    datetime, AfterValidator(whole_seconds), PlainSerializer(stamp, return_type=str, when_used="json")
]
StatusTime: TypeAlias = Annotated[_Seconds, BeforeValidator(_parsed)]
OptionalTime: TypeAlias = Annotated[_Seconds | None, BeforeValidator(_parsed)]


def seconds_since(began: datetime | None, now: datetime) -> float:
    """Return the seconds from that time until now; 0 if there is none, or it lies ahead."""
    return 0.0 if began is None else max(0.0, (now - began).total_seconds())


def earliest(*times: datetime | None) -> datetime | None:
    """Return the earliest of the times that are given; None if there is none."""
    return min((time for time in times if time is not None), default=None)
