"""Atomic writes of small files that others read meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, finds the old content or the new one and nothing between."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
