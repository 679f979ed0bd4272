"""Every process holds the whole model; gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.report import TimePart
from finetune_trainer.strategies.full_state import FullState
from finetune_trainer.strategies.strategy_protocol import Placed, computes_in_bf16, expect, not_in_effect, type_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DataParallel(FullState):
    """torch's DistributedDataParallel, wrapped by accelerate; bf16 (also around fp8 layers) and fp16 by autocast."""

    name: StrategyName = "ddp"
    # The forward pass begins with a broadcast of the buffers of rank 0.
    communicates_in: tuple[TimePart, ...] = ("forward", "backward")

    def __init__(self, precision: Precision, world_size: int) -> None:
        self._precision = precision
        self._world_size = world_size

    def arguments(self) -> Mapping[str, object]:
        """Enable autocast unless the precision is fp32; accelerate scales the loss of fp16."""
        return {"bf16": computes_in_bf16(self._precision), "fp16": self._precision == "fp16"}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model unchanged; accelerate wraps it later."""
        return model

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Average gradients after the last micro-batch only."""
        return placed.wrapped.no_sync()  # type: ignore[operator,no-any-return]

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect DistributedDataParallel over the planned number of processes."""
        from torch.nn.parallel import DistributedDataParallel

        wrapped = placed.wrapped
        if not isinstance(wrapped, DistributedDataParallel):
            problem = f"the model is a {type_name(wrapped)}, not DistributedDataParallel"
            raise not_in_effect(self.name, "NotDistributedDataParallel", problem)
        size = wrapped.process_group.size()
        expect(
            size == self._world_size,
            self.name,
            "WrongGroupSize",
            f"gradients are averaged over {size} of {self._world_size}",
        )
