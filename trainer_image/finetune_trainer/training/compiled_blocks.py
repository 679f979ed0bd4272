"""torch.compile for each transformer block by itself, in place of the whole model.

Blocks have the same code and shapes, so that one is compiled and all use it: a model of 80 layers takes as long to
compile as one of 2 (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Hooks of a strategy around
blocks, which gather weights and reduce gradients, stay outside. Embeddings, head and loss are not compiled, so the loss
of a decoder is computed in chunks.

Shapes are static until one changes; the second shape is compiled with dynamic rows and lengths, which fits all further
ones (torch's `dynamic=None`). Rows of one length, such as packed ones, keep the faster static code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from finetune_trainer.compile_cache import separate_compile_cache
from finetune_trainer.strategies.fsdp_groups import transformer_blocks
from finetune_trainer.strategies.strategy_protocol import expect

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledBlocks:
    """Result of `compile_blocks`."""

    blocks: tuple[nn.Module, ...]
    """Compiled modules; none if the job does not ask for torch.compile."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of torch.compile."""

    def assert_in_effect(self, strategy: str, *, requested: bool) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT unless blocks are compiled if, and only if, it is `requested`."""
        compiled = [block for block in self.blocks if block._compiled_call_impl is not None]
        found = f"training.arguments.torch_compile is {requested}, and {len(compiled)} blocks are compiled"
        expect(bool(compiled) == requested and len(compiled) == len(self.blocks), strategy, "WrongCompilation", found)

    def figures(self) -> dict[str, int]:
        """Return the number of compilations in this process so far, and how many of them replaced code that did not
        fit an input; empty without torch.compile.
        """
        if not self.blocks:
            return {}
        from torch._dynamo.utils import get_compilation_metrics

        metrics = [each for each in get_compilation_metrics() if each.co_name is not None and not each.fail_type]
        again = [each for each in metrics if each.recompile_reason]
        for each in again:
            log.info("torch.compile compiled %s again: %s", each.co_name, each.recompile_reason)
        return {"compilations": len(metrics), "recompilations": len(again)}


def compile_blocks(model: PreTrainedModel, args: TrainingArguments) -> CompiledBlocks:
    """Compile the transformer blocks of `model` in place, at their first call, if `args` ask for it."""
    if not args.torch_compile:
        return CompiledBlocks(())
    separate_compile_cache()
    requested = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    settings: dict[str, Any] = {name: value for name, value in requested.items() if value is not None}
    blocks = [block for block in transformer_blocks(model) if not isinstance(block, nn.Embedding)]
    for block in blocks:
        block.compile(**settings)
    return CompiledBlocks(tuple(blocks), settings)
