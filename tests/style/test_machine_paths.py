"""No file holds anything of a single machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_ONE_MACHINE = re.compile(r"(?<![\w.-])/(?:work|farm|root)/")


def test_no_tracked_file_names_a_path_of_one_machine(tracked_files: Sequence[Path]) -> None:
    checked = 0
    found: list[str] = []
    for path in tracked_files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        checked += 1
        if OF_ONE_MACHINE.search(text) is None:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if OF_ONE_MACHINE.search(line)
        ]
    assert checked > 30
    assert found == []
