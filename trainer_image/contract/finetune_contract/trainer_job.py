"""`job.json`: every setting the trainer needs, decided. It holds no `auto`.

The operator writes it from the plan; the trainer obeys it or refuses it. A setting that is not here does not reach the
trainer, and a field unknown to the trainer is refused rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from finetune_contract.choices import (
    ActivationOffload,
    AdapterMethod,
    CheckpointingMode,
    Device,
    OffloadDevice,
    OptimizerName,
    PipelineSchedule,
    Precision,
    RankOrder,
    SchedulerName,
    Sharding,
    Stage,
    StrategyName,
    Task,
    Transport,
    ZeroStage,
)
from finetune_contract.contract_models import Order
from finetune_contract.data_settings import DataSource, ModelSource, Preparation
from finetune_contract.inference_settings import Evaluation, Generation, InferenceProcesses, Prediction, Serving
from finetune_contract.measured_devices import PlannedDevice

SCHEMA_VERSION: Literal[1] = 1
WHOLE_CHECKPOINTS: tuple[StrategyName, ...] = ("single", "ddp", "fsdp")
"""Strategies whose checkpoints hold the whole state by parameter name, also with tensor and pipeline parallelism: each
resumes from those of the others. DeepSpeed reads its own shards only.
"""


class Pipeline(Order):
    """The model's layers split into consecutive stages on several processes."""

    degree: int = Field(gt=1)
    """Processes that the layers are split over."""
    micro_batches: int = Field(gt=0)
    """Micro-batches of one run of the schedule; they divide the accumulation."""
    schedule: PipelineSchedule = "1f1b"

    @property
    def stages_per_process(self) -> int:
        """Model chunks of one process; the interleaved schedule has two, for a shorter bubble."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.degree * self.stages_per_process


class Strategy(Order):
    """Distribution of the model over processes. It is in effect as configured here, or the stage fails."""

    name: StrategyName
    zero_stage: ZeroStage | None = None
    """ZeRO stage. With `deepspeed`; with `ddp` stage 1 beside tensor or pipeline parallelism, over the replicas."""
    fsdp_sharding: Sharding = "full"
    """Kind of sharding. Only with `fsdp`."""
    offload_optimizer: OffloadDevice = "none"
    offload_parameters: OffloadDevice = "none"
    """With `fsdp` parameters and optimizer state move together."""
    offload_activations: ActivationOffload = "none"
    activation_checkpointing: CheckpointingMode = "none"
    tensor: int = Field(default=1, gt=0)
    """Processes that each layer is split over."""
    pipeline: Pipeline | None = None
    """Pipeline parallelism. None: every process has all layers."""
    sequence: int = Field(default=1, gt=0)
    """Neighbouring processes that each hold a slice of the tokens of the same rows."""
    rank_order: RankOrder = "DPT"
    """Dimensions of the mesh of processes (data, pipeline, tensor), that of neighbouring ranks last."""

    @property
    def model_ranks(self) -> int:
        """Number of processes that together hold one replica of the model by tensor and pipeline parallelism."""
        return self.tensor * (self.pipeline.degree if self.pipeline is not None else 1)

    @property
    def replica_ranks(self) -> int:
        """Number of processes that read the same rows: they share a replica of the model, or slices of the rows."""
        return self.model_ranks * self.sequence

    @property
    def sharding(self) -> str:
        """Division of state among processes, e.g. `ddp` or `deepspeed-zero2`."""
        return str(self.name) if self.zero_stage is None else f"{self.name}-zero{self.zero_stage}"

    @property
    def checkpoint_form(self) -> str:
        """Form of a checkpoint, by its writer; DeepSpeed with state in files reads only its own form."""
        if self.name != "deepspeed":
            return self.name
        return self.sharding + ("-nvme" if self.offload_optimizer == "nvme" else "")

    def resumes_from(self, form: str) -> bool:
        """Return True if it can resume from checkpoints of form `form` written by as many processes."""
        return form == self.checkpoint_form or {form, self.checkpoint_form} <= set(WHOLE_CHECKPOINTS)

    @property
    def label(self) -> str:
        """Strategy in one word, e.g. `ddp` or `deepspeed-zero2+activation-checkpointing+optimizer-offload`."""
        label = self.sharding
        if self.fsdp_sharding != "full":
            label += f"-{self.fsdp_sharding}"
        if self.tensor > 1:
            label += f"+tensor{self.tensor}"
        if self.pipeline is not None:
            label += f"+pipeline{self.pipeline.degree}-{self.pipeline.schedule}"
        if self.sequence > 1:
            label += f"+sequence{self.sequence}"
        if self.activation_checkpointing != "none":
            kind = "" if self.activation_checkpointing == "full" else "selective-"
            label += f"+{kind}activation-checkpointing"
        offloaded = {
            "optimizer": self.offload_optimizer,
            "parameter": self.offload_parameters,
            "activation": self.offload_activations,
        }
        for state, where in offloaded.items():
            if where != "none":
                label += f"+{state}-offload{'-nvme' if where == 'nvme' else ''}"
        return label

    @property
    def uses_nvme(self) -> bool:
        """True if optimizer state or parameters are offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)


