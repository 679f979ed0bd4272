"""Waits and limits of the tests follow the speed of the machine: see tests/suite_plugins/patience.py.

The tests here read the syntax of all other tests. Figures of speed belong to tests/benchmarks, which is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
FIGURE = re.compile(r"(\b|_)(seconds|elapsed|took|duration|per_second)\b", re.IGNORECASE)
ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
LONG_SLEEP_SECONDS = 1
SUSPECT = re.compile(r"monotonic|perf_counter|process_time|\btime\(|sleep|timeout|result\(|wait_for\(")
"""Pattern in the text of every file that can have a fault."""

DURATION, LIMIT, DEADLINE, SLEEP = "asserted duration", "fixed limit", "fixed deadline", "long sleep"

EXCEPTIONS: dict[tuple[str, str, str], str] = {
    (
        "cluster_support/api_access.py",
        SLEEP,
        "await asyncio.sleep(1)",
    ): "polls for a kind that another test may install",
    ("cluster_support/kubelet.py", SLEEP, "await asyncio.sleep(10)"): "the interval of a node's lease",
    (
        "e2e/cluster/test_box_faults_control_plane.py",
        DEADLINE,
        "before, end = last_step(history), time.monotonic() + AWAY_SECONDS",
    ): "Kubernetes' own leases end within that time on any machine",
}
"""File, fault and line -> reason for keeping it."""


@dataclass(frozen=True)
class Fault:
    """A wait or an assertion that depends on the speed of the machine."""

    kind: str
    line: int
    text: str


@dataclass
class Module:
    """Facts behind the faults of a file: the names that hold clock readings, and its constants."""

    numbers: dict[str, float]
    """Constants that are bare numbers, also those that it imports from other files of the tests."""
    attributes: set[str] = field(default_factory=set)
    """Attributes and functions whose value is computed from a clock."""

    def reads_clock(self, node: ast.AST, local: set[str]) -> bool:
        """Return whether an expression is computed from a clock."""
        return any(
            (isinstance(one, ast.Call) and _called(one) in CLOCKS and not one.args)
            or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id in local)
            or (isinstance(one, ast.Attribute) and one.attr in self.attributes)
            or (isinstance(one, ast.Call) and _called(one) in self.attributes)
            for one in ast.walk(node)
        )

    def number(self, node: ast.AST) -> float:
        """Return the value of an expression that `patient` has not scaled; 0 if it is no number."""
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.Name(id=name):
                return self.numbers.get(name, 0)
            case ast.BinOp(left=left, right=right) if self.number(left) and self.number(right):
                return self.number(left) + self.number(right)
        return 0


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _functions(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each function with its body, and the module itself."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.body
        elif isinstance(node, ast.Module):
            yield "", node.body


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions in it."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield pairs of target and value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(target.elts, value.elts, strict=False)
                else:
                    yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value


def _clock_names(module: Module, nodes: Sequence[ast.AST]) -> dict[str, set[str]]:
    """Find names that hold clock readings, by function; attributes and functions go to `module`."""
    local: dict[str, set[str]] = {}
    while True:
        before = (len(module.attributes), sum(map(len, local.values())))
        for name, body in _functions(nodes):
            known = local.setdefault(name, set())
            for node in _own(body):
                for target, value in _assigned(node):
                    if module.reads_clock(value, known):
                        known.update([target.id] if isinstance(target, ast.Name) else [])
                        module.attributes.update([target.attr] if isinstance(target, ast.Attribute) else [])
                if isinstance(node, ast.Return) and node.value is not None and _is_reading(module, node.value, known):
                    module.attributes.add(name)
        if before == (len(module.attributes), sum(map(len, local.values()))):
            return local


def _is_reading(module: Module, node: ast.expr, known: set[str]) -> bool:
    """Return whether an expression is itself a reading or a difference of readings, not a container of one."""
    plain = isinstance(node, ast.BinOp | ast.Name | ast.Attribute) or (
        isinstance(node, ast.Call) and _called(node) in CLOCKS | {"round", "int", "float", "max", "min"}
    )
    return plain and module.reads_clock(node, known)


def _calls_with_limits(module: Module, node: ast.Call) -> bool:
    """Return whether a call that waits has a bare number as its limit."""
    limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    match _called(node), node.args:
        case ("result", [limit]) | ("timeout", [limit]) | ("wait_for", [_, limit]):
            # The plugin scales a marker's limit.
            limits += [] if "mark." in ast.unparse(node.func) else [limit]
    return any(module.number(limit) for limit in limits)


def _is_bounded_figure(module: Module, node: ast.Compare) -> bool:
    """Return whether a figure in seconds, perhaps measured by the program, is compared with a number but 0."""
    sides = (node.left, *node.comparators)
    return any(map(module.number, sides)) and any(FIGURE.search(ast.unparse(side)) for side in sides)


def _kinds(module: Module, node: ast.AST, known: set[str]) -> Iterator[str]:
    """Yield the faults of one node."""
    match node:
        case ast.Assert(test=test):
            compared = (one for one in ast.walk(test) if isinstance(one, ast.Compare))
            for one in compared:
                ordering = any(isinstance(op, ORDERING) for op in one.ops)
                if ordering and (module.reads_clock(one, known) or _is_bounded_figure(module, one)):
                    yield DURATION
        case ast.Call(args=[seconds, *_]) if _called(node) == "sleep":
            if module.number(seconds) >= LONG_SLEEP_SECONDS:
                yield SLEEP
        case ast.Call() if _calls_with_limits(module, node):
            yield LIMIT
        case ast.BinOp(left=ast.Call() as clock, op=ast.Add(), right=limit):
            # A sum with time.time() is a date given to the program.
            if _called(clock) in CLOCKS - {"time", "time_ns"} and not clock.args and module.number(limit):
                yield DEADLINE


def constants(nodes: Sequence[ast.AST]) -> dict[str, float]:
    """Find the constants of a module that are bare numbers."""
    return {
        target.id: value.value
        for node in _top_level(nodes)
        for target, value in _assigned(node)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    }


def imported(nodes: Sequence[ast.AST], modules: Mapping[str, Sequence[ast.AST]]) -> dict[str, float]:
    """Find the constants that a module imports from other files of the tests."""
    found: dict[str, float] = {}
    for node in _top_level(nodes):
        if isinstance(node, ast.ImportFrom):
            theirs = constants(modules.get(f"tests/{(node.module or '').replace('.', '/')}.py", ()))
            found |= {alias.asname or alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}
    return found


def _top_level(nodes: Sequence[ast.AST]) -> list[ast.stmt]:
    return nodes[0].body if nodes and isinstance(nodes[0], ast.Module) else []


def faults_in(
    text: str, nodes: Sequence[ast.AST] = (), modules: Mapping[str, Sequence[ast.AST]] | None = None
) -> list[Fault]:
    """Find the faults of one file. `nodes`: those of its syntax, parsed here if not given."""
    if SUSPECT.search(text) is None:
        return []
    nodes, lines = nodes or list(ast.walk(ast.parse(text))), text.splitlines()
    module = Module(imported(nodes, modules or {}) | constants(nodes))
    local = _clock_names(module, nodes)
    found = {
        Fault(kind, node.lineno, lines[node.lineno - 1].strip())  # type: ignore[attr-defined]
        for name, body in _functions(nodes)
        for node in _own(body)
        for kind in _kinds(module, node, local[name])
    }
    return sorted(found, key=lambda fault: fault.line)


@pytest.fixture(scope="module")
def files(modules: Mapping[str, Sequence[ast.AST]]) -> Mapping[str, Sequence[ast.AST]]:
    """Return the modules of the tests that are read, by their path in tests/."""
    apart = ("tests/benchmarks/", "tests/gpu_check/", "tests/suite_plugins/")
    return {
        path.removeprefix("tests/"): nodes
        for path, nodes in modules.items()
        if path.startswith("tests/") and not path.startswith(apart)
    }


def test_waits_and_limits_of_tests_follow_the_speed_of_the_machine(
    files: Mapping[str, Sequence[ast.AST]], modules: Mapping[str, Sequence[ast.AST]]
) -> None:
    """Use `patient`, `wait_until` of suite_plugins.waiting, a count, or the order of events."""
    found = {
        (path, fault.kind, fault.text): f"tests/{path}:{fault.line}"
        for path, nodes in files.items()
        for fault in faults_in((TESTS / path).read_text(encoding="utf-8"), nodes, modules)
    }
    new = [f"{place}: {fault[1]}: {fault[2]}" for fault, place in found.items() if fault not in EXCEPTIONS]
    assert new == []
    assert EXCEPTIONS.keys() <= found.keys(), "an exception is not needed any more"


SAMPLE = """
import asyncio
import subprocess
import time

