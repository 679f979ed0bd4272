"""Fixtures of the tests of style, which read files and start nothing: `make lint` runs them."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("operator", "trainer_image", "tests", ".ci")


@pytest.fixture(scope="session")
def modules() -> Mapping[str, Sequence[ast.AST]]:
    """Return the nodes of each Python file in FOLDERS by its path from the root; the first node is the module.

    No file is parsed twice. Collections of garbage among more than a million nodes would take most of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        found = {
            file.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            for folder in FOLDERS
            for file in sorted((ROOT / folder).rglob("*.py"))
            if "build" not in file.parts
        }
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
    assert len(found) > 900
    return found


@pytest.fixture(scope="session")
def sources(modules: Mapping[str, Sequence[ast.AST]]) -> Mapping[str, Sequence[ast.AST]]:
    """Return the modules of the product alone."""
    packages = ("operator/finetune_operator/", "trainer_image/finetune_trainer/", "trainer_image/contract/")
    return {path: nodes for path, nodes in modules.items() if path.startswith(packages)}


@pytest.fixture(scope="session")
def tracked_files() -> Sequence[Path]:
    """Return the files that git knows of or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
