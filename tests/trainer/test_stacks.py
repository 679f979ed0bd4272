"""A process that makes no progress prints its stacks, whatever it hangs in."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_contract.layout import ENV_STACKS_SECONDS
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.stage.stacks import with_stacks
from suite_plugins.patience import patient

PROGRAM = """
import ctypes, sys, time
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.stage.stacks import as_rank, with_stacks

def hangs():
    sys.setswitchinterval(1e9)  # nobody else gets the interpreter's lock while this one counts
    written, end = ctypes.create_string_buffer(65536), time.monotonic() + {patience}
    pread = ctypes.PyDLL(None).pread  # keeps the lock, unlike os.pread
    while b"<module>" not in written.value and time.monotonic() < end:
        sum(range(1000))
        pread(2, written, 65535, ctypes.c_int64(0))
    return 0

def work():
    sink = with_stacks(NoProgress(), 0)
    sink.update(1, 2)
    {then}

sys.exit(as_rank(3, 4, work))
"""


def ran(tmp_path: Path, seconds: int, then: str) -> str:
    """Run PROGRAM with that limit of silence; return its standard error."""
    script, errors = tmp_path / "rank.py", tmp_path / "errors"
    script.write_text(PROGRAM.format(then=then, patience=patient(120)))
    with errors.open("w+b") as file:
        environment = {ENV_STACKS_SECONDS: str(seconds)}
        done = subprocess.run([sys.executable, str(script)], env=environment, stderr=file, timeout=patient(300))
    assert done.returncode == 0, errors.read_text()
    return errors.read_text()


def test_a_rank_that_holds_the_interpreter_shows_where_and_which_it_is(tmp_path: Path):
    stack = ran(tmp_path, 1, "return hangs()")
    functions = re.findall(r" in (\S+)$", stack, re.MULTILINE)
    assert functions == ["hangs", "work", "rank_3_of_4", "as_rank", "<module>"]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("sink.close(); time.sleep(1.25 * {seconds}); return 0", id="it is over"),
        pytest.param(
            "[(time.sleep({seconds} / 20), sink.update(step, 99)) for step in range(25)]; sink.close(); return 0",
            id="it goes on",
        ),
    ],
)
def test_no_stacks_are_written_during_progress_or_after_the_stage(tmp_path: Path, then: str):
    seconds = math.ceil(patient(1))
    assert ran(tmp_path, seconds, then.format(seconds=seconds)) == ""


def test_without_a_time_nothing_watches(caplog: pytest.LogCaptureFixture):
    sink = NoProgress()
    assert with_stacks(sink, 0, {}) is sink
    assert caplog.text == ""
    for wrong in ("", "0", "soon", "-5"):
        assert with_stacks(sink, 0, {ENV_STACKS_SECONDS: wrong}) is sink
    assert caplog.text.count(ENV_STACKS_SECONDS) == 4
