"""torch.compile for each transformer block by itself, in place of the whole model.

Blocks have the same code and shapes, so that one is compiled and all use it: a model of 80 layers takes as long to
compile as one of 2 (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Hooks of a strategy around
blocks, which gather weights and reduce gradients, stay outside. Embeddings, head and loss are not compiled, so the loss
of a decoder is computed in chunks.

Shapes are static until one changes; the second shape is compiled with dynamic rows and lengths, which fits all further
ones (torch's `dynamic=None`). Rows of one length, such as packed ones, keep the faster static code.

A job that asks for it fails if it cannot be compiled. One that the plan compiles goes on without: all of it if a small
function cannot be compiled here, or those functions alone that cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_contract.arguments import COMPILATION
from finetune_trainer.core.distributed import gathered
from finetune_trainer.core.library_patches import uncompiled_where_it_fails
from finetune_trainer.devices.compile_cache import separate_compile_cache
from finetune_trainer.strategies.fsdp_groups import transformer_blocks
from finetune_trainer.strategies.strategy_protocol import expect

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from finetune_contract.trainer_job import Training

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
        problem = f"training.arguments.torch_compile is {requested}, and {len(compiled)} blocks are compiled"
        expect(bool(compiled) == requested and len(compiled) == len(self.blocks), strategy, "WrongCompilation", problem)

    def figures(self) -> dict[str, int]:
        """Return the number of compilations in this process so far, how many of them replaced code that did not fit an
        input, and the number of functions that could not be compiled if there are any; empty without torch.compile.
        """
        if not self.blocks:
            return {}
        from torch._dynamo.utils import get_compilation_metrics

        tried = [metric for metric in get_compilation_metrics() if metric.co_name is not None]
        metrics = [metric for metric in tried if not metric.fail_type]
        failed = [metric for metric in tried if metric.fail_type]
        for metric in failed:
            log.warning("torch.compile failed for %s, which ran uncompiled: %s", metric.co_name, metric.fail_reason)
        again = [metric for metric in metrics if metric.recompile_reason]
        for metric in again:
            log.info("torch.compile compiled %s again: %s", metric.co_name, metric.recompile_reason)
        counts = {"compilations": len(metrics), "recompilations": len(again)}
        return {**counts, "failed_compilations": len(failed)} if failed else counts


def with_working_compiler(training: Training) -> Training:
    """Return the training as it is, or without torch.compile if its plan has added that, and some process cannot
    compile a small function on its device. Every rank must call it.
    """
    if not training.compiles_by_plan:
        return training
    answers = gathered(_why_not_compiled(torch.device(training.world.device)))
    reasons = [reason for reason in answers if reason]
    if not reasons:
        uncompiled_where_it_fails.until_end()
        return training
    log.warning("torch.compile is off, as it fails in %d of %d processes: %s", len(reasons), len(answers), reasons[0])
    kept = {name: value for name, value in training.arguments.items() if name not in COMPILATION}
    return training.model_copy(update={"arguments": kept, "compiles_by_plan": False})


def _why_not_compiled(device: torch.device) -> str:
    """Return the reason why torch.compile does not work on `device`; empty if it does."""
    from torch._dynamo.utils import clear_compilation_metrics

    def small(numbers: torch.Tensor) -> torch.Tensor:
        return (numbers * 2).sin().sum()

    numbers = torch.linspace(0, 1, 1000, device=device)
    try:
        separate_compile_cache()
        torch.testing.assert_close(torch.compile(small)(numbers), small(numbers))
    except Exception as error:  # compilers fail in any way
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    finally:
        clear_compilation_metrics()
    return ""


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
