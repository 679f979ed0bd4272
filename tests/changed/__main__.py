"""Run the tests that a change can break: `make test-changed`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from changed.graph import Choice, Chosen, build, choose, is_test
from changed.repository import BaseUnknownError, changed_since, default_base, files_of, product_imports, sources_of
from changed.table import TABLE

ROOT = Path(__file__).parents[2]
NOTHING_CHOSEN = 5
"""Exit code of pytest without a test: an option may deselect all of the files' tests."""

EXAMPLES = """\
examples:
  make test-changed                       changes since the branch left main, on main since the last commit but
                                          one; and what is not committed yet
  make test-changed BASE=HEAD             only what is not committed yet
  make test-changed BASE=v0.1.0           changes since a tag
  make test-changed ARGS=--list           name the tests and the reasons, run nothing
  make test-changed ARGS='-o json'        the same for a program
  python -m changed -- -x -m "not slow"   with options for pytest (in tests/, or with it in PYTHONPATH)

A reason is a chain from the test to the changed file: `imports golden_cases.py::read_case > imports
finetune_operator.planning.assumed_facts`. The nearest tests run first. A change that nothing explains runs every test;
a new use that is neither an import nor a path needs a row in tests/changed/table.py.
"""


@dataclass(frozen=True)
class Suite:
    """Tests that need a cluster."""

    folder: str
    target: str
    """Target of the Makefile that runs all of them."""
    why_not: Callable[[], str | None]
    """Returns the missing requirement on this machine; None if there is none."""


def why_no_cluster() -> str | None:
    """Return the missing requirement for an API server on this machine; None if there is none."""
    from cluster_support.control_plane import CONTROL_PLANE, assets_folder
    from suite_plugins.shared_folder import missing

    if os.environ.get("FINETUNE_TEST_KUBECONFIG"):
        return None
    if not CONTROL_PLANE.is_file():
        return f"FINETUNE_TEST_KUBECONFIG is not set and {missing(CONTROL_PLANE)}"
    if not (assets_folder() / "kube-apiserver").is_file():
        return "FINETUNE_TEST_KUBECONFIG is not set and KUBEBUILDER_ASSETS has no kube-apiserver"
    return None


def why_no_nodes() -> str | None:
    """Return the missing requirement for a cluster with nodes on this machine; None if there is none."""
    from box_support.box import why_no_box

    return None if os.environ.get("FINETUNE_TEST_KUBECONFIG") else why_no_box()


SUITES = (
    Suite("tests/cluster/", "test-cluster", why_no_cluster),
    Suite("tests/e2e/cluster/", "test-e2e", why_no_nodes),
)


@dataclass(frozen=True)
class Part:
    """Chosen tests that one call of pytest runs."""

    suite: Suite | None
    tests: tuple[Chosen, ...]
    why_not: str | None = None


def parts_of(choice: Choice) -> list[Part]:
    """Group the chosen tests by their requirements, those without a cluster first."""
    rest, parts = list(choice.tests), []
    for suite in SUITES:
        mine = tuple(each for each in rest if each.test.startswith(suite.folder))
        rest = [each for each in rest if each not in mine]
        if mine:
            parts.append(Part(suite, mine, suite.why_not()))
    return [Part(None, tuple(rest)), *parts] if rest else parts


def document(base: str, changed: Sequence[str], choice: Choice, parts: Sequence[Part]) -> dict[str, object]:
    """Return the choice for `-o json`."""
    return {
        "base": base,
        "changed": list(changed),
        "everything": list(choice.everything),
        "tests": [{"file": each.test, "reason": each.reason} for part in parts for each in part.tests],
        "notHere": {part.suite.target: part.why_not for part in parts if part.suite and part.why_not},
    }


def lines(base: str, changed: Sequence[str], choice: Choice, parts: Sequence[Part], tests: int) -> list[str]:
    """Return the choice as text lines."""
    if not changed:
        return [f"Nothing changed since {base}."]
    report = [f"{len(changed)} changed files since {base}; {len(choice.tests)} of {tests} test files can break."]
    report += [f"Every test runs: {why}" for why in choice.everything]
    for part in parts:
        if part.suite:
            report.append(f"make {part.suite.target}" + (f" (not run here: {part.why_not})" if part.why_not else ""))
        report += [f"  {each.test}: {each.reason}" for each in part.tests]
    return report


def run(parts: Sequence[Part], options: Sequence[str]) -> int:
    """Run the parts that this machine can run; return the worst exit code of pytest."""
    codes = [0]
    for part in parts:
        if part.why_not is None:
            # Suites on a cluster share one, so their files do not run in parallel.
            beside = options if part.suite is None else [*options, "--numprocesses", "0"]
            command = [sys.executable, "-m", "pytest", *beside, *(each.test for each in part.tests)]
            code = subprocess.run(command, cwd=ROOT).returncode
            codes.append(0 if code == NOTHING_CHOSEN else code)
    return max(codes, key=abs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make test-changed",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", help="commit to compare with (default: the merge base with main)")
    parser.add_argument("--list", action="store_true", help="name the tests with the reasons, and run nothing")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="json: implies --list")
    parser.add_argument("pytest", nargs="*", metavar="-- PYTEST-OPTION", help="options for pytest")
    given = parser.parse_args()
    try:
        base = given.base or default_base(ROOT)
        changed = changed_since(ROOT, base)
    except BaseUnknownError as error:
        print(error, file=sys.stderr)
        return 2
    files = files_of(ROOT)
    tests = {path for path in files if is_test(path)}
    graph = build(files, sources_of(ROOT, files), product_imports(ROOT), TABLE)
    choice = choose(changed, tests, graph, TABLE)
    parts = parts_of(choice)
    if given.output == "json":
        print(json.dumps(document(base, changed, choice, parts), indent=2))
        return 0
    print("\n".join(lines(base, changed, choice, parts, len(tests))), flush=True)
    return 0 if given.list else run(parts, given.pytest)


if __name__ == "__main__":
    sys.exit(main())
