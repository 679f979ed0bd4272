"""What a task must bring along. A task knows data, labels, heads and metrics; it knows nothing of strategies or
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finetune_contract.choices import Task
from finetune_contract.facts import DataFacts
from finetune_contract.job import Columns, TrainerJob
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.sources import ColumnNeed, RawSplit

Logits: TypeAlias = NDArray[np.float32]
"""Shape (rows, labels)."""
LabelIds: TypeAlias = NDArray[np.int64]
"""Shape (rows,)."""
Feature: TypeAlias = Mapping[str, Any]
"""One prepared row: `input_ids`, `token_type_ids` with pairs, `label` when it is known."""


@dataclass(frozen=True)
class Labels:
    """Label names in the order of their ids, and each labelled split's ids."""

    names: tuple[str, ...]
    ids: Mapping[str, LabelIds]
    """Role -> one id for each row; a role without labels is missing."""


class TaskModule(Protocol):
    """One task."""

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """The raw columns to read; `setting` is the path of the data source. The label is required when `labelled`."""

    def texts(self, columns: Columns) -> dict[str, str]:
        """Role of each text column (a field of `Columns`) -> its name in the data."""

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """StageError DATA `NullText` or `NotText` for the first row whose text is none."""

    def encode(
        self, rows: Mapping[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> tuple[dict[str, list[list[int]]], int]:
        """Token features of rows (keyed as `texts`) and how many of the rows were truncated."""

    def labels(self, raw: Mapping[str, RawSplit], columns: Columns, known: Sequence[str] | None) -> Labels:
        """The labels of all splits. `known`: the names of a model that is not trained, in the order of its ids.

        StageError DATA `LabelOutOfRange`, `NullLabel`, `LabelType`, `OneLabel`.
        """

    def model_labels(self, config: PretrainedConfig) -> tuple[str, ...] | None:
        """The label names of a model that has this task's head; None when it has no such head."""

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The job's model with a head for `facts.labels`, to be trained; float32 unless `dtype` is given.

        A new head is drawn from the job's seed whatever the caller's random state, so that all processes and
        strategies start alike.
        """

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """The architecture with a head for that many labels, without weights of a checkpoint."""

    def load_model(self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """A model that has its head already, in float32, to run inference."""

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `token_type_ids` with pairs, `labels` when known; padded to the longest."""

    def metrics(self, logits: Logits, labels: LabelIds, names: Sequence[str]) -> dict[str, float]:
        """The task's metrics, with the names of Hugging Face and without `eval_`."""

    def majority(self, labels: LabelIds, names: Sequence[str]) -> dict[str, float]:
        """The same metrics for always answering the most frequent label."""

    def loss(self, logits: Logits, labels: LabelIds) -> float:
        """Mean loss over the rows, without label smoothing."""

    def predictions(self, logits: Logits, facts: DataFacts) -> list[dict[str, Any]]:
        """One JSON object for each row."""


def task_module(task: Task) -> TaskModule:
    """The module of `task`; StageError CONFIG `NotYetSupported` for tasks that have none yet."""
    if task == "text-classification":
        from finetune_trainer.tasks.text_classification import TextClassification

        return TextClassification()
    raise StageError(
        FailureClass.CONFIG,
        "NotYetSupported",
        f"task is {task!r}, which this trainer does not know yet.",
        "Set task to 'text-classification'.",
    )
