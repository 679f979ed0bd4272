"""Texts of pods on a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import io

import pytest

from finetune_contract.layout import FailureClass
from finetune_operator.cli.terminal import console
from finetune_operator.cli.terminal.printable_console import PrintableConsole
from finetune_operator.jobs.outcomes.remedies import Cause
from finetune_operator.spec.printable import printable

HOSTILE = "a\x1b[2Jb\x07c\u202ed\u2066e\x9bf\rg\x00h\x7f"
SHOWN = "a\ufffd[2Jb\ufffdc\ufffdd\ufffde\ufffdf\ufffdg\ufffdh\ufffd"


def test_control_characters_are_replaced_and_lines_and_letters_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("one\r\ntwo\n\tü 日本 עברית 🏔") == "one\ntwo\n\tü 日本 עברית 🏔"


def test_a_console_obeys_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("name")
    table.add_row(HOSTILE)
    made = PrintableConsole(file=io.StringIO(), force_terminal=True, width=80)
    made.print(HOSTILE)
    made.print(HOSTILE, style="bold red")
    made.print(table)
    console.print_line(HOSTILE)
    file = made.file
    assert isinstance(file, io.StringIO)
    for written in (file.getvalue(), capsys.readouterr().out):
        assert "\x1b[2J" not in written
        assert not set("\x07\u202e\u2066\x9b\x00") & set(written)


def test_a_failure_holds_no_control_characters() -> None:
    failure = Cause(FailureClass.DATA, "Reason", HOSTILE, hint=HOSTILE).to_failure_status(None, None)
    assert (failure.message, failure.hint) == (SHOWN, SHOWN)
