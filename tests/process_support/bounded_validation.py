"""Trains a job by processes with the memory of small devices, for `tests/trainer/test_bounded_validation.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_support.group_batches import SmallMemory


def train(arguments: Sequence[str], limits: list[int], out: str) -> None:
    """Run the trainer, in whose process `rank` a pass without gradients holds `limits[rank]` tokens; each process
    writes the tokens of its passes to `out`.
    """
    from finetune_trainer.__main__ import run
    from finetune_trainer.training import run as of_training

    rank = os.environ["RANK"]
    memory = SmallMemory(limits[int(rank)])
    started = of_training._start

    def limited(given: Any) -> Any:
        start = started(given)
        memory.limit(start.model)
        return start

    of_training._start = limited
    of_training.device_memory = lambda device: memory
    code = run(list(arguments))
    found = {"probes": memory.probes, "tried": memory.tried[memory.probed :]}
    (Path(out) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    raise SystemExit(code)
