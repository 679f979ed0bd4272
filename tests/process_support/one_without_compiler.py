"""A train stage in which rank 1 alone has no working compiler."""

from __future__ import annotations

import os
import sys


def train(arguments: list[str]) -> None:
    """Run the stage; end the process with its exit code."""
    from finetune_trainer.__main__ import run
    from finetune_trainer.training.passes import compiled_blocks

    reason = "InvalidCxxCompiler: no compiler is here" if os.environ["RANK"] == "1" else ""
    compiled_blocks._why_not_compiled = lambda device: reason  # type: ignore[assignment]
    code = run(arguments)
    sys.stdout.flush()
    os._exit(code)
