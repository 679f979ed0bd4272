"""Files that a reader sees whole or not at all, and locks that keep writers apart."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str, *, folder: bool = True) -> None:
    """Writes beside the place and moves it there, and leaves nothing behind when it fails. Makes the folder, or without
    `folder` raises FileNotFoundError where there is none.
    """
    with replaced(path, folder=folder) as partial:
        write_synced(partial, text)


@contextmanager
def replaced(path: Path, *, folder: bool = True) -> Iterator[Path]:
    """A file beside the place, to write to, which is moved there in the end; as `write_atomically`."""
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def share(folder: Path) -> None:
    """Lets those read the files below `folder` who may read the folder: safetensors writes each for its owner alone,
    and who loads a model from a claim is often another user.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o444)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the lock on `path` and holds it; the kernel gives it up with the process, however that ends."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
