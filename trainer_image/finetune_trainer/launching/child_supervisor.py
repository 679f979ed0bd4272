"""Supervision of one program and all its descendants: start it, pass on the stop signal, wait, leave none behind.

The first process of a container gets the kubelet's SIGTERM and inherits every orphan. torchrun puts its ranks into
sessions of their own and tokenisers start pools, so neither a process group nor a parent's death reaches all of them:
this process adopts orphans and at the end kills all remaining descendants. psutil is imported only then, so that the
program starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from finetune_contract.layout import DEFAULT_GRACE_SECONDS, ENV_GRACE_SECONDS, FailureClass

if TYPE_CHECKING:
    import psutil

MARGIN_SECONDS = 5
"""Share of the grace period for a layer's own end: the agent's in the launcher's, the launcher's in the pod's."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: orphaned descendants become children of this process."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""mpirun passes SIGUSR1 on to its ranks, and no other signal before SIGKILL."""
_TAIL_BYTES = 8192
_KILL_AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class End:
    """End of the program."""

    code: int
    """Exit code; minus the signal if it was killed."""
    stop_requested_at: float | None
    """Unix time in seconds of the request to stop; None: there was none."""
    last_output: str
    """End of the stderr of the program and its children."""


def grace_seconds() -> int:
    """Return the time for ranks to save and end; the pod's grace period is two margins longer. StageError CONFIG."""
    text = os.environ.get(ENV_GRACE_SECONDS, str(DEFAULT_GRACE_SECONDS))
    if not text.isdecimal():
        from finetune_trainer.core.failures import StageError

        raise StageError(
            FailureClass.CONFIG,
            "BadProcessVariable",
            f"The environment variable {ENV_GRACE_SECONDS} is {text!r}; it must be a number of seconds.",
            "Correct it, or leave it out.",
        )
    return max(1, int(text) - 2 * MARGIN_SECONDS)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, as a killed parent cannot. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ChildSupervisor:
    """Runs one program in the main thread of this process."""

    def __init__(
        self, request_stop: Callable[[int], None] | None = None, grace_seconds: float = 60.0, attached: bool = False
    ) -> None:
        """`request_stop` stops the program with this process id, by SIGTERM if None; `grace_seconds` later everything
        is killed. `attached`: everything is also killed when our standard input ends, as its writer has ended or wants
        that; and the program when we are killed.
        """
        self._request_stop = request_stop or _terminate
        self._grace = grace_seconds
        self._attached = attached
        self._program: subprocess.Popen[bytes] | None = None
        self._stop_requested_at: float | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> End:
        """Call `start`, then `wait`."""
        self.start(command, environment, folder)
        return self.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        """Start the program in `folder`, else in our own. OSError if it cannot be started."""
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        # A session of its own, or a terminal's Ctrl-C would reach it a second time.
        program = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent if self._attached else None,
        )
        assert program.stderr is not None
        self._tail = _Tail(program.stderr)
        self._program = program
        if self._stop_requested_at is not None:  # the signal came during the start
            self._request_stop(program.pid)
        if self._attached:
            threading.Thread(target=_kill_at_end_of_input, name="stdin", daemon=True).start()

    def kill(self) -> None:
        """Kill the program and its descendants at once; from any thread, while `wait` waits in the main one."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def wait(self) -> End:
        """Wait for the program's end, and kill its remaining descendants."""
        assert self._program is not None, "nothing was started"
        code = _wait_for(self._program)
        # The rest takes a moment, and a signal must not prevent the report.
        for number in (*_STOP_SIGNALS, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        kill_all_descendants()
        return End(code, self._stop_requested_at, self._tail.text())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass on the first signal only: a launcher that gets a second one kills at once."""
        if self._stop_requested_at is not None:
            return
        self._stop_requested_at = time.time()
        signal.setitimer(signal.ITIMER_REAL, self._grace)
        if self._program is not None:
            self._request_stop(self._program.pid)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        _kill(_live_descendants())


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _leave_signals_to_the_main_thread() -> None:
    """Block signals in another thread: it could take one that comes while the process is stopped (SIGSTOP, a frozen
    container), and the main thread, which waits for the program, would not wake up to handle it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP_SIGNALS, signal.SIGALRM})


def _kill_at_end_of_input() -> None:
    _leave_signals_to_the_main_thread()
    while os.read(0, 1):
        pass
    # Sent to the main thread, which waits for the program and would otherwise not wake up.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def _wait_for(program: subprocess.Popen[bytes]) -> int:
    """Return its exit code. Reaps every other child too: adopted orphans would stay as zombies."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program.pid:
            program.returncode = os.waitstatus_to_exitcode(status)
            return program.returncode


def kill_all_descendants() -> None:
    """Kill descendants until none is left: a killed one may have started another, which becomes our child."""
    while descendants := _live_descendants():
        _kill(descendants)
        _reap_children()
        time.sleep(_KILL_AGAIN_SECONDS)
    _reap_children()


def _kill(processes: Sequence[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _live_descendants() -> list[psutil.Process]:
    import psutil

    def alive(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.Process().children(recursive=True) if alive(process)]


class _Tail:
    """Copies a stream to stderr and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._thread = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        _leave_signals_to_the_main_thread()
        while block := os.read(self._stream.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # our stderr is closed: the program must not stop for that
                sys.stderr.buffer.write(block)
                sys.stderr.buffer.flush()
            self._kept.append(block)
            self._size += len(block)
            while self._size - len(self._kept[0]) >= _TAIL_BYTES:
                self._size -= len(self._kept.popleft())

    def text(self) -> str:
        """Wait for the end of the stream, whose writers have all ended by now, and return its tail."""
        self._thread.join(timeout=5)
        return b"".join(self._kept)[-_TAIL_BYTES:].decode(errors="replace").strip()
