"""Walks through docs/first-run.md like a newcomer, and draws docs/first-run.svg from the commands' output.

    python tests/first_run.py FOLDER    runs the page's commands in a new folder, and draws the picture

The preparation of the folder (clone, installation) is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from box_support.terminal_picture import CommandRun, Excerpt, terminal_svg

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-run.md"
PICTURE = ROOT / "docs" / "first-run.svg"
BEFORE = ("git clone", "cd ", "make install", "source ", "mkdir mine")
"""Prefixes of lines that prepare the folder."""
FILES = {"yaml": "job.yaml", "python": "ask.py"}
"""Language of a block -> file name under which the reader saves it."""
GATE_NOT_MET = 1
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = {
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
    """Return the commands of a console block to run."""
    lines = [line.removeprefix("$ ") for line in block.splitlines()]
    return [line for line in lines if not line.startswith(BEFORE)]


def walk(folder: Path, seconds: float) -> Iterator[Step]:
    """Execute the page in `folder`, which must be new: files are saved and commands run in the order of the page.

    `seconds`: time-out of one command. The environment's own programs are first in the PATH.
    """
    (folder / "manifests").symlink_to(ROOT / "manifests")
    mine = folder / "mine"
    mine.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "118"}
    for language, text in blocks():
        if language in FILES:
            (mine / FILES[language]).write_text(text, encoding="utf-8")
            continue
        for line in commands(text):
            began = time.monotonic()
            ran = subprocess.run(
                line,
                shell=True,
                cwd=mine,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
            )
            yield Step(CommandRun(line, ran.stdout), ran.returncode, time.monotonic() - began)


def picture(steps: Sequence[Step], folder: Path) -> str:
    """Return the steps as an SVG, with times from a second on; `folder` is shown as ~/finetune-operator."""
    shown = []
    for step in steps:
        run = CommandRun(step.run.command, step.run.output.replace(str(folder), "~/finetune-operator"))
        if step.seconds >= 1:
            taken = f"real {int(step.seconds // 60)}m{step.seconds % 60:.0f}s"
            run = CommandRun(f"time {run.command}", f"{run.output.rstrip()}\n{taken}\n")
        shown += [(run, excerpt) for start, excerpt in SHOWN.items() if step.run.command.startswith(start)]
    return terminal_svg("From a CSV file to a model", shown)


def main() -> None:
    folder, steps = Path(sys.argv[1]).resolve(), []
    for step in walk(folder, 3600):
        steps.append(step)
        print(f"{step.seconds:7.1f} s  exit {step.code}  {step.run.command}\n{step.run.output}", flush=True)
    PICTURE.write_text(picture(steps, folder), encoding="utf-8")


if __name__ == "__main__":
    main()
