"""Choose which cases of a grid run in CI and which only in `make test-everything`.

A test over a grid of expensive cases (strategy x model x option) describes each case by its axes:

    @pytest.mark.parametrize("case", covering("strategies", CASES, axes_of))

CI runs a choice with every value and every pair of values on neighbouring axes; `suite_plugins.covering` has its
algorithm and guarantee. The other cases get the marker `everything` and are deselected, unless pytest is called with
--everything, or with the node id of a test. `pytest tests/trainer --grids` runs nothing and prints the cases left out,
and the chosen cases that cover their pairs.

`pytest -m slow` imports only the files with the marker, as does -m with the other markers of MARKERS: importing all
test files takes each worker longer than most tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from suite_plugins.covering import Axes, Case, Choice, choose

T = TypeVar("T")
MARKERS = frozenset({"slow", "bare", "alone", "last"})
"""Markers set as `pytest.mark.NAME` in the file with the test."""
GRIDS: dict[str, Choice] = {}
"""Name of a grid -> its choice, for the imported modules."""


def covering(
    grid: str,
    cases: Mapping[str, T],
    axes: Callable[[T], Axes],
    cost: Callable[[T], float] = lambda case: 1.0,
    marks: Callable[[T], Any] = lambda case: (),
) -> list[Any]:
    """Return names of cases as parameters, with the marker `everything` on those that are not chosen.

    grid: name for the printed choice; axes: axes of a case, in the order of `suite_plugins.covering`; cost: approximate
    time of a case; marks: further marks of a case.
    """
    choice = choose(Case(name, axes(case), cost(case)) for name, case in cases.items())
    GRIDS[grid] = choice
    params = []
    for name, case in cases.items():
        given = marks(case)
        own = list(given) if isinstance(given, (list, tuple)) else [given]
        params.append(
            pytest.param(name, id=name, marks=[*own, *([] if name in choice.chosen else [pytest.mark.everything])])
        )
    return params


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="run every case of every grid, not a choice of them")
    parser.addoption("--grids", action="store_true", help="run nothing; print which cases of grids are left, and why")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "everything: case of a grid that CI leaves out; runs with --everything")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without a test that -m selects."""
    markers = re.split(r"\s+or\s+", config.option.markexpr.strip())
    if not MARKERS.issuperset(markers) or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(f"mark.{marker}" in text for marker in markers) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases that are not chosen."""
    if config.getoption("--grids"):
        config.hook.pytest_deselected(items=items[:])
        items[:] = []
        return
    if config.getoption("--everything"):
        return
    named = tuple(argument for argument in config.args if "::" in argument)
    left = [
        item
        for item in items
        if item.get_closest_marker("everything") and not (named and item.nodeid.startswith(named))
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the choice on request."""
    if config.getoption("--grids"):
        for line in explained(GRIDS):
            terminalreporter.write_line(line)


def explained(grids: Mapping[str, Choice]) -> list[str]:
    """Return lines about each grid: its chosen cases, those left out, and the chosen ones that cover them."""
    lines = []
    for grid, choice in grids.items():
        lines.append(f"{grid}: {len(choice.chosen)} of {len(choice.cases)} cases run, {len(choice.left)} are left")
        lines += [f"  runs  {case.name}" for case in choice.cases if case.name in choice.chosen]
        for case in choice.left:
            lines.append(f"  left  {case.name}")
            for other, pairs in choice.covering(case).items():
                uncovered = ", ".join(" with ".join(f"{axis} {value}" for axis, value in pair) for pair in pairs)
                lines.append(f"          tested in {other}: {uncovered}")
    return lines