WAIT_SECONDS = 40


def elapsed(began):
    return time.monotonic() - began


def test_speed(story, process):
    began = time.perf_counter()
    story.takeover_seconds = time.monotonic() - began
    took = round(time.perf_counter() - began)
    assert took < 5
    assert story.takeover_seconds <= WAIT_SECONDS
    assert elapsed(began) < 3
    assert story.report["seconds"] < 4
    while not process.poll():
        assert time.monotonic() < began + 3
    end = time.monotonic() + 60
    other = time.monotonic() + WAIT_SECONDS
    subprocess.run(["true"], timeout=20)
    process.communicate(timeout=WAIT_SECONDS)
    process.result(60)
    time.sleep(3)
    time.sleep(WAIT_SECONDS + 1)


async def test_limits():
    async with asyncio.timeout(60):
        await asyncio.wait_for(asyncio.sleep(2), 30)
"""

GOOD = """
import subprocess
import time

import pytest
from suite_plugins.patience import patient

RETRIES = 3


@pytest.mark.timeout(60)
def test_well(process, events, now):
    end = time.monotonic() + patient(60)
    subprocess.run(["true"], timeout=patient(20))
    process.communicate(timeout=patient(RETRIES))
    time.sleep(0.05)
    assert len(events) < RETRIES
    assert now < end_of(now)
    assert process.report(time=time.time()) == 3
    assert process.seconds > 0
    assert process.limit_seconds == 60
