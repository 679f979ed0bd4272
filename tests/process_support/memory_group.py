"""A memory cgroup with a limit, as a container has one: its processes meet the kernel's real out-of-memory killer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from suite_plugins.waiting import wait_until

_ROOT = Path("/sys/fs/cgroup")
EATS_MEMORY = "blocks = []\nwhile True:\n    blocks.append(b'x' * (1 << 22))\n"
"""Python program that takes all memory that it can get."""


@dataclass(frozen=True)
class MemoryGroup:
    """An empty cgroup."""

    folder: Path

    def wrapper(self, file: Path, program: str) -> str:
        """Write a program that runs `program` with its arguments in this group, and return its path."""
        procs = shlex.quote(str(self.folder / "cgroup.procs"))
        file.write_text(f'#!/bin/sh\necho $$ > {procs}\nexec {shlex.quote(program)} "$@"\n')
        file.chmod(0o755)
        return str(file)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Create a cgroup of version 2 or 1 at the root; skip the test where that is not permitted."""
    version_2 = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if version_2 else _ROOT / "memory") / f"test-{uuid4().hex}"
    try:
        if version_2:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be created: {error}")
    try:
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        # Without swap accounting there is no such file, and mostly no swap.
        for name in ("memory.swap.max",) if version_2 else ("memory.memsw.limit_in_bytes",):
            if (folder / name).exists():
                (folder / name).write_text("0" if version_2 else str(limit_bytes))
        yield MemoryGroup(folder)
        wait_until(lambda: not (folder / "cgroup.procs").read_text().strip(), "all processes of the group have ended")
    finally:
        with suppress(OSError):  # after a failure, processes may be in it
            folder.rmdir()
