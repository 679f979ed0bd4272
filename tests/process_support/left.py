"""Remaining processes that should have ended."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def left(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run. An ended one may stay as a zombie: init reaps it, and may be slow."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
