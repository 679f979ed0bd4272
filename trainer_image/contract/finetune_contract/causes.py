"""Root cause of a failed gang of processes: the first failure over all of them, not its echo in the others.

A pure function of the processes' reports and exits; the launcher that started them collects both. It knows no log
formats.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finetune_contract.layout import CLASS_OF_EXIT_CODE, EXIT_OK, FailureClass
from finetune_contract.report import FailureReport, TrainerReport

ECHOES = (FailureClass.COLLECTIVE, FailureClass.PREEMPTED)
"""Failures of the remaining ranks once one is lost: their connection broke, or the launcher terminated them."""

_SIGNAL_BASE = 128
"""Shells and container runtimes report a signal as 128 + its number."""


@dataclass(frozen=True)
class Cause:
    """Failure and the rank it happened on; None when no single rank can be named."""

    rank: int | None
    failure: FailureReport


def first_cause(reports: Iterable[TrainerReport], ends: Mapping[int, int], time: float = 0.0) -> Cause | None:
    """Return the earliest failure that is not an echo; None when no report and no exit shows a failure.

    `ends`: rank -> exit code of the processes known to have failed, as `of_exit` takes it, in the order observed. A
    rank that failed without a report is a cause of its own, unless it was terminated; `time` (Unix, seconds) is when
    that was observed.
    """
    failed = sorted(
        ((report.failure.known_time, report.rank, report.failure) for report in reports if report.failure is not None),
        key=lambda entry: entry[:2],
    )
    for _, rank, failure in failed:
        if failure.failure_class not in ECHOES:
            return Cause(rank, failure)
    reported = {rank for _, rank, _ in failed}
    silent = [Cause(rank, of_exit(code, time)) for rank, code in ends.items() if rank not in reported]
    for cause in silent:
        if cause.failure.failure_class not in ECHOES:
            return cause
    if failed:
        _, rank, failure = failed[0]
        return Cause(rank, failure)
    return silent[0] if silent else None


def of_exit(code: int, time: float = 0.0, subject: str = "The process") -> FailureReport:
    """Return the failure of a process that exited without a report.

    `code` is minus the signal for a killed one, or 128 + it as a shell or a container reports it; the contract's own
    codes above that have the meaning of its table. `subject` begins the message.
    """
    signalled = signal_of(code)
    if signalled is not None:
        return _killed(signalled, time, subject)
    if code == EXIT_OK:
        return FailureReport(
            failure_class=FailureClass.PROGRAM,
            reason="NoReport",
            message=f"{subject} ended with exit code 0 but wrote no success report, so its results may be incomplete.",
            hint="Look for code that ends the process early, e.g. os._exit in a library.",
            time=time,
        )
    return FailureReport(
        failure_class=CLASS_OF_EXIT_CODE.get(code, FailureClass.PROGRAM),
        reason="NoReport",
        message=f"{subject} ended with exit code {code} and wrote no report.",
        hint="See the last lines of the log.",
        time=time,
    )


def of_oom_kill(failure: FailureReport) -> FailureReport:
    """Return `failure`, of class KILLED, with the kernel's out-of-memory killer as its cause."""
    return FailureReport(
        failure_class=FailureClass.OUT_OF_MEMORY,
        reason="OOMKilled",
        message=f"{failure.message} Memory ran out: the kernel's out-of-memory killer has ended a process here.",
        hint="Raise resources.memory, lower training.microBatchSize or preparation.maxLength, or shard or offload more "
        "under parallelism. For a script, change its own settings.",
        time=failure.time,
    )


def signal_of(code: int) -> int | None:
    """Return the signal that ended the process; None when it exited by itself."""
    if code < 0:
        return -code
    number = code - _SIGNAL_BASE
    known = CLASS_OF_EXIT_CODE.get(code)
    if number not in signal.valid_signals() or (known is not None and number not in (signal.SIGKILL, signal.SIGTERM)):
        return None
    return number


def _killed(number: int, time: float, subject: str) -> FailureReport:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return FailureReport(
            failure_class=FailureClass.KILLED,
            reason="Killed",
            message=f"{subject} was killed from outside with {name} (exit code 137).",
            hint="Nothing shows that memory ran out. Look for who killed it: a person, or a watchdog of the node.",
            time=time,
        )
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        return FailureReport(
            failure_class=FailureClass.PREEMPTED,
            reason="Terminated",
            message=f"{subject} was stopped by {name} before it could save or report.",
            hint="Run the job again; it resumes from its last checkpoint.",
            time=time,
        )
    return FailureReport(
        failure_class=FailureClass.PROGRAM,
        reason="KilledBySignal",
        message=f"{subject} was ended by {name} and wrote no report.",
        hint="See the last lines of the log; a crash in a native library leaves its trace there.",
        time=time,
    )
