"""Interface of a task. A task knows data, labels, heads and metrics; it knows nothing of strategies or processes.

Three terms: a *row* is one row of the data; a *feature* is one input of the model, a row or a window of it; an *answer*
is the model's output for a feature, as arrays whose meaning only the task knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finetune_contract.choices import LabelForm, Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Generation
from finetune_contract.trainer_job import TrainerJob

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedData, PreparedSplit
    from finetune_trainer.data.sources import ColumnNeed, RawSplit
    from finetune_trainer.tasks.class_metrics import Confusion

Feature: TypeAlias = Mapping[str, Any]
"""One prepared feature: `input_ids` and the task's other columns, without padding."""
DRAW = "draw"
"""Key in a training feature: the first numbers of its random seed, others in each epoch."""
Answer: TypeAlias = Mapping[str, NDArray[Any]]
"""The model's output for one feature, without padding."""
LabelPlace: TypeAlias = Literal["same", "next", "decoder"]
"""Place of a label: that of its logits; that of the token after its logits; or that of its logits in a decoder, which
reads the labels before.
"""
WARM_TEXT = "The server warms up with a sentence of a few words before it takes requests."
REFERENCE = "reference_"
"""Prefix of the reference's values, see `Objective`, in answers, features and batches."""


@dataclass(frozen=True)
class Labels:
    """Labels of a head."""

    names: tuple[str, ...] = ()
    """Label names in the order of their ids; empty for tasks without labels."""
    form: LabelForm | None = None
    """Form of the labels, for tasks with several forms."""


@dataclass(frozen=True)
class Targets:
    """Checked targets of the prediction."""

    labels: Labels = Labels()
    of: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Role -> one target for each row, as `encode` takes it; a role without targets is missing."""
    notes: tuple[str, ...] = ()
    """Sentences for people on how targets are read."""


@dataclass(frozen=True)
class Coding:
    """Settings for turning rows into features."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Limit of a feature's tokens, special tokens included."""
    stride: int
    """Tokens that two neighbouring windows of a row share; for tasks that cut long rows into windows."""
    model_type: str
    """Type in the model's config: some architectures need more than tokens."""
    embedded: int | None = None
    """Number of token ids that the model has embeddings of; None: unknown."""


@dataclass(frozen=True)
class Encoded:
    """Features of some rows, in their order."""

    features: Mapping[str, Sequence[Any]]
    """Column -> one value for each feature: a whole number, or a list of them."""
    rows: Sequence[int] | None = None
    """Index of each feature's row among the rows given; None: each row is one feature."""
    truncated: int = 0
    """Number of rows that lost text."""
    learnt: Sequence[int] | None = None
    """Number of items of the loss in each feature; None: one, or there are no targets."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Part of a row that was left out -> number of rows that lost it; empty for tasks that do not say."""


@dataclass(frozen=True)
class Card:
    """Task-specific parts of a model card."""

    use: str
    """Python lines that query `model`."""
    long_rows: str
    """Treatment of rows that are longer than a feature, in a sentence."""
    counted: str
    """Name of the items that `count_labels` counts."""
    baseline: str
    """Description of the answer behind `baseline`, as the end of a sentence."""
    tag: str | None = None
    """Name of the task in transformers and on the Hub; None: the same as ours."""
    auto: str | None = None
    """Class that loads the model, for which `use` has a `tokenizer`; None: `model` is a pipeline of transformers, which
    does not exist for every task.
    """


class Objective(Protocol):
    """Loss that a task minimises in place of the model's own. It may compare the model with the reference, which is the
    model before training.
    """

    @property
    def compares(self) -> tuple[str, ...]:
        """Names of an answer's values that are compared with the reference's; empty: there is no reference."""

    @property
    def of_rows(self) -> Objective | None:
        """The same for a model whose loss, from its labels, is the negative log-likelihood of each row, shape (rows,);
        None: it cannot be computed from these.
        """

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the items of a batch. The batch has the reference's values under `REFERENCE` names."""


class Writer(Protocol):
    """Text generation of a task's model."""

    stages: frozenset[Stage]
    """Stages whose answers hold the generated text; in other stages answers are those of a forward pass."""

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Return the indices of the features for which it writes."""

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """Return the model's text for each of `features`, as `generated_text`."""


class Encoding(Protocol):
    """Rows of a task: their columns, targets and features."""

    windows: bool = False
    """True if a row that is longer than a feature becomes several features; False: it is cut."""
    packed: tuple[str, ...] = ()
    """Columns of features, as long as `input_ids`, that a pack concatenates (see `data/packing.py`); empty for tasks
    whose features cannot share a sequence.
    """

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the raw columns to read; `setting` is the data source's path. Targets are required when `labelled`."""

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return role of each encoded column (a field of `Columns`), without the target -> its name in the data."""

    def judged(self, columns: Columns) -> dict[str, str]:
        """Return role of each further column that `score` needs -> its name in the data."""
        return {}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Raise StageError DATA for the first row with inputs that the task cannot use."""

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the targets of all splits. `known`: the labels of a model that is not trained.

        Raise StageError DATA for the first row with a target that the task cannot use.
        """

    def count_labels(self, targets: NDArray[Any], labels: Labels) -> dict[str, int]:
        """Return label name -> its count; empty for tasks without labels."""
        return {}

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode rows (keyed as `inputs`), and their targets where they are known."""

    def remarks(self, columns: Columns, coding: Coding) -> tuple[str, ...]:
        """Return sentences for people on how the tokenizer suits the task."""
        return ()

    def in_windows(self, columns: Columns) -> bool:
        """Return `windows`, for tasks whose columns do not matter; `columns`: those of the job's data set."""
        return self.windows

    def widths(self, prepared: PreparedData, role: str) -> NDArray[np.int64]:
        """Return the tokens that each feature takes in a batch of similar features: its own number, unless it is
        several sequences of different lengths.
        """
        return prepared.lengths(role)

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Return the model's inputs: `input_ids`, `attention_mask` and the task's others, padded to the longest."""

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the items of which a batch's loss is the mean."""


