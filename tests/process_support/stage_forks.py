"""Stages as processes of multiprocessing's fork server, which has imported the stages' modules.

A process has one such server, and its first user decides on the imports: so all use this module. With another list,
each process of later users would have to import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")
IMPORTED = (
    "finetune_trainer.data.prepare",
    "finetune_trainer.data.prepare_pods",
    "finetune_trainer.inference.predict",
    "finetune_trainer.measured_facts",
    "finetune_trainer.rank",
    "scipy.stats",
    "sklearn.metrics",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "process_support.predicting",
    "process_support.preparing",
    "process_support.settled_heap",
)
"""Imports of both stages, and the tiny model's modules; the last one exempts all of them from garbage collection."""


def fork(run: Callable[[T], None], one: T) -> BaseProcess:
    """Start a process that calls `run` with `one`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=run, args=(one,))
    process.start()
    return process
