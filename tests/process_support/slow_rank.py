"""A train stage in which rank 0 works alone for longer than the timeout of a collective operation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from suite_plugins.patience import patient

TIMEOUT_SECONDS = patient(3)
"""Timeout of a collective operation: two processes that work together are never this far apart."""
SLOW_SECONDS = 1.2 * TIMEOUT_SECONDS


def train(arguments: list[str], calls: list[str]) -> None:
    """Run the stage with those calls of rank 0 slow; end the process with its exit code."""
    from finetune_trainer.__main__ import run
    from finetune_trainer.checkpoint import tensor_files
    from finetune_trainer.checkpoint.checkpoints import CheckpointStore
    from finetune_trainer.core import distributed
    from finetune_trainer.strategies import full_state, shard_files

    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=TIMEOUT_SECONDS)
    if os.environ["RANK"] == "0":
        owners = {"newest": CheckpointStore, "load_shards": full_state, "write_tensors": shard_files}
        owners |= {"commit": CheckpointStore, "write_gathered": tensor_files}
        for name in calls:
            setattr(owners[name], name, _slowly(name, getattr(owners[name], name)))
    sys.stdout.flush()
    os._exit(run(arguments))


def _slowly(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` with a delay at the first call."""
    calls = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            print(f"rank 0 alone: {name}", flush=True)
            time.sleep(SLOW_SECONDS)
        calls.append(name)
        return work(*args, **kwargs)

    return slow
