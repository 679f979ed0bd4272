"""Collaborators of the training loop, in four values: data, model, schedule and hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedModel, TrainerState

from finetune_contract.choices import CheckpointingMode, OptimizerName
from finetune_contract.report import TimePart
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.models.adapters import Adapted
from finetune_trainer.models.float8 import InFloat8
from finetune_trainer.strategies.strategy_protocol import Placed, Strategy
from finetune_trainer.tasks.task_protocol import Objective
from finetune_trainer.training.engine import Engine
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
from finetune_trainer.training.passes.activations import Activations, OnDevice
from finetune_trainer.training.passes.objective import ModelLoss
from finetune_trainer.training.passes.packed_attention import PackAttention, WithMasks
from finetune_trainer.training.reference_answers import NoReference, Reference
from finetune_trainer.training.timing import PartClock
from finetune_trainer.training.tracking import BoundedTracker
from finetune_trainer.training.validation_rounds import Validation


class RunningLoop(Protocol):
    """Parts of a loop that its checkpoints hold."""

    state: TrainerState

    @property
    def engine(self) -> Engine:
        """The model in training, with optimizer and schedule."""

    @property
    def placed(self) -> Placed:
        """The model and the optimizer as the strategy placed them."""


@dataclass(frozen=True)
class LoopData:
    """Rows of the steps and of the evaluations."""

    order: EpochOrder
    rows: TrainRows
    collate: Collate
    validation: Validation | None
    """Validation split; None: the data have none."""
    reference: Reference = field(default_factory=NoReference)
    """Model with whose answers to the rows the objective compares."""


@dataclass(frozen=True)
class LoopModel:
    """The model, how it is spread, and how it computes its loss."""

    loaded: PreTrainedModel
    """Model before the strategy prepares it; afterwards it is that of the `Engine`."""
    strategy: Strategy
    optimizer: OptimizerName = "adamw"
    objective: Objective = field(default_factory=ModelLoss)
    """Loss to minimise."""
    adapted: Adapted | None = None
    """Adapter in the model; None: all weights are trained."""
    in_float8: InFloat8 | None = None
    """Layers in fp8; None: no layer multiplies in fp8."""
    packs: PackAttention = field(default_factory=WithMasks)
    checkpointing: CheckpointingMode = "none"
    activations: Activations = field(default_factory=OnDevice)


class Saver(Protocol):
    """Writes and reads checkpoints of a running loop."""

    def wants(self) -> bool:
        """Return whether a checkpoint by the clock is due; called on rank 0."""

    def due(self, step: int, *, by_clock: bool) -> bool:
        """Return whether to save after `step`; the same answer on every rank."""

    def save(self, loop: RunningLoop, *, wait: bool) -> None:
        """Save a checkpoint, and `wait` until it is valid, or let it be written beside the training; every rank calls
        it.
        """

    @property
    def writing(self) -> bool:
        """True from `save` to `finish` of a checkpoint that is written beside the training; alike on all ranks."""

    def finish(self) -> None:
        """Wait for a checkpoint that is written beside the training; every rank calls it."""

    def resume(self, loop: RunningLoop) -> None:
        """Restore model, optimizer, schedule, the count of steps, and the generators; every rank calls it."""


class Stopper(Protocol):
    """Decides whether to end before the last step."""

    def should_stop(self, step: int, metrics: Mapping[str, float], placed: Placed) -> bool:
        """Return the decision after an evaluation; called on every rank, with the same figures."""

    @property
    def stopped(self) -> bool:
        """Return whether it has decided to stop, in this attempt or in the resumed one."""


@dataclass(frozen=True)
class LoopSchedule:
    """When to save, and when to end before the last step."""

    saver: Saver
    stopper: Stopper
    interruption: Interruption
    save_on_preemption: bool


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    """Seconds from requesting its rows, or from the loss of the step before if that came later, to its loss; without
    evaluation and checkpoints.
    """
    samples: int
    tokens: int
    computed_tokens: int
    """`tokens` with padding."""
    parts: Mapping[TimePart, float]
    """Seconds since the previous step, or since the start."""

    @property
    def rates(self) -> dict[str, float]:
        """Return the rates over all processes; tokens without padding."""
        return {
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }


class Observer(Protocol):
    """Receives finished steps and evaluations."""

    def on_step(self, report: StepReport) -> None:
        """Handle a finished step; called after every step, on every rank."""

    def on_validation_batch(self, step: int, done: int) -> None:
        """Handle a finished batch of an evaluation after `step`; called on every rank."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle a finished evaluation; called on every rank, with the same figures."""

    def on_pause(self, step: int, parts: Mapping[TimePart, float]) -> None:
        """Handle the end of an evaluation or checkpoint after `step`, with the time since the step; on every rank."""


@dataclass(frozen=True)
class LoopHooks:
    """Receivers of time and figures, which change nothing in the training."""

    observer: Observer
    clock: PartClock = field(default_factory=PartClock)
    trackers: Sequence[BoundedTracker] = ()
    """Experiment trackers; of transformers' events they receive the begin, the end and the figures of a training."""
