"""Record in the JUnit report the CPU seconds of each test, and the speed of the machine.

Each test case gets properties:

    nodeid            the argument with which pytest runs this test alone
    cpu.process       CPU seconds of the test process
    cpu.children      of the processes below it, running or reaped
    cpu.daemons       of its detached processes, where a control group counts them
    cpu.before        of this process up to its first test: imports and collection
    calibration       CPU time of a fixed piece of work divided by that of the reference machine, every minute

`.ci/budgets.py` divides by the calibration, so that budgets hold on machines of any speed.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
CALIBRATION_SECONDS = 0.12
"""CPU seconds of the calibration on the reference machine: 2 cores of an Intel Xeon, virtual, Python 3.11."""
CALIBRATION_PAUSE = 60.0
"""Seconds between two calibrations of a process."""


def calibration() -> float:
    """Do the fixed piece of work: integers, JSON and a compilation; return its CPU time over the reference's."""
    began = time.process_time()
    sum(number * number for number in range(300_000))
    text = json.dumps([{"name": f"n{number}", "value": [number, str(number), {"a": number}]} for number in range(3000)])
    for _ in range(4):
        json.dumps(json.loads(text), indent=1)
    compile(Path(ast.__file__).read_text(encoding="utf-8"), "sample", "exec")
    return (time.process_time() - began) / CALIBRATION_SECONDS


def cpu_seconds() -> tuple[float, float]:
    """Return CPU seconds so far of this process, and of all below it."""
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = _ticks_of_tree(os.getpid(), itself=False)
    return own.ru_utime + own.ru_stime, reaped.ru_utime + reaped.ru_stime + ticks / _TICKS_PER_SECOND


def _ticks_of_tree(process: int, itself: bool = True) -> int:
    """Return CPU time in ticks of the running processes below `process`, and of those that they have reaped."""
    ticks = 0
    try:
        if itself:
            # Fields 14 to 17 of proc(5), after the name in brackets: user and system time, own and of reaped children.
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
        for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208 (a Path for each costs more than the rest)
            with open(f"/proc/{process}/task/{thread}/children") as file:  # noqa: PTH123
                ticks += sum(_ticks_of_tree(int(child)) for child in file.read().split())
    except OSError:
        pass  # It has ended meanwhile, or this kernel does not list children.
    return ticks


class ControlGroup:
    """A control group that counts the CPU time of this process and of all its descendants, including daemons.

    Only root can create one, and only where accounting (cpuacct of version 1) is separate from scheduling: a group of
    its own must not change a test's share of the processor.
    """

    PARENT = Path("/sys/fs/cgroup/cpuacct")
    PREFIX = "finetune-tests-"

    def __init__(self) -> None:
        self._folder: Path | None = None

    def join(self) -> None:
        if self.PARENT.is_symlink() or not os.access(self.PARENT / "cpuacct.usage", os.R_OK):
            return
        for left in self.PARENT.glob(f"{self.PREFIX}*"):
            with suppress(OSError):
                left.rmdir()  # It fails as long as a process is in it.
        folder = self.PARENT / f"{self.PREFIX}{os.getpid()}"
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
            self._folder = folder

    def leave(self) -> None:
        if self._folder is not None:
            with suppress(OSError):
                (self.PARENT / "cgroup.procs").write_text(f"{os.getpid()}\n")
                self._folder.rmdir()
            self._folder = None

    def seconds(self) -> float | None:
        """Return CPU seconds since it was joined; None without such a group."""
        return int((self._folder / "cpuacct.usage").read_text()) / 1e9 if self._folder else None


class Recorder:
    """Records the CPU time of the running test."""

    def __init__(self) -> None:
        self.group = ControlGroup()
        self._first = True
        self._calibrated = float("-inf")
        self._cpu = (0.0, 0.0)
        self._cpu_of_group: float | None = None
        self._more: dict[str, float] = {}

    def begin(self) -> None:
        self._cpu = cpu_seconds()
        self._more = {"cpu.before": sum(self._cpu)} if self._first else {}
        self._first = False
        if time.monotonic() > self._calibrated + CALIBRATION_PAUSE:
            self._more["calibration"] = calibration()
            self._calibrated = time.monotonic()
            self._cpu = cpu_seconds()
        self._cpu_of_group = self.group.seconds()

    def end(self) -> dict[str, float]:
        """Return all properties but the node id."""
        process, children = (now - then for now, then in zip(cpu_seconds(), self._cpu, strict=True))
        found = {"cpu.process": process, "cpu.children": children, **self._more}
        group = self.group.seconds()
        if group is not None and self._cpu_of_group is not None:
            found["cpu.daemons"] = max(0.0, group - self._cpu_of_group - process - children)
        return found


_recorder = Recorder()


def pytest_configure(config: pytest.Config) -> None:
    """Count, and forget the report of an earlier run: one that ends without a report must not leave it."""
    if given := config.getoption("xmlpath", None):
        if not hasattr(config, "workerinput"):
            Path(os.path.expandvars(given)).expanduser().unlink(missing_ok=True)
        _recorder.group.join()


def pytest_unconfigure() -> None:
    _recorder.group.leave()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    _recorder.begin()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    if call.when == "teardown":
        item.user_properties.append(("nodeid", item.nodeid))
        item.user_properties += [(name, f"{value:.3f}") for name, value in _recorder.end().items() if value >= 0.0005]
    return (yield)
