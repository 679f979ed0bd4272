"""A train stage that computes in fp8 on a CPU, which jobs cannot request."""

from __future__ import annotations

import os
import sys
from functools import partial


def train(arguments: list[str]) -> None:
    """Run the stage; end the process with its exit code."""
    from finetune_trainer.__main__ import run
    from finetune_trainer.stage import stages
    from finetune_trainer.training import run as training

    stages.refuse_combinations = lambda _job, _training: None
    training.train = partial(training.train, fp8_without_units=True)
    code = run(arguments)
    sys.stdout.flush()
    os._exit(code)
