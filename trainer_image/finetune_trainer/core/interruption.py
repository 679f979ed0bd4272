"""SIGTERM, SIGINT and, below mpirun, which forwards no other, SIGUSR1: end at once where nothing can be saved, after
the step where training can save.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError


def preempted(where: str) -> StageError:
    """Return the error that ends a stage after a signal to stop; exit code 143."""
    return StageError(
        FailureClass.PREEMPTED,
        "Interrupted",
        f"The process was stopped {where}.",
        "Start it again; training resumes.",
    )


class Interruption:
    """Requests to stop this process.

    Until `defer` a signal raises StageError PREEMPTED at once; from then on it is only recorded. A launcher forwards
    one Ctrl-C as a second signal, so any number of them counts as one.
    """

    def __init__(self) -> None:
        self._deferred = False
        self.requested = False

    def install(self) -> None:
        """Handle the three signals; only the main thread can, elsewhere (in a test) nothing happens."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, self._on_signal)

    def defer(self) -> None:
        """From now on record signals in `requested`, for the loop to act upon between two steps."""
        self._deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if first and not self._deferred:
            raise preempted(
                f"by {signal.Signals(number).name} outside of training steps, where there is nothing to save"
            )
