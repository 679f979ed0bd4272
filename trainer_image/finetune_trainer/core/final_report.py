"""Final `TrainerReport` of a process, written to the file that its launcher reads.

Several ranks of a pod may share the file. The first failure is the cause and stays; a later report of another rank, for
example on a lost peer, must not replace it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import ValidationError

from finetune_contract.layout import DEFAULT_REPORT_PATH, ENV_REPORT
from finetune_contract.report import TrainerReport

log = logging.getLogger(__name__)


def report_path(rank: int, environment: Mapping[str, str]) -> Path | None:
    """Return the path of this rank's report; None when none was requested and there is no termination log."""
    template = environment.get(ENV_REPORT)
    if template:
        return Path(template.replace("{rank}", str(rank)))
    default = Path(DEFAULT_REPORT_PATH)
    return default if os.access(default, os.W_OK) else None


def write_report(report: TrainerReport, path: Path | None) -> None:
    """Write the report unless the file already holds a failure of this run. Never raises: an error here would hide the
    outcome.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if _holds_failure_of_this_run(file.read()):
                return
            file.seek(0)
            file.truncate()
            file.write(report.to_termination_message())
    except OSError as error:
        log.warning("The report cannot be written to %s: %s", path, error)


def _holds_failure_of_this_run(text: str) -> bool:
    """Return whether `text` is a failure of this run; one from before this process's start is of an earlier attempt."""
    try:
        earlier = TrainerReport.model_validate_json(text)
    except ValidationError:
        return False
    return earlier.failure is not None and earlier.failure.time >= psutil.Process().create_time()
