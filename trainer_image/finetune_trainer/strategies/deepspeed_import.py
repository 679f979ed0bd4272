"""DeepSpeed's import, without what no job of ours uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from finetune_trainer.core.library_patches import deepspeed_decorates_nothing, no_collective_to_compile, without_mlflow

_Function = TypeVar("_Function", bound=Callable[..., object])


def import_deepspeed() -> None:
    """Import DeepSpeed once; later imports find it. Left out are:

    - mlflow and torch's compiler, two fifths of the import's CPU time (DeepSpeed 0.19). The Muon optimizer's module
      loads the compiler to decorate three functions, which would be slower without it, not wrong.
    - a shared-memory collective on CPUs.
    """
    if "deepspeed" not in sys.modules:
        with without_mlflow():
            import deepspeed
        with deepspeed_decorates_nothing(_as_it_is):
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    no_collective_to_compile.until_end()


def _as_it_is() -> Callable[[_Function], _Function]:
    """Return a decorator that returns functions as they are."""
    return lambda function: function
