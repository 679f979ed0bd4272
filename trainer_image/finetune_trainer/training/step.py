"""One optimizer step, from the batches of the loader to changed weights.

`OptimizerStep.take` shows the order. A step reads no clock, agrees on nothing with other ranks and reports nothing: it
names each part that begins, and the loop around it does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache

from finetune_contract.report import TimePart
from finetune_trainer.core.token_shards import LABELS
from finetune_trainer.training.engine import Engine
from finetune_trainer.training.loop_parts import LoopModel
from finetune_trainer.training.passes.known_padding import KnownPadding, known_padding

if TYPE_CHECKING:
    from finetune_trainer.strategies.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class StepBatch:
    """A batch of the loader: one micro-batch, or those of a pass through a pipeline."""

    tensors: Mapping[str, torch.Tensor]
    """Batch in host memory."""
    items: Sequence[int]
    """Labelled items of each of its micro-batches, counted before the transfer to the device, for which the host need
    not wait.
    """


@dataclass(frozen=True)
class StepResult:
    """Figures of one optimizer step."""

    loss: torch.Tensor
    """Loss of this rank, on the device; the mean over all ranks is that of the global batch."""
    learning_rate: float
    grad_norm: Any
    """Norm before clipping, a number or a tensor on the device; None where DeepSpeed computes none."""


class OptimizerStep:
    """An optimizer step of one model."""

    def __init__(self, engine: Engine, model: LoopModel, enter: Callable[[TimePart], None]) -> None:
        """`enter`: called at the begin of each part of a step."""
        self._engine = engine
        self._model = model
        self._replica_step = model.strategy.replica_step
        self._enter = enter

    def take(self, batches: Sequence[StepBatch], global_items: float, *, clear_cache: bool = False) -> StepResult:
        """Change the weights by the mean gradient of the global batch. `global_items`: its labelled items, over all
        ranks. `clear_cache`: release freed memory of the device after each forward pass. Every rank must call it.
        """
        engine = self._engine
        loss = torch.zeros((), device=engine.args.device)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with nullcontext() if last else engine.accumulating():
                loss += self._forward_and_backward(batch, global_items, last=last, clear_cache=clear_cache)
        self._average_gradients()
        self._enter("optimizer")
        grad_norm = engine.clip_and_step()
        learning_rate = engine.step_schedule()
        engine.wrapped.zero_grad()
        self.scale_weights()
        return StepResult(loss, learning_rate, grad_norm)

    def _forward_and_backward(
        self, batch: StepBatch, global_items: float, *, last: bool, clear_cache: bool
    ) -> torch.Tensor:  # fmt: skip
        """Add the gradients of a batch, and return its share in the loss of the step."""
        padding = KnownPadding.of(batch.tensors)
        self._enter("data")  # on its way to the device
        tensors = self._engine.to_device(batch.tensors)
        if self._replica_step is not None and self._replica_step.pipeline is not None:
            self._enter("forward_backward")
            loss = self._through_pipeline(self._replica_step.pipeline, tensors, batch.items, global_items, padding)
        else:
            self._enter("forward")
            with known_padding(padding), self._model.packs.over(batch.tensors):
                loss = self._share(self._engine.wrapped, tensors, batch.items[0], global_items)
            if clear_cache:
                clear_device_cache()
            self._enter("backward")
            self._engine.backward(loss, last=last)
        self._enter("rest")
        return loss.detach()

    def _through_pipeline(
        self,
        pipeline: Pipeline,
        tensors: Mapping[str, torch.Tensor],
        items: Sequence[int],
        global_items: float,
        padding: KnownPadding | None,
    ) -> torch.Tensor:
        """Run both passes of a batch's micro-batches, which take turns in a pipeline."""
        micro_batches, counts = self._micro_batches(tensors), iter(items)

        def share_of(stage: Any, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self._share(stage, micro_batch, next(counts), global_items)

        with known_padding(padding.of_each(len(micro_batches)) if padding is not None else None):
            return pipeline.step(micro_batches, share_of)

    def _share(self, model: Any, batch: dict[str, torch.Tensor], items: int, global_items: float) -> torch.Tensor:
        """Return the micro-batch's share in the mean over the global batch, times the ranks, because gradients are
        averaged over them; processes of one replica read the same rows, and are counted as often on both sides. Where
        the tokens of rows are divided, each process counts its own.

        mean over global batch = sum over micro-batches of (mean of micro-batch x its items) / items of the global batch
        """
        with self._model.activations.forward():
            if items:
                mean = self._model.objective.loss(model, batch)
                share: torch.Tensor = mean * (items * self._engine.args.world_size / global_items)
            else:
                # A window may hold no item; the mean over none is NaN, and all ranks have to run the backward pass.
                outputs = model(**{name: value for name, value in batch.items() if name not in LABELS})
                share = outputs.logits.sum() * 0.0
        self._model.activations.assert_in_effect(self._model.strategy.name)
        self._model.packs.assert_in_effect()
        return share

    def _average_gradients(self) -> None:
        """Average the gradients over the global batch, where the strategy does it itself."""
        if self._replica_step is not None:
            self._enter("communication")
            self._replica_step.average_gradients(self._engine.model)

    def scale_weights(self) -> None:
        """Compute the scales of the weights that are gathered in fp8, after the weights have changed."""
        if self._model.in_float8 is not None:
            self._model.in_float8.scale_weights(self._engine.model)

    def batch_of(
        self, tensors: Mapping[str, torch.Tensor], items_of: Callable[[Mapping[str, torch.Tensor]], int]
    ) -> StepBatch:
        """Return a batch of the loader with the items of its micro-batches, which `items_of` counts."""
        return StepBatch(tensors, [items_of(micro) for micro in self._micro_batches(tensors)])

    def _micro_batches(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Divide a batch of the loader into the micro-batches of a pass through a pipeline; without one, keep it."""
        passed = 1 if self._replica_step is None else self._replica_step.passed
        if passed == 1:
            return [dict(tensors)]
        parts = {name: value.chunk(passed) for name, value in tensors.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(passed)]
