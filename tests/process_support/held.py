"""A train stage that stands still behind one of its steps until a file is there: what a test does to a training in its
midst must not race with the steps that are left.

    python -m process_support.held STEP FILE train --job ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.02


def train(step: int, file: Path | str, arguments: list[str]) -> NoReturn:
    """Runs the stage, and ends the process as it does."""
    from finetune_trainer.__main__ import main
    from finetune_trainer.training.history import History

    add, file = History.add, Path(file)

    def add_and_wait(history: History, line: Mapping[str, Any]) -> None:
        add(history, line)
        while line["step"] == step and not file.exists():
            time.sleep(POLL_SECONDS)

    History.add = add_and_wait  # type: ignore[method-assign]
    main(arguments)


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
