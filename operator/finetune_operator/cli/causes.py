"""Why a stage failed: the first cause over all its processes, not the echo of it in the others."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, EXIT_OK, FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.api.types import FailureStatus

LOG_LINES = 15
LOG_BYTES = 4096

ECHOES = (FailureClass.COLLECTIVE, FailureClass.PREEMPTED)
"""What the other ranks report once one is gone: their connection broke, or torchrun told them to end."""

_TORCHRUN_RANK = re.compile(r"rank +: (?P<rank>\d+) .*\n.*exitcode +: (?P<code>-?\d+)")
"""One failed rank in torchrun's summary (`torch.distributed.elastic.multiprocessing.errors`); the root cause
comes last."""

_DEADLY = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTERM}
)


def first_cause(stage: Stage, exit_code: int, reports: Path, log: Path) -> FailureStatus:
    """The failure of a stage that ended with `exit_code` and left no completion marker."""
    text = log.read_text(errors="replace") if log.exists() else ""
    failed = sorted(
        (report for report in _reports(reports, stage) if report.failure is not None),
        key=lambda report: report.failure.time if report.failure else 0.0,
    )
    own = [report for report in failed if report.failure and report.failure.failure_class not in ECHOES]
    killed = _killed_rank(exit_code, text, {report.rank for report in failed})
    if own:
        rank, cause = own[0].rank, own[0].failure
    elif killed is not None:
        rank, cause = killed[0], _killed(killed[1])
    elif failed:
        rank, cause = failed[0].rank, failed[0].failure
    else:
        rank, cause = None, _silent(stage, exit_code)
    assert cause is not None
    return FailureStatus(
        failure_class=cause.failure_class.value,
        reason=cause.reason,
        message=cause.message,
        hint=cause.hint or None,
        stage=stage.value,
        rank=rank,
        exit_code=EXIT_CODES[cause.failure_class] if exit_code != EXIT_OK else exit_code,
        log_tail=_tail(text),
    )


def _reports(folder: Path, stage: Stage) -> list[TrainerReport]:
    reports = []
    for file in folder.glob(f"{stage}-*.json"):
        try:
            reports.append(TrainerReport.model_validate_json(file.read_text()))
        except (OSError, ValidationError):
            continue  # a process that was killed while it wrote; its signal says more
    return reports


def _killed_rank(exit_code: int, log: str, reported: set[int]) -> tuple[int, int] | None:
    """Rank and signal of a process that was killed and so could not report.

    torchrun lists every failed rank and calls the one root cause that it saw first; when it sees several at
    one look, that may be a rank that merely lost its connection. Its own SIGTERM to the others comes after,
    so other signals go before that one.
    """
    ended = [(int(found["rank"]), int(found["code"])) for found in _TORCHRUN_RANK.finditer(log)]
    if not ended:
        return (0, exit_code - 128) if exit_code - 128 in _DEADLY and 0 not in reported else None
    killed = [(rank, -code) for rank, code in reversed(ended) if code < 0 and rank not in reported]
    return min(killed, key=lambda one: one[1] == signal.SIGTERM, default=None)


def _killed(number: int) -> FailureReport:
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    if number == signal.SIGKILL:
        return FailureReport(
            failure_class=FailureClass.OUT_OF_MEMORY,
            reason="Killed",
            message=f"The process was killed from outside with {name} (exit code 137) and could not say why. "
            "Most often the kernel does this when memory runs out.",
            hint="Look at the kernel's log (dmesg). If it was memory, set training.microBatchSize or "
            "preparation.maxLength lower, or shard or offload more under parallelism.",
        )
    if number == signal.SIGTERM:
        return FailureReport(
            failure_class=FailureClass.PREEMPTED,
            reason="Terminated",
            message="The process was told to end (SIGTERM), and not by this command; it could not say why.",
            hint="Run the job again; it goes on from its last checkpoint.",
        )
    return FailureReport(
        failure_class=FailureClass.PROGRAM,
        reason="KilledBySignal",
        message=f"The process was ended by {name} and could not say why.",
        hint="The log's last lines are below; a crash in a native library leaves its trace there.",
    )


def _silent(stage: Stage, exit_code: int) -> FailureReport:
    if exit_code == EXIT_OK:
        return FailureReport(
            failure_class=FailureClass.PROGRAM,
            reason="NoCompletionMarker",
            message=f"The process ended with exit code 0, but state/{stage}.json is not there, so its results may "
            "not be whole.",
            hint="Something inside the process ended it early, e.g. os._exit in a library; see the log.",
        )
    return FailureReport(
        failure_class=FailureClass.PROGRAM,
        reason="NoReport",
        message=f"The process ended with exit code {exit_code} and left no report.",
        hint="The log's last lines are below.",
    )


def _tail(log: str) -> str | None:
    lines = log.rstrip().splitlines()[-LOG_LINES:]
    text = "\n".join(lines).encode()[-LOG_BYTES:].decode(errors="ignore")
    return text or None
