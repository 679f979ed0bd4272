"""A thread that works beside the training, and whose error the training raises."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWork:
    """Work of one thread, begun at once. The thread is a daemon: a process that fails does not wait for it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `wait` raises it
            self._error = error

    @property
    def done(self) -> bool:
        """True once the work has ended, also with an error."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True once the work has ended with an error."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the end of the work, and raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
