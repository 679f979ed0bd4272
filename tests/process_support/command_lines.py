"""Command lines of processes."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return the arguments, or none for a process that has ended or is a zombie, as may happen between two looks."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def trainer_arguments(command: list[str]) -> list[str]:
    """Return the arguments of the trainer in the command of a Python process; none for another command."""
    if "-m" not in command[1:3]:
        return []
    module, *arguments = command[command.index("-m") + 1 :]
    return arguments if module == "finetune_trainer" else []
