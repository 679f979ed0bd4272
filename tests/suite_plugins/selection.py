"""Choose which tests a tier runs, and which cases of a grid run in `make test-everything` only.

`pytest --cheap` is T1: without the dear files of `tests/areas.toml`, and without tests marked `slow`. `pytest --dear
FILE` runs what T1 leaves out of a file.

A test over a grid of expensive cases (strategy x model x option) describes each case by its axes:

    @pytest.mark.parametrize("case", covering("strategies", CASES, axes_of))

CI runs a choice with every value and every pair of values on neighbouring axes; `suite_plugins.covering` has its
algorithm and guarantee. The other cases get the marker `everything` and are deselected, unless pytest is called with
--everything, or with the node id of a test.

`pytest -m bare` imports only the files with the marker, as does -m with the other markers of MARKERS: importing all
test files takes each worker longer than most tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dear_tests import ROOT, DearFile, read_areas
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
    parser.addoption("--cheap", action="store_true", help="run T1: no dear file of tests/areas.toml, and no slow test")
    parser.addoption("--dear", action="store_true", help="run the tests of the files that T1 leaves out")
    parser.addoption("--everything", action="store_true", help="run every case of every grid, not a choice of them")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "everything: case of a grid that CI leaves out; runs with --everything")


@cache
def dear_files() -> dict[Path, DearFile]:
    """Return the dear files of the table by their paths."""
    return {ROOT / file.path: file for file in read_areas().files}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files of which T1 runs nothing, and files without a test that -m selects."""
    if config.getoption("--cheap") and (file := dear_files().get(collection_path)) and not file.slow:
        return True
    markers = re.split(r"\s+or\s+", config.option.markexpr.strip())
    if not MARKERS.issuperset(markers) or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(f"mark.{marker}" in text for marker in markers) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases that are not chosen."""
    named = tuple(argument for argument in config.args if "::" in argument)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        is_named = named and item.nodeid.startswith(named)
        (kept if is_named or not _is_left(item, config) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _is_left(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether this run leaves out a test."""
    slow = item.get_closest_marker("slow") is not None
    if item.get_closest_marker("everything") and not config.getoption("--everything"):
        return True
    if config.getoption("--dear"):
        return not slow and item.path in dear_files() and dear_files()[item.path].slow
    return slow and bool(config.getoption("--cheap"))
