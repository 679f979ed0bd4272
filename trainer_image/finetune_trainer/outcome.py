"""The last word of a process: its `TrainerReport`, where the one who started it looks for it.

Several ranks of a pod may share the file. The first failure is the cause and stays; what another rank says later,
about a peer that went away, must not hide it.
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
    """Where this rank reports; None when nobody asked and there is no termination log."""
    asked = environment.get(ENV_REPORT)
    if asked:
        return Path(asked.replace("{rank}", str(rank)))
    default = Path(DEFAULT_REPORT_PATH)
    return default if os.access(default, os.W_OK) else None


def write_report(report: TrainerReport, path: Path | None) -> None:
    """Writes the report unless the file holds a failure of this run already. Never raises: it would hide what
    happened.
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
    """A failure from before this process was started is left from an earlier attempt."""
    try:
        earlier = TrainerReport.model_validate_json(text)
    except ValidationError:
        return False
    return earlier.failure is not None and earlier.failure.time >= psutil.Process().create_time()
