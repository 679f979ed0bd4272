"""A picture of a terminal, from real commands and their real output.

Three dots mark omitted lines; nothing is added or changed. The picture names no font that would have to be fetched:
each piece of text has its width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 118
"""Columns."""
_FETCHED_FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


@dataclass(frozen=True)
class CommandRun:
    """A command and its output."""

    command: str
    output: str


@dataclass(frozen=True)
class Excerpt:
    """Lines of an output to show: from its start, from its middle at equal distances, and from its end."""

    head: int = 0
    middle: int = 0
    tail: int = 0

    def of(self, output: str) -> list[str]:
        """Return the lines, with dots for omitted ones."""
        lines = [line.rstrip() for line in output.splitlines()]
        if len(lines) <= self.head + self.middle + self.tail + 1:
            return lines
        end = len(lines) - self.tail
        between = [self.head + (end - self.head) * (2 * i + 1) // (2 * self.middle) for i in range(self.middle)]
        shown: list[str] = []
        before = -1
        for number in [*range(self.head), *between, *range(end, len(lines))]:
            shown += ["..."] * (number > before + 1) + [lines[number]]
            before = number
        return shown


def terminal_svg(title: str, session: Sequence[tuple[CommandRun, Excerpt]], *, wrap: bool = False) -> str:
    """Return the session as an SVG; long lines are cut, or wrapped."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    for run, excerpt in session:
        console.print(Text.assemble(("$ ", "bold green"), (run.command, "bold")), overflow="fold")
        for line in excerpt.of(run.output):
            console.print(Text(line), overflow="fold" if wrap else "ellipsis", no_wrap=not wrap)
        console.print()
    form = _FETCHED_FONT.sub("", CONSOLE_SVG_FORMAT).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"
    )
    return console.export_svg(title=title, code_format=form, unique_id="tour")
