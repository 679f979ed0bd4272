"""Files that a reader sees whole or not at all, and locks that keep writers apart."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from finetune_contract.base import Message


class FileEntry(Message):
    """What a file is known by."""

    size: int
    sha256: str


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


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, which is gone in the end unless it was moved, also when somebody still writes into it.
    Readable as the umask says, unlike those of `tempfile`: other pods of the job may run as another user.
    """
    folder = _unused(parent, prefix)
    folder.mkdir()
    try:
        yield folder
    finally:
        discard(folder, parent, prefix)


def discard(folder: Path, parent: Path, prefix: str) -> bool:
    """Takes the folder away, and then apart; False when it was not there, or not ours to take. It goes in one step, to
    a name in `parent` that begins with `prefix`: who would go on writing into it finds it no more, and cannot keep it
    from being removed.
    """
    aside = _unused(parent, prefix)
    try:
        folder.rename(aside)
    except OSError:
        return False
    for _ in range(2):  # a file that was being made while it was renamed may be there after its content was listed
        shutil.rmtree(aside, ignore_errors=True)
    return True


def discard_leftovers(parent: Path, prefix: str) -> None:
    """Does so with all folders in `parent` whose names begin with `prefix`, which somebody who was killed has left."""
    for leftover in list(parent.glob(f"{prefix}*")):  # the names that they go to begin with it as well
        discard(leftover, parent, prefix)


def _unused(parent: Path, prefix: str) -> Path:
    return parent / f"{prefix}{uuid.uuid4().hex}"


def share(folder: Path) -> None:
    """Lets those read the files below `folder` who may read the folder: safetensors writes each for its owner alone,
    and who loads a model from a claim is often another user.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o444)


def entries_of(folder: Path) -> dict[str, FileEntry]:
    """All files below `folder`, by their path from there, once they are on the disk."""
    return {str(path.relative_to(folder)): _entry(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def first_difference(folder: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, str] | None:
    """The first file that is not as its entry has it, and how it differs."""
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return path, "is missing"
        size = path.stat().st_size
        if size != entry.size:
            return path, f"has {size} bytes instead of {entry.size}"
        if _sha256(path) != entry.sha256:
            return path, "has other content than was written"
    return None


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits for the lock on `path` and holds it; the kernel gives it up with the process, however that ends.

    `on_wait` is called when somebody else holds it. OSError where the file system has no locks.
    """
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
