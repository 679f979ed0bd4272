"""Source of an earlier release, from git's history: tests of upgrades run its programs beside the current ones."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMIT = "f169ec4c4c4df50ab40e205882dd858788b6fc1b"
"""Last release, whose jobs and checkpoints this tree resumes; update it with each release."""


def unpack(folder: Path, *paths: str) -> Path:
    """Write these paths of the earlier release into `folder`; skip the test without git's history."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", COMMIT, *paths], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"git's history does not hold commit {COMMIT[:7]}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
        content.extractall(folder, filter="data")
    return folder


def python_path(*sources: Path) -> dict[str, str]:
    """Return an environment in which Python imports packages from these folders, not the installed ones."""
    environment = {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    packages = [init.parent.name for source in sources for init in source.glob("*/__init__.py")]
    show = f"import {', '.join(packages)}; print({', '.join(f'{name}.__file__' for name in packages)})"
    command = [sys.executable, "-c", show]
    found = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout.split()
    assert packages
    assert all(any(Path(path).is_relative_to(source) for source in sources) for path in found), found
    return environment


def script(project: Path, name: str) -> tuple[str, ...]:
    """Return the command that runs the project's script of that name: an installed one is this tree's."""
    scripts = tomllib.loads((project / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[name].partition(":")
    return sys.executable, "-c", f"from {module} import {function}; {function}()"


def assert_imported(packages: Sequence[str], folder: str) -> None:
    """Fail if this process imports one of the packages from outside `folder`."""
    files = {name: importlib.import_module(name).__file__ for name in packages}
    assert all(file is not None and Path(file).is_relative_to(folder) for file in files.values()), files
