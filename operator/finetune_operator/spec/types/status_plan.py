"""Status of the plan of a FineTuneJob: its choices and estimates, and their comparison with measurements."""

from typing import Literal

from pydantic import Field, JsonValue

from finetune_operator.spec.types.field_types import StatusModel
from finetune_operator.spec.types.status_stages import Capacity, StageText


class EstimateStatus(StatusModel):
    """Estimates of the plan."""

    duration_seconds: float | None = Field(default=None, ge=0, description="Training time in seconds.")
    cost: float | None = Field(default=None, ge=0, description="Cost of the training in `currency`.")
    currency: str | None = Field(default=None, description="ISO 4217 code of the currency.")
    step_seconds: float | None = Field(default=None, ge=0, description="Time of an optimizer step in seconds.")
    step_parts: dict[str, float] = Field(
        default_factory=dict, description="Seconds of each part of a step. Empty on CPUs, where only the sum is known."
    )
    time_factor: float | None = Field(
        default=None, gt=0, description="Factor on the time of a step, learned from finished jobs. Unset without one."
    )
    pauses: dict[str, float] = Field(
        default_factory=dict,
        description="Part of durationSeconds between steps, in seconds: checkpoints, and validation once the data are "
        "prepared.",
    )


class InferenceStatus(StatusModel):
    """GPUs of a stage that evaluates or predicts."""

    stage: StageText = Field(description="Stage.")
    processes: int = Field(ge=1, description="Processes of one pod that share the rows.")
    gpus_per_process: int = Field(ge=1, description="GPUs that hold the model of one process.")
    processes_per_model: int | None = Field(
        default=None, ge=2, description="Processes that split each layer of one model; unset if each has a whole one."
    )


class PlanStatus(StatusModel):
    """Resolved plan; it contains no auto."""

    strategy: str = Field(description="Parallelism strategy, e.g. deepspeed-zero2.")
    launcher: str = Field(description="Launcher of the training.")
    capacity: Capacity | None = Field(
        default=None, description="Kind of nodes for the first training attempt. Unset if any nodes are used."
    )
    network: Literal["tcp", "rdma", "efa"] | None = Field(
        default=None,
        description="Network between nodes: tcp, or the kind of devices that the pods request. Unset if the training "
        "has one node, or no GPUs.",
    )
    world_size: int = Field(ge=1, description="Training processes over all nodes.")
    product: str | None = Field(
        default=None, description="Product of the GPU that the plan counts with, or `cpu`. Unset if nothing is trained."
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="Rows per process and forward pass. Unset if a script decides."
    )
    gradient_accumulation: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches per process and optimizer step. Unset if a script decides.",
    )
    memory_per_device: dict[str, int] = Field(
        default_factory=dict, description="Estimated device memory in bytes by component, and the total."
    )
    estimated: EstimateStatus = Field(default=EstimateStatus.model_construct(), description="Expected time and cost.")
    data_parallel: int | None = Field(
        default=None,
        ge=1,
        description="Replicas of the model, if each is spread over several processes. Unset if each process holds a "
        "replica.",
    )
    predict_workers: int | None = Field(
        default=None, ge=1, description="Pods that share the rows to predict. Unset if one pod predicts."
    )
    inference: tuple[InferenceStatus, ...] = Field(
        default=(), max_length=2, description="Stages whose pods evaluate or predict on several GPUs."
    )
    device: str | None = Field(
        default=None,
        description="GPU that the training is planned for if labels and settings do not say which the nodes have: "
        "assumed, or measured by an earlier attempt. Unset if it is known.",
    )
    reasons: tuple[str, ...] = Field(
        default=(), max_length=64, description="One sentence for each decision of the plan."
    )


class ComparisonStatus(StatusModel):
    """Estimate and its measurement."""

    planned: float = Field(ge=0, description="Value in the plan.")
    measured: float = Field(ge=0, description="Measured value, in the same unit.")
    ratio: float = Field(ge=0, description="Measured divided by planned: above 1 the estimate was too low.")
    terms: dict[str, float] = Field(
        default_factory=dict, description="Ratio of each part that is both planned and measured."
    )


class PlanCheckStatus(StatusModel):
    """Estimates of the plan that the training ran, compared with its measurements."""

    strategy: str = Field(description="Parallelism strategy of the training.")
    attempt: int = Field(ge=0, description="Attempt at the training that was measured.")
    device: str | None = Field(default=None, description="Product of the GPU in the plan, or `cpu`.")
    memory: ComparisonStatus | None = Field(
        default=None,
        description="Peak memory of the fullest device in bytes; on CPU that of a process. Unset if it is not known.",
    )
    step_time: ComparisonStatus | None = Field(
        default=None,
        description="Median time of an optimizer step in seconds, without evaluation and checkpoints. Unset if it is "
        "not known.",
    )
    message: str = Field(
        default="", max_length=1024, description="Sentences about estimates that were wrong by more than 15 %."
    )


class AdaptationStatus(StatusModel):
    """Changes of the plan after failures."""

    micro_batch_limit: int | None = Field(
        default=None, ge=1, description="Largest micro-batch to try since an attempt ran out of memory."
    )
    skipped_strategies: tuple[str, ...] = Field(
        default=(), max_length=128, description="Strategies that ran out of memory at their smallest micro-batch."
    )
    checkpoint_form: str | None = Field(
        default=None,
        description="Strategy that wrote the checkpoints when memory ran out, e.g. ddp or deepspeed-zero2; only "
        "strategies that can resume from them are tried. Unset if there were none.",
    )
    reasons: tuple[str, ...] = Field(default=(), max_length=32, description="One sentence for each change.")


class MeasuredStatus(StatusModel):
    """Measurements that the plan rests on."""

    model: dict[str, JsonValue] | None = Field(default=None, description="Shape of the model.")
    data: dict[str, JsonValue] | None = Field(default=None, description="Rows and lengths of the prepared data.")
    nodes: dict[str, JsonValue] | None = Field(
        default=None, description="GPUs of the cluster's nodes, read before the first stage started."
    )
    learned: tuple[dict[str, JsonValue], ...] = Field(
        default=(),
        max_length=64,
        description="Medians of measured over planned values of finished jobs in the namespace, read before the first "
        "stage started, if the operator's settings allow it.",
    )
    device: dict[str, JsonValue] | None = Field(
        default=None,
        description="GPUs of the last training attempt that reported them, as its processes measured them.",
    )
    replanned_for: tuple[dict[str, JsonValue], ...] = Field(
        default=(),
        max_length=8,
        description="Kinds of GPUs that attempts measured on nodes without known ones, and for which the job was "
        "planned again.",
    )
