"""Turns of threads that write with one model: one computes at a time, and hands over after each token."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """A fair lock: handed on in the order of the requests."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the turn inside the context."""
        self._take()
        try:
            yield
        finally:
            self._leave()

    def hand_on(self) -> float:
        """Let all waiting threads have a turn before the caller's next one; return the seconds that they took.

        Restores the caller's random state, as all threads draw from one generator.
        """
        if not self._waiting:
            return 0.0
        import torch

        began, drawn = time.perf_counter(), torch.get_rng_state()
        self._leave()
        self._take()
        torch.set_rng_state(drawn)
        return time.perf_counter() - began

    def _take(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def _leave(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
