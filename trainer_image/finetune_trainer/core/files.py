"""Files that readers see whole or not at all, and locks that keep writers apart."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Protocol, TypeAlias, TypeVar

from pydantic import AfterValidator

from finetune_contract.contract_models import Message

T = TypeVar("T")
log = logging.getLogger(__name__)

OUTAGE_SECONDS = 120.0
"""Time without the storage after which an operation fails: less than the silence after which the other workers of a
prediction take over, and more than a file server's restart.
"""
_AWAY = (errno.EIO, errno.ETIMEDOUT)
"""Errors of a storage that does not respond. ESTALE is none: it also means that somebody removed the folder."""


def through_outage(operation: Callable[[], T]) -> T:
    """Call `operation`, and repeat it while the storage does not respond, for at most `OUTAGE_SECONDS`. It must be safe
    to repeat after it was done in part.
    """
    until, seconds = time.monotonic() + OUTAGE_SECONDS, 0.1
    while True:
        try:
            return operation()
        except OSError as error:
            if error.errno not in _AWAY or time.monotonic() > until:
                raise
            if seconds == 0.1:  # the first wait
                log.warning("The storage does not respond, waiting for it: %s", error)
        time.sleep(seconds)
        seconds = min(5.0, 2 * seconds)


class FileEntry(Message):
    """Size and hash that identify a file's content."""

    size: int
    sha256: str


def _inside_folder(name: str) -> str:
    """Return `name`; raise ValueError for a path that leads out of the folder it is relative to."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path below the folder")
    return name


EntryName: TypeAlias = Annotated[str, AfterValidator(_inside_folder)]
"""Path of a file, relative to a folder that somebody else may have written: it never leads out of that folder."""


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_hashed(path: Path, text: str) -> FileEntry:
    """Write a file as `write_synced`, and return its size and hash."""
    write_synced(path, text)
    content = text.encode()
    return FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def write_atomically(path: Path, text: str, *, folder: bool = True) -> None:
    """Write to a temporary file and move it into place; leave nothing behind on failure. Creates the folder, or without
    `folder` raises FileNotFoundError where there is none.
    """
    with replaced(path, folder=folder) as partial:
        write_synced(partial, text)


def create_whole(path: Path, text: str) -> bool:
    """Create a file that readers see whole or not at all; return False where it exists."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(partial, text)
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create(path, text)
    finally:
        partial.unlink(missing_ok=True)
    return True


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links, where a reader may see the file before it is whole."""


def _create(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


@contextmanager
def replaced(path: Path, *, folder: bool = True) -> Iterator[Path]:
    """Yield a temporary file to write to, which is moved into place at the end; as `write_atomically`."""
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
    """Yield a new folder in `parent`, which is deleted at the end unless it was moved, also while others write into it.
    Readable as the umask says, unlike those of `tempfile`: other pods of the job may run as another user.
    """
    folder = _unused(parent, prefix)
    folder.mkdir()
    try:
        yield folder
    finally:
        discard(folder, parent, prefix)


def discard(folder: Path, parent: Path, prefix: str) -> bool:
    """Delete the folder; return False when it does not exist or may not be deleted. It is first renamed to a name in
    `parent` that begins with `prefix`: a writer then no longer finds it, and cannot keep it from being removed.
    """
    renamed = _unused(parent, prefix)
    try:
        folder.rename(renamed)
    except OSError:
        return False
    for _ in range(2):  # a file created during the rename may appear after the content was listed
        shutil.rmtree(renamed, ignore_errors=True)
    return True


def discard_leftovers(parent: Path, prefix: str) -> None:
    """Discard all folders in `parent` whose names begin with `prefix`, left by killed processes."""
    for leftover in list(parent.glob(f"{prefix}*")):  # the names that they are moved to begin with it as well
        discard(leftover, parent, prefix)


def _unused(parent: Path, prefix: str) -> Path:
    return parent / f"{prefix}{uuid.uuid4().hex}"


def share(folder: Path) -> None:
    """Let everybody who may read the folder read the files in it: safetensors writes files for their owner alone, and
    the process that loads a model from a claim often runs as another user.
    """
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o444)


def entries_of(folder: Path) -> dict[str, FileEntry]:
    """Return the entries of all files below `folder` by relative path, once they are on the disk. Raise OSError for a
    symbolic link or a device among them.
    """
    return {name: entry_of(folder / name) for name in names_of(folder)}


def names_of(folder: Path) -> list[str]:
    """Return the relative paths of all files below `folder`. Raise OSError as `entries_of`."""
    return [str(path.relative_to(folder)) for path in _files_in(folder)]


def first_difference(folder: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, str] | None:
    """Return the first file that differs from its entry, and the difference; None when all match. Reads every byte,
    about 1.5 GB a second on one core.
    """
    return next(
        (different for name, entry in entries.items() if (different := difference(folder, name, entry)) is not None),
        None,
    )


class FileHashing(Protocol):
    """Hashes the files of a folder: this process alone, or several at the same time."""

    def entries_of(self, folder: Path) -> dict[str, FileEntry]:
        """Return the result of the function of that name."""

    def first_difference(self, folder: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, str] | None:
        """Return the result of the function of that name."""


class HashingAlone:
    """This process hashes all files."""

    def entries_of(self, folder: Path) -> dict[str, FileEntry]:
        """Return the result of the function of that name."""
        return entries_of(folder)

    def first_difference(self, folder: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, str] | None:
        """Return the result of the function of that name."""
        return first_difference(folder, entries)


ALONE = HashingAlone()


def difference(folder: Path, name: str, entry: FileEntry) -> tuple[Path, str] | None:
    """Return the file `name` below `folder` and its difference from its entry; None when it matches. It must be a
    regular file, reached without a symbolic link.
    """
    path = folder
    for part in PurePosixPath(name).parts:
        path /= part
        if path.is_symlink():
            return path, "is a symbolic link"
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path, "is missing"
    if not stat.S_ISREG(status.st_mode):
        return path, "is not a regular file"
    if status.st_size != entry.size:
        return path, f"has {status.st_size} bytes instead of {entry.size}"
    if sha256_of(path) != entry.sha256:
        return path, "has changed since it was written"
    return None


def first_unlisted(folder: Path, listed: Collection[str]) -> Path | None:
    """Return the first entry below `folder`, folders aside, whose relative path is not `listed`; None when there is
    none. Does not follow symbolic links, which are entries themselves.
    """
    return next((path for path in _entries_in(folder) if str(path.relative_to(folder)) not in listed), None)


def _entries_in(folder: Path) -> list[Path]:
    paths = [
        Path(place, name)
        for place, folders, files in os.walk(folder)
        for name in (*files, *(subfolder for subfolder in folders if Path(place, subfolder).is_symlink()))
    ]
    return sorted(paths)


def _files_in(folder: Path) -> Iterator[Path]:
    for path in _entries_in(folder):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(f"{path} is not a regular file, and only those can be stored by hash.")
        yield path


def entry_of(path: Path) -> FileEntry:
    """Return the size and hash of a file, once it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(size=path.stat().st_size, sha256=sha256_of(path))


def sha256_of(path: Path) -> str:
    """Return the sha256 of the file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for the lock on `path` and hold it; the kernel releases it when the process ends, for whatever reason.

    `on_wait` is called when another process holds it. Raise OSError where the file system has no locks.
    """
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
