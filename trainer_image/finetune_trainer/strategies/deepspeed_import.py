"""DeepSpeed's import, without what no job of ours uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from finetune_trainer.core.unused_libraries import not_importable

_Function = TypeVar("_Function", bound=Callable[..., object])


def import_deepspeed() -> None:
    """Import DeepSpeed once; later imports find it. Left out are:

    - mlflow, which its autotuner imports wherever it is installed. Tracking imports it by itself.
    - torch's compiler, which the Muon optimizer's module loads to decorate three functions. No job has that optimizer,
      and without the compiler the functions would be slower, not wrong.
    - a shared-memory collective that it compiles on CPU at its first start: half a minute and a compiler, for inference
      only. Training collectives use gloo with or without it.

    The first two are two fifths of the import's CPU time (DeepSpeed 0.19).
    """
    if "deepspeed" not in sys.modules:
        with not_importable("mlflow"):
            import deepspeed
        with _not_compiling():
            import deepspeed.runtime.zero.muon.original_muon
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def _not_compiling() -> Iterator[None]:
    """Have DeepSpeed's decorator for compiled functions return them as they are."""
    from deepspeed.runtime import compiler

    def as_it_is() -> Callable[[_Function], _Function]:
        return lambda function: function

    compiling = compiler.compile
    compiler.compile = as_it_is
    try:
        yield
    finally:
        compiler.compile = compiling
