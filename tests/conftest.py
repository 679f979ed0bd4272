"""For all tests. Golden files: whole answers, kept beside the tests that compare with them;
`pytest tests/golden tests/chart --update-golden` writes them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytest_plugins = ["suite_plugins.fuzz", "suite_plugins.patience", "suite_plugins.selection", "suite_plugins.times"]

# Before anything imports torch, and for the programs that tests start. Threads that have nothing to do wait by spinning
# otherwise; with models as tiny as those of tests that was two thirds of all the time that they took.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected files anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name beside the test, or write it with --update-golden."""
    update: bool = request.config.getoption("--update-golden")
    folder = request.path.parent

    def check(name: str, text: str) -> None:
        file = folder / name
        if update:
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{name} is missing: run with --update-golden, and read the difference"
        assert text == file.read_text(encoding="utf-8"), f"{name} differs: --update-golden writes it anew"

    return check
