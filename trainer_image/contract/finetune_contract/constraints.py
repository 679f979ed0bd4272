"""Choices of a job that constrain each other, and the terms that the table of constraints is written in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from finetune_contract.arguments import compiles
from finetune_contract.choices import (
    ActivationOffload,
    AdapterMethod,
    CheckpointingMode,
    Device,
    OffloadDevice,
    OptimizerName,
    Precision,
    Sharding,
    StrategyName,
    Task,
    ZeroStage,
)

if TYPE_CHECKING:
    from finetune_contract.trainer_job import Strategy, TrainerJob, Training

Value: TypeAlias = str | int | bool


@dataclass(frozen=True)
class Choices:
    """Choices of one job that constrain each other. None: not chosen yet, or unknown."""

    task: Task | None = None
    """Task that the built-in loop trains for."""
    packing: Literal["always", "never"] | None = None
    adapter: AdapterMethod | Literal["none"] | None = None
    precision: Precision | None = None
    optimizer: OptimizerName | None = None
    torch_compile: bool | None = None
    liger: bool | None = None
    """True if Liger's kernels are requested."""
    strategy: StrategyName | None = None
    zero_stage: ZeroStage | None = None
    sharding: Sharding | None = None
    offload_optimizer: OffloadDevice | None = None
    offload_parameters: OffloadDevice | None = None
    offload_activations: ActivationOffload | None = None
    checkpointing: CheckpointingMode | None = None
    tensor: int | None = None
    pipeline: int | None = None
    """Degree of pipeline parallelism."""
    sequence: int | None = None
    deepspeed_config: bool | None = None
    """True if the job overrides keys of the DeepSpeed configuration."""
    device: Device | None = None
    nodes: int | None = None
    processes_per_node: int | None = None

    @property
    def model_ranks(self) -> int | None:
        """Number of processes that together hold one replica of the model."""
        return None if self.tensor is None or self.pipeline is None else self.tensor * self.pipeline

    @property
    def offload(self) -> str | None:
        """Location of optimizer state and parameters, e.g. `cpu+none`."""
        if self.offload_optimizer is None or self.offload_parameters is None:
            return None
        return f"{self.offload_optimizer}+{self.offload_parameters}"

    def with_strategy(self, strategy: Strategy) -> Choices:
        """Return these choices with those of `strategy` in place of their own."""
        return replace(
            self,
            strategy=strategy.name,
            zero_stage=strategy.zero_stage,
            sharding=strategy.fsdp_sharding,
            offload_optimizer=strategy.offload_optimizer,
            offload_parameters=strategy.offload_parameters,
            offload_activations=strategy.offload_activations,
            checkpointing=strategy.activation_checkpointing,
            tensor=strategy.tensor,
            pipeline=strategy.pipeline.degree if strategy.pipeline is not None else 1,
            sequence=strategy.sequence,
        )


def choices_of(job: TrainerJob, training: Training) -> Choices:
    """Return the choices of a planned job that trains by `training`: none is open."""
    world, adapter = training.world, training.adapter
    return Choices(
        task=job.task,
        packing="always" if job.preparation.packing else "never",
        adapter=adapter.method if adapter is not None else "none",
        precision=training.precision,
        optimizer=training.optimizer,
        torch_compile=compiles(training.arguments),
        liger=bool(training.arguments.get("use_liger_kernel")),
        device=world.device,
        nodes=world.nodes,
        processes_per_node=world.processes_per_node,
    ).with_strategy(training.strategy)


@dataclass(frozen=True)
class Term:
    """A choice and the values that it must have."""

    choice: str
    """Name of a field or a property of `Choices`."""
    values: tuple[Value, ...]
    excluded: bool = False
    """True if it must have any value but these."""
    chosen: bool = False
    """As a need: True if an open choice breaks it, because nothing else would choose such a value."""

    def is_met(self, choices: Choices) -> bool:
        """Return True if the choice is made and has such a value."""
        value = getattr(choices, self.choice)
        return value is not None and (value in self.values) != self.excluded

    def can_be_met(self, choices: Choices) -> bool:
        """Return True if the choice has such a value or may still get it."""
        return self.is_met(choices) or (getattr(choices, self.choice) is None and not self.chosen)


def one_of(choice: str, *values: Value) -> Term:
    """Require one of `values`; without values the choice must be open."""
    return Term(choice, values)


def none_of(choice: str, *values: Value) -> Term:
    """Require a value that is not one of `values`."""
    return Term(choice, values, excluded=True)


def chosen(choice: str, *values: Value) -> Term:
    """Require one of `values`; unlike with `one_of`, an open choice is not enough."""
    return Term(choice, values, chosen=True)


@dataclass(frozen=True)
class Constraint:
    """Choices that require others."""

    name: str
    field: str
    """Path from `spec` of the field to report."""
    when: tuple[Term, ...]
    needs: tuple[Term, ...]
    rule: str
    """Predicate of a sentence about the field, without the full stop."""
    hint: str
    """Instruction that solves the problem."""

    def value(self, choices: Choices) -> Value | None:
        """Return the value of the reported field; None if no single choice is made by it."""
        terms = (*self.when, *self.needs)
        made = (term.choice for term in terms if FIELDS[term.choice] == (self.field,))
        return next((getattr(choices, choice) for choice in made), None)

    def holds(self, choices: Choices) -> bool:
        """Return True if the choices made so far satisfy the constraint."""
        return not all(term.is_met(choices) for term in self.when) or all(
            term.can_be_met(choices) for term in self.needs
        )


FIELDS: dict[str, tuple[str, ...]] = {
    "task": ("task", "training.script"),
    "packing": ("preparation.packing",),
    "adapter": ("model.adapter.method",),
    "precision": ("training.precision",),
    "optimizer": ("training.optimizer",),
    "torch_compile": ("training.arguments",),
    "liger": ("training.arguments",),
    "strategy": ("parallelism.strategy",),
    "zero_stage": ("parallelism.zeroStage",),
    "sharding": ("parallelism.sharding",),
    "offload": ("parallelism.offload.optimizer", "parallelism.offload.parameters"),
    "offload_optimizer": ("parallelism.offload.optimizer",),
    "offload_parameters": ("parallelism.offload.parameters",),
    "offload_activations": ("parallelism.offload.activations",),
    "checkpointing": ("parallelism.activationCheckpointing",),
    "tensor": ("parallelism.tensor",),
    "pipeline": ("parallelism.pipeline.degree",),
    "model_ranks": ("parallelism.tensor", "parallelism.pipeline.degree"),
    "sequence": ("parallelism.sequence",),
    "deepspeed_config": ("parallelism.deepspeedConfig",),
    "device": ("resources.gpusPerNode",),
    "nodes": ("resources.nodes",),
    "processes_per_node": ("resources.processesPerNode",),
}
"""Choice -> fields below `spec` that make it."""
