"""Libraries that a job does not need, and that others would import where they find them."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.library_patches import importable_again, without_bitsandbytes, without_torchao


def leave_out_unused(job: TrainerJob) -> None:
    """Block the import of libraries that `job` does not need: transformers and peft load bitsandbytes and torchao
    wherever they find them, the first of which takes 0.7 s of a start's 4.6 on one core, the second 2. A job in fp8 can
    import the library that our image installs apart for it. Call it before the heavy imports.
    """
    training = job.training
    if training is None or not training.in_four_bits:
        without_bitsandbytes.until_end()
    if training is None or training.precision != "fp8":
        without_torchao.until_end()
    else:
        allow_import("torchao")


def allow_import(name: str) -> None:
    """Let a library be imported after all, from the folder of our image that holds it away from all others, too."""
    importable_again(name)
    place = str(Path(sys.prefix) / "fp8")
    if name == "torchao" and place not in sys.path:
        sys.path.append(place)
