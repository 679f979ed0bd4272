"""What tasks have in common whose model has the vocabulary for its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import LabelForm
from finetune_contract.trainer_job import Columns
from finetune_trainer.data.slices import NOT_LEARNT
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.task_protocol import Answer, Labels, Writer
from finetune_trainer.tasks.writing import TEXT_SCHEMA, WRITTEN, Continues, surprising_rows, text_table, written

if TYPE_CHECKING:
    import pyarrow as pa
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


class DecoderTask(LanguageTask):
    """The part that decoders have in common: what is to be learnt is in their features as `labels`, and they write on
    behind the first `prompt` tokens of a feature.
    """

    auto: str = "AutoModelForCausalLM"
    of_checkpoints: str = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    # transformers knows by the name of a model's class that its labels are of the next token; FSDP changes that name.
    smooths_labels: frozenset[LabelForm | None] = frozenset()
    answer_columns: frozenset[str] = frozenset({WRITTEN})
    writer: Writer | None = Continues()

    def judged(self, columns: Columns) -> dict[str, str]:
        """Nothing: what is to be written is in the features."""
        return {}

    def labelled(self, split: PreparedSplit) -> bool:
        """Whether there is something to learn."""
        return "labels" in split.columns

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """`generated_text`, whatever the labels."""
        return TEXT_SCHEMA

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """`generated_text`: what follows the text, the prompt or the conversation without its last reply."""
        return text_table(written(answers, split.features_by_row[rows]))

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """The rows that the model expects least: evaluation measures how likely the given text is, and writes none."""
        return surprising_rows(answers, split, most)
