"""Shared parts of tasks whose model's outputs are its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.models.loading import load_config
from finetune_trainer.tasks.heads import AutoHead, adopt_padding
from finetune_trainer.tasks.task_protocol import Answer, Description, Encoding, Labels, Scoring
from finetune_trainer.tasks.writing import TEXT_SCHEMA, surprising_rows, text_table, token_figures, written

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit


class LanguageEncoding(Encoding):
    """Rows whose features hold the tokens to learn as `labels`."""

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the learnt tokens."""
        return int(batch["labels"].ne(NOT_LEARNT).sum())


class LanguageHead(AutoHead):
    """Head whose outputs are the vocabulary: there are no labels."""

    of_checkpoints: str
    """Table of `transformers.models.auto.modeling_auto` with the classes of checkpoints that have the task's head."""

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Return labels without names, for a checkpoint that has the head."""
        from transformers.models.auto import modeling_auto

        known = getattr(modeling_auto, self.of_checkpoints).values()
        return Labels() if set(config.architectures or ()) & set(known) else None

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Build an empty model; its outputs are the vocabulary, whatever the labels."""
        model: PreTrainedModel = self._class().from_config(config)
        return model

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model; a head that the checkpoint lacks is drawn."""
        return self.built(job, load_config(job), dtype)


class DecoderHead(LanguageHead):
    """Head of decoders, which continue the first `prompt` tokens of a feature."""

    auto = "AutoModelForCausalLM"
    of_checkpoints = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model with a padding token."""
        model = super().build_model(job, facts, dtype=dtype)
        adopt_padding(job, model)
        return model


class LanguageScoring(Scoring):
    """Answers that hold the loss of each learnt token. An answer that ignores the input would be another model, so
    there is no baseline.
    """

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """See `token_figures`: of a row with a prompt only completions and replies are learnt."""
        return token_figures(answers)

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the rows whose learnt tokens have the highest loss."""
        return surprising_rows(answers, split, most)


class TextDescription(Description):
    """Predictions that are one text for each row: a summary, or the continuation of a text, a prompt or a conversation
    before its last reply.
    """

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `generated_text`, whatever the labels."""
        return TEXT_SCHEMA

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `generated_text`."""
        return text_table(written(answers, split.features_by_row[rows]))


class DecoderDescription(TextDescription):
    """Predictions of decoders, which may know conversations."""

    def served_facts(self, labels: Labels, columns: Columns, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return whether the tokenizer has a chat template."""
        return {"chat": tokenizer.chat_template is not None}