class Batch(Order):
    """Arithmetic of one optimizer step: `global = micro x accumulation x data-parallel ranks`, exactly."""

    global_batch_size: int = Field(gt=0)
    micro_batch_size: int = Field(gt=0)
    gradient_accumulation: int = Field(gt=0)
    data_parallel: int = Field(gt=0)


class World(Order):
    """Processes that the plan assumes; the trainer refuses any other number."""

    nodes: int = Field(gt=0)
    processes_per_node: int = Field(gt=0)
    device: Device
    threads_per_process: int = Field(gt=0)
    """CPU threads of one process (OMP_NUM_THREADS)."""
    network: Annotated[Transport | None, Field(exclude_if=lambda network: network is None)] = None
    """Network between nodes whose devices the pods have: the training fails if NCCL uses sockets instead. None: no
    devices are requested. Omitted if None: images that do not know the field read such jobs.
    """

    @property
    def size(self) -> int:
        """Number of processes over all nodes."""
        return self.nodes * self.processes_per_node


class EarlyStopping(Order):
    """Stop of a training whose `metric` has not improved for `patience` evaluations."""

    metric: str = "loss"
    patience: int = Field(gt=0)


class Adapter(Order):
    """Small matrices trained beside frozen weights, and the task's head, which is trained whole."""

    method: AdapterMethod
    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    """Scale of the update; the effective factor is alpha / rank."""
    dropout: float = Field(ge=0, lt=1)
    """Dropout probability on the adapter's input."""
    target_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Name suffixes of the linear layers to adapt; None: all linear layers of the blocks."""


MOST_SAVING = 0.03
"""Fraction of the time that checkpoints of `within_minutes` may take."""


class CheckpointSchedule(Order):
    """Times at which checkpoints are written, and the number that is kept."""

    every_steps: int = Field(gt=0)
    """Optimizer steps between two checkpoints."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Wall-clock minutes between two checkpoints; `every_steps` is then ignored."""
    within_minutes: Annotated[float | None, Field(gt=0, exclude_if=lambda minutes: minutes is None)] = None
    """Minutes of work after which a checkpoint is written in addition to those of `every_steps`, later if saving would
    take too much of the time; None: no additional ones.
    """
    keep: int = Field(gt=0)
    on_preemption: bool = True
    """True to save when SIGTERM arrives."""
    resume: bool = True
    asynchronous: Annotated[bool, Field(exclude_if=lambda asynchronous: not asynchronous)] = False
    """True if the training goes on while a thread writes a checkpoint from a copy of the state in host memory; not for
    the last one, nor for one when SIGTERM arrives. Omitted if false: older images do not know it.
    """
    signed: Annotated[bool, Field(exclude_if=lambda signed: not signed)] = False
    """True if checkpoints are signed, and only signed ones read. Omitted if false: older images do not know it."""


class Training(Order):
    """One training run, all sizes decided."""

    max_steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""
    steps_per_epoch: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    scheduler: SchedulerName
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(ge=0)
    """Maximum gradient norm; 0: no clipping."""
    optimizer: OptimizerName
    seed: int = Field(ge=0)
    label_smoothing: float = Field(ge=0, lt=1)
    early_stopping: EarlyStopping | None = None
    adapter: Adapter | None = None
    """Adapter; None: all weights are trained."""
    precision: Precision
    strategy: Strategy
    batch: Batch
    world: World
    checkpoints: CheckpointSchedule
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of `transformers.TrainingArguments`, as the user wrote them."""
    compiles_by_plan: bool = Field(default=False, exclude_if=lambda planned: not planned)
    """True if the plan has added `torch_compile` to the arguments: where that fails, the training goes on without."""

    @model_validator(mode="after")
    def _copies_its_state(self) -> Training:
        if self.checkpoints.asynchronous and self.strategy.name not in WHOLE_CHECKPOINTS:
            raise ValueError(f"asynchronous checkpoints are for {', '.join(WHOLE_CHECKPOINTS)}")
        return self

    @property
    def in_four_bits(self) -> bool:
        """True if the frozen linear layers are held in 4 bits."""
        return self.adapter is not None and self.adapter.method == "qlora"

    @property
    def loop_batch(self) -> Batch:
        """`batch` as the loop counts it: one run of the pipeline's schedule is one of its micro-batches."""
        pipeline, batch = self.strategy.pipeline, self.batch
        passed = 1 if pipeline is None else pipeline.micro_batches
        return batch.model_copy(
            update={
                "micro_batch_size": batch.micro_batch_size * passed,
                "gradient_accumulation": batch.gradient_accumulation // passed,
            }
        )


