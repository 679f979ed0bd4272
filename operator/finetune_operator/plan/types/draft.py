"""Draft of a plan, which the phases of planning pass on.

Each phase takes a draft and returns a richer one, with its decision, a sentence with the reason, a sentence for each
assumed fact, and a problem for each request that cannot be met. A phase never raises; `plan` stops between groups of
phases, so that all problems of one group are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from finetune_contract.choices import Device, InferencePrecision, Optimization, Precision, PredictOptimization, Stage
from finetune_contract.facts import DataFacts, HardwareFacts, ModelFacts, SplitFacts
from finetune_contract.measured_devices import PlannedDevice
from finetune_contract.packed_rows import why_packs_have_masks
from finetune_contract.trainer_job import Adapter, Batch, CheckpointSchedule, Strategy, World
from finetune_operator.plan.types.plan_types import (
    Adaptation,
    Facts,
    MemoryEstimate,
    NetworkPlan,
    NodesNetwork,
    PlanLauncher,
    Servers,
)
from finetune_operator.spec.problems import PathPart, Problem, Reason, describe_value, format_path
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import Capacity, FineTuneJob, FineTuneJobSpec, ScriptSpec, TrainingSpec

Value = TypeVar("Value")

DEFAULT_LENGTH = 512
"""Default truncation length in tokens, if the model allows it; the trainer uses the same."""


def decided(value: Value | None) -> Value:
    """Return a decision of an earlier phase; a missing one is a bug in the order of the phases."""
    assert value is not None, "a phase ran before the one that it needs"
    return value


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows to train on, in tokens."""

    longest: int
    """Length of the longest sequence."""
    typical: float
    """Length of a typical sequence."""
    sequences: int = 1
    """Sequences of one row."""

    @property
    def row(self) -> float:
        """Return the length of a typical row."""
        return self.typical * self.sequences


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of the run."""

    per_epoch: int
    total: int
    warmup: int


@dataclass(frozen=True)
class PlanInputs:
    """Values that a plan follows from; phases read them."""

    job: FineTuneJob
    """Job with copied settings replaced by our fields."""
    facts: Facts
    """Facts as they are known, without assumptions."""
    settings: Settings
    adaptation: Adaptation
    as_known: bool
    """True to refuse a job that does not fit by the known facts, even if prepare could still measure less."""


@dataclass(frozen=True)
class Basis:
    """Facts with assumptions in place of those that are not known."""

    hardware: HardwareFacts
    device_source: Literal["known", "assumed", "measured"]
    """Source of the GPU's facts; `measured` by an earlier attempt."""
    model: ModelFacts
    model_known: bool
    """False if the model was not read and its name gives at most a size."""
    lengths: Lengths


@dataclass(frozen=True)
class InferenceChoices:
    """Decisions on evaluate, predict and serve."""

    precision: InferencePrecision = "fp32"
    devices: int = 1
    """Devices that hold the model of one process that evaluates or predicts."""
    evaluate_processes: int = 1
    """Processes of the pod that evaluates, each with a whole model, or groups of `evaluate_tensor` processes."""
    evaluate_tensor: int = 1
    """Processes that split each layer of a model that evaluates."""
    predict_workers: int = 1
    """Pods that share the rows to predict."""
    predict_processes: int = 1
    """Processes of the pod that predicts, or groups of `predict_tensor` processes; 1 with several pods."""
    predict_tensor: int = 1
    """Processes that split each layer of a model that predicts."""
    predict_engine: Literal["job", "spark"] = "job"
    """Engine of predict's workers."""
    predict_optimization: PredictOptimization = "none"
    serve_optimization: Optimization = "none"
    servers: Servers | None = None


