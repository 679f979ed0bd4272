"""Answers of a model before its strategy splits it, without the whole model in fp32 in the memory of each process.

Weights stay in their mapped files (`models/stored_weights.py`), and one block at a time is in fp32 while it
computes. Conversion of bf16 and fp16 to fp32 is exact, so that the answers are those of a model in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

from finetune_trainer.core.distributed import patiently_shared
from finetune_trainer.models.stored_weights import is_converted
from finetune_trainer.strategies.fsdp_groups import transformer_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def shared_from_first(compute: Callable[[], T]) -> T:
    """Return the result of `compute` on rank 0, on every rank; the others do not call it. Every rank must call this.

    Raise RuntimeError on the others if `compute` fails on rank 0.
    """
    outcome: tuple[T | None, str] | None = None
    if distributed.get_rank() == 0:
        try:
            outcome = compute(), ""
        except Exception as error:
            patiently_shared((None, f"{type(error).__name__}: {error}"))
            raise
    answers, problem = patiently_shared(outcome)
    if problem:
        raise RuntimeError(f"Rank 0 could not compute the answers of the whole model: {problem}")
    return answers  # type: ignore[return-value]


@contextmanager
def fp32_by_block(model: PreTrainedModel) -> Iterator[None]:
    """Have `model` compute in fp32, whatever the types of its weights: those of a block are converted while the block
    computes, the others, such as embeddings and head, for the whole context. Afterwards all are as before.

    Only without gradients: autograd would keep the converted weights of all blocks.
    """
    blocks = transformer_blocks(model)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    computing: list[list[tuple[nn.Parameter, torch.Tensor]]] = []

    def widen(block: nn.Module, _: Any) -> None:
        computing.append(_widened(block.parameters()))

    def restore(block: nn.Module, *_: Any) -> None:
        _restored(computing.pop())

    handles = [block.register_forward_pre_hook(widen) for block in blocks]
    handles += [block.register_forward_hook(restore) for block in blocks]
    others = _widened(parameter for parameter in model.parameters() if id(parameter) not in inside)
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        while computing:  # blocks that failed
            _restored(computing.pop())
        _restored(others)


def _widened(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Convert parameters to fp32; return each converted one with its weights before."""
    before = []
    for parameter in parameters:
        if is_converted(parameter) and parameter.dtype != torch.float32:
            before.append((parameter, parameter.data))
            parameter.data = parameter.data.float()
    return before


def _restored(before: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, weights in before:
        parameter.data = weights
