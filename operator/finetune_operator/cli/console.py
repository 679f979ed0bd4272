"""Where the command writes: results to standard output, everything else to standard error.

Colours only on a terminal, and none with NO_COLOR; a program that reads the output gets plain text or data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console, RenderableType

from finetune_operator.api.problems import Problem
from finetune_operator.documents.scalars import NotResolvableError, resolve


class Output(StrEnum):
    """Form of a result."""

    TEXT = "text"
    YAML = "yaml"
    JSON = "json"


class DocumentOutput(StrEnum):
    """Form of a result that is a document by nature."""

    YAML = "yaml"
    JSON = "json"


class UsageError(typer.BadParameter):
    """A call that is wrong: told with the usage line, and ended with exit code 2."""

    def format_message(self) -> str:
        """The text alone: it names the option itself."""
        return self.message


def program_name() -> str:
    """What the user typed: `kubectl finetune` when kubectl started this as its plug-in."""
    return "kubectl finetune" if Path(sys.argv[0]).name.startswith("kubectl-finetune") else "finetune"


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        # Lines in a log or a pipe are not broken: a path cut in two cannot be searched for.
        console.width = 200
    return console


def out() -> Console:
    """Standard output."""
    return _console(stderr=False)


def err() -> Console:
    """Standard error."""
    return _console(stderr=True)


def print_trimmed(console: Console, what: RenderableType) -> None:
    """Print with no spaces at the ends of lines: text that is copied or compared has none."""
    with console.capture() as capture:
        console.print(what)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def note(text: str) -> None:
    """Tell something that is no error."""
    err().print(f"Note: {text}", style="dim", soft_wrap=True)


def note_misfits(problems: Sequence[Problem]) -> None:
    """Tell what does not fit so far."""
    for problem in problems:
        note(f"{problem.path} {problem.rule}. Prepare measures first, and the plan is made anew.")


def complain(text: str) -> None:
    """Tell why the command fails."""
    err().print(f"Error: {text}", style="red", soft_wrap=True)


def described(problem: Problem, source: str) -> str:
    """`FILE:LINE: path: value V: rule. Way out.`, leaving out what is not known."""
    place = source if problem.line is None else f"{source}:{problem.line}"
    what = [problem.path] if problem.path else []
    if problem.value is not None:
        what.append(f"value {problem.value}")
    way_out = problem.way_out[:1].upper() + problem.way_out[1:]
    return ": ".join([place, *what, f"{_ended(problem.rule)} {_ended(way_out)}"])


def _ended(text: str) -> str:
    return text if not text or text[-1] in ".?!" else f"{text}."


def report(problems: Sequence[tuple[str, Problem]]) -> None:
    """All problems with their files, one a line."""
    console = err()
    for source, problem in problems:
        console.print(described(problem, source).rstrip(), style="red", soft_wrap=True)


def problem_data(source: str, problem: Problem) -> dict[str, Any]:
    """A problem for `-o json`."""
    return {
        "file": source,
        "line": problem.line,
        "column": problem.column,
        "path": problem.path,
        "value": problem.value,
        "rule": problem.rule,
        "wayOut": problem.way_out,
        "reason": problem.reason,
    }


def emit(values: Sequence[Any], output: Output | DocumentOutput) -> None:
    """Data on standard output: one value as itself; several as a list in JSON and as documents in YAML."""
    if output == "json":
        print(json.dumps(values[0] if len(values) == 1 else list(values), indent=2, ensure_ascii=False))
    else:
        print(documents(values), end="")


def documents(values: Sequence[Any]) -> str:
    """YAML, a document each."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and in quotes what kubectl would read as something other than
    text."""

    def ignore_aliases(self, data: object) -> bool:
        """Equal parts are written out: a reader should not have to know anchors."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _stays_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _stays_text(text: str) -> bool:
    try:
        return isinstance(resolve(text, None, plain=True), str)
    except NotResolvableError:
        return False


_Dumper.add_representer(str, _text)