class Script(Order):
    """A user's own training program, fetched by prepare and run by every rank in place of the built-in loop."""

    url: str
    """HTTPS address of a git repository."""
    ref: str
    """Branch, tag or commit (all 40 digits); prepare pins it to a commit."""
    path: str | None = None
    """Working directory of the program inside the repository; None: the root."""
    entry_point: str
    """File that Python runs, relative to `path`."""
    arguments: tuple[str, ...] = ()
    """Arguments after the file on its command line, verbatim."""
    world: World
    resume: bool = True
    """True if a restarted program gets the path of its newest checkpoint."""


class Preference(Order):
    """Learning of preferences."""

    beta: float = Field(default=0.1, gt=0)
    """Penalty for diverging from the model before training: the larger, the closer it stays."""


class TrainerJob(Order):
    """Content of `job.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    run: str | None = None
    """Identity of the job (its uid in a cluster). Results of another run in the same folder are moved aside by prepare,
    never reused; None: whoever starts the stages ensures that.
    """
    task: Task
    model: ModelSource
    dataset: DataSource | None = None
    preparation: Preparation = Preparation()
    training: Training | None = None
    """Built-in training loop."""
    device: Annotated[PlannedDevice | None, Field(exclude_if=lambda device: device is None)] = None
    """GPU that the training is planned for, if the nodes are not known: the trainer measures its own and compares.
    Omitted if they are known: images that do not know the field read such jobs.
    """
    script: Script | None = None
    """The user's own training program in place of the loop: at most one of the two is set."""
    evaluation: Evaluation | None = None
    predict: Prediction | None = None
    serving: Annotated[Serving | None, Field(exclude_if=lambda serving: serving is None)] = None
    """Model server. Omitted if there is none: images that do not know the field read such jobs."""
    generation: Generation = Generation()
    """Generation settings, for tasks whose answers are text."""
    preference: Preference = Preference()
    """Settings of preference-tuning."""
    seed: int = Field(default=42, ge=0)
    """Seed of the rows that are set aside for validation; with training it equals `training.seed`."""

    @model_validator(mode="after")
    def _one_way_to_spread(self) -> TrainerJob:
        for settings in (self.evaluation, self.predict):
            if settings is not None and settings.device == "cpu" and settings.devices_per_process > 1:
                raise ValueError("devices_per_process is for GPUs: a process on the CPU has one device")
            if settings is not None and settings.processes > 1 and self.script is not None:
                raise ValueError("processes is 1 with script: the stage prepares rows for the program's model first")
        if self.evaluation is not None and self.evaluation.optimization != "none" and self.evaluation.processes > 1:
            raise ValueError("processes is 1 with optimization: each process would measure for itself")
        if self.predict is not None and self.predict.tensor > 1 and self.predict.optimization != "none":
            raise ValueError("optimization is none with tensor: backends convert a whole model")
        if self.predict is not None and self.predict.processes > 1 and self.predict.workers > 1:
            raise ValueError("processes is for one pod: with several workers, each has one process")
        return self

    @model_validator(mode="after")
    def _one_way_to_train(self) -> TrainerJob:
        if self.training is not None and self.script is not None:
            raise ValueError("training and script exclude each other")
        return self

    @property
    def trains(self) -> bool:
        """True if the train stage has work."""
        return self.world is not None

    @property
    def world(self) -> World | None:
        """Processes of the train stage; None: nothing is trained."""
        trains = self.training or self.script
        return None if trains is None else trains.world

    def inference(self, stage: Stage) -> InferenceProcesses:
        """Return the processes of one pod of `stage`; one on one device for all but evaluate and predict."""
        settings = {Stage.EVALUATE: self.evaluation, Stage.PREDICT: self.predict}.get(stage)
        return InferenceProcesses() if settings is None else settings
