"""Why a stage of a local run failed: what its processes reported, how they ended, and what the log adds.

Which of them is the cause is the contract's business; what is read here is what only a local run has: torchrun's
summary in the log, and a stage that ended well without its completion marker.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from finetune_contract import causes
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_OK, FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.api.types import FailureStatus

LOG_LINES = 15
LOG_BYTES = 4096

_TORCHRUN_RANK = re.compile(r"rank +: (?P<rank>\d+) .*\n.*exitcode +: (?P<code>-?\d+)")
"""One failed rank in torchrun's summary (`torch.distributed.elastic.multiprocessing.errors`); the root cause
comes last."""


def first_cause(stage: Stage, exit_code: int, reports: Path, log: Path) -> FailureStatus:
    """The failure of a stage that ended with `exit_code` and left no completion marker."""
    text = log.read_text(errors="replace") if log.exists() else ""
    cause = causes.first_cause(_reports(reports, stage), _ends(exit_code, text))
    if cause is None:
        cause = causes.Cause(None, _silent(stage, exit_code))
    failure = cause.failure
    return FailureStatus(
        failure_class=failure.failure_class.value,
        reason=failure.reason,
        message=failure.message,
        hint=failure.hint or None,
        stage=stage.value,
        rank=cause.rank,
        exit_code=failure.exit_code if exit_code != EXIT_OK else exit_code,
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


def _ends(exit_code: int, log: str) -> dict[int, int]:
    """Rank -> exit code of the ranks that failed, first the one that torchrun calls the root cause.

    Without a summary the one process is rank 0, when it was killed: the exit code of one that ended by itself may be
    that of torchrun.
    """
    ended = {int(found["rank"]): int(found["code"]) for found in _TORCHRUN_RANK.finditer(log)}
    if ended:
        return dict(reversed(ended.items()))
    return {0: exit_code} if causes.signal_of(exit_code) is not None else {}


def _silent(stage: Stage, exit_code: int) -> FailureReport:
    if exit_code != EXIT_OK:
        return causes.of_exit(exit_code)
    return FailureReport(
        failure_class=FailureClass.PROGRAM,
        reason="NoCompletionMarker",
        message=f"The process ended with exit code 0, but state/{stage}.json is not there, so its results may "
        "not be whole.",
        hint="Something inside the process ended it early, e.g. os._exit in a library; see the log.",
    )


def _tail(log: str) -> str | None:
    lines = log.rstrip().splitlines()[-LOG_LINES:]
    text = "\n".join(lines).encode()[-LOG_BYTES:].decode(errors="ignore")
    return text or None
