"""How the command was called; read before anything else is imported."""

from __future__ import annotations

import sys
from pathlib import Path

COMPLETE_VARIABLE = "_FINETUNE_COMPLETE"
"""By which a shell's script asks the command what could follow."""


def program_name() -> str:
    """What the user typed: `kubectl finetune` when kubectl started this as its plug-in."""
    return "kubectl finetune" if Path(sys.argv[0]).name.startswith("kubectl-finetune") else "finetune"
