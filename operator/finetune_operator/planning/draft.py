"""The value that walks through the phases of planning.

Each phase takes a draft and returns a richer one: its decision, one sentence why, a sentence for each fact that it had
to assume, and a problem for each wish that cannot be met. A phase never raises; `plan` stops between groups of phases,
so that all problems of one group are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from finetune_contract.choices import Device, InferencePrecision, Optimization, Precision, Stage
from finetune_contract.facts import DataFacts, HardwareFacts, ModelFacts, SplitFacts
from finetune_contract.trainer_job import Adapter, Batch, CheckpointSchedule, Strategy, World
from finetune_operator.api.problems import PathPart, Problem, Reason, describe_value, format_path
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import Capacity, FineTuneJob, FineTuneJobSpec, ScriptSpec, TrainingSpec
from finetune_operator.launchers.launcher_rows import LauncherName
from finetune_operator.planning.plan_types import Adaptation, EndpointRuntime, MemoryEstimate, PlanLauncher, Servers

Value = TypeVar("Value")

DEFAULT_LENGTH = 512
"""Truncation length in tokens that the trainer takes when the job gives none and the model allows it."""


def decided(value: Value | None) -> Value:
    """A decision of an earlier phase; that it is missing is an error in the order of the phases."""
    assert value is not None, "a phase ran before the one that it needs"
    return value


@dataclass(frozen=True)
class Lengths:
    """Lengths of what is trained on, in tokens."""

    longest: int
    """Of a sequence."""
    typical: float
    """Of a sequence."""
    sequences: int = 1
    """That one row is."""

    @property
    def row(self) -> float:
        """Of a typical row."""
        return self.typical * self.sequences


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of the run."""

    per_epoch: int
    total: int
    warmup: int


@dataclass(frozen=True)
class Draft:
    """A job on its way to a plan."""

    job: FineTuneJob
    local: bool
    served: tuple[LauncherName, ...]
    """Launchers whose kinds the cluster serves."""
    kserve: bool
    """Whether the cluster serves InferenceServices of KServe."""
    runtime_there: EndpointRuntime | None
    """Runtime of the job's endpoint as it is deployed now."""
    prepared: bool
    """Whether prepare has succeeded."""
    predicted: bool
    """Whether predict has succeeded."""
    settings: Settings
    adaptation: Adaptation
    hardware: HardwareFacts
    hardware_known: bool
    """False: `hardware` follows from what the job asks for, and says nothing about any node."""
    model: ModelFacts
    model_known: bool
    """False: nobody has read the model, and its name says no more than a size, or nothing."""
    model_revision: str
    as_known: bool
    """True: what does not fit as far as is known is refused, also where prepare could still measure less."""
    data: DataFacts | None
    lengths: Lengths
    stages: tuple[Stage, ...] = ()
    engine: Literal["local", "job", "spark"] = "local"
    """What prepares."""
    predict_engine: Literal["job", "spark"] = "job"
    """Engine of predict's workers."""
    inference_precision: InferencePrecision = "fp32"
    predict_workers: int = 1
    """Processes that share the rows to predict."""
    predict_optimization: Optimization = "none"
    serve_optimization: Optimization = "none"
    servers: Servers | None = None
    launcher: PlanLauncher | None = None
    world: World | None = None
    adapter: Adapter | None = None
    """None: all weights are trained."""
    precision: Precision | None = None
    scaled: bool = True
    """Whether `auto` may take fp16, which wants its loss scaled."""
    packing: bool = False
    strategy: Strategy | None = None
    batch: Batch | None = None
    memory: MemoryEstimate | None = None
    steps: Steps | None = None
    checkpoints: CheckpointSchedule | None = None
    capacity: Capacity | None = None
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def spec(self) -> FineTuneJobSpec:
        return self.job.spec

    @property
    def training(self) -> TrainingSpec:
        """The training that is asked for; only phases of a training read it."""
        return decided(self.job.spec.training)

    @property
    def model_ranks(self) -> int:
        """Processes that hold one replica of the model together by tensor and pipeline parallelism."""
        return self.spec.parallelism.model_ranks

    @property
    def replica_ranks(self) -> int:
        """Processes that read the same rows: those that hold a replica of the model, or slices of the rows."""
        return self.spec.parallelism.replica_ranks

    @property
    def data_ranks(self) -> int:
        """Processes, or groups of them, each of which reads rows of its own."""
        return max(1, decided(self.world).size // self.replica_ranks)

    @property
    def script(self) -> ScriptSpec | None:
        """The user's own program that trains, in place of the loop."""
        return self.spec.script

    @property
    def loops(self) -> bool:
        """Whether the built-in loop trains."""
        return self.spec.training is not None and self.script is None

    @property
    def compares(self) -> bool:
        """Whether the model is compared with itself before training, on two answers to each row."""
        return self.spec.task == "preference-tuning"

    @property
    def train_split(self) -> SplitFacts | None:
        """The prepared train split, when prepare has run."""
        return None if self.data is None else self.data.splits.get("train")

    @property
    def length_limit(self) -> int:
        """Truncation length in tokens."""
        if self.data is not None:
            return self.data.max_length
        return self.spec.preparation.max_length or min(self.model.max_positions or DEFAULT_LENGTH, DEFAULT_LENGTH)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that the job gets."""
        asked = self.spec.resources.gpus_per_node
        return self.hardware.gpus_per_node if asked == "auto" else asked

    @property
    def inference_device(self) -> Device:
        """What evaluate and predict compute on."""
        return "cpu" if self.spec.resources.gpus_per_node == 0 else self.hardware.device

    @property
    def device_bytes(self) -> int:
        """Memory of one process's device: of its GPU, or its share of the node."""
        world = decided(self.world)
        if world.device == "cuda":
            return decided(self.hardware.gpu).memory_bytes
        return self.hardware.memory_bytes // world.processes_per_node

    def because(self, reason: str) -> Self:
        """Add the sentence of a decision."""
        return replace(self, reasons=(*self.reasons, reason))

    def assuming(self, assumption: str) -> Self:
        """Add the sentence of something that was not known."""
        return replace(self, assumptions=(*self.assumptions, assumption))

    def refusing(
        self, path: Sequence[PathPart], value: object, rule: str, way_out: str, reason: Reason = "Invalid"
    ) -> Self:
        """Add a problem with the field at `path` below `spec`; a value of None is not shown."""
        full = ("spec", *path)
        shown = None if value is None else describe_value(value, full)
        return replace(self, problems=(*self.problems, Problem(format_path(full), shown, rule, way_out, reason=reason)))
