"""Cache of prepared data that jobs share.

An entry is named after all of its inputs, and appears whole or not at all. A job takes it by hard links where cache and
workspace are on one file system, else by copies, so that emptying the cache removes nothing from a job. As linked files
are the same files, a change in one job would reach the next: each entry keeps the hashes of its files, and one that
differs is deleted.

Jobs that want the same entry at once wait for the first one's lock. Correctness does not depend on it: where a file
system has no locks both prepare, and the later one finds the other's entry. A cache that cannot be used is logged, and
the job prepares for itself.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import COMPLETION_MARKER, ENV_CACHE, JobPaths
from finetune_trainer.core.files import (
    EntryName,
    FileEntry,
    discard,
    discard_leftovers,
    entries_of,
    first_difference,
    locked,
    temporary_folder,
    write_synced,
)

log = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 24 * 3600
"""Age since the last use after which the next job that prepares deletes an entry."""
_MANIFEST = "manifest.json"
_DATA = "data"
_TEMPORARY = "tmp-"


class _Manifest(Message):
    """Files of an entry; the manifest's modification time is the entry's last use."""

    files: dict[EntryName, FileEntry]


@dataclass(frozen=True)
class SharedData:
    """Prepared data in one cache."""

    folder: Path

    @classmethod
    def of(cls, paths: JobPaths, environment: Mapping[str, str]) -> SharedData:
        """Return the environment's cache; by default it is beside the jobs of the workspace."""
        named = environment.get(ENV_CACHE)
        return cls((Path(named) if named else paths.root.parent / ".cache") / "prepared")

    @contextmanager
    def entry(self, name: str) -> Iterator[Entry | None]:
        """Yield the entry of that name, locked against other jobs; None where the cache cannot be used."""
        entry = Entry(self.folder / name)
        with ExitStack() as stack:
            try:
                entry.folder.mkdir(parents=True, exist_ok=True)
                self._remove_unused(entry.folder)
                stack.enter_context(_alone(entry.folder))
                usable = True
            except OSError as error:
                log.warning("Prepared data cannot be shared with other jobs in %s: %s", self.folder, error)
                usable = False
            yield entry if usable else None

    def _remove_unused(self, wanted: Path) -> None:
        since = time.time() - KEPT_SECONDS
        for folder in self.folder.iterdir():
            entry = Entry(folder)
            unused = folder != wanted and folder.is_dir() and entry.used() < since
            if unused and discard(folder, self.folder, _TEMPORARY):
                log.info("Removing %s: no job has used it for %d days.", folder, KEPT_SECONDS // 86400)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the entry, where there are locks."""
    file = folder / "lock"
    with ExitStack() as stack:
        try:
            stack.enter_context(
                locked(file, lambda: log.info("Another job is preparing the same data: waiting for it."))
            )
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            log.info(
                "%s does not support locks (%s): jobs that start at the same time may prepare the same data twice.",
                folder,
                error,
            )
        yield


@dataclass(frozen=True)
class Entry:
    """Entry of one name."""

    folder: Path

    def used(self) -> float:
        """Return the time when it was last taken or given, in seconds since the epoch."""
        for path in (self.folder / _DATA / _MANIFEST, self.folder):
            try:
                return path.stat().st_mtime
            except OSError:
                continue
        return time.time()

    def take(self, place: Path) -> bool:
        """Fill the empty folder `place`, without its completion marker; return False when there is no whole entry."""
        data = self.folder / _DATA
        try:
            manifest = _Manifest.model_validate_json((data / _MANIFEST).read_bytes())
        except FileNotFoundError:
            return False
        except (OSError, ValidationError):
            return self._throw_away(f"{_MANIFEST} cannot be read")
        try:
            _link_all(data, place, manifest.files)
            different = first_difference(place, manifest.files)
            if different is not None:
                return self._throw_away(" ".join(map(str, different)))
            with suppress(PermissionError):  # another user's
                os.utime(data / _MANIFEST)
        except FileNotFoundError as error:
            return self._throw_away(f"{error.filename} is missing")
        except OSError as error:
            log.warning("Prepared data of another job cannot be read from %s: %s", data, error)
            return False
        log.info("Using the data in %s, which another job has prepared.", data)
        return True

    def _throw_away(self, why: str) -> bool:
        log.warning("%s is damaged: %s. Removing it and preparing the data again.", self.folder, why)
        discard(self.folder / _DATA, self.folder, _TEMPORARY)
        return False

    def give(self, prepared: Path) -> None:
        """Keep a copy of a whole folder of prepared data for other jobs. A failure is only logged."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            discard_leftovers(self.folder, _TEMPORARY)
            with temporary_folder(self.folder, _TEMPORARY) as temporary:
                files = entries_of(prepared)
                files.pop(COMPLETION_MARKER, None)
                _link_all(prepared, temporary, files)
                write_synced(temporary / _MANIFEST, _Manifest(files=files).to_json())
                temporary.rename(self.folder / _DATA)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process without a lock was earlier
                log.warning("Prepared data cannot be stored in %s for other jobs: %s", self.folder, error)


def _link_all(source: Path, target: Path, names: Mapping[str, FileEntry]) -> None:
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:
            # Another file system, one without hard links, or another user's file.
            shutil.copyfile(source / name, target / name)
