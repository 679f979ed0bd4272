"""What tasks have in common whose model has the vocabulary for its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune_trainer.tasks import heads
from finetune_trainer.tasks.base import Labels
from finetune_trainer.tasks.writing import NOT_LEARNT

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune_trainer.data.prepared import PreparedSplit


class LanguageTask(heads.WithHead):
    """The part of a TaskModule that does not depend on how such a model reads."""

    of_checkpoints: str
    """Table of `transformers.models.auto.modeling_auto` with the classes of checkpoints that have the task's head."""

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """None are there."""
        return {}

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """No names, for a checkpoint that has the head."""
        from transformers.models.auto import modeling_auto

        known = getattr(modeling_auto, self.of_checkpoints).values()
        return Labels() if set(config.architectures or ()) & set(known) else None

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Its outputs are the vocabulary, whatever the labels."""
        model: PreTrainedModel = self._class().from_config(config)
        return model

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Tokens that are learnt."""
        return int(batch["labels"].ne(NOT_LEARNT).sum())

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """None: an answer that looks at nothing would be another model."""
        return {}
