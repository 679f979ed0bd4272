"""One stage as processes of this machine: started, watched, told to stop, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

GRACE_SECONDS = 60
"""Time to save a checkpoint after the first Ctrl-C or SIGTERM."""


class StageProcess:
    """A running stage below its supervisor (see `supervise`); all output goes to one log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "finetune_operator.cli.supervise", *command],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """None while it runs; 128 + the signal for a stage that was killed."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def ask_to_stop(self) -> None:
        """SIGTERM: the stage saves what it can and ends."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything that belongs to the stage and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP while stages run, in place of the default that would tear the command
    away."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in self.SIGNALS:
            # What is ignored already (nohup does that to SIGHUP) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned it takes back

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, 129 for a terminal that went away."""
        return 128 + (self.first or signal.SIGINT)