class Head(Protocol):
    """Models of a task, and the loss that their training minimises."""

    label_place: LabelPlace | None = None
    """Place of the labels whose loss is over classes, which can be smoothed; None: the task has no such labels."""
    smoothed_form: LabelForm | None = None
    """Form of these labels, for tasks with several forms."""
    objective: Objective | None = None
    """Loss to minimise; None: the model's own."""
    named_outputs: bool = False
    """True if the outputs have the names of labels: training keeps the order of those that a checkpoint has."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Return the values that the objective compares with the reference; empty where it has none."""
        return () if self.objective is None else self.objective.compares

    def smooths(self, form: LabelForm | None) -> bool:
        """Return whether labels of that form can be smoothed."""
        return self.label_place is not None and form == self.smoothed_form

    def refuse_packing(self, job: TrainerJob, config: PretrainedConfig) -> None:
        """Raise StageError CONFIG `PackingNotSupported` when models of that config mix the rows of a pack."""

    def model_labels(self, config: PretrainedConfig) -> Labels | None:
        """Return the labels of a model that has this task's head; None when it has no such head."""

    def shown(self, facts: DataFacts) -> dict[str, Any]:
        """Return fields for the config of a model that was trained elsewhere: those that its job's rows decide."""
        return {}

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the job's model with a head for `facts.labels`, for training; float32 unless `dtype` is given.

        A new head is drawn from the job's seed whatever the caller's random state, so that all processes and strategies
        start alike.
        """

    def empty_model(self, config: PretrainedConfig, labels: int) -> PreTrainedModel:
        """Build the architecture with a head for that many labels, without weights of a checkpoint."""

    def load_model(
        self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> PreTrainedModel:
        """Load a model that already has its head, to run inference in `dtype`."""

    def load_incomplete(
        self, job: TrainerJob, name_or_path: str, arguments: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[PreTrainedModel, frozenset[str]]:
        """Load a model as `load_model` does, and return also the names of the weights that its checkpoint lacks."""

    def identity(self, job: TrainerJob) -> dict[str, Any]:
        """Return the settings of the job beside `training` on which the course of training depends."""
        return {}


class Scoring(Protocol):
    """Answers of a task's model, and what they are worth."""

    metrics: Mapping[LabelForm | None, tuple[str, ...]]
    """Form of the labels -> metrics of `score` besides the loss, by their Hugging Face names, without `eval_`."""
    learnt: str = "labels"
    """Column that only features with targets have."""

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the model's answer to each of `features`, from which `batch` was collated; on the CPU and in float32,
        whatever the model's precision.
        """

    def labelled(self, split: PreparedSplit) -> bool:
        """Return whether the targets of a split are known."""
        return self.learnt in split.columns

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Return `loss` (without label smoothing) and `metrics` over a split whose targets are known."""

    def baseline(self, split: PreparedSplit) -> dict[str, float]:
        """Return the same metrics for the best answer that ignores the rows, for example always the most frequent
        label; empty where there is none.
        """
        return {}

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return rows for the report: `row` (index among those of the split), `label` and `predicted` where the task
        has them, `score`; the most informative ones first.
        """

    def confusion(self, answers: Sequence[Answer], split: PreparedSplit) -> Confusion | None:
        """Return counts of given classes by right class; None where an answer is not one of a few classes."""
        return None


class Description(Protocol):
    """Predictions of a task's model for others: files, servers and the model card."""

    text_role: str = "text"
    """Role of a text that a request gives without a role, for tasks that read one text."""
    chat_role: str | None = None
    """Role of a conversation to continue, for tasks whose server has OpenAI's API; None: it has not."""

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return names and types of the columns of `predictions` for a model with these labels."""

    @property
    def answer_columns(self) -> frozenset[str]:
        """Return the names of the columns of `predictions`, whatever the labels."""
        return frozenset(self.answer_schema(Labels()).names)

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return the task's own columns of the predictions for some of the split's rows, one schema for all."""

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Return the task's part of the trained model's card."""

    def prompt_role(self, columns: Columns) -> str:
        """Return `text_role`, for tasks whose columns do not matter; `columns`: those of the job's data set."""
        return self.text_role

    def warm_row(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return a row, keyed as `Encoding.inputs`, with which a server warms up and measures."""
        return {self.prompt_role(Columns()): WARM_TEXT}

    def served_facts(self, labels: Labels, columns: Columns, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return facts about inputs and outputs beyond the task, for a server's page and other clients."""
        return {}


@dataclass(frozen=True)
class TaskParts:
    """One task. Who uses it needs one of its parts, or two."""

    encoding: Encoding
    head: Head
    scoring: Scoring
    description: Description
    writer: Writer | None = None
    """Text generation, for tasks whose answers are generated text."""


def labels_of(facts: DataFacts) -> Labels:
    """Return the labels of prepared data."""
    return Labels(facts.labels, facts.label_form)
