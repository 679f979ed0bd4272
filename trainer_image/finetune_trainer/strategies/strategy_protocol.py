"""Protocol of the strategies, and the values that they receive.

The requested strategy is in effect or the stage fails: libraries replace one by another without an error (accelerate
turns FSDP on CPU into DDP), and the run would then need other memory and prove something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune_trainer.strategies.parallel.pipeline import Pipeline
    from finetune_trainer.strategies.shard_files import StagedState


WeightsPlace = Literal["files", "device"]
"""Place and type of the weights of a model that is to be spread: as stored in mapped files, or on the device in the
types in which they are trained.
"""


@dataclass(frozen=True)
class Placed:
    """The model after set-up."""

    model: PreTrainedModel
    """The Hugging Face model itself."""
    wrapped: torch.nn.Module
    """Module whose forward pass is called: the model or its wrapper."""
    optimizer: torch.optim.Optimizer
    """The optimizer that steps, without accelerate's wrapper."""
    world_size: int
    device: torch.device
    adapted: bool = False
    """True if most weights are frozen; then only the trained ones are saved, as the others are in model.uri."""


class ReplicaStep(Protocol):
    """Parts of a step that differ if one replica of the model spans several processes."""

    @property
    def passed(self) -> int:
        """Number of micro-batches in one batch of the loader: those of a pass through the pipeline, or 1."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Pipeline that runs forward and backward in place of the model; None: the model itself does."""

    def stepped_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the parameters that this process steps; a group may become empty."""

    def share_weights(self) -> None:
        """Get the weights that other replicas have stepped, after the optimizer's step. Every rank must call it."""

    def average_gradients(self, model: PreTrainedModel) -> None:
        """Average gradients over the whole global batch, once a step. Every rank must call it."""

    def clip_gradients(self, model: PreTrainedModel, most: float) -> torch.Tensor:
        """Scale gradients so that their norm over the whole model is at most `most`, and return the norm before. Every
        rank must call it.
        """


class Strategy(Protocol):
    """One way to spread a model."""

    name: StrategyName

    shards_itself: bool
    """True if `prepare_model` returns the model ready for training; otherwise accelerate moves and wraps it."""

    takes_weights: WeightsPlace
    """Place in which `prepare_model` expects the weights."""

    scales_loss: bool
    """True if the strategy computes in fp16 without accelerate's autocast, so that the engine has to scale the loss."""

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts of a step in which processes exchange data while they compute, without separate communication."""

    @property
    def replica_step(self) -> ReplicaStep | None:
        """Parts of a step that the strategy does itself; None if every process has a replica of its own."""

    def arguments(self) -> Mapping[str, object]:
        """Return the fields of TrainingArguments that this strategy sets."""

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Prepare the model before an optimizer is created from its parameters."""

    def assert_in_effect(self, placed: Placed) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT unless `placed` is spread as requested."""

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return the context of every micro-batch of a step but the last: gradients need not be exchanged in it."""

    def write_weights(self, placed: Placed, path: Path) -> FileEntry | None:
        """Write all weights (of an adapted model only the trained ones), unsharded and tied ones once, into a file of
        safetensors on rank 0, which returns its entry. They are gathered one at a time. Every rank must call it.
        """

    def save(self, placed: Placed, folder: Path) -> Mapping[str, FileEntry]:
        """Write weights and optimizer state below `folder`, which exists. Return the files that this process wrote and
        hashed meanwhile, by their names below `folder`; others hash the rest. Every rank must call it.
        """

    def stage(self, placed: Placed) -> StagedState:
        """Copy weights and optimizer state into host memory, from which a thread writes the files of `save` while the
        training goes on. Every rank must call it. Raise NotImplementedError for a strategy without such copies.
        """

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Read the files written by `save` or from the result of `stage`. Every rank must call it."""

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Return why a checkpoint of that strategy and world cannot be continued here; None if it can."""


def computes_in_bf16(precision: Precision) -> bool:
    """Return whether layers without a precision of their own compute in bf16."""
    return precision in ("bf16", "fp8")


def not_in_effect(strategy: str, reason: str, problem: str) -> StageError:
    """Return the error for a strategy other than the requested one; `reason` is a word in CamelCase."""
    return StageError(
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        reason,
        f"parallelism.strategy {strategy} was requested and is not in effect: {problem}.",
        "This is a defect of the image or its libraries; another strategy may work meanwhile.",
    )


def expect(holds: bool, strategy: str, reason: str, problem: str) -> None:
    """Raise `not_in_effect` unless `holds`."""
    if not holds:
        raise not_in_effect(strategy, reason, problem)


def refuse_uneven(field: str, degree: int, counts: Mapping[str, object]) -> None:
    """Raise StageError CONFIG `UnevenHeads` unless `degree` divides each of `counts` (name -> count in the model). A
    value that is no integer is absent from the model, and skipped.
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
"""Fields of a model's config."""


def type_name(value: object) -> str:
    """Return the qualified name of the type of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the second name of each tied weight -> its first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
