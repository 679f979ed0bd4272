"""Folder beside the repository that some tests use: real data, other projects' CRDs, tools that create clusters."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FINETUNE_TEST_SHARED"
SHARED = Path(os.environ.get(VARIABLE) or Path(__file__).parents[3] / "shared").resolve()
DATA = SHARED / "data"
CRDS = SHARED / "crds"
TOOLS = SHARED / "tools"


def missing(part: Path) -> str:
    """Return the reason for skipping a test that needs this part."""
    return f"{part} is not there; set {VARIABLE} to a folder that has {part.relative_to(SHARED)}"
