"""Command lines of Python processes, which never import modules from the folder in which they happen to start.

`python -m` looks for modules in the working directory first: a `torch.py` in the folder of a job file, or a volume
mounted at `/finetune_trainer`, would run in the trainer's place.
"""

from __future__ import annotations

import sys

ENV_SAFE_PATH = "PYTHONSAFEPATH"
"""Variable with the effect of `-P`, for Python processes that a library starts."""


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs `module`. `python`: interpreter; None for that of this process."""
    return [python or sys.executable, "-P", "-m", module, *arguments]
