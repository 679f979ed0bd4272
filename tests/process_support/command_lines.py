"""Command lines of processes."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line; empty for an ended process or a zombie: a process may end between two looks."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
