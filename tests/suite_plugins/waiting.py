"""Wait for an event, with a limit scaled to the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from suite_plugins.patience import bounded

T = TypeVar("T")

# Ample for any wait of the tests on the reference machine, next to other tests.
WAIT_SECONDS = 240.0
MOST_SECONDS = 900.0
"""Limit of one wait for any patience, unless the caller passes a longer one: two waits that fail end within the time
that a run of CI has to spare.
"""


def wait_until(
    look: Callable[[], T | None],
    goal: str | Callable[[], object],
    seconds: float = WAIT_SECONDS,
    *,
    poll_seconds: float = 0.02,
) -> T:
    """Return the first true value of `look`; after `seconds`, scaled to the machine, fail with `goal` or its value."""
    limit = bounded(seconds, MOST_SECONDS)
    end = time.monotonic() + limit
    while True:
        # Compare before looking: a process that was stopped for long still gets a look after its limit.
        late = time.monotonic() > end
        if value := look():
            return value
        if late:
            raise AssertionError(f"not within {limit:g} s: {goal() if callable(goal) else goal}")
        time.sleep(poll_seconds)
