"""Python stacks of a process that makes no progress, written into its log.

A hanging rank cannot report it, and the others wait for it in a collective operation, so every rank writes its stacks
after a long silence. A thread of the interpreter's own does that: it needs neither the main thread nor the GIL, which a
library may hold forever. Nothing is stopped here; the operator does that, and keeps the end of the log.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from finetune_contract.layout import ENV_STACKS_SECONDS
from finetune_trainer.core.progress import ProgressSink

log = logging.getLogger(__name__)

APART_SECONDS = 0.25
"""Delay between the stacks of two ranks: they fall silent at the same moment, and share a log."""


def as_rank(rank: int, size: int, work: Callable[[], int]) -> int:
    """Call `work` below a frame whose name contains the rank: stacks hold only names of functions."""

    def frame() -> int:
        return work()

    frame.__code__ = frame.__code__.replace(co_name=f"rank_{rank}_of_{size}")
    return frame()


@dataclass(frozen=True)
class StacksWhenSilent:
    """Forwards progress; each update postpones the writing of the stacks."""

    sink: ProgressSink
    seconds: float

    def update(self, step: int, total: int, **values: float) -> None:
        """See `ProgressSink`; called on every rank."""
        faulthandler.dump_traceback_later(self.seconds, file=sys.stderr)
        self.sink.update(step, total, **values)

    def close(self) -> None:
        """Cancel the writing: the stage is over."""
        faulthandler.cancel_dump_traceback_later()
        self.sink.close()


def with_stacks(sink: ProgressSink, rank: int, environment: Mapping[str, str] | None = None) -> ProgressSink:
    """Return `sink`, with stacks where the environment asks for them."""
    text = (os.environ if environment is None else environment).get(ENV_STACKS_SECONDS)
    if text is None:
        return sink
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        log.warning("%s is %r, which is not a number of seconds; no stacks will be written.", ENV_STACKS_SECONDS, text)
        return sink
    return StacksWhenSilent(sink, int(text) + rank * APART_SECONDS)
