"""A process that makes no progress says where it stands, whatever it hangs in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_contract.layout import ENV_STACKS_SECONDS
from finetune_trainer.progress import NoProgress
from finetune_trainer.stacks import with_stacks

PROGRAM = """
import sys, time
from finetune_trainer.progress import NoProgress
from finetune_trainer.stacks import as_rank, with_stacks

def hangs():
    sys.setswitchinterval(1e9)  # nobody else gets the interpreter's lock while this one counts
    end = time.monotonic() + 4
    while time.monotonic() < end:
        sum(range(1000))
    return 0

def work():
    sink = with_stacks(NoProgress(), 0)
    sink.update(1, 2)
    {then}

sys.exit(as_rank(3, 4, work))
"""


def ran(tmp_path: Path, then: str) -> str:
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM.format(then=then))
    done = subprocess.run(
        [sys.executable, str(script)], env={ENV_STACKS_SECONDS: "2"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_rank_that_holds_the_interpreter_shows_where_and_which_it_is(tmp_path: Path):
    stack = ran(tmp_path, "return hangs()")
    functions = re.findall(r" in (\S+)$", stack, re.MULTILINE)
    assert functions == ["hangs", "work", "rank_3_of_4", "as_rank", "<module>"]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("sink.close(); time.sleep(2.5); return 0", id="it is over"),
        pytest.param(
            "[(time.sleep(0.1), sink.update(step, 99)) for step in range(30)]; sink.close(); return 0", id="it goes on"
        ),
    ],
)
def test_nothing_is_written_while_there_is_progress_or_when_the_stage_is_over(tmp_path: Path, then: str):
    assert ran(tmp_path, then) == ""


def test_without_a_time_nothing_watches(caplog: pytest.LogCaptureFixture):
    sink = NoProgress()
    assert with_stacks(sink, 0, {}) is sink
    assert caplog.text == ""
    for wrong in ("", "0", "soon", "-5"):
        assert with_stacks(sink, 0, {ENV_STACKS_SECONDS: wrong}) is sink
    assert caplog.text.count(ENV_STACKS_SECONDS) == 4
