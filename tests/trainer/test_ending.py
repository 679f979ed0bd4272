"""A process ends after the threads of its collectives, also if it runs a user's program."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread, get_native_id
from types import SimpleNamespace

import pytest

from finetune_trainer.core import orderly_exit
from finetune_trainer.scripts import site
from suite_plugins.patience import patient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen in /proc")

PROGRAM = """
import hashlib, pathlib, sys, threading
def compute():
    pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    named.set()
    hashlib.pbkdf2_hmac("sha512", b"", b"", 100_000)  # some hundredths of a second without the interpreter
    pathlib.Path(sys.argv[1]).write_text("let go")
named = threading.Event()
threading.Thread(target=compute, daemon=True).start()
named.wait()
"""


def run(program: str, *arguments: Path, folders: tuple[Path, ...]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *site.__path__])}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(120), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_program_ends_after_a_thread_that_still_lets_go_of_a_collective(tmp_path: Path):
    run(PROGRAM, tmp_path / "seen", folders=())
    assert (tmp_path / "seen").read_text() == "let go"


@pytest.mark.parametrize("theirs_first", [True, False])
def test_the_sitecustomize_of_the_environment_is_imported_too(theirs_first: bool, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'imported'\n")
    program = "import sys; print(theirs, sys.modules['sitecustomize'].__file__)"
    if theirs_first:
        printed = run(program, folders=(tmp_path,))
    else:
        added = f"import site, sys; sys.path.append({str(tmp_path)!r}); sys.modules.pop('sitecustomize', None)\n"
        ours = f"sys.path.insert(0, {next(iter(site.__path__))!r}); import sitecustomize\n"
        printed = run(added + ours + program, folders=())
    assert printed.split() == ["imported", str(tmp_path / "sitecustomize.py")]


@pytest.fixture
def sleeping() -> Iterator[None]:
    """Run a thread of this process that looks like one waiting for a collective."""
    named, over = Event(), Event()

    def sleep() -> None:
        Path(f"/proc/self/task/{get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        over.wait()

    thread = Thread(target=sleep)
    thread.start()
    named.wait()
    yield
    over.set()
    thread.join()


@pytest.mark.timeout(60)
def test_sleeping_thread_does_not_delay_the_end(sleeping: None, monkeypatch: pytest.MonkeyPatch):
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    # The clock stands still, so patience never runs out.
    monkeypatch.setattr(orderly_exit, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    orderly_exit.let_collectives_end()
    assert slept


def test_exit_waits_for_threads_and_calls_registered_functions():
    program = (
        "import atexit, threading, time\n"
        "from finetune_trainer import __main__ as trainer\n"
        "def late(): threading.main_thread().join(0.2); print('a thread has ended')\n"
        "trainer.run = lambda arguments: threading.Thread(target=late).start() or 0\n"
        "atexit.register(print, 'the last word')\n"
        "trainer.main([])\n"
        "print('not reached')\n"
    )
    assert run(program, folders=()) == "a thread has ended\nthe last word\n"


ENDLESS = """
import atexit, threading
from finetune_trainer.core import orderly_exit
orderly_exit._EXIT_SECONDS = 0.2
forever = threading.Event()
threading.Thread(target=forever.wait).start()
atexit.register(forever.wait)
orderly_exit.settle_exit()
"""


def test_exit_handler_that_never_returns_does_not_hold_the_process():
    run(ENDLESS, folders=(Path(orderly_exit.__file__).parents[2],))
