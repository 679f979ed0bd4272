"""Programs of users: the one of docs/scripts.md, and one that only records its inputs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scripts.md"

TELLTALE = """
import json, os, pathlib, sys
given = os.environ
seen = {"argv": sys.argv[1:], "folder": os.getcwd(), "environment": dict(given)}
place = pathlib.Path(given["FINETUNE_CHECKPOINTS"])
place.mkdir(exist_ok=True)
(place / f"seen-{given.get('RANK', '0')}.json").write_text(json.dumps(seen))
import helper
if given.get("RANK", "0") == "0":
    model = pathlib.Path(given["FINETUNE_OUTPUT"])
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
"""
"""Program that writes `seen-RANK.json` and the files of a fake model. Takes a hundredth of a second."""
TELLTALE_FILES = {"train.py": TELLTALE, "helper.py": ""}


def documented(kind: str) -> str:
    """Return the first block of this kind in docs/scripts.md."""
    blocks = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"{PAGE} has no {kind} block"
    return str(blocks[0])
