"""Files of this machine: places behind URIs, and atomic writes of small files that others read meanwhile."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def place_of(uri: str) -> Path | None:
    """Return the path behind `file://`, or behind `pkg://` in an installed package, which is not imported; None for
    another scheme, and for a package that is not installed.
    """
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "file":
            return Path(rest)
        case "pkg":
            package, _, inner = rest.partition("/")
            spec = importlib.util.find_spec(package) if package.isidentifier() else None
            folders = spec.submodule_search_locations if spec is not None else None
            return Path(next(iter(folders))) / inner if folders else None
        case _:
            return None


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
