"""Every command answers an unusable file without a traceback: with the file, the fault, and exit code 1 or 2."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from typer.testing import CliRunner, Result

from each_case import each_case
from examples import EXAMPLES, FOLDER
from finetune_command import finetune
from finetune_operator.cli.main import app
from finetune_operator.controller.command import app as operator_app
from finetune_operator.documents import MAX_BYTES, read_documents
from suite_plugins.fuzz import examples
from suite_plugins.selection import covering

GOOD = str(FOLDER / "quickstart.yaml")
COMMANDS: dict[str, Callable[[str], tuple[object, list[str]]]] = {
    "validate": lambda file: (app, ["validate", file]),
    "validate --settings": lambda file: (app, ["validate", "--settings", file, GOOD]),
    "plan": lambda file: (app, ["plan", "--no-measure", file]),
    "render": lambda file: (app, ["render", "--no-measure", file]),
    "review": lambda file: (app, ["review", file]),
    "run": lambda file: (app, ["run", "--dry-run", "--no-measure", file]),
    "images": lambda file: (app, ["images", file]),
    "images --values": lambda file: (app, ["images", "--values", file]),
    "check-settings": lambda file: (operator_app, ["check-settings", file]),
}
JOB = b"apiVersion: finetune.dev/v1alpha1\nkind: FineTuneJob\n"
BROKEN = {
    "nothing": b"",
    "a comment": b"# to be written\n",
    "an unfinished list": b"a: [1,\n",
    "a colon in a value": b"a: b: c\n",
    "a tab": b"a:\n\t- 1\n",
    "the braces of Helm": b"a: {{ .Values.name }}\nb:\n{{- if .Values.b }}\n",
    "half of a character": b"\xff\xfea",
    "UTF-16": "a: [".encode("utf-16"),
    "Latin 1": "name: Jürgen\n".encode("latin-1"),
    "NUL": b'a: "\0"\n',
    "an alias bomb": b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (at, at, b", ".join([b"*%c" % (at - 1)] * 9)) for at in b"bcdefgh"),
    "an alias of itself": b"a: &a [*a]\n",
    "deep lists": b"[" * 10_000,
    "deep objects": b'{"a":' * 10_000,
    "a deep object in a job": b'{"kind": "FineTuneJob", "spec": {"template": {"affinity": '
    + b'{"a":' * 90
    + b"1"
    + b"}" * 93,
    "a scalar": b"job\n",
    "null": b"null\n",
    "a list": b"- a\n- b\n",
    "a number that is none": JOB + b"spec: {training: {epochs: .nan}}\n",
    "an enormous number": JOB + b"spec: {seed: " + b"9" * 5000 + b"}\n",
    "another kind": b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n",
    "a kind that is no text": b"apiVersion: [1]\nkind: {a: b}\nmetadata: 7\nspec: []\n",
    "a List without items": b"apiVersion: v1\nkind: List\n",
    "an archive": b"PK\x03\x04" + bytes(range(256)) * 8,
    "too much": b"#" * (MAX_BYTES + 1),
}
HOSTILE = some.sampled_from([
    *b"""{~[~}~: ~- ~\t~&a ~*a~!!int ~<<: *a~? ~'~"~%~---\n~\0~\xff~{{ x }}~null~1e999~.inf~0x~|""".split(b"~"),
    "\u2028".encode(),
    b"9" * 400,
    b"a" * 5000,
    b"[" * 300,
])  # fmt: skip
"""Bytes to insert into an example."""


def run_command(command: str, file: Path | str) -> Result:
    cli, arguments = COMMANDS[command](str(file))
    return CliRunner().invoke(cli, arguments)  # type: ignore[arg-type]  # a Typer, whichever


def assert_answered(result: Result, codes: Sequence[int] = (0, 1, 2)) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in codes
    assert "Traceback" not in result.output
    assert result.exit_code == 0 or result.output.strip(), "it says nothing"


GRID = {f"{command} of {content}": (command, content) for command in COMMANDS for content in BROKEN}


@cache
def refusal(content: str) -> str:
    """Return the step that refuses the content."""
    documents, problems = read_documents(BROKEN[content])
    return problems[0].reason if problems else "after reading" if documents else "nothing"


def axes(case: tuple[str, str]) -> dict[str, Hashable]:
    """Return the axes: commands share the reader, so each meets every kind of refusal, but not every content."""
    command, content = case
    return {"command": command, "refusal": refusal(content), "content": content}


@pytest.mark.parametrize("case", covering("broken files", GRID, axes))
def test_broken_file_is_reported(case: str, tmp_path: Path) -> None:
    command, content = GRID[case]
    file = tmp_path / "broken.yaml"
    file.write_bytes(BROKEN[content])
    assert_answered(run_command(command, file))


def test_helm_template_is_recognized() -> None:
    _, (problem,) = read_documents(BROKEN["the braces of Helm"])
    assert "helm template" in problem.hint


@each_case("command", ["plan", "run"])
@each_case("example", EXAMPLES)
def test_every_example_is_answered_also_where_it_cannot_run(command: str, example: str) -> None:
    assert_answered(run_command(command, FOLDER / f"{example}.yaml"))


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_path_is_reported(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name in ("absent.yaml", "empty", "loop.yaml", "x" * 300 + ".yaml", "y" * 5000, "empty/absent.yaml/a"):
        assert_answered(run_command(command, tmp_path / name), codes=(1, 2))
    for name in ("/dev/zero", "", "a\0b"):  # endless, nameless, with an impossible name
        assert_answered(run_command(command, name), codes=(1, 2))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_read_as_a_file(command: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"a: [1,\n"))
    writer.start()
    result = run_command(command, pipe)
    writer.join()
    assert_answered(result, codes=(1, 2))
    assert "pipe.yaml" in result.output


@some.composite
def broken(draw: some.DrawFn) -> bytes:
    """Return an example with parts removed, doubled, replaced or spelled otherwise."""
    text = draw(some.sampled_from(SOURCES))
    for _ in range(draw(some.integers(1, 4))):
        start = draw(some.integers(0, len(text)))
        end = min(len(text), start + draw(some.sampled_from([0, 1, 2, 8, 40, 400])))
        middle = draw(some.one_of(some.just(b""), HOSTILE, some.binary(max_size=8), some.just(text[start:end] * 2)))
        text = text[:start] + middle + text[end:]
    return text


SOURCES = [(FOLDER / f"{name}.yaml").read_bytes() for name in EXAMPLES]


@pytest.mark.parametrize("command", COMMANDS)
@examples(8, everything=80)
@given(content=broken())
def test_no_broken_example_ends_in_a_traceback(
    command: str, tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "broken-example.yaml"
    file.write_bytes(content)
    assert_answered(run_command(command, file))


@pytest.mark.parametrize("command", ["validate", "plan", "render", "review", "run"])
def test_command_reports_a_broken_file_with_its_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(BROKEN["an unfinished list"])
    # A fault of the program's start would show in one of them.
    ran = finetune(command, "broken.yaml", folder=tmp_path, own_process=command == "validate")
    assert ran.returncode == 1
    assert "broken.yaml:2" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
