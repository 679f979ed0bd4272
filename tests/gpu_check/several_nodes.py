"""Nodes that are checked together: the same command runs on each, and the first one writes the report.

Their folder for the report is shared. The first node prepares a training and leaves a file there; the others wait for
it, and the nodes meet at a port of the first one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Nodes:
    """Position of this machine among those that are checked together."""

    count: int = 1
    index: int = 0
    """0: the first node, which writes the report."""
    endpoint: str = ""
    """Host and port of the first node: `host:port`; empty for one node."""

    @property
    def first(self) -> bool:
        return self.index == 0

    def problem(self) -> str | None:
        """Return why the nodes cannot be checked; None if they can."""
        if self.count < 1 or not 0 <= self.index < self.count:
            return f"--node is {self.index}, and --nodes {self.count}: number them from 0 to {self.count - 1}."
        host, _, port = self.endpoint.rpartition(":")
        if self.count > 1 and not (host and port.isdecimal()):
            return f"--first is {self.endpoint!r}: several nodes need the first one's host:port."
        return None

    def meeting(self, name: str) -> list[str]:
        """Return torchrun's arguments for a run of that name on all nodes."""
        if self.count == 1:
            return ["--standalone"]
        host, _, port = self.endpoint.rpartition(":")
        # Static, so that the first node has rank 0.
        where = [f"--node-rank={self.index}", f"--master-addr={host}", f"--master-port={port}"]
        return [f"--nnodes={self.count}", f"--rdzv-id={name}", *where]

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables with which the trainer's launcher meets the other nodes for a run of that name."""
        return {**os.environ, "PET_RDZV_ENDPOINT": self.endpoint, "PET_RDZV_ID": name}


ALONE = Nodes()


def announce(file: Path, text: str) -> None:
    """Leave `text` in a file that other nodes wait for."""
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def awaited(file: Path, limit: float) -> str:
    """Return the text of a file once it is there. Raise TimeoutError after `limit` seconds."""
    ends = monotonic() + limit
    while monotonic() < ends:
        if file.exists():
            return file.read_text(encoding="utf-8")
        sleep(_POLL_SECONDS)
    raise TimeoutError(f"the first node has not written {file} in {limit:.0f} s: is --out a shared folder?")


def together(found: Mapping[str, str], count: int) -> str:
    """Return the facts of several nodes for the report: one text if they agree, else that of each."""
    texts = sorted(set(found.values()))
    if len(texts) == 1:
        return f"{count} nodes alike: {texts[0]}"
    return "; ".join(f"node {name}: {text}" for name, text in sorted(found.items()))
