"""Signal state of a process, as reported by Linux."""

from __future__ import annotations

import signal
from pathlib import Path


def handles(process: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for this signal."""
    return _set(process, "SigCgt", number)


def waits_for(process: int, number: signal.Signals) -> bool:
    """Return whether this signal is pending for the process, which is stopped."""
    return _set(process, "ShdPnd", number)


def blocks(process: int, number: signal.Signals) -> list[bool]:
    """Return for each of its threads, the main one first, whether it blocks this signal."""
    threads = sorted(int(folder.name) for folder in Path(f"/proc/{process}/task").iterdir())
    return [_set(thread, "SigBlk", number) for thread in sorted(threads, key=lambda thread: thread != process)]


def _set(process: int, mask: str, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(f"{mask}:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
