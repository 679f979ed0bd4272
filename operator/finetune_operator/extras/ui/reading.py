"""Safe reading of a workspace's files: bounded, regular files only, no symbolic link followed.

A run's folder may hold anything that a training program has left there, such as a link to a private file, or a pipe
that would never answer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of change in ns; None: there is no such regular file."""


class UnreadableError(Exception):
    """Error of a file that exists and cannot be read; the text has the reason."""


@dataclass(frozen=True)
class Content:
    """Content of a file, or its end."""

    data: bytes
    cut: bool = False
    """True if the file is longer than the limit."""

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


def read(root: Path, *parts: str, limit: int, end: bool = False) -> Content | None:
    """Return at most `limit` bytes of the file `parts` below `root`, with `end` the last ones; None if it does not
    exist. Raise UnreadableError.
    """
    name = "/".join(parts)
    try:
        with _opened(root, *parts) as file:
            size = os.fstat(file).st_size
            if end and size > limit:
                os.lseek(file, size - limit, os.SEEK_SET)
            pieces, left = [], limit
            while left and (piece := os.read(file, min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
            return Content(b"".join(pieces), size > limit)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnreadableError(f"{name} cannot be read: {error.strerror or error}") from error


def stamp(root: Path, *parts: str) -> Stamp:
    """Return a value that changes when the file does."""
    try:
        status = root.joinpath(*parts).lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def folders(root: Path) -> list[tuple[str, float]]:
    """Return the folders in `root` whose names do not begin with a dot, with their times of change. Raise
    UnreadableError.
    """
    folder_times = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    folder_times.append((entry.name, entry.stat(follow_symlinks=False).st_mtime))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableError(f"{root} cannot be read: {error.strerror or error}") from error
    return folder_times


@contextmanager
def _opened(root: Path, *parts: str) -> Iterator[int]:
    """Yield a descriptor of a regular file, opened folder by folder so that none can become a link in between."""
    assert all(part not in ("", ".", "..") and "/" not in part for part in parts), parts
    *within, name = parts
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for part in within:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        # A pipe would wait for a writer without O_NONBLOCK.
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    finally:
        os.close(place)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(None, "it is not a regular file")
        yield file
    finally:
        os.close(file)
