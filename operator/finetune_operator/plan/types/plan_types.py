"""Types of the inputs and the result of planning.

`plan(job, facts, settings)` is a pure function. The plan contains the `TrainerJob` that the trainer will get, so that
the plan shown is the plan that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pydantic import Field, JsonValue

from finetune_contract.choices import Stage, Transport
from finetune_contract.contract_models import Message
from finetune_contract.facts import DataFacts, DeviceFacts, HardwareFacts, ModelFacts
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.spec.launcher_rows import BUILT_IN, LauncherName
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.types import Capacity, FineTuneJob

PlanLauncher: TypeAlias = LauncherName | Literal["local"]
EndpointRuntime: TypeAlias = Literal["deployment", "kserve"]
"""Kind of object that runs an endpoint's servers."""
LossForm: TypeAlias = Literal["full", "chunked"]
HeadForm: TypeAlias = Literal["whole", "split", "kept", "resharded"]


class NodeDevice(Message):
    """Network device that nodes advertise."""

    resource: str
    count: int = Field(gt=0)
    """Fewest on one of the nodes that have it."""
    nodes: int = Field(gt=0)
    """Nodes that have it."""


class NodesNetwork(Message):
    """Network devices of the nodes that can run a job's pods."""

    nodes: int = Field(ge=0)
    node_gpus: int = Field(ge=0)
    """Most GPUs of one of them."""
    devices: tuple[NodeDevice, ...] = ()
    huge_page_bytes: int = Field(default=0, ge=0)
    """Fewest bytes in huge pages of 2 MiB on one of them."""
    without_plugin: tuple[str, ...] = ()
    """Instance types among them that have EFA interfaces and advertise none."""


class NodesFacts(Message):
    """GPUs of the nodes that can run a job's pods, by the nodes' labels and resources."""

    gpu: DeviceFacts | None = None
    """GPU of the weakest of them; None if it is unknown or there are no such nodes."""
    words: str
    """Source of this, or the reason why it is unknown."""
    network: NodesNetwork | None = None
    """Their network devices; None if there are no such nodes."""


class LearnedRatios(Message):
    """Measured over planned values of finished jobs with the same model, strategy and device: medians."""

    model_type: str
    parameters: int
    strategy: str
    """Label of the strategy."""
    device: str
    """Product of the GPU, or `cpu`."""
    jobs: int = Field(ge=1)
    step_time: float | None = Field(default=None, gt=0)
    memory: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class Facts:
    """Known facts; the plan replaces None by an assumption and lists it."""

    model: ModelFacts | None = None
    data: DataFacts | None = None
    hardware: HardwareFacts | None = None
    nodes: NodesFacts | None = None
    """GPUs by the labels of the cluster's nodes; None if the nodes were not read."""
    learned: tuple[LearnedRatios, ...] = ()
    """Ratios of finished jobs that correct the estimates; none unless the settings allow it."""
    devices: tuple[DeviceFacts, ...] = ()
    """GPUs that earlier attempts of the training measured where labels and tables left them unknown."""
    model_revision: str | None = None
    """Commit of the model on the Hub when prepare read it; later stages use the same one."""
    local: bool = False
    """True if the job runs as processes of this machine, with launcher `local`."""
    predict_bytes: int | None = None
    """Size of the rows of `predict.dataset` in bytes; None unless they are text files of this machine."""
    served: tuple[LauncherName, ...] = BUILT_IN
    """Launchers whose kinds the cluster serves."""
    kserve: bool = False
    """True if the cluster serves KServe's InferenceServices."""
    custom_metrics: bool = False
    """True if the cluster serves the custom metrics API, which autoscalers read metrics of pods from."""
    http_routes: bool = False
    """True if the cluster serves HTTPRoutes of the Gateway API."""
    http_scaled_objects: bool = False
    """True if the cluster serves HTTPScaledObjects of the KEDA HTTP add-on."""
    runtime_there: EndpointRuntime | None = None
    """Runtime of the job's endpoint as deployed now; None if it is not."""
    prepared: bool = False
    """True if prepare has succeeded, so that its own requirements are not checked any more."""
    predicted: bool = False
    """True if predict has succeeded, likewise."""


@dataclass(frozen=True)
class Adaptation:
    """Limits found by earlier attempts that ran out of memory. The global batch does not change."""

    micro_batch_limit: int | None = None
    """Largest micro-batch to try."""
    skipped_strategies: tuple[str, ...] = ()
    """Labels of strategies (`Strategy.label`) that ran out of memory with one row at a time."""
    checkpoint_form: str | None = None
    """Form of the existing checkpoints (`Strategy.checkpoint_form`), which only some strategies can resume from; None
    if there are none yet.
    """


class MemoryTerm(Message):
    """Term of the memory estimate."""

    name: str
    bytes: int = Field(ge=0)
    formula: str
    """Computation of the term, with its numbers."""


class MemoryEstimate(Message):
    """Memory of one device (of one process on CPU), term by term."""

    terms: tuple[MemoryTerm, ...]
    total_bytes: int = Field(ge=0)
    capacity_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    """Host memory of all processes of one node."""
    disk_bytes: int = Field(default=0, ge=0)
    """State in files of all processes of one node."""


class Recipe(Message):
    """Recipe of a training. Plans and traces name it: only figures of trainings with the same recipe are compared."""

    loss: LossForm
    """`chunked` if the loss is computed for some tokens at a time, so that their logits alone are in memory."""
    compiled: bool
    """True if torch.compile fuses kernels."""
    head: HeadForm
    """Weights that score a token, during a step: on each process (`whole`), divided by rows or columns that are not
    gathered (`split`), gathered from the forward to the backward pass (`kept`), or released between both (`resharded`).
    """

    @property
    def text(self) -> str:
        """Return a line for people: `loss chunked, not compiled, head kept`."""
        return f"loss {self.loss}, {'compiled' if self.compiled else 'not compiled'}, head {self.head}"


