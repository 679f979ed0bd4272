"""Modules import each other in no circles, have names of their own, and import what their distribution requires."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions and those for type checkers count: both tie the modules together for a reader."""
    graph = grimp.build_graph("finetune_contract", "finetune_operator", "finetune_trainer", cache_dir=None)
    assert len(graph.modules) > 150
    imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_two_modules_have_the_same_file_name(tracked_files: Sequence[Path]) -> None:
    places: dict[str, list[str]] = {}
    for file in tracked_files:
        if file.suffix == ".py" and file.name not in {"__init__.py", "__main__.py", "conftest.py"}:
            places.setdefault(file.name, []).append(str(file.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_ruff_sorts_imports_of_test_modules_as_first_party() -> None:
    """Modules beside the tests' folders and in packages without tests: ruff takes unlisted ones for libraries."""
    sorted_as_ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["isort"]
    tests = ROOT / "tests"
    modules = {path.stem for path in tests.glob("*.py")} - {"conftest"}
    packages = {path.parent.name for path in tests.glob("*/*.py")} - {
        path.parent.name for path in (*tests.glob("*/test_*.py"), *tests.glob("*/conftest.py"))
    }
    assert len(packages) > 5
    assert {*modules, *packages} - set(sorted_as_ours["known-first-party"]) == {"benchmarks"}  # nobody imports these


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: list[str]) -> set[str]:
    """Return the distributions that requirements name, without their versions and extras."""
    return {normal(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in requirements}


def imported(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the top-level modules that a module imports, each with its line."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            yield name.split(".")[0], node.lineno  # type: ignore[attr-defined]


# Covered by another of our requirements, whose releases name the compatible releases of these.
COMES_WITH = {"huggingface-hub": "transformers", "tokenizers": "transformers"}
distributions_by_module = cache(packages_distributions)


@pytest.mark.parametrize("distribution", ["trainer_image/contract", "trainer_image", "operator"])
def test_distribution_requires_every_package_its_modules_import(
    distribution: str, sources: Mapping[str, Sequence[ast.AST]]
) -> None:
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    wanted = named(project["dependencies"]).union(*map(named, project.get("optional-dependencies", {}).values()))
    [package] = [path.parent for path in (ROOT / distribution).glob("finetune_*/__init__.py")]
    seen = 0
    missing: list[str] = []
    for path, nodes in sources.items():
        if not path.startswith(f"{package.relative_to(ROOT)}/"):
            continue
        for module, line in imported(nodes):
            if module in sys.stdlib_module_names or module == package.name:
                continue
            seen += 1
            offered = {normal(name) for name in distributions_by_module().get(module, [])}
            offered |= {COMES_WITH[name] for name in offered & COMES_WITH.keys()}
            if not offered & wanted:
                missing.append(f"{path}:{line} imports {module}")
    assert seen > 0
    assert missing == []


def test_constraints_pin_every_direct_dependency_and_name_no_address() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+", line) for line in lines), lines

    pinned = {normal(line.split("==")[0]) for line in lines}
    wanted: set[str] = set()
    for file in ("operator/pyproject.toml", "trainer_image/pyproject.toml", "trainer_image/contract/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        wanted |= named(project["dependencies"])
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for group in groups.values():
        wanted |= named([item for item in group if isinstance(item, str)])
    wanted -= {"finetune-contract", "finetune-operator", "finetune-trainer"}
    assert len(wanted) > 20
    assert wanted <= pinned, wanted - pinned
