"""Fixtures of all tests. Golden files: whole expected outputs beside their tests;
`pytest tests/golden tests/chart --update-golden` writes them again (docs/tests.md).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable

import pytest

pytest_plugins = [
    "suite_plugins.fuzz",
    "suite_plugins.garbage",
    "suite_plugins.patience",
    "suite_plugins.selection",
    "suite_plugins.times",
]

# Set before torch is imported, and for programs that tests start. Idle threads would spin otherwise; with the tests'
# tiny models that was two thirds of all their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

MOST_LINES = 60
"""Lines of a difference that a failed comparison shows."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected files instead of comparing")
    parser.addoption("--record-page", metavar="FOLDER", help="write pictures of the page of a model server")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name beside the test, or write it with --update-golden."""
    update: bool = request.config.getoption("--update-golden")
    folder = request.path.parent

    def check(name: str, text: str) -> None:
        file = folder / name
        if update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{name} is missing: run with --update-golden, and read the difference"
        recorded = file.read_text(encoding="utf-8")
        if text != recorded:
            pytest.fail(f"{name} differs: --update-golden rewrites it\n{_changed_lines(recorded, text)}", pytrace=False)

    return check


def _changed_lines(before: str, after: str) -> str:
    """Return the lines that differ, below their head: the last line that is not indented."""
    old, new = before.split("\n"), after.split("\n")
    shown: list[str] = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        head = next((line for line in reversed(old[: start + 1]) if line and not line.startswith((" ", "-"))), "")
        shown += [head] if head not in shown else []
        shown += [f"- {line}" for line in old[start:end]] + [f"+ {line}" for line in new[new_start:new_end]]
    more = [f"... and {len(shown) - MOST_LINES} lines more"] if len(shown) > MOST_LINES else []
    return "\n".join([*shown[:MOST_LINES], *more])
