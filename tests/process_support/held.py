"""A train stage that blocks after one of its steps until a file exists, so that a test that acts on a running training
does not race with the remaining steps.

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
    """Run the stage; end the process with its exit code."""
    from finetune_trainer.__main__ import main
    from finetune_trainer.report.history import History

    add, file = History.add, Path(file)

    def add_and_wait(history: History, line: Mapping[str, Any]) -> None:
        add(history, line)
        while line["step"] == step and not file.exists():
            time.sleep(POLL_SECONDS)

    History.add = add_and_wait  # type: ignore[method-assign]
    main(arguments)


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
