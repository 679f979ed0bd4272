"""`history.jsonl`: one line for each optimizer step, over all attempts of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class History:
    """The lines of one run. Rank 0 writes; a resumed run drops what came after the step that it resumes from."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int) -> None:
        """Keeps the lines up to `step` (0: none) and drops the others, also a last line that was cut off."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self._path.with_suffix(".part")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self._path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends one step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines."""
        if not self._path.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break  # The process ended while it wrote this one; nothing can follow.
        return lines

    def losses(self) -> list[float]:
        """The training loss of every step, in order."""
        return [line["loss"] for line in self.read() if "loss" in line]


def first_and_last(losses: list[float]) -> tuple[float, float]:
    """Means over the first and the last 5 % of the steps, of at least one step."""
    count = max(1, len(losses) // 20)
    return sum(losses[:count]) / count, sum(losses[-count:]) / count
