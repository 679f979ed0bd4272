"""Scale every wait and limit of the tests to the speed of the machine.

Limits in the tests are seconds on the reference machine. One factor, measured once at the start of a run, scales them
all: `patient(60)` is 60 s there and 144 s on a machine that is 2.4 times slower at its slowest kind of work.
`FINETUNE_TEST_PATIENCE` sets the factor, and hands it to the workers of xdist and to the programs that tests start.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

VARIABLE = "FINETUNE_TEST_PATIENCE"

# Seconds that each kind of work takes on the reference machine (2 cores of an AMD EPYC, virtual, NVMe disk, Python
# 3.11) next to another suite, where every limit of the tests is ample: twice the CPU time that was measured there, the
# lower median of 8 rounds; for the disk the lower quartile of 12 rounds.
REFERENCE_SECONDS = {
    "import": 0.24,  # Start Python and import the modules of PROBE, all of the standard library: 0.12 s of CPU time.
    "disk": 0.06,  # Write and sync 10 files of 64 KiB in the folder for temporary files.
    "cpu": 0.07,  # Add up a million squares in each of 2 processes: 0.035 s each.
}

MAX_FACTOR = 12.0
"""On a slower machine a failure is better than limits of hours."""
ROUNDS = 3
MEASURE_SECONDS = 2.0
"""A slow machine is known after one round."""

PROBE = """
import json, os, sys, tempfile, time
import asyncio, email.mime.multipart, http.server, logging.config, multiprocessing.pool, sqlite3, unittest.mock
import xml.dom.minidom, zipfile

imported = time.monotonic()
with tempfile.TemporaryDirectory() as folder:
    for number in range(10):
        with open(os.path.join(folder, str(number)), "wb") as file:
            file.write(bytes(65536))
            file.flush()
            os.fsync(file.fileno())
written = time.monotonic()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        sum(number * number for number in range(1_000_000))
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
computed = time.monotonic()
print(json.dumps({"import": imported - float(sys.argv[1]), "disk": written - imported, "cpu": computed - written}))
"""

MOST_TEST_SECONDS = 1800.0
"""Limit of one test for any patience, unless the test has a longer one."""

# The factor of this process if its environment lost it, and the ratios if it was measured here.
_factor: float | None = None
_ratios: dict[str, float] = {}


def patient(seconds: float) -> float:
    """Return `seconds` of the reference machine, scaled to the speed of this machine."""
    return seconds * factor()


def bounded(seconds: float, most: float) -> float:
    """Return `seconds` scaled as `patient` does, but at most `most`, where that is more than the seconds themselves.

    For limits that are ample already: a wait for an event that never comes must not take an hour of a run.
    """
    return min(patient(seconds), max(seconds, most))


def factor() -> float:
    """Return the factor of this run; measure it if neither the environment nor this process has it."""
    global _factor
    if given := os.environ.get(VARIABLE):
        return _parsed(given)
    if _factor is None:
        _ratios.update(measured_ratios())
        # Rounded, as workers read it from the environment: all have the same limits.
        _factor = round(min(MAX_FACTOR, max(1.0, *_ratios.values())), 2)
    os.environ[VARIABLE] = f"{_factor:.2f}"
    return _factor


def raise_to(ratio: float, kind: str) -> None:
    """Raise the factor to `ratio`, at most MAX_FACTOR, if it is lower: for work that only some suites can measure.

    A suite on a control plane calls this with the seconds of its start divided by those of the reference machine. Waits
    and limits that are computed later use the new factor; those of tests that run already keep the old one.
    """
    global _factor
    if min(ratio, MAX_FACTOR) > factor():
        _ratios[kind] = ratio
        _factor = min(ratio, MAX_FACTOR)
        os.environ[VARIABLE] = f"{_factor:.2f}"


def measured_ratios() -> dict[str, float]:
    """Measure each kind of work and divide by the reference: the median of up to three rounds, about a second."""
    rounds: list[dict[str, float]] = []
    end = time.monotonic() + MEASURE_SECONDS
    while len(rounds) < ROUNDS and (not rounds or time.monotonic() < end):
        command = [sys.executable, "-I", "-c", PROBE, str(time.monotonic())]
        rounds.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return {
        kind: statistics.median_low([each[kind] for each in rounds]) / reference
        for kind, reference in REFERENCE_SECONDS.items()
    }


def _parsed(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise pytest.UsageError(f"{VARIABLE} is {given!r}: set it to a number of at least 1, or unset it")
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure before a test module is imported and before the workers of xdist start, which inherit the environment."""
    if not config.option.collectonly:
        factor()


def pytest_report_header() -> str | None:
    """Show the factor, with the ratios that it was chosen from."""
    if VARIABLE not in os.environ:
        return None
    origin = ", ".join(f"{kind} {ratio:.1f}" for kind, ratio in _ratios.items()) or VARIABLE
    return f"patience: {factor():.1f} ({origin})"


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Scale the limit of a test, whether from the configuration, the command line or a marker."""
    # Not at the top: the plugin may be disabled, and this hook with it.
    import pytest_timeout

    limit = bounded(settings.timeout, MOST_TEST_SECONDS)
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit))
