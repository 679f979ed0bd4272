"""Recipe of a training: how it computes what its strategy leaves open, and what its memory and time depend on."""

from __future__ import annotations

from finetune_operator.planning.memory import loss_chunk_tokens, reshards_head
from finetune_operator.planning.memory_workload import Workload
from finetune_operator.planning.plan_types import HeadForm, Recipe


def recipe_of(work: Workload, compiled: bool) -> Recipe:
    """Return the recipe of a training."""
    return Recipe(loss="chunked" if loss_chunk_tokens(work) else "full", compiled=compiled, head=_head(work))


def _head(work: Workload) -> HeadForm:
    strategy = work.strategy
    if strategy.tensor > 1:
        return "split"
    if strategy.zero_stage == 3 or reshards_head(work):
        return "resharded"
    return "kept" if strategy.name == "fsdp" else "whole"
