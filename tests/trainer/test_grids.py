"""The selection of trainings in CI: a real grid loses nothing but combinations."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from suite_plugins.selection import GRIDS

NAMES = re.compile(r"covering\(\s*\"([^\"]+)\"")
FILES = {
    path: names
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path != Path(__file__) and (names := NAMES.findall(path.read_text(encoding="utf-8")))
}
ALL = sorted(name for names in FILES.values() for name in names)


@pytest.fixture(scope="module")
def _grids() -> None:
    """Import the modules of grids that pytest has not collected."""
    for path, names in FILES.items():
        if not set(names) <= set(GRIDS):
            spec = importlib.util.spec_from_file_location(f"_grids_of_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look it up there
            spec.loader.exec_module(module)


def test_grids_are_found() -> None:
    assert {"strategies", "model parallel", "sequence parallel", "models that write"} <= set(ALL)
    assert len(set(ALL)) == len(ALL)


@pytest.mark.usefixtures("_grids")
@pytest.mark.parametrize("name", ALL)
def test_selected_cases_cover_each_value_and_neighbouring_pair_of_a_grid(name: str) -> None:
    choice = GRIDS[name]
    assert len(choice.cases) >= 4
    assert 0 < len(choice.chosen) < len(choice.cases)
    run = [case for case in choice.cases if case.name in choice.chosen]
    axes = list(choice.cases[0].axes)
    for axis in axes:
        assert {case.axes[axis] for case in run} == {case.axes[axis] for case in choice.cases}, axis
    for one, two in pairwise(axes):
        wanted = {(case.axes[one], case.axes[two]) for case in choice.cases}
        assert {(case.axes[one], case.axes[two]) for case in run} == wanted, f"{one} with {two}"
