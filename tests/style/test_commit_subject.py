"""The hook for commit messages, run as git runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).with_name("commit_subject.py")


def refusal_of(message: str, folder: Path) -> str:
    """Return the hook's output on stderr; empty for an accepted message."""
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    run = subprocess.run([sys.executable, HOOK, file], capture_output=True, text=True, check=False)
    assert run.returncode == bool(run.stderr), run
    return run.stderr


@pytest.mark.parametrize(
    "message",
    [
        "Add a hook for commit messages",
        "Pass the seed to each worker\n\nWorkers drew equal texts.\n",
        "Merge branch 'other' and much more than seventy-two characters of what git itself wrote here",
        "Need fewer pods\n# Lines that git adds are no part of the message.\n",
        "Bring back the table",
        "A" * 72,
    ],
)
def test_good_messages_are_accepted(message: str, tmp_path: Path) -> None:
    assert refusal_of(message, tmp_path) == ""


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("", "empty"),
        ("A" * 73, "at most 72"),
        ("add a hook", "capital letter"),
        ("Added a hook", "imperative"),
        ("Adding a hook", "imperative"),
        ("Adds a hook", "imperative"),
        ("Add a hook.", "full stop"),
        ("Add a hook\nfor messages", "blank line"),
    ],
)
def test_refused_messages_name_the_rule(message: str, rule: str, tmp_path: Path) -> None:
    assert rule in refusal_of(message, tmp_path)
