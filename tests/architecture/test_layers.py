"""The layers of the project hold, and no file holds anything of a single machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest

from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_imports_point_down_only() -> None:
    found = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert found.returncode == 0, found.stdout + found.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", found.stdout)
    assert kept is not None
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert int(kept.group(1)) == len(contracts) >= 5


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions and those for type checkers count: both tie the modules together for a reader."""
    graph = grimp.build_graph("finetune_contract", "finetune_operator", "finetune_trainer", cache_dir=None)
    assert len(graph.modules) > 150
    imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_two_modules_have_the_same_file_name() -> None:
    places: dict[str, list[str]] = {}
    for file in tracked_files():
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


def test_the_finetune_command_starts_without_a_deep_learning_library() -> None:
    program = (
        "import sys; from finetune_operator.cli.main import COMMANDS, load; [load(name) for name in COMMANDS]; "
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'datasets', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


READERS_OF_STATUS = ("cli.jobview", "cli.watching", "reconcile.observed", "reconcile.fleet_metrics", "shell.store")


def test_readers_of_a_status_import_no_template_engine() -> None:
    imports = "".join(f"import finetune_operator.{name}\n" for name in READERS_OF_STATUS)
    program = f"import sys\n{imports}print([name for name in ('jinja2', 'torch') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300))
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: list[str]) -> set[str]:
    """Return the distributions that requirements name, without their versions and extras."""
    return {normal(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in requirements}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the top-level modules that the files of `folder` import, each with a place that does."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                yield name.split(".")[0], f"{path.relative_to(ROOT)}:{node.lineno}"


# Covered by another of our requirements, whose releases name the compatible releases of these.
COMES_WITH = {"huggingface-hub": "transformers", "tokenizers": "transformers"}


@pytest.mark.parametrize("distribution", ["trainer_image/contract", "trainer_image", "operator"])
def test_distribution_requires_every_package_its_modules_import(distribution: str) -> None:
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    wanted = named(project["dependencies"]).union(*map(named, project.get("optional-dependencies", {}).values()))
    [package] = [path.parent for path in (ROOT / distribution).glob("finetune_*/__init__.py")]
    offered = packages_distributions()
    seen = 0
    missing: list[str] = []
    for module, place in imported(package):
        if module in sys.stdlib_module_names or module == package.name:
            continue
        seen += 1
        sources = {normal(name) for name in offered.get(module, [])}
        sources |= {COMES_WITH[name] for name in sources & COMES_WITH.keys()}
        if not sources & wanted:
            missing.append(f"{place} imports {module}")
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


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.-])/(?:work|farm|root)/")
    checked = 0
    found: list[str] = []
    for path in tracked_files():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        checked += 1
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert checked > 30
    assert found == []


def test_every_module_has_a_docstring() -> None:
    modules = [
        path
        for folder in ("operator/finetune_operator", "trainer_image/finetune_trainer", "trainer_image/contract")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and "build" not in path.parts
    ]
    assert len(modules) > 20
    silent = [
        str(path.relative_to(ROOT)) for path in modules if not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert silent == []
