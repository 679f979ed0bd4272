"""Scale every wait and limit of the tests to the speed of the machine."""

from __future__ import annotations


def patient(seconds: float) -> float:
    """Return `seconds` scaled to the speed of this machine."""
    return seconds
