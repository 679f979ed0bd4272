"""What processes were started with."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that is gone by now, or a zombie: on a busy machine a process may end between two looks."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