@dataclass(frozen=True)
class Draft:
    """A job on its way to a plan."""

    inputs: PlanInputs
    basis: Basis
    stages: tuple[Stage, ...] = ()
    engine: Literal["local", "job", "spark"] = "local"
    """Engine of prepare."""
    inference: InferenceChoices = InferenceChoices()
    launcher: PlanLauncher | None = None
    world: World | None = None
    network: NetworkPlan | None = None
    """None if the training has one node, or no GPUs."""
    adapter: Adapter | None = None
    """None if all weights are trained."""
    precision: Precision | None = None
    scaled: bool = True
    """True if `auto` may choose fp16, which needs loss scaling."""
    packing: bool = False
    strategy: Strategy | None = None
    batch: Batch | None = None
    memory: MemoryEstimate | None = None
    steps: Steps | None = None
    checkpoints: CheckpointSchedule | None = None
    compiles_by_plan: bool = False
    """True if the plan has added torch.compile, which the job leaves open."""
    capacity: Capacity | None = None
    device: PlannedDevice | None = None
    """GPU of unknown nodes that the training is planned for."""
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def job(self) -> FineTuneJob:
        return self.inputs.job

    @property
    def settings(self) -> Settings:
        return self.inputs.settings

    @property
    def adaptation(self) -> Adaptation:
        return self.inputs.adaptation

    @property
    def local(self) -> bool:
        """Return whether the job runs as processes of this machine."""
        return self.inputs.facts.local

    @property
    def data(self) -> DataFacts | None:
        """Return the prepared data; None before prepare."""
        return self.inputs.facts.data

    @property
    def nodes_network(self) -> NodesNetwork | None:
        """Return the network devices of the nodes that can run the pods; None if they are not known."""
        return None if self.inputs.facts.nodes is None else self.inputs.facts.nodes.network

    @property
    def hardware(self) -> HardwareFacts:
        return self.basis.hardware

    @property
    def model(self) -> ModelFacts:
        return self.basis.model

    @property
    def model_known(self) -> bool:
        return self.basis.model_known

    @property
    def lengths(self) -> Lengths:
        return self.basis.lengths

    @property
    def spec(self) -> FineTuneJobSpec:
        return self.job.spec

    @property
    def training(self) -> TrainingSpec:
        """Return the job's training; only phases of a training read it."""
        return decided(self.job.spec.training)

    @property
    def model_ranks(self) -> int:
        """Return the processes that together hold one replica of the model by tensor and pipeline parallelism."""
        return self.spec.parallelism.model_ranks

    @property
    def replica_ranks(self) -> int:
        """Return the processes that read the same rows: those of one replica of the model, or of slices of the rows."""
        return self.spec.parallelism.replica_ranks

    @property
    def data_ranks(self) -> int:
        """Return the number of data-parallel ranks: processes, or groups of them, that read rows of their own."""
        return max(1, decided(self.world).size // self.replica_ranks)

    @property
    def script(self) -> ScriptSpec | None:
        """Return the user's own training program, which replaces the built-in loop; None without one."""
        return self.spec.script

    @property
    def loops(self) -> bool:
        """Return whether the built-in loop trains."""
        return self.spec.training is not None and self.script is None

    @property
    def compares(self) -> bool:
        """Return whether the model is compared with its untrained state, on two answers to each row."""
        return self.spec.task == "preference-tuning"

    @property
    def train_split(self) -> SplitFacts | None:
        """Return the prepared train split; None before prepare."""
        return None if self.data is None else self.data.splits.get("train")

    @property
    def length_limit(self) -> int:
        """Return the truncation length in tokens."""
        if self.data is not None:
            return self.data.max_length
        return self.spec.preparation.max_length or min(self.model.max_positions or DEFAULT_LENGTH, DEFAULT_LENGTH)

    def why_packs_have_masks(self, strategy: Strategy) -> str:
        """Return the reason why attention over packed rows needs a mask; empty: each row is computed by itself."""
        pipeline = strategy.pipeline is not None
        return why_packs_have_masks(self.model.model_type, self.training.arguments, pipeline=pipeline)

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs that the job gets on a node."""
        asked = self.spec.resources.gpus_per_node
        return self.hardware.gpus_per_node if asked == "auto" else asked

    @property
    def inference_device(self) -> Device:
        """Return the device of inference: evaluate, predict and serve."""
        return "cpu" if self.spec.resources.gpus_per_node == 0 else self.hardware.device

    @property
    def device_bytes(self) -> int:
        """Return the memory of one process's device: of its GPU, or its share of the node's."""
        world = decided(self.world)
        if world.device == "cuda":
            return decided(self.hardware.gpu).memory_bytes
        return self.hardware.memory_bytes // world.processes_per_node

    def with_inputs(self, **changes: Any) -> Self:
        """Return a copy that is planned from other inputs in these fields."""
        return replace(self, inputs=replace(self.inputs, **changes))

    def with_basis(self, **changes: Any) -> Self:
        """Return a copy with these fields of the basis changed."""
        return replace(self, basis=replace(self.basis, **changes))

    def with_inference(self, **changes: Any) -> Self:
        """Return a copy with these decisions on inference changed."""
        return replace(self, inference=replace(self.inference, **changes))

    def because(self, reason: str) -> Self:
        """Add the reason of a decision, a sentence."""
        return replace(self, reasons=(*self.reasons, reason))

    def assuming(self, assumption: str) -> Self:
        """Add an assumption about an unknown fact, a sentence."""
        return replace(self, assumptions=(*self.assumptions, assumption))

    def refusing(
        self, path: Sequence[PathPart], value: object, rule: str, hint: str, reason: Reason = "Invalid"
    ) -> Self:
        """Add a problem with the field at `path` below `spec`; a value of None is not shown."""
        full = ("spec", *path)
        shown = None if value is None else describe_value(value, full)
        return replace(self, problems=(*self.problems, Problem(format_path(full), shown, rule, hint, reason=reason)))
