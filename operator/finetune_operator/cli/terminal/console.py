"""Output of the command: results to standard output, everything else to standard error.

Colours only on a terminal, and none with NO_COLOR; a program that reads the output gets plain text or data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from finetune_operator.spec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from finetune_operator.spec.problems import Problem


class Output(StrEnum):
    """Format of a result."""

    TEXT = "text"
    YAML = "yaml"
    JSON = "json"


class DocumentOutput(StrEnum):
    """Format of a result that is a document by nature."""

    YAML = "yaml"
    JSON = "json"


class UsageError(typer.BadParameter):
    """Error of a wrong call: reported with the usage line, and exit code 2."""

    def format_message(self) -> str:
        """Return the text alone: it names the option itself."""
        return self.message


def _console(stderr: bool) -> Console:
    from finetune_operator.cli.terminal.printable_console import PrintableConsole

    console = PrintableConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        # Lines in a log or a pipe are not broken: a path cut in two cannot be searched for.
        console.width = 200
    return console


def out() -> Console:
    """Return the console of standard output."""
    return _console(stderr=False)


def err() -> Console:
    """Return the console of standard error."""
    return _console(stderr=True)


def print_trimmed(console: Console, content: RenderableType) -> None:
    """Print without spaces at the ends of lines, which are unwanted in copied or compared text."""
    with console.capture() as capture:
        console.print(content)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def print_line(text: str, *, style: str | None = None, stderr: bool = False) -> None:
    """Write a line, in `style` if colours are shown."""
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:  # closed by the caller
        return
    if stream.isatty() or _COLOUR_VARIABLES & os.environ.keys():
        _console(stderr).print(text, style=style, soft_wrap=True)
    else:  # no import of rich, which takes longer than checking a file
        print(printable(text), file=stream, flush=True)


_COLOUR_VARIABLES = frozenset({"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"})
"""Variables with which rich treats a pipe as a terminal."""


def note(text: str) -> None:
    """Print a note that is no error."""
    print_line(f"Note: {text}", style="dim", stderr=True)


def note_misfits(problems: Sequence[Problem]) -> None:
    """Print requirements that are not met so far."""
    for problem in problems:
        note(f"{problem.path} {problem.rule}. Prepare measures first, and the job is planned again.")


def print_error(text: str) -> None:
    """Print why the command fails."""
    print_line(f"Error: {text}", style="red", stderr=True)


def described(problem: Problem, source: str) -> str:
    """Return `FILE:LINE: path: value V: rule. Hint.`, without unknown parts."""
    place = source if problem.line is None else f"{source}:{problem.line}"
    parts = [problem.path] if problem.path else []
    if problem.value is not None:
        parts.append(f"value {problem.value}")
    hint = problem.hint[:1].upper() + problem.hint[1:]
    return ": ".join([place, *parts, f"{sentence(problem.rule)} {sentence(hint)}"])


def sentence(text: str) -> str:
    """Return the text with a full stop, unless it is empty or ends as a sentence."""
    return text if not text or text[-1] in ".?!" else f"{text}."


def report(problems: Sequence[tuple[str, Problem]]) -> None:
    """Print all problems with their files, one a line."""
    for source, problem in problems:
        print_line(described(problem, source).rstrip(), style="red", stderr=True)


def problem_data(source: str, problem: Problem) -> dict[str, Any]:
    """Return a problem for `-o json`."""
    from finetune_operator.spec.problems import hint_data

    return {
        "file": source,
        "line": problem.line,
        "column": problem.column,
        "path": problem.path,
        "value": problem.value,
        "rule": problem.rule,
        "wayOut": problem.hint,
        "change": hint_data(problem),
        "reason": problem.reason,
    }


def list_of(objects: Sequence[Any]) -> dict[str, Any]:
    """Return objects of a cluster as the List that kubectl prints and accepts for them."""
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def emit(values: Sequence[Any], output: Output | DocumentOutput) -> None:
    """Write data to standard output: one value as itself; several as a list in JSON and as documents in YAML."""
    if output == "json":
        print(json.dumps(values[0] if len(values) == 1 else list(values), indent=2, ensure_ascii=False))
    else:
        from finetune_operator.cli.terminal.yaml_text import documents

        print(documents(values), end="")