"""


def test_each_fault_is_found_in_a_sample() -> None:
    found = [(fault.line, fault.kind) for fault in faults_in(SAMPLE)]
    lines = {text: number for number, text in enumerate(map(str.strip, SAMPLE.splitlines()), 1)}
    expected = {
        "assert took < 5": [DURATION],
        "assert story.takeover_seconds <= WAIT_SECONDS": [DURATION],
        "assert elapsed(began) < 3": [DURATION],
        'assert story.report["seconds"] < 4': [DURATION],
        "assert time.monotonic() < began + 3": [DURATION],
        "end = time.monotonic() + 60": [DEADLINE],
        "other = time.monotonic() + WAIT_SECONDS": [DEADLINE],
        'subprocess.run(["true"], timeout=20)': [LIMIT],
        "process.communicate(timeout=WAIT_SECONDS)": [LIMIT],
        "process.result(60)": [LIMIT],
        "time.sleep(3)": [SLEEP],
        "time.sleep(WAIT_SECONDS + 1)": [SLEEP],
        "async with asyncio.timeout(60):": [LIMIT],
        "await asyncio.wait_for(asyncio.sleep(2), 30)": [LIMIT, SLEEP],
    }
    assert sorted(found) == [(lines[text], kind) for text, kinds in expected.items() for kind in sorted(kinds)]


def test_scaled_and_counted_waits_are_accepted() -> None:
    assert faults_in(GOOD) == []


def test_number_imported_from_another_file_of_the_tests_is_a_fixed_limit() -> None:
    support = list(ast.walk(ast.parse("SECONDS = 9")))
    text = "from support.limits import SECONDS as LIMIT\nprocess.communicate(timeout=LIMIT)\n"
    [fault] = faults_in(text, modules={"tests/support/limits.py": support})
    assert (fault.kind, fault.line) == (LIMIT, 2)


def test_the_files_of_all_suites_are_read(files: Mapping[str, Sequence[ast.AST]]) -> None:
    folders = {path.partition("/")[0] for path in files}
    assert {"cluster", "cluster_support", "box_support", "e2e", "trainer", "unit", "conftest.py"} <= folders
