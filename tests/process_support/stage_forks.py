"""Stages as processes of multiprocessing's fork server, which has imported their modules.

A process has one such server, and its first user settles the imports, so all use this module. With another list, each
later process would import torch by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")
IMPORTED = (
    "finetune_trainer.prepare.prepare",
    "finetune_trainer.prepare.prepare_pods",
    "finetune_trainer.predict.predict",
    "finetune_trainer.report.measured_facts",
    "finetune_trainer.stage.rank",
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
"""Imports of both stages, with the tiny model's modules; the last one exempts them all from garbage collection."""


def fork(run: Callable[[T], None], one: T) -> BaseProcess:
    """Start a process that calls `run` with `one`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=run, args=(one,))
    process.start()
    return process
