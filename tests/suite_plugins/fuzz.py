"""Profiles of Hypothesis for tests over generated input.

`ci`, the default, derives the examples of a test from the test itself: the same ones on every run, so that a change is
never rejected for a bug that chance found elsewhere. `fuzz` (`make fuzz`, or `--hypothesis-profile fuzz`) draws new
examples, many times as many, and prints how to reproduce a failure.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FUZZ_FACTOR = 25
"""Examples of a test in `fuzz` for each one in `ci`."""

# The duration of an example, or of the search for one, depends on the machine and on its other load.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _COMMON, derandomize=True, database=None, max_examples=100)
settings.register_profile("fuzz", _COMMON, derandomize=False, print_blob=True, max_examples=100 * FUZZ_FACTOR)
settings.load_profile("ci")
_with_everything = False


def examples(count: int, everything: int | None = None, **changes: Any) -> settings:
    """Return settings for `count` examples in `ci`. `everything`: examples with --everything, and FUZZ_FACTOR times as
    many in `fuzz`, if not `count`; `changes`: other settings.

    Without it a test gets 100 examples in `ci`.
    """
    return settings(max_examples=scaled(count, everything), **changes)


def scaled(count: int, everything: int | None = None) -> int:
    """Return `count`, or `everything` with --everything; FUZZ_FACTOR times as many under `fuzz`."""
    more = count if everything is None else everything
    if _fuzzing():
        return more * FUZZ_FACTOR
    return more if _with_everything else count


def generator(seed: int) -> random.Random:
    """Return a generator seeded with `seed`; under `fuzz` the seed is random, and printed for a failure's report."""
    if _fuzzing():
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed: {seed}")
    return random.Random(seed)


def pytest_configure(config: pytest.Config) -> None:
    global _with_everything
    _with_everything = config.getoption("--everything")


def _fuzzing() -> bool:
    return settings.get_current_profile_name().startswith("fuzz")
