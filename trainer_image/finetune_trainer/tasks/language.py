"""Shared parts of tasks whose model's outputs are its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import LabelForm
from finetune_contract.data_settings import Columns
from finetune_trainer.core.slices import NOT_LEARNT
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.task_protocol import Answer, LabelPlace, Labels, Writer
from finetune_trainer.tasks.writing import TEXT_SCHEMA, WRITTEN, DecoderWriter, surprising_rows, text_table, written

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune_trainer.data.prepared import PreparedSplit


class LanguageTask(heads.HeadModels):
    """Part of a TaskModule that does not depend on the model's architecture."""

    of_checkpoints: str
    """Table of `transformers.models.auto.modeling_auto` with the classes of checkpoints that have the task's head."""

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Return no counts: there are no labels."""
        return {}

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Return labels without names, for a checkpoint that has the head."""
        from transformers.models.auto import modeling_auto

        known = getattr(modeling_auto, self.of_checkpoints).values()
        return Labels() if set(config.architectures or ()) & set(known) else None

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Build an empty model; its outputs are the vocabulary, whatever the labels."""
        model: PreTrainedModel = self._class().from_config(config)
        return model

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the learnt tokens."""
        return int(batch["labels"].ne(NOT_LEARNT).sum())

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """Return no metrics: an answer that ignores the input would be another model."""
        return {}


class DecoderTask(LanguageTask):
    """Shared part of decoders: their features hold the tokens to learn as `labels`, and they continue the first
    `prompt` tokens of a feature.
    """

    auto: str = "AutoModelForCausalLM"
    of_checkpoints: str = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    smooths_labels: Mapping[LabelForm | None, LabelPlace] = {}
    answer_columns: frozenset[str] = frozenset({WRITTEN})
    writer: Writer | None = DecoderWriter()

    def judged(self, columns: Columns) -> dict[str, str]:
        """Return no columns: the text to write is in the features."""
        return {}

    def labelled(self, split: PreparedSplit) -> bool:
        """Return whether there are tokens to learn."""
        return "labels" in split.columns

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `generated_text`, whatever the labels."""
        return TEXT_SCHEMA

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `generated_text`: the continuation of a text, a prompt or a conversation before its last reply."""
        return text_table(written(answers, split.features_by_row[rows]))

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the rows of the highest perplexity: evaluation rates the given text, and writes none."""
        return surprising_rows(answers, split, most)
