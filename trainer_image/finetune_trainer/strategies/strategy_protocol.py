"""What every strategy answers, and what it is handed.

A strategy that is asked for is in effect or the stage fails: libraries on the way down replace one by another without
an error (accelerate, for one, turns FSDP on CPU into DDP), and the run would then need other memory and prove
something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_trainer.checkpoints import CheckpointPart
from finetune_trainer.failures import StageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune_trainer.strategies.pipeline import Pipeline


@dataclass(frozen=True)
class Placed:
    """The model after set-up."""

    model: PreTrainedModel
    """The Hugging Face model itself."""
    wrapped: torch.nn.Module
    """What the forward pass is called on: the model, or what was put around it."""
    optimizer: torch.optim.Optimizer
    """The optimizer that steps, without accelerate's wrapper."""
    world_size: int
    device: torch.device
    adapted: bool = False
    """Whether most weights are frozen; then only those that are trained are saved, as the others are in model.uri."""


class ReplicaStep(Protocol):
    """The parts of a step that differ where one replica of the model is on several processes."""

    @property
    def passed(self) -> int:
        """Micro-batches that one batch of the loader is: those of a pass through the pipeline, or 1."""

    @property
    def pipeline(self) -> Pipeline | None:
        """What goes forward and backward in place of the model; None: the model itself."""

    def average_gradients(self, model: PreTrainedModel) -> None:
        """Makes them those of the whole global batch, once a step. Every rank must call it."""

    def clip_gradients(self, model: PreTrainedModel, most: float) -> torch.Tensor:
        """Scales gradients so that their norm over the whole model is `most` at most; the norm before. Every rank must
        call it.
        """


class Strategy(Protocol):
    """One way to spread a model."""

    name: StrategyName

    spreads_itself: bool
    """Whether `prepare_model` leaves the model as it is trained; otherwise accelerate moves and wraps it."""

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts of a step in which processes exchange data while they compute; communication apart is not among
        them.
        """

    @property
    def replica_step(self) -> ReplicaStep | None:
        """The parts of a step that it does itself; None where every process has a replica of its own."""

    def arguments(self) -> Mapping[str, object]:
        """Fields of TrainingArguments that this strategy sets."""

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """What has to happen to the model before an optimizer is made of its parameters."""

    def assert_in_effect(self, placed: Placed) -> None:
        """StageError STRATEGY_NOT_IN_EFFECT unless `placed` is spread as asked for."""

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return the context of every micro-batch of a step but the last, in which gradients need not be exchanged."""

    def model_state(self, placed: Placed) -> dict[str, Any]:
        """All weights, of an adapted model the trained ones, whole, on the CPU of rank 0; empty elsewhere. Every rank
        must call it.
        """

    def save(self, placed: Placed, folder: Path) -> None:
        """Writes weights and optimizer state below `folder`, which exists. Every rank must call it."""

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Reads what `save` wrote. Every rank must call it."""

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Why a checkpoint of that strategy and world cannot be continued here; None when it can."""


def computes_in_bf16(precision: Precision) -> bool:
    """Whether what no layer does in a precision of its own is computed in bf16."""
    return precision in ("bf16", "fp8")


def not_in_effect(strategy: str, reason: str, found: str) -> StageError:
    """The error for a strategy that is not what was asked for; `reason` is the CamelCase word for the case."""
    return StageError(
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        reason,
        f"parallelism.strategy {strategy} was asked for and is not in effect: {found}.",
        "This is a defect of the image or its libraries; another strategy may work meanwhile.",
    )


def expect(holds: bool, strategy: str, reason: str, found: str) -> None:
    """Raises `not_in_effect` unless `holds`."""
    if not holds:
        raise not_in_effect(strategy, reason, found)


def refuse_uneven(field: str, degree: int, counts: Mapping[str, object]) -> None:
    """StageError CONFIG `UnevenHeads` unless `degree` divides each of `counts`, those of a model by their names; one
    that is no number the model has not.
    """
    for name, count in counts.items():
        if isinstance(count, int) and count % degree:
            raise StageError(
                FailureClass.CONFIG,
                "UnevenHeads",
                f"{field} is {degree}, which does not divide the {count} {name} of the model.",
                f"Set {field} to a divisor of {count}.",
            )


HEADS = ("num_attention_heads", "num_key_value_heads")
"""In a model's config."""


def type_name(value: object) -> str:
    """Qualified name of the type of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Second name of a weight -> its first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
