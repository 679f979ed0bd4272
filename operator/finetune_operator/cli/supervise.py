"""A process between `finetune run` and a stage, so that nothing of a stage outlives the command.

torchrun puts its workers into sessions of their own, and tokenisers start pools: killing a process group does
not reach them, and a command that was killed outright can clean up nothing. So each stage runs below this
small program. It holds one end of a pipe (its standard input): when the other end closes, because the command
wants the stage gone or is itself gone, everything below is killed. It passes SIGTERM on, so that a stage can
save, and ends as the stage ended (128 + signal for a killed one).

It imports neither torch nor anything of ours; it must start at once and not fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: processes that lose their parent become children of this one, so that they can still be
found."""

POLL_SECONDS = 0.1


def main(command: list[str]) -> int:
    """Run `command` to its end and return its exit code."""
    # The terminal's Ctrl-C is for the command above, which then decides what this stage is told.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A SIGTERM that comes while the stage is being started waits until it can be passed on; it would end this process
    # alone, and leave the stage behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    stage = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_listen_to_signals)
    signal.signal(signal.SIGTERM, lambda *_: stage.send_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while stage.poll() is None:
        if _command_is_gone():
            break
    _kill_everything_below()
    code = stage.wait()
    _bury_the_adopted()
    return 128 - code if code < 0 else code


def _listen_to_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _command_is_gone() -> bool:
    """Waits up to POLL_SECONDS for the end of the pipe; nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) == b""


def _kill_everything_below() -> None:
    """Again until nobody is left: what is killed may have started another before, and its children come to
    us."""
    while below := [process for process in psutil.Process().children(recursive=True) if _alive(process)]:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)  # waiting through psutil would take the stage's exit code away from Popen


def _bury_the_adopted() -> None:
    """Take note of the ends of processes that came to us; where init does not, they would stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
