"""Reads a checkout: its files, the changed ones, the tests' own sources, and the imports of the product."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import grimp

from changed.file_references import Folder, Source, parse, path_constants
from changed.graph import module_of
from changed.table import PACKAGES

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git's name of the empty tree: the base of a repository's first commit."""


class BaseUnknownError(Exception):
    """The base is unknown to git."""


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails."""
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return ran.stdout if ran.returncode == 0 else None


def listed(root: Path, *arguments: str) -> list[str]:
    """Return the paths that a git command prints with -z."""
    output = git(root, *arguments)
    if output is None:
        raise BaseUnknownError(f"git {' '.join(arguments)} failed in {root}")
    return [path for path in output.split("\0") if path]


def files_of(root: Path) -> list[str]:
    """Return all files except ignored ones."""
    found = listed(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({path for path in found if (root / path).is_file()})


def default_base(root: Path) -> str:
    """Return the merge base with main; on main itself the last commit but one."""
    head = (git(root, "rev-parse", "HEAD") or "").strip()
    for main in ("main", "origin/main"):
        base = (git(root, "merge-base", "HEAD", main) or "").strip()
        if base and base != head:
            return base
    before = (git(root, "rev-parse", "--verify", "--quiet", "HEAD~1") or "").strip()
    return before or EMPTY_TREE


def changed_since(root: Path, base: str) -> list[str]:
    """Return files that differ from the base: committed, staged, edited, deleted and new ones."""
    if base != EMPTY_TREE and git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") is None:
        raise BaseUnknownError(f"git knows no commit {base!r}")
    differ = listed(root, "diff", "--name-only", "--no-renames", "-z", base)
    new = listed(root, "ls-files", "-z", "--others", "--exclude-standard")
    return sorted({*differ, *new})


def sources_of(root: Path, files: list[str]) -> dict[str, Source]:
    """Parse the tests' own Python files."""
    trees = {
        path: ast.parse((root / path).read_text(encoding="utf-8"))
        for path in files
        if path.startswith("tests/") and path.endswith(".py")
    }
    known: dict[str, dict[str, Folder]] = {}
    # Constants may come from a module that imports them from another one.
    for _ in range(3):
        known = {module_of(path): path_constants(path, tree, known) for path, tree in trees.items()}
    return {path: parse(path, tree, known) for path, tree in trees.items()}


def product_imports(root: Path) -> dict[str, set[str]]:
    """Return the imports among the product's modules, also those in functions, without those for type checkers only."""
    before = list(sys.path)
    # Use this checkout, even if the environment has another one installed.
    sys.path[:0] = [str(root / folder) for folder in PACKAGES.values()]
    try:
        graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    finally:
        sys.path[:] = before
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
