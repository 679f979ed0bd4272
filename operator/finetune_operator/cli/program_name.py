"""Name under which the command was called; read before anything else is imported."""

from __future__ import annotations

import sys
from pathlib import Path

COMPLETE_VARIABLE = "_FINETUNE_COMPLETE"
"""Variable by which a shell's script requests completions."""


def program_name() -> str:
    """Return the typed name: `kubectl finetune` if kubectl started this as its plug-in."""
    return "kubectl finetune" if Path(sys.argv[0]).name.startswith("kubectl-finetune") else "finetune"
