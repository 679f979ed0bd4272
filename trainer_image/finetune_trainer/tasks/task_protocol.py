"""What a task must bring along. A task knows data, labels, heads and metrics; it knows nothing of strategies or
processes.

Three words: a *row* is one row of the data; a *feature* is what the model is given, one row or a window of it; an
*answer* is what the model says about a feature, as arrays whose meaning only the task knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finetune_contract.choices import LabelForm, Stage
from finetune_contract.facts import DataFacts
from finetune_contract.trainer_job import Columns, Generation, TrainerJob

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedData, PreparedSplit
    from finetune_trainer.data.sources import ColumnNeed, RawSplit
    from finetune_trainer.tasks.class_figures import Confusion

Feature: TypeAlias = Mapping[str, Any]
"""One feature as it was prepared: `input_ids` and what else the task has encoded, without padding."""
DRAW = "draw"
"""Of a feature in training: numbers that draws for it begin with, others in each epoch."""
Answer: TypeAlias = Mapping[str, NDArray[Any]]
"""What a model says about one feature, without padding."""
REFERENCE = "reference_"
"""Before the name of what an answer has of the reference, see `Objective`; of features and batches, too."""


@dataclass(frozen=True)
class Labels:
    """What a head answers with."""

    names: tuple[str, ...] = ()
    """Label names in the order of their ids; empty for tasks without labels."""
    form: LabelForm | None = None
    """Of tasks whose labels have several."""


@dataclass(frozen=True)
class Targets:
    """What is to be predicted, checked."""

    labels: Labels = Labels()
    of: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Role -> one target for each row, as `encode` takes it; a role without targets is missing."""
    notes: tuple[str, ...] = ()
    """Sentences for people on how targets are read."""


@dataclass(frozen=True)
class Coding:
    """How rows become features."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Tokens of a feature at most, special tokens included."""
    stride: int
    """Tokens that two neighbouring windows of a row share; for tasks that cut long rows into windows."""
    model_type: str
    """Of the model's config: some architectures want more than tokens."""


@dataclass(frozen=True)
class Encoded:
    """Features of some rows, in their order."""

    features: Mapping[str, Sequence[Any]]
    """Column -> one value for each feature: a whole number, or a list of them."""
    rows: Sequence[int] | None = None
    """Index of each feature's row among the rows given; None: each row is one feature."""
    truncated: int = 0
    """Rows that have lost text."""
    learnt: int | None = None
    """Items of the loss, where there are targets; None: as many as features."""


@dataclass(frozen=True)
class Card:
    """What only the task can say in a model card."""

    use: str
    """Python lines that ask `model` something."""
    long_rows: str
    """What becomes of rows that are longer than a feature, in a sentence."""
    counted: str
    """What `count_labels` counts."""
    baseline: str
    """Whose metrics `baseline` has, as the end of a sentence."""
    tag: str | None = None
    """What transformers and the Hub call the task; None: as we do."""
    auto: str | None = None
    """Class that loads the model, which `use` has a `tokenizer` for; None: `model` is a pipeline of transformers, which
    has none for every task.
    """


class Objective(Protocol):
    """A loss that a task minimises in place of the one that its model computes. It may compare the model with the
    reference, which is the model as it was before training.
    """

    @property
    def compares(self) -> tuple[str, ...]:
        """Numbers of an answer that are compared with those of the reference; empty: there is no reference."""

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch. The batch has what is compared, of the reference, under
        `REFERENCE` names.
        """


class Writer(Protocol):
    """How the model of a task writes."""

    stages: frozenset[Stage]
    """Where answers have what it writes; in other stages they are those of a forward pass."""

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Indices of the features that it writes to."""

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """What the model writes to each of `features`, as `generated_text`."""


class TaskModule(Protocol):
    """One task."""

    metrics: Mapping[LabelForm | None, tuple[str, ...]]
    """Form of the labels -> what `score` measures besides the loss, as Hugging Face calls it, without `eval_`."""
    smooths_labels: frozenset[LabelForm | None]
    """Forms of labels whose loss is one of classes, which transformers can smooth."""
    answer_columns: frozenset[str]
    """Names of the columns of `predictions`."""
    packed: tuple[str, ...]
    """Columns of features, as long as `input_ids`, that a pack of several features has one after the other (see
    `data/packing.py`); empty for tasks whose features cannot share a sequence.
    """
    writer: Writer | None
    """How the model writes, for tasks whose answers are text of its own."""
    objective: Objective | None
    """None: the loss of the model itself is minimised."""

    # --------------------------------------------------------------------------------------------------------- data

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """The raw columns to read; `setting` is the path of the data source. Targets are required when `labelled`."""

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Role of each column that is encoded (a field of `Columns`), without the target -> its name in the data."""

    def judged(self, columns: Columns) -> dict[str, str]:
        """Role of each further column that `score` needs -> its name in the data."""

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """StageError DATA for the first row whose inputs are not what the task takes."""

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """The targets of all splits. `known`: the labels of a model that is not trained.

        StageError DATA for the first row whose target is not what the task takes.
        """

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Label name -> how often it is there; empty for tasks without labels."""

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Features of rows (keyed as `inputs`), and of their targets where they are known."""

    def widths(self, prepared: PreparedData, role: str) -> NDArray[np.int64]:
        """Tokens that each feature takes in a batch of features like it: its own, but where it is several sequences of
        different lengths.
        """

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """What the model takes: `input_ids`, `attention_mask` and what else there is, padded to the longest."""

    # ------------------------------------------------------------------------------------------------------- models

    def refuse_packing(self, job: TrainerJob, config: PretrainedConfig) -> None:
        """StageError CONFIG `PackingNotSupported` when models of that config do not keep the rows of a pack apart."""

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """The labels of a model that has this task's head; None when it has no such head."""

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The job's model with a head for `facts.labels`, to be trained; float32 unless `dtype` is given.

        A new head is drawn from the job's seed whatever the caller's random state, so that all processes and
        strategies start alike.
        """

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """The architecture with a head for that many labels, without weights of a checkpoint."""

    def load_model(
        self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> PreTrainedModel:
        """A model that has its head already, to run inference in `dtype`."""

    # ------------------------------------------------------------------------------------------------------ results

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """How many items the loss of a batch is the mean of."""

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """What the model says about each of `features`, of which `batch` was made; on the CPU, and in float32 however
        the model computes.
        """

    def labelled(self, split: PreparedSplit) -> bool:
        """Whether the targets of a split are known."""

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """`loss` (without label smoothing) and `metrics` over a split whose targets are known."""

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """The same metrics for the best answer that looks at no row, as for always giving the most frequent label;
        empty where there is none.
        """

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return names and types of the columns of `predictions` for a model with these labels."""

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """The task's own columns of the predictions for some of the split's rows, one schema for all."""

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """For the card of the trained model."""

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Rows for the report: `row` (index among those of the split), `label` and `predicted` where the task has them,
        `score`; the telling ones first.
        """

    def confusion(self, answers: Sequence[Answer], split: PreparedSplit) -> Confusion | None:
        """Which class was given for which; None where an answer is not one of a few classes."""


def labels_of(facts: DataFacts) -> Labels:
    """Those of prepared data."""
    return Labels(facts.labels, facts.label_form)


def compared(task: TaskModule) -> tuple[str, ...]:
    """Return what the task's objective compares with the reference; empty where it has none."""
    return () if task.objective is None else task.objective.compares
