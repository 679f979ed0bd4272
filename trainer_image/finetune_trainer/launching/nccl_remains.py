"""Remains of a training that failed or hung in NCCL, for the pod's log: its warnings, and the flight recorder's dumps.

When a collective times out, torch writes the last collectives of each process into a file and ends the process. The
launcher outlives it and names the collective that each rank did not complete.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune_trainer.devices.nccl import DUMP_PREFIX, nccl_warnings

MOST_LINES = 40
_LIBRARIES = ("/torch/", "/transformers/", "/accelerate/", "/deepspeed/")


def remains(folder: Path) -> list[str]:
    """Return the lines for the log from the files of a launcher's ranks; none without such files. Never raises: an
    error here would hide the ranks' reports.
    """
    try:
        return _remains(folder)
    except Exception as error:
        return [f"The files of NCCL cannot be read: {type(error).__name__}: {error}"]


def _remains(folder: Path) -> list[str]:
    lines = [f"NCCL warning: {text}" for text in nccl_warnings(folder)[:MOST_LINES]]
    waiting: dict[str, list[int]] = {}
    for file in folder.glob(f"{DUMP_PREFIX}*"):
        rank = file.name.removeprefix(DUMP_PREFIX)
        if rank.isdecimal():
            waiting.setdefault(_last_collective(file), []).append(int(rank))
    rows = sorted(waiting.items(), key=lambda row: min(row[1]))
    return [*lines, *(f"Flight recorder, {_ranks(ranks)}: {text}" for text, ranks in rows[:MOST_LINES])]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for numbers, text, lists and maps: a file of a user's process may hold anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def _last_collective(file: Path) -> str:
    """Describe the first collective of a dump that has not completed, or the last one."""
    try:
        dump = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
        entries = dump["entries"]
        pending = [entry for entry in entries if entry["state"] != "completed"]
        if not entries:
            return "no collective was recorded"
        if not pending:
            return f"all collectives completed, the last one {_described(entries[-1])}"
        return f"not completed: {_described(pending[0])}"
    except Exception as error:  # of unpickling, or of a form that is not known
        return f"the dump cannot be read ({type(error).__name__})"


def _described(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    group = entry["process_group"][1] or entry["process_group"][0]
    place = _place(entry.get("frames") or ())
    shapes = entry.get("input_sizes")
    return f"{entry['profiling_name']} number {number} of group {group}, {entry['state']}, shapes {shapes}{place}"


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame that is not a library's, as `, from step (loop.py:120)`."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and not any(name in file for name in _LIBRARIES):
            return f", from {frame.get('name')} ({Path(file).name}:{frame.get('line')})"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(map(str, ordered))}"
