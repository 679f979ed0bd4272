"""Command lines of processes."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return the arguments, or none for a process that has ended or is a zombie, as may happen between two looks."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
