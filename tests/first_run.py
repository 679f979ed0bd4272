"""Walks through docs/first-run.md like a newcomer, and draws docs/first-run.svg from the commands' output.

    python tests/first_run.py FOLDER    runs the page's commands in a new folder, and draws the picture

The clone is one of this checkout's last commit. The suite's test of the page skips the clone and the installation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from box_support.terminal_picture import CommandRun, Excerpt, terminal_svg

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-run.md"
PICTURE = ROOT / "docs" / "first-run.svg"
BEFORE = ("git clone", "cd ", "make install", "source ", "mkdir mine")
"""Prefixes of lines that prepare the folder."""
ADDRESS = "$REPOSITORY"
SECONDS = 3600.0
"""Time-out of a command when the picture is recorded."""
FILES = {"yaml": "job.yaml", "python": "ask.py"}
"""Language of a block -> file name under which the reader saves it."""
GATE_NOT_MET = 1
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = {
    "git clone": Excerpt(tail=1),
    "make install": Excerpt(tail=1),
    "head ": Excerpt(head=3),
    "finetune validate": Excerpt(head=2),
    "finetune plan": Excerpt(head=20, tail=1),
    "finetune run": Excerpt(head=3, middle=6, tail=17),
    "sed ": Excerpt(),
    "ls ": Excerpt(head=20),
    "python ask.py": Excerpt(tail=3),
}
"""Prefixes of the commands in the picture -> excerpt of their output."""


@dataclass(frozen=True)
class Step:
    """One executed command of the page."""

    run: CommandRun
    code: int
    seconds: float


def blocks() -> list[tuple[str, str]]:
    """Return language and text of each block of the page, in order."""
    return FENCE.findall(PAGE.read_text(encoding="utf-8"))


def commands(block: str) -> list[str]:
    """Return the commands of a console block to run in the prepared folder."""
    return [line for line in lines_of(block) if not line.startswith(BEFORE)]


def lines_of(block: str) -> list[str]:
    """Return all commands of a console block."""
    return [line.removeprefix("$ ") for line in block.splitlines()]


def prepared(folder: Path) -> Path:
    """Return the folder in which the page's job runs, beside the examples; `folder` must be new."""
    (folder / "manifests").symlink_to(ROOT / "manifests")
    mine = folder / "mine"
    mine.mkdir()
    return mine


def whole_walk(folder: Path) -> Iterator[Step]:
    """Execute the page with the clone and the installation, into folder/finetune-operator."""
    clone = folder / "finetune-operator"
    for line in (line for language, text in blocks() if language == "console" for line in lines_of(text)):
        if line.startswith(("git clone", "make install")):
            inside = folder if line.startswith("git clone") else clone
            step = _executed(line.replace(ADDRESS, str(ROOT)), inside, dict(os.environ), SECONDS)
            yield replace(step, run=replace(step.run, command=line))
    mine = clone / "mine"
    mine.mkdir()
    yield from walk(mine, SECONDS, clone / ".venv" / "bin")


def walk(mine: Path, seconds: float, programs: Path) -> Iterator[Step]:
    """Execute the page in `mine`, which must be empty: files are saved and commands run in the order of the page.

    `seconds`: time-out of one command. `programs` is first in the PATH.
    """
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "118"}
    for language, text in blocks():
        if language in FILES:
            (mine / FILES[language]).write_text(text, encoding="utf-8")
            continue
        for line in commands(text):
            yield _executed(line, mine, environment, seconds)


def _executed(line: str, folder: Path, environment: dict[str, str], seconds: float) -> Step:
    began = time.monotonic()
    ran = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    return Step(CommandRun(line, ran.stdout), ran.returncode, time.monotonic() - began)


def picture(steps: Sequence[Step], folder: Path) -> str:
    """Return the steps as an SVG, with times from a second on; `folder` is shown as ~/finetune-operator."""
    shown = []
    for step in steps:
        run = CommandRun(step.run.command, step.run.output.replace(str(folder), "~/finetune-operator"))
        if step.seconds >= 1:
            taken = f"real {int(step.seconds // 60)}m{step.seconds % 60:.0f}s"
            run = CommandRun(f"time {run.command}", f"{run.output.rstrip()}\n{taken}\n")
        shown += [(run, excerpt) for start, excerpt in SHOWN.items() if step.run.command.startswith(start)]
    return terminal_svg("From a CSV file to a model", shown, wrap=True)


def main() -> None:
    folder, steps = Path(sys.argv[1]).resolve(), []
    for step in whole_walk(folder):
        steps.append(step)
        print(f"{step.seconds:7.1f} s  exit {step.code}  {step.run.command}\n{step.run.output}", flush=True)
    PICTURE.write_text(picture(steps, folder / "finetune-operator"), encoding="utf-8")


if __name__ == "__main__":
    main()
