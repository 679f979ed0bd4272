"""Files of a checkpoint hashed by all processes at the same time, each its share: rank 0 alone would read them for
minutes, while all others wait.

Rank 0 seals and verifies checkpoints (`checkpoints.py`), and gives out the work; the others are in `help_rank_0`
meanwhile. A process hashes the files that it wrote: those are in its node's memory. Files that it hashed while writing
them are not read again for the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from finetune_trainer.core.distributed import patiently_gathered, patiently_shared
from finetune_trainer.core.files import FileEntry, difference, entry_of, names_of


@dataclass(frozen=True)
class _Work:
    """Files that one process hashes, below a folder that all of them see."""

    folder: str
    entries: Mapping[str, FileEntry | None] = field(default_factory=dict)
    """Name -> entry to compare with; None: the entry is wanted."""


@dataclass(frozen=True)
class _Found:
    """Results of one process."""

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    different: tuple[Path, str] | None = None
    error: Exception | None = None


class ShardedHashing:
    """Hashing by all processes of the world; for rank 0."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._written: Sequence[Mapping[str, FileEntry]] = [{} for _ in range(processes)]

    def wrote(self, by_rank: Sequence[Mapping[str, FileEntry]]) -> None:
        """Take note of the files that each process wrote and hashed meanwhile, by their names below the folder of the
        next `entries_of`.
        """
        self._written = by_rank

    def entries_of(self, folder: Path) -> dict[str, FileEntry]:
        """Return the entries of all files, once they are on the disk; as `files.entries_of`. Written files that are not
        found are listed too: without them a checkpoint would look whole.
        """
        known = {name: entry for written in self._written for name, entry in written.items()}
        names = sorted({*names_of(folder), *known})
        results = self._ask(folder, {name: None for name in names if name not in known})
        everything = known | {name: entry for result in results for name, entry in result.entries.items()}
        return {name: everything[name] for name in names}

    def first_difference(self, folder: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, str] | None:
        """Return a file that differs from its entry, and the difference; None when all match."""
        results = self._ask(folder, entries)
        return next((result.different for result in results if result.different is not None), None)

    def _ask(self, folder: Path, entries: Mapping[str, FileEntry | None]) -> list[_Found]:
        """Have every process hash its share. Raise the first error of a process."""
        shares = divided(folder, entries, self._written)
        works = [_Work(str(folder), {name: entries[name] for name in share}) for share in shares]
        patiently_shared(works)
        results = patiently_gathered(_do(works[0]))
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def finish(self) -> None:
        """Release the other processes from `help_rank_0`."""
        patiently_shared([])


def divided(
    folder: Path, names: Mapping[str, FileEntry | None], written: Sequence[Mapping[str, FileEntry]]
) -> list[list[str]]:
    """Divide files among the processes, for each a list: to their writers, and the rest so that all have about as many
    bytes to read.
    """
    shares: list[list[str]] = [[] for _ in written]
    load = [0] * len(written)
    writers = {name: rank for rank, files in enumerate(written) for name in files}
    sizes = {name: _size(folder / name) if entry is None else entry.size for name, entry in names.items()}
    for name in sorted(names, key=lambda file: (file not in writers, -sizes[file], file)):
        rank = writers.get(name, min(range(len(load)), key=load.__getitem__))
        shares[rank].append(name)
        load[rank] += sizes[name]
    return shares


def _size(path: Path) -> int:
    return path.lstat().st_size


def help_rank_0(rank: int) -> None:
    """Hash this process's shares until rank 0 has finished."""
    works: list[_Work] = patiently_shared(None)
    while works:
        patiently_gathered(_do(works[rank]))
        works = patiently_shared(None)


def _do(work: _Work) -> _Found:
    folder = Path(work.folder)
    entries: dict[str, FileEntry] = {}
    try:
        for name, entry in work.entries.items():
            if entry is None:
                entries[name] = entry_of(folder / name)
            elif (different := difference(folder, name, entry)) is not None:
                return _Found(different=different)
    except Exception as error:  # goes to rank 0, which raises it
        return _Found(error=error)
    return _Found(entries)


@contextmanager
def work_of_rank_0(rank: int, hashing: ShardedHashing) -> Iterator[bool]:
    """Yield True on rank 0, which may use `hashing` in the block. The others help it first, and get False."""
    if rank != 0:
        help_rank_0(rank)
        yield False
        return
    try:
        yield True
    finally:
        hashing.finish()