class Estimate(Message):
    """Expected time and cost of the training; None without a basis."""

    seconds: float | None = None
    cost: float | None = None
    currency: str | None = None
    basis: str
    """Basis of the estimate, in a sentence."""
    step_seconds: float | None = None
    """Time of an optimizer step."""
    step_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds of each part of a step; empty on CPUs, where the plan knows only the sum."""
    time_factor: float | None = None
    """Factor that finished jobs have put on the time of a step; None: none."""
    pauses: dict[str, float] = Field(default_factory=dict)
    """Part of `seconds` between steps: of all checkpoints, and of all validations."""


class VllmServer(Message):
    """Choices for one server that is vLLM's own, in bf16."""

    gpus: int = Field(ge=1)
    """GPUs that share the layers' matrices (tensor parallelism)."""
    gpu_share: float = Field(gt=0, le=1)
    """Share of each GPU's memory that the server takes."""
    max_batch_tokens: int | None = None
    """Tokens of one batch; None: vLLM's own choice."""
    max_queue: int = Field(gt=0)
    """Most requests beside those of a batch; others are answered with 503."""
    adapter_rank: int | None = None
    """Rank that memory is reserved for; None without adapters."""
    concurrent_adapters: int = Field(default=0, ge=0)
    """Most adapters of one batch."""
    temperature: float
    """Temperature of requests that name none."""
    top_p: float
    """Likewise, the probability of the tokens to sample from."""
    kserve_runtime: str | None = Field(default=None, exclude_if=lambda name: name is None)
    """Serving runtime of KServe whose vLLM serves; None: that of our settings' image."""


class Servers(Message):
    """Servers of the endpoint."""

    runtime: EndpointRuntime = "deployment"
    replicas: int = Field(ge=1)
    most: int = Field(ge=1)
    """Servers under full load; equal to `replicas` without an autoscaler."""
    target_requests: int | None = Field(default=None, exclude_if=lambda target: target is None)
    """Requests in flight per server that the autoscaler aims at; None: it scales by CPU use."""
    idle_seconds: int | None = Field(default=None, ge=1, exclude_if=lambda seconds: seconds is None)
    """Time without requests, after which all servers end, in seconds; None: servers stay."""
    requests: dict[str, str]
    """Requests of one server that have no limit; quantities by Kubernetes' names."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Limits of one server, and equal requests."""
    ceilings: dict[str, str] = Field(default_factory=dict, exclude_if=lambda ceilings: not ceilings)
    """Limits of one server above its requests: KServe sets limits of its own if there are none."""
    threads: int = Field(ge=1)
    vllm: VllmServer | None = Field(default=None, exclude_if=lambda server: server is None)
    """Choices for vLLM's own server; None: ours serves."""
    cost_per_hour: float | None = None
    """Cost of all `replicas`; None if such nodes have no price."""
    currency: str | None = None


class NetworkPlan(Message):
    """Network between the nodes of a training with GPUs."""

    transport: Transport
    limits: dict[str, str] = Field(default_factory=dict)
    """Devices and huge pages of each pod."""
    env: dict[str, str] = Field(default_factory=dict)
    host: bool = False
    """True if the pods use the network of their node."""


class JobPlan(Message):
    """Complete plan of a job; it contains no `auto`."""

    name: str
    stages: tuple[Stage, ...]
    launcher: PlanLauncher
    strategy: str
    """Label of the strategy, e.g. `deepspeed-zero2+optimizer-offload`; `none` if nothing trains."""
    capacity: Capacity | None = None
    """Capacity type that the training requests first; None for any node."""
    trainer: TrainerJob
    deepspeed_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """`parallelism.deepspeedConfig` as the user wrote it; rendering merges it last into the DeepSpeed configuration."""
    memory: MemoryEstimate | None = None
    recipe: Recipe | None = Field(default=None, exclude_if=lambda recipe: recipe is None)
    """None if the built-in loop does not train."""
    servers: Servers | None = Field(default=None, exclude_if=lambda servers: servers is None)
    """None if the job has no endpoint."""
    network: NetworkPlan | None = Field(default=None, exclude_if=lambda network: network is None)
    """None if the training has one node, or no GPUs."""
    estimate: Estimate
    hardware: HardwareFacts
    model: ModelFacts
    data: DataFacts | None = None
    reasons: tuple[str, ...]
    """One sentence for each decision."""
    assumptions: tuple[str, ...] = ()
    """Unknown facts, each with the assumption in its place."""

    @property
    def predict_workers(self) -> int:
        """Return the processes that share the rows to predict; 1 without prediction."""
        return 1 if self.trainer.predict is None else self.trainer.predict.workers

    @property
    def on_several_devices(self) -> tuple[Stage, ...]:
        """Return the stages whose pods evaluate or predict on several devices, or by several processes."""
        return tuple(stage for stage in self.stages if self.trainer.inference(stage).devices > 1)

    def engine_of(self, stage: Stage) -> Literal["local", "job", "spark"]:
        """Return the engine of a stage that distributes its rows; `local` for any other stage."""
        if stage is Stage.PREPARE:
            return self.trainer.preparation.engine
        return "local" if stage is not Stage.PREDICT or self.trainer.predict is None else self.trainer.predict.engine


class PlanRefused(Exception):  # noqa: N818 - it names an answer, as a plan does, not a defect
    """Error of a job that cannot run as requested; it has every problem with its field."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class PlanRequest(NamedTuple):
    """Everything, beside the settings, that a plan follows from."""

    job: FineTuneJob
    facts: Facts
    adaptation: Adaptation
