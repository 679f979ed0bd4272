"""Libraries that a job does not need, and that others would import where they find them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_contract.trainer_job import TrainerJob


def leave_out_unused(job: TrainerJob) -> None:
    """Block the import of libraries that `job` does not need: transformers and peft load bitsandbytes and torchao
    wherever they find them, the first of which takes 0.7 s of a start's 4.6 on one core, the second 2. A job in fp8 can
    import the library that our image installs apart for it. Call it before the heavy imports.
    """
    training = job.training
    unused = []
    if training is None or not training.in_four_bits:
        unused.append("bitsandbytes")
    if training is None or training.precision != "fp8":
        unused.append("torchao")
    else:
        allow_import("torchao")
    for name in unused:
        _leave_out(name)


@contextmanager
def not_importable(name: str) -> Iterator[None]:
    """Have imports of `name` fail meanwhile, unless it is imported or left out already."""
    known = name in sys.modules
    _leave_out(name)
    try:
        yield
    finally:
        if not known:
            del sys.modules[name]


def _leave_out(name: str) -> None:
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's marker for "not to be imported"


def allow_import(name: str) -> None:
    """Let a library be imported after all, from the folder of our image that holds it away from all others, too."""
    if name in sys.modules and sys.modules[name] is None:
        del sys.modules[name]
    place = str(Path(sys.prefix) / "fp8")
    if name == "torchao" and place not in sys.path:
        sys.path.append(place)
