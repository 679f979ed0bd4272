"""The time of the API server, by the `Date` of its answers.

Objects carry times of the control plane, such as a child's end or the end of a pod's grace period. They are compared
with `now`; if the clock of this process differs, a wait would be over at once, or never.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

log = logging.getLogger(__name__)

SMALLEST = timedelta(seconds=2)
"""Smaller differences count as none: `Date` has whole seconds, and an answer takes a moment."""
LOGGED = timedelta(seconds=5)
"""Smallest difference that is logged."""
QUICK = timedelta(seconds=1)
"""Answers that took longer do not show when they were written."""


def local_now() -> datetime:
    """Return the time of this process."""
    return datetime.now(UTC)


class ClusterClock:
    """See the module."""

    def __init__(self, local: Callable[[], datetime] = local_now) -> None:
        self._local = local
        self._offset = timedelta(0)
        self._logged_offset = timedelta(0)

    def now(self) -> datetime:
        """Return the time of the API server."""
        return self._local() + self._offset

    def local(self) -> datetime:
        """Return the time of this process, to measure how long an answer takes."""
        return self._local()

    def answered(self, date: str | None, sent: datetime) -> None:
        """Take the `Date` of an answer to a request that was sent at `sent` by the clock of this process."""
        received = self._local()
        if date is None or not timedelta(0) <= received - sent <= QUICK:
            return
        try:
            reported = parsedate_to_datetime(date)
        except ValueError:
            return
        if reported.tzinfo is None:
            return
        # The header leaves out the part of a second that has passed: half of one on average.
        difference = reported + timedelta(seconds=0.5) - (sent + (received - sent) / 2)
        self._offset = difference if abs(difference) >= SMALLEST else timedelta(0)
        if abs(self._offset - self._logged_offset) >= LOGGED:
            self._logged_offset = self._offset
            seconds = self._offset.total_seconds()
            log.warning(
                "The API server's clock is %.0f s %s the clock of this process; the operator uses the API server's.",
                abs(seconds), "ahead of" if seconds > 0 else "behind",
            )  # fmt: skip
