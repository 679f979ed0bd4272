"""One process, nothing around the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.report import TimePart
from finetune_trainer.strategies.full_state import FullState
from finetune_trainer.strategies.strategy_protocol import Placed, computes_in_bf16, expect, type_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Single(FullState):
    """Unwrapped model; bf16 (also around fp8 layers) and fp16 by autocast."""

    name: StrategyName = "single"
    communicates_in: tuple[TimePart, ...] = ()

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def arguments(self) -> Mapping[str, object]:
        """Enable autocast unless the precision is fp32; accelerate scales the loss of fp16."""
        return {"bf16": computes_in_bf16(self._precision), "fp16": self._precision == "fp16"}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model unchanged."""
        return model

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect one process, and no wrapper."""
        expect(placed.world_size == 1, self.name, "WorldNotSingle", f"{placed.world_size} processes train together")
        expect(
            placed.wrapped is placed.model,
            self.name,
            "ModelIsWrapped",
            f"the model is wrapped in {type_name(placed.wrapped)}",
        )
