"""Record in the JUnit report how the time of each test is spent.

Each test case gets properties, in seconds, without those that round to 0.000:

    nodeid                  the argument with which pytest runs this test alone
    seconds.setup, .call, .teardown
    cpu.process             CPU time of the test process
    cpu.children            CPU time of the processes below it, running or reaped; not of daemons
    cpu.daemons             CPU time of its detached processes, if a control group counts it
    fixture.NAME            set-up of a fixture, without the fixtures that it requests
    kind.NAME               time inside `spent(NAME)`, see KINDS
    before                  start of this process to its first test: imports and collection
    before.kind.NAME        the part of it inside `spent(NAME)`

A support module marks its time with `spent`, as a context manager or a decorator:

    @spent("waiting")
    def wait_until(...): ...

Beside REPORT.xml, REPORT.exit has pytest's exit status and the number of collected tests, so that a truncated report is
not mistaken for a whole one. `make test-times` prints the sums.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ContextDecorator, suppress
from pathlib import Path
from typing import Any

import pytest

KINDS = ("waiting", "starting processes", "importing torch", "training", "building", "control plane", "kubectl")

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Clock:
    """Counts seconds by name. Time inside an inner name does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        self._book()
        self._open.append(name)

    def leave(self) -> None:
        self._book()
        self._open.pop()

    def take(self) -> Counter[str]:
        """Return the seconds since the last call."""
        self._book()
        taken, self.seconds = self.seconds, Counter()
        return taken

    def _book(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


_kinds = Clock()
_fixtures = Clock()


class spent(ContextDecorator):  # noqa: N801 (reads as a function)
    """Count the time inside as `kind`, if spent by the thread that runs the tests."""

    def __init__(self, kind: str) -> None:
        assert kind in KINDS, f"{kind!r} is not in suite_plugins.times.KINDS"
        self.kind = kind

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _kinds.enter(self.kind)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            _kinds.leave()


class _TimedImport:
    """Import hook that times the first import of torch in this process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = spent("importing torch")(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


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
    """Records the times of the running test."""

    def __init__(self) -> None:
        self.group = ControlGroup()
        self._born: float | None = time.perf_counter()
        self._cpu = (0.0, 0.0)
        self._cpu_of_group: float | None = None
        self._before: list[tuple[str, float]] = []
        self.phases: dict[str, float] = {}

    def begin(self) -> None:
        kinds = _kinds.take()
        _fixtures.take()
        self.phases, self._before = {}, []
        if self._born is not None:
            self._before = [("before", time.perf_counter() - self._born)]
            self._before += [(f"before.kind.{kind}", seconds) for kind, seconds in kinds.items()]
            self._born = None
        self._cpu = cpu_seconds()
        self._cpu_of_group = self.group.seconds()

    def end(self) -> list[tuple[str, float]]:
        """Return all properties with seconds."""
        process, children = (now - then for now, then in zip(cpu_seconds(), self._cpu, strict=True))
        group = self.group.seconds()
        counted = (
            [("cpu.daemons", group - self._cpu_of_group - process - children)] if group and self._cpu_of_group else []
        )
        return [
            *((f"seconds.{phase}", seconds) for phase, seconds in self.phases.items()),
            ("cpu.process", process),
            ("cpu.children", children),
            *counted,
            *((f"fixture.{name}", seconds) for name, seconds in _fixtures.take().items()),
            *((f"kind.{kind}", seconds) for kind, seconds in _kinds.take().items()),
            *self._before,
        ]


_recorder = Recorder()


def node_id(item: pytest.Item) -> str:
    """Return the id without the group that pytest-xdist appends under `--dist loadgroup`, which pytest cannot find."""
    whole: str = item.nodeid
    grouped = next(item.iter_markers("xdist_group"), None) and item.config.getoption("dist", None) == "loadgroup"
    return whole.rpartition("@")[0] if grouped and "@" in whole else whole


def pytest_configure(config: pytest.Config) -> None:
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TimedImport())  # type: ignore[arg-type]
    if report := _report(config):
        report.unlink(missing_ok=True)  # A run that ends without a report must not leave an older one.
        _exit_file(report).unlink(missing_ok=True)
    if config.getoption("xmlpath", None):
        _recorder.group.join()


def pytest_unconfigure() -> None:
    _recorder.group.leave()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    _recorder.begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    _fixtures.enter(fixturedef.argname)
    try:
        return (yield)
    finally:
        _fixtures.leave()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    _recorder.phases[call.when] = call.duration
    if call.when == "teardown":
        item.user_properties.append(("nodeid", node_id(item)))
        item.user_properties += [(name, f"{seconds:.3f}") for name, seconds in _recorder.end() if seconds >= 0.0005]
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Write the exit status once the report is written."""
    result = yield
    if (report := _report(session.config)) and report.parent.is_dir():
        ended = {"status": int(session.exitstatus), "collected": session.testscollected}
        _exit_file(report).write_text(json.dumps(ended) + "\n")
    return result


def _report(config: pytest.Config) -> Path | None:
    """Return the file of `--junitxml` in the process that writes it; None elsewhere."""
    given = None if hasattr(config, "workerinput") else config.getoption("xmlpath", None)
    return Path(os.path.expandvars(given)).expanduser() if given else None


def _exit_file(report: Path) -> Path:
    return report.with_suffix(".exit")
