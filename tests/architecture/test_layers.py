"""The layers of the project hold, and files say nothing that belongs to one machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
        [str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", found.stdout)
    assert kept is not None
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert int(kept.group(1)) == len(contracts) >= 5


def test_the_finetune_command_starts_without_a_deep_learning_library() -> None:
    program = (
        "import sys, finetune_operator.cli.main; "
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'datasets', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def test_constraints_pin_every_direct_dependency_and_name_no_address() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+", line) for line in lines), lines

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {normal(line.split("==")[0]) for line in lines}
    wanted: set[str] = set()
    for file in ("operator/pyproject.toml", "trainer_image/pyproject.toml", "trainer_image/contract/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        wanted |= {normal(re.split(r"[<>=!~\[; ]", dependency)[0]) for dependency in project["dependencies"]}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for group in groups.values():
        wanted |= {normal(re.split(r"[<>=!~\[; ]", item)[0]) for item in group if isinstance(item, str)}
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


def test_every_module_says_what_it_is_for() -> None:
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
