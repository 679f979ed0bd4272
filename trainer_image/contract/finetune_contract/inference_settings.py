"""Settings of `job.json` for the stages that use a model: evaluation, prediction and serving."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from finetune_contract.choices import (
    ADAPTER_NAME_PATTERN,
    Device,
    InferencePrecision,
    Optimization,
    PredictOptimization,
)
from finetune_contract.contract_models import Order
from finetune_contract.data_settings import DataSource

CPU_BATCH_TOKENS = 2_048
"""Padded tokens of an inference batch on CPUs: their activations stay in the caches. MiniLM answers 1.3 to 1.5 times
the rows of batches of 8,192 (`tests/benchmarks/README.md`).
"""
GPU_BATCH_TOKENS = 16_384
"""Padded tokens of an inference batch on GPUs: enough to fill any of them, and below 1 GB of activations up to 2,048
wide.
"""
BATCH_TOKENS: dict[Device, int] = {"cpu": CPU_BATCH_TOKENS, "cuda": GPU_BATCH_TOKENS}
"""Padded tokens of an inference batch where no plan has decided them, by device."""


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
    """Fraction of rows whose labels must equal the plain model's; None: backends whose labels can differ are used only
    by name, or by `metric_tolerance`.
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
            raise ValueError("optimization is none with adapters: backends convert a model without them")
        if not self.adapters and not self.serves_model:
            raise ValueError("serves_model is false only with adapters")
        return self
