"""Process that plans jobs for the operator: settings and limits, then requests, from its standard input.

    python -P -m finetune_operator.controller.reconcile.plan_process

Frames are pickles behind their length. A plan that takes too much CPU ends the process by SIGPROF.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from finetune_operator.jobs.state.plan_table import Answer, PlanningFailedError, planned, refusal
from finetune_operator.plan.types.plan_types import PlanRequest
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import Settings

NICENESS = 10
LENGTH = struct.Struct("!I")
"""Length of a frame in bytes."""


def read(stream: BinaryIO) -> Any:
    """Return the next frame. EOFError at the end."""
    length = stream.read(LENGTH.size)
    if len(length) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*LENGTH.unpack(length)))


def frame(value: object) -> bytes:
    """Return a value as a frame."""
    content = pickle.dumps(value)
    return LENGTH.pack(len(content)) + content


@dataclass(frozen=True)
class Limits:
    """Limits of one plan."""

    cpu_seconds: float = 30.0
    """CPU time; the slowest seen, 70 billion parameters on 16 old GPUs, takes a tenth."""
    memory_bytes: int = 512 << 20
    """Address space of the process, which takes 50 MB without a plan."""


def too_much(limit: str) -> Problem:
    """Return the problem of a job whose plan takes more than a limit."""
    rule = f"planning must not take more than {limit}, and this job's does"
    return Problem("", None, rule, "request fewer GPUs or a known model, set spec.parallelism, or report this as a bug")


def answer(request: PlanRequest, settings: Settings, limits: Limits) -> Answer:
    """Return the plan for a table, within the limits."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        return planned(request, settings)
    except MemoryError:
        return refusal((too_much(f"{limits.memory_bytes >> 20} MiB of memory"),))
    except Exception as error:
        failed = PlanningFailedError(f"{type(error).__name__}: {error}")
        failed.add_note(traceback.format_exc())
        return failed
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer until the operator closes the pipe."""
    # The operator ends this process, which ctrl-C in a terminal reaches as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Probes and reports, which the operator answers, come before plans.
    os.nice(NICENESS)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # A stray print must not end up among the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        settings, limits = read(requests)
        # macOS does not limit it, and a lower limit of the surroundings stays.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        while True:
            answers.write(frame(answer(read(requests), settings, limits)))
            answers.flush()
    except (EOFError, BrokenPipeError):
        pass


if __name__ == "__main__":
    main()
