"""Covering selections of grids: they have all pairs of neighbouring values, are cheap, and are always the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dear_tests import DearFile
from suite_plugins import selection
from suite_plugins.covering import Case, choose
from suite_plugins.selection import MARKERS, covering

TESTS = Path(__file__).parents[1]
PATH = os.pathsep.join(map(str, (TESTS, TESTS.parent / ".ci")))
AXES = ("family", "engine", "checkpointing", "processes")
NEIGHBOURS = list(pairwise(AXES))
values = st.tuples(*(st.integers(0, 3) for _ in AXES), st.integers(1, 5))
grids = st.lists(values, max_size=40).map(
    lambda rows: [Case(str(at), dict(zip(AXES, row, strict=False)), row[-1]) for at, row in enumerate(rows)]
)


def whole_grid() -> list[Case]:
    return [Case("-".join(map(str, row)), dict(zip(AXES, row, strict=True))) for row in product(range(3), repeat=4)]


@given(grids)
def test_every_pair_of_neighbouring_values_is_in_a_chosen_case(grid: list[Case]) -> None:
    choice = choose(grid)
    chosen = [case for case in grid if case.name in choice.chosen]
    for one, two in NEIGHBOURS:
        wanted = {(case.axes[one], case.axes[two]) for case in grid}
        assert {(case.axes[one], case.axes[two]) for case in chosen} == wanted


@given(grids)
def test_no_chosen_case_is_superfluous(grid: list[Case]) -> None:
    chosen = [case for case in grid if case.name in choose(grid).chosen]
    for case in chosen:
        others = {pair for each in chosen if each is not case for pair in each.pairs}
        assert not case.pairs <= others


@given(grids)
def test_same_grid_gives_same_choice(grid: list[Case]) -> None:
    assert choose(grid) == choose(list(grid))


def test_full_product_shrinks_to_a_fraction() -> None:
    grid = whole_grid()
    assert len(grid) == 81
    assert 9 <= len(choose(grid).chosen) <= 14


def test_cheaper_of_two_equal_cases_is_chosen() -> None:
    axes = {"engine": "ddp", "processes": "any"}
    assert choose([Case("dear", axes, 4), Case("cheap", axes, 2)]).chosen == {"cheap"}
    assert choose([Case("first", axes), Case("second", axes)]).chosen == {"first"}


@pytest.mark.parametrize(
    "grid",
    [
        [Case("one", {"engine": "ddp", "family": "bert"}), Case("two", {"family": "bert", "engine": "ddp"})],
        [Case("one", {"engine": "ddp"})],
        [Case("one", {"engine": "ddp", "family": "bert"}), Case("one", {"engine": "fsdp", "family": "bert"})],
    ],
    ids=["axes in another order", "a single axis", "a name twice"],
)
def test_uneven_grid_is_refused(grid: list[Case]) -> None:
    with pytest.raises(ValueError, match=r"axes differ|comes twice"):
        choose(grid)


def test_left_cases_get_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr("suite_plugins.selection.GRIDS", made)
    cases = {"ddp": ("ddp", 2), "ddp on 4": ("ddp", 4), "ddp again": ("ddp", 2)}
    params = covering(
        "sample",
        cases,
        lambda case: dict(zip(("engine", "processes"), case, strict=True)),
        marks=lambda case: pytest.mark.slow,
    )
    assert [(param.id, [mark.name for mark in param.marks]) for param in params] == [
        ("ddp", ["slow"]),
        ("ddp on 4", ["slow"]),
        ("ddp again", ["slow", "everything"]),
    ]


PROGRAM = """
import pytest
from suite_plugins.selection import covering

CASES = {"one": (1, 1), "two": (1, 2), "again": (1, 1)}


@pytest.mark.parametrize("name", covering("sample", CASES, lambda case: dict(zip("ab", case))))
def test_case(name):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ([], "2 passed, 1 deselected"),
        (["--everything"], "3 passed"),
        (["test_program.py::test_case[again]"], "1 passed"),
    ],
    ids=["by default", "on request", "by its node id"],
)
def test_left_cases_run(arguments: list[str], end: str, tmp_path: Path) -> None:
    run_pytest(tmp_path, {"test_program.py": PROGRAM}, arguments, end)


def run_pytest(folder: Path, files: dict[str, str], arguments: list[str], end: str) -> str:
    """Run the tests in these files and return pytest's output, whose last line has to be `end`."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    settings = "[pytest]\naddopts = --strict-markers\nmarkers =\n    slow\n    bare\n"
    (folder / "pytest.ini").write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "suite_plugins.selection", "-p", "no:cacheprovider", *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}:{TESTS.parent / '.ci'}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert f" {end} in " in f" {done.stdout.strip().splitlines()[-1].strip('= ')}", done.stdout + done.stderr
    return done.stdout


MARKED = "import pytest\n\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n\n\ndef test_quick():\n    pass\n"


@pytest.mark.parametrize(
    ("marks", "end"),
    [
        ("slow", "1 passed, 1 deselected"),
        ("slow and not bare", "1 deselected, 1 error"),
    ],
)
def test_files_without_a_selected_test_are_not_imported(marks: str, end: str, tmp_path: Path) -> None:
    files = {"test_marked.py": MARKED, "test_other.py": "raise AssertionError('imported')\n"}
    run_pytest(tmp_path, files, ["-m", marks], end)


def test_selecting_markers_are_written_in_the_files_of_their_tests() -> None:
    written = re.compile(rf"mark\.({'|'.join(MARKERS)})\b")
    support = [file for file in TESTS.rglob("*.py") if not file.name.startswith("test_")]
    assert len(support) > 20
    assert [file.name for file in support if written.search(file.read_text(encoding="utf-8"))] == []


def test_t1_leaves_dear_files_and_slow_tests_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a.py": DearFile("a.py", 1, ()), "b.py": DearFile("b.py", 1, (), slow=True)}
    monkeypatch.setattr(selection, "dear_files", lambda: {Path(name): file for name, file in files.items()})

    def run(option: str) -> list[str]:
        """Return the tests of three files that run."""
        config = SimpleNamespace(
            getoption=lambda name: name == option,
            option=SimpleNamespace(markexpr=""),
            args=[],
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        items = [
            SimpleNamespace(
                path=Path(name), nodeid=mark, get_closest_marker=lambda name, mark=mark: name == mark or None
            )
            for name in ("a.py", "b.py", "c.py")
            if not selection.pytest_ignore_collect(Path(name), config)  # type: ignore[arg-type]
            for mark in ("slow", "quick")
        ]
        selection.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        return [f"{item.path}-{item.nodeid}" for item in items]

    assert run("--cheap") == ["b.py-quick", "c.py-quick"]
    assert run("--dear") == ["a.py-slow", "a.py-quick", "b.py-slow", "c.py-slow", "c.py-quick"]
