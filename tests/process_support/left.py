"""What is left of processes that should be gone."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. One that has ended may stay as a zombie: taking note of its end is init's, who may be slow
    about it.
    """
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
