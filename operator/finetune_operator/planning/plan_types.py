"""What goes into a plan and what comes out of it.

`plan(job, facts, settings)` is a pure function; these are its types. The plan holds the `TrainerJob` that the trainer
will get, so that what is shown is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message
from finetune_contract.facts import DataFacts, DeviceFacts, HardwareFacts, ModelFacts
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.api.problems import Problem
from finetune_operator.api.types import Capacity
from finetune_operator.launchers.launcher_rows import BUILT_IN, LauncherName

PlanLauncher: TypeAlias = LauncherName | Literal["local"]
EndpointRuntime: TypeAlias = Literal["deployment", "kserve"]
"""What runs an endpoint's servers."""


class NodesTold(Message):
    """GPUs of the nodes that can run a job's pods, by the nodes' labels and resources."""

    gpu: DeviceFacts | None = None
    """Of the weakest of them; None: they tell nothing, or there are none."""
    words: str
    """How that is known, or why it is not."""


@dataclass(frozen=True)
class Facts:
    """What is known; None is replaced by an assumption that the plan names."""

    model: ModelFacts | None = None
    data: DataFacts | None = None
    hardware: HardwareFacts | None = None
    nodes: NodesTold | None = None
    """What the cluster's nodes tell of their GPUs; None: nobody has asked them."""
    model_revision: str | None = None
    """Commit of the Hub that the model was at when prepare took it; the later stages take that one, too."""
    local: bool = False
    """True when the job runs as processes of this machine: the launcher is then `local`."""
    served: tuple[LauncherName, ...] = BUILT_IN
    """Launchers whose kinds the cluster serves."""
    kserve: bool = False
    """Whether the cluster serves InferenceServices of KServe."""
    runtime_there: EndpointRuntime | None = None
    """Runtime of the job's endpoint as it is deployed now; None: it is not."""
    prepared: bool = False
    """Whether prepare has succeeded, so that nothing is asked any more of what only it runs with."""
    predicted: bool = False
    """The same of predict."""


@dataclass(frozen=True)
class Adaptation:
    """What earlier attempts have shown not to fit. The global batch stays as it is."""

    micro_batch_limit: int | None = None
    """Largest micro-batch to try."""
    skipped_strategies: tuple[str, ...] = ()
    """Labels of strategies (`Strategy.label`) that ran out of memory with one row at a time."""
    checkpoint_form: str | None = None
    """What has written checkpoints (`Strategy.checkpoint_form`), so that only strategies are left that go on from them;
    None: there are none yet.
    """


class MemoryTerm(Message):
    """One term of the memory estimate."""

    name: str
    bytes: int = Field(ge=0)
    formula: str
    """How it was computed, with the numbers in it."""


class MemoryEstimate(Message):
    """Memory of one device (of one process on CPU), term by term."""

    terms: tuple[MemoryTerm, ...]
    total_bytes: int = Field(ge=0)
    capacity_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    """Host memory of all processes of one node."""
    disk_bytes: int = Field(default=0, ge=0)
    """State in files of all processes of one node."""


class Estimate(Message):
    """Expected time and cost of the training; None: nothing to base it on."""

    seconds: float | None = None
    cost: float | None = None
    currency: str | None = None
    basis: str
    """What the estimate rests on, in a sentence."""


class Servers(Message):
    """The endpoint's servers."""

    runtime: EndpointRuntime = "deployment"
    replicas: int = Field(ge=1)
    most: int = Field(ge=1)
    """Servers under load; as many as `replicas` where nothing scales."""
    requests: dict[str, str]
    """Requests of one server that have no limit; quantities by Kubernetes' names."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Limits of one server, and equal requests."""
    ceilings: dict[str, str] = Field(default_factory=dict, exclude_if=lambda ceilings: not ceilings)
    """Limits of one server above what it requests: KServe sets limits of its own where there are none."""
    threads: int = Field(ge=1)
    cost_per_hour: float | None = None
    """Of all `replicas`; None: there is no price for such nodes."""
    currency: str | None = None


class JobPlan(Message):
    """The complete answer to "what will run"; it holds no `auto`."""

    name: str
    stages: tuple[Stage, ...]
    launcher: PlanLauncher
    strategy: str
    """In words, e.g. `deepspeed-zero2+optimizer-offload`; `none` when nothing trains."""
    capacity: Capacity | None = None
    """Nodes that the training asks for first; None: any."""
    trainer: TrainerJob
    deepspeed_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """`parallelism.deepspeedConfig` as the user wrote it; rendering merges it last into the DeepSpeed configuration."""
    memory: MemoryEstimate | None = None
    servers: Servers | None = Field(default=None, exclude_if=lambda servers: servers is None)
    """None: the job has no endpoint."""
    estimate: Estimate
    hardware: HardwareFacts
    model: ModelFacts
    data: DataFacts | None = None
    reasons: tuple[str, ...]
    """One sentence for each decision."""
    assumptions: tuple[str, ...] = ()
    """What was not known, and what was taken in its place."""

    @property
    def predict_workers(self) -> int:
        """Processes that share the rows to predict; 1 where nothing is predicted."""
        return 1 if self.trainer.predict is None else self.trainer.predict.workers

    def engine_of(self, stage: Stage) -> Literal["local", "job", "spark"]:
        """What runs the processes of a stage that shares its rows out; `local` for any other stage."""
        if stage is Stage.PREPARE:
            return self.trainer.preparation.engine
        return "local" if stage is not Stage.PREDICT or self.trainer.predict is None else self.trainer.predict.engine


class PlanRefused(Exception):  # noqa: N818 - it names an answer, as a plan does, not a defect
    """The job cannot run as asked; every reason with its field."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems
