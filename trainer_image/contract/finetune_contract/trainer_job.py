"""`job.json`: every setting the trainer needs, decided. It holds no `auto`.

The operator writes it from the plan; the trainer obeys it or refuses it. A setting that is not here does not reach the
trainer, and a field unknown to the trainer is refused rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, model_validator

from finetune_contract.choices import (
    ADAPTER_NAME_PATTERN,
    ActivationOffload,
    AdapterMethod,
    CheckpointingMode,
    Device,
    InferencePrecision,
    OffloadDevice,
    Optimization,
    OptimizerName,
    PipelineSchedule,
    Precision,
    PredictOptimization,
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
from finetune_contract.measured_devices import PlannedDevice
from finetune_contract.stage_pods import preparing_pods

SCHEMA_VERSION: Literal[1] = 1
WHOLE_CHECKPOINTS: tuple[StrategyName, ...] = ("single", "ddp", "fsdp")
"""Strategies whose checkpoints hold the whole state by parameter name, also with tensor and pipeline parallelism: each
resumes from those of the others. DeepSpeed reads its own shards only.
"""


class ModelSource(Order):
    """Source of the model."""

    uri: str
    revision: str = "main"
    trust_remote_code: bool = False


class Columns(Order):
    """Names of the data set's columns by their role in the task; None: not used."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    tokens: str | None = None
    tags: str | None = None
    question: str | None = None
    context: str | None = None
    answers: str | None = None
    source: str | None = None
    target: str | None = None
    messages: str | None = None
    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None


class Splits(Order):
    """Split names as the user wrote them; None: the split with the role's own name, if any."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None


class DataSource(Order):
    """Source of the rows."""

    uri: str
    config: str | None = None
    splits: Splits = Splits()
    columns: Columns = Columns()
    labels: dict[str, str] = Field(default_factory=dict, exclude_if=lambda labels: not labels)
    """Value of the label column as text -> label name; empty: the values are the names. Omitted if empty, so that
    images that do not know the field read such jobs.
    """


class Preparation(Order):
    """Tokenisation of the rows."""

    max_length: int | None = Field(default=None, gt=0)
    """Truncation length in tokens; None: the model's limit, at most 512."""
    stride: int | None = Field(default=None, ge=0)
    """Tokens that neighbouring windows of a long row share, in tasks that cut rows into windows; None: 128, or a
    quarter of the window if that is less.
    """
    engine: Literal["local", "job", "spark"] = "local"
    """Executor of tokenisation: processes of this machine, the pods of an Indexed Job, or Spark."""
    workers: int = Field(default=1, ge=1)
    """Tokenising processes; partitions with Spark."""
    packing: bool = False
    """True if rows of the train split share sequences of `max_length` tokens, which are then the units of a batch."""

    @property
    def pods(self) -> int:
        """Number of pods that run the stage in a cluster; Spark's driver is one of them."""
        return preparing_pods(self.engine, self.workers)


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


class Gate(Order):
    """Bounds on a metric: the job fails below the minimum, or above the maximum."""

    metric: str
    minimum: float | None = None
    maximum: float | None = Field(default=None, exclude_if=lambda maximum: maximum is None)
    """Upper bound. Omitted if there is none: images that do not know the field read such jobs."""


_InferencePrecision: TypeAlias = Annotated[InferencePrecision, Field(exclude_if=lambda precision: precision == "fp32")]
"""Precision, omitted if fp32: images that do not know the field read such jobs, and compute in fp32."""


_SomeProcesses: TypeAlias = Annotated[int, Field(ge=1, exclude_if=lambda count: count == 1)]
"""Number of processes or devices, omitted if 1: images that do not know the field read such jobs."""


class InferenceProcesses(Order):
    """Use of a pod's devices for inference: `processes`, each with a whole model on its own devices, or with a slice of
    one that `tensor` neighbouring processes hold together.
    """

    processes: _SomeProcesses = 1
    """Processes of one pod. Those without a common model share the rows."""
    devices_per_process: _SomeProcesses = 1
    """GPUs that hold the layers of one process's model, each GPU a part of them."""
    tensor: _SomeProcesses = 1
    """Degree of tensor parallelism: neighbouring processes that split each layer of one model, for the same rows."""

    @model_validator(mode="after")
    def _one_way_to_divide_the_model(self) -> Self:
        if self.tensor > 1 and self.devices_per_process > 1:
            raise ValueError("devices_per_process is 1 with tensor: each process has a slice of all layers")
        if self.processes % self.tensor:
            raise ValueError(f"processes must be a multiple of tensor, {self.tensor}")
        return self

    @property
    def devices(self) -> int:
        """Devices of one pod."""
        return self.processes * self.devices_per_process

    @property
    def models(self) -> int:
        """Models of one pod, which share the rows."""
        return self.processes // self.tensor

    @property
    def devices_per_model(self) -> int:
        """Devices that hold one model."""
        return self.tensor * self.devices_per_process


class Evaluation(InferenceProcesses):
    """Measurements on the test split (on validation if there is no test split)."""

    metrics: tuple[str, ...] | None = None
    """Metrics to measure; None: the task's own set."""
    gate: Gate | None = None
    device: Device
    batch_tokens: int = Field(gt=0)
    """Padded tokens of one inference batch (longest row x rows)."""
    precision: _InferencePrecision = "fp32"
    """Precision of the weights and their computations; losses, probabilities and metrics are computed in fp32."""
    optimization: Annotated[Optimization, Field(exclude_if=lambda name: name == "none")] = "none"
    """Optimization as in a prediction: that of the servers that the gate decides on. Omitted if none, as `tolerance`:
    images that do not know the fields read such jobs.
    """
    tolerance: Annotated[float | None, Field(gt=0.5, le=1, exclude_if=lambda share: share is None)] = None
    """Tolerance as in a prediction."""


class Generation(Order):
    """Text generation in evaluation and prediction; names as in `generate` of transformers."""

    max_new_tokens: int = Field(default=128, gt=0)
    num_beams: int = Field(default=1, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: always the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Total probability of the likeliest tokens that are sampled from."""


class Preference(Order):
    """Learning of preferences."""

    beta: float = Field(default=0.1, gt=0)
    """Penalty for diverging from the model before training: the larger, the closer it stays."""


class Prediction(InferenceProcesses):
    """Batch inference over the predict data set, or over the test split when `dataset` is None."""

    dataset: DataSource | None = None
    output: str | None = None
    """URI of the result; None: `predictions.jsonl` in the job's folder. Ending `/`: a folder of parts."""
    format: Annotated[Literal["jsonl", "parquet"] | None, Field(exclude_if=lambda form: form is None)] = None
    """Format of the result. None: by the ending of `output`, JSONL in a folder. Omitted if None, as `workers` and
    `id_column` are at their defaults: images that do not know these fields read such jobs.
    """
    columns: tuple[str, ...] = ()
    """Input columns copied into the output."""
    id_column: Annotated[str | None, Field(exclude_if=lambda column: column is None)] = None
    """Input column that identifies a row, written as `id`."""
    workers: Annotated[int, Field(ge=1, exclude_if=lambda workers: workers == 1)] = 1
    """Pods that share the rows, or Spark's driver and executors; 1: one pod."""
    server: Annotated[str | None, Field(exclude_if=lambda server: server is None)] = None
    """URL of the OpenAI-compatible server that generates texts with `optimization` vllm."""
    engine: Annotated[Literal["job", "spark"], Field(exclude_if=lambda engine: engine == "job")] = "job"
    """Kind of workers: pods of an Indexed Job, or Spark's driver and its executors."""
    max_bad_rows: int = Field(default=0, ge=0)
    """Maximum number of rows that may be unreadable or unanswerable before the stage fails."""
    max_bad_share: float = Field(default=0.0, ge=0, le=1)
    """`max_bad_rows` as a fraction of the rows; the larger of the two counts."""
    device: Device
    batch_tokens: int = Field(gt=0)
    precision: _InferencePrecision = "fp32"
    """Precision, as in an evaluation."""
    optimization: Annotated[PredictOptimization, Field(exclude_if=lambda name: name == "none")] = "none"
    tolerance: Annotated[float | None, Field(gt=0.5, le=1, exclude_if=lambda share: share is None)] = None
    """Fraction of rows whose labels must equal the plain model's; None: rungs whose labels can differ are used only by
    name, or by `metric_tolerance`.
    """
    metric_tolerance: Annotated[float | None, Field(ge=0, le=1, exclude_if=lambda most: most is None)] = None
    """Maximum loss of a metric against the plain model, on labelled rows of the prepared data."""


class ServedAdapter(Order):
    """A LoRA adapter that a server computes beside the weights of its model, without merging them."""

    name: Annotated[str, Field(pattern=ADAPTER_NAME_PATTERN, max_length=63)]
    """Name of the adapter in requests, in place of a model's."""
    uri: str
    """Folder as peft writes it."""


class Serving(Order):
    """A server that answers requests with the model."""

    model_name: str
    """Name of the model in requests."""
    adapters: Annotated[tuple[ServedAdapter, ...], Field(exclude_if=lambda adapters: not adapters)] = ()
    """Adapters of the model. Omitted if there are none: images that do not know the field read such jobs."""
    serves_model: Annotated[bool, Field(exclude_if=lambda serves: serves)] = True
    """True if the model also answers by itself, provided that it has the task's head. False: only its adapters do."""
    device: Device
    precision: _InferencePrecision = "fp32"
    """Precision, as in an evaluation."""
    optimization: Annotated[Optimization, Field(exclude_if=lambda name: name == "none")] = "none"
    """Optimization as in a prediction; `measured` measures on the rows left by prepare, or on none."""
    tolerance: Annotated[float | None, Field(gt=0.5, le=1, exclude_if=lambda share: share is None)] = None
    """Tolerance as in a prediction."""
    max_latency_seconds: float = Field(default=0.1, gt=0)
    """Maximum time from a request's arrival to its answer that batches are composed for."""
    max_batch_tokens: int = Field(gt=0)
    """Padded tokens of one batch (longest row x rows)."""
    max_queue: int = Field(default=256, gt=0)
    """Maximum number of waiting rows; further requests are answered with 429."""
    drain_seconds: float = Field(default=30, gt=0)
    """Time after SIGTERM in which accepted requests are still answered."""

    @model_validator(mode="after")
    def _adapters_can_be_told_apart(self) -> Serving:
        names = [self.model_name, *(adapter.name for adapter in self.adapters)]
        if len(set(names)) < len(names):
            raise ValueError("the names of adapters must differ, and from model_name")
        if self.adapters and self.optimization != "none":
            raise ValueError("optimization is none with adapters: rungs convert a model without them")
        if not self.adapters and not self.serves_model:
            raise ValueError("serves_model is false only with adapters")
        return self


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
            raise ValueError("optimization is none with tensor: rungs convert a whole model")
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
