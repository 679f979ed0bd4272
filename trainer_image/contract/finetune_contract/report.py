"""Reports of a stage: while it runs (`Progress`) and when it ends (`TrainerReport`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message, Seconds
from finetune_contract.facts import DataFacts, ModelFacts
from finetune_contract.layout import EXIT_CODES, REPORT_LIMIT_BYTES, FailureClass
from finetune_contract.measured_devices import MeasuredDevices

TimePart: TypeAlias = Literal[
    "start",
    "data",
    "forward",
    "backward",
    "forward_backward",
    "communication",
    "optimizer",
    "evaluation",
    "checkpoint",
    "rest",
    "finish",
]
"""Part of a training's wall-clock time. `start`: until the first step (model, sharding, reading a checkpoint); `data`:
waiting for batches and moving them to the device; `forward_backward`: both, where a pipeline interleaves them;
`communication`: collectives that overlap with nothing, including the wait for the slowest process; `optimizer`:
clipping and the update; `rest`: between them, such as gathering the loss; `finish`: gathering and writing the model.
"""


class TimeSplit(Message):
    """Split of a training's wall-clock time, on rank 0, over the attempts whose steps count."""

    total_seconds: float
    parts: dict[TimePart, float]
    """Seconds of each part. They add up to the total."""
    with_communication: tuple[TimePart, ...] = ()
    """Parts whose communication between processes cannot be separated from their computation."""
    clock: Literal["host", "cuda-events"] = "host"
    """Clock that marks the end of a part: on GPUs the device's, not the host's."""


MOST_RANKS = 2**31 - 1
"""Bound of the processes of a job: the Kubernetes API holds no larger rank."""


def shortened(text: str, limit: int) -> str:
    """Return the text cut to at most `limit` characters: a longer one loses its middle."""
    half = limit // 2 - 3
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


class Communication(Message):
    """Transports that NCCL chose, by its log."""

    inside: Literal["nvlink", "p2p", "shm", "network"] | None = None
    """Slowest transport between GPUs of one node: NVLink, PCIe, host memory, or the network. None: there are no such
    connections.
    """
    between: str | None = None
    """Slowest transport between nodes: `ib`, `roce`, `efa`, `socket`, `nvlink`, or the name of another plugin of NCCL.
    None: one node.
    """
    gpudirect: bool | None = None
    """True if adapters read and write all GPUs' memory by themselves (GPUDirect RDMA). None: one node, or no adapters.
    """
    nvls: bool = False
    """True if NVLink's switches add up (NVLink SHARP)."""
    adapters: tuple[str, ...] = ()
    """Adapters or interfaces between nodes, e.g. `mlx5_0:1/IB` or `eth0`."""
    library: str | None = None
    """Version of NCCL."""

    @property
    def words(self) -> str:
        """Return the transports in a phrase, e.g. `nvlink (NVLS) in a node, ib (GPUDirect) between nodes`."""
        inside = f"{self.inside}{' (NVLS)' * self.nvls} in a node" if self.inside else ""
        direct = {True: " (GPUDirect)", False: " (through host memory)", None: ""}[self.gpudirect]
        between = f"{self.between}{direct} between nodes" if self.between else ""
        return ", ".join(filter(None, (inside, between)))


class Progress(Message):
    """State of a running stage. `step` counts optimizer steps in training and rows elsewhere."""

    stage: Stage
    step: int = Field(ge=0)
    total_steps: int = Field(ge=0)
    epoch: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    remaining_seconds: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """Further metrics, e.g. `eval_accuracy`."""
    devices: MeasuredDevices | None = None
    """GPUs as the ranks measured them. Only from the built-in training loop on GPUs."""
    communication: Communication | None = None
    """Transports between the processes. Only from train on several GPUs; None: unknown."""
    note: str | None = None
    """Remark for the job's status, e.g. on a tracker that was left out."""
    time: float
    """Unix time in seconds."""

    @property
    def percent(self) -> int:
        """Percentage done, 0 to 100, rounded down."""
        return min(100, 100 * self.step // self.total_steps) if self.total_steps else 0


class KubeflowMetric(Message):
    """A metric in the Kubeflow protocol, which carries values as text."""

    name: str
    value: str


DEVICES, COMMUNICATION = "devices", "communication"
"""Metrics of the protocol whose values are JSON: `MeasuredDevices` and `Communication`."""
NOTE = "note"
"""Metric of the protocol whose value is text: `Progress.note`."""


class KubeflowStatus(Message):
    """`trainerStatus` of the protocol of Kubeflow Trainer 2.3 (`pkg/runtime/framework/plugins/trainjobstatus`)."""

    progress_percentage: int | None = Field(default=None, ge=0, le=100)
    estimated_remaining_seconds: int | None = Field(default=None, ge=0)
    metrics: tuple[KubeflowMetric, ...] = ()
    last_updated_time: str
    """RFC 3339 with seconds, in UTC."""


class KubeflowUpdate(Message):
    """Body of a progress POST."""

    trainer_status: KubeflowStatus


class FailureReport(Message):
    """Failure of a stage on this rank."""

    failure_class: FailureClass
    reason: str = Field(max_length=64)
    """CamelCase word for the exact cause, e.g. `MissingColumn`."""
    message: str
    """One or two sentences: path, value, rule."""
    hint: str = ""
    """Instruction that solves the problem."""
    time: Seconds = 0.0
    """Unix time in seconds of the failure: the earliest over all ranks is the cause."""

    @property
    def known_time(self) -> float:
        """`time` as a sort key: a failure without a time comes last."""
        return self.time or math.inf

    @property
    def exit_code(self) -> int:
        """Exit code of the process that reports this."""
        return EXIT_CODES[self.failure_class]


class MeasuredFacts(Message):
    """Measurements of prepare, small enough for a report: no label names, no label counts."""

    model: ModelFacts | None = None
    data: DataFacts | None = None


class TrainerReport(Message):
    """Final report of one process. It fits into a Kubernetes termination message."""

    schema_version: Literal[1] = 1
    job: str
    stage: Stage
    rank: int = Field(ge=0, le=MOST_RANKS, default=0)
    world_size: int = Field(ge=1, le=MOST_RANKS, default=1)
    outcome: Literal["succeeded", "failed"]
    failure: FailureReport | None = None
    metrics: dict[str, JsonValue] = Field(default_factory=dict)
    """Entries that the stage adds to metrics.json (small: numbers and short words)."""
    artifacts: dict[str, str] = Field(default_factory=dict)
    """Name (model, predictions, report, prepared) -> path relative to the job's folder, or URI."""
    fingerprint: str | None = None
    """Fingerprint of the prepared data."""
    model_revision: str | None = None
    """Hub commit of the model. Only from prepare: later stages get it as their revision."""
    measured: MeasuredFacts | None = None
    """Facts that a plan of the later stages rests on. Only from prepare."""
    devices: MeasuredDevices | None = None
    """GPUs as the ranks measured them. Only from the built-in training loop on GPUs."""
    communication: Communication | None = None
    """Transports between the processes. Only from train on several GPUs; None: unknown."""
    note: str | None = None
    """Remark for the job's status, e.g. on a tracker that was left out."""
    seconds: Seconds = 0.0

    def to_termination_message(self) -> str:
        """Return one line of JSON below `REPORT_LIMIT_BYTES`, whatever the fields hold.

        The least needed is dropped first: histogram buckets, then the middle of a long failure message, then the
        note, the metrics, the measured facts, and at last the hint and the paths.
        """
        smaller = self
        for shrink in _SHRINKINGS:
            text = smaller._line()
            if len(text.encode()) < REPORT_LIMIT_BYTES:
                return text
            smaller = shrink(smaller)
        return smaller._line()

    def _line(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


_Shrinking: TypeAlias = Callable[[TrainerReport], TrainerReport]


def _with_buckets(count: int) -> _Shrinking:
    def shrink(report: TrainerReport) -> TrainerReport:
        if report.measured is None or report.measured.data is None:
            return report
        data = report.measured.data.for_planning(count)
        return report.model_copy(update={"measured": report.measured.model_copy(update={"data": data})})

    return shrink


def _with_message_of(characters: int) -> _Shrinking:
    def shrink(report: TrainerReport) -> TrainerReport:
        failure = report.failure
        if failure is None or len(failure.message) <= characters:
            return report
        cut = failure.model_copy(update={"message": shortened(failure.message, characters)})
        return report.model_copy(update={"failure": cut})

    return shrink


def _without(**fields: object) -> _Shrinking:
    return lambda report: report.model_copy(update=fields)


def _bare(report: TrainerReport) -> TrainerReport:
    """Return only job, stage and outcome. A character can take 12 bytes once JSON has escaped it."""
    failure = report.failure
    if failure is not None:
        failure = failure.model_copy(update={"message": failure.message[:64], "hint": ""})
    return TrainerReport(
        job=report.job[:63],
        stage=report.stage,
        rank=report.rank,
        world_size=report.world_size,
        outcome=report.outcome,
        failure=failure,
        fingerprint=report.fingerprint[:64] if report.fingerprint else None,
        model_revision=report.model_revision[:64] if report.model_revision else None,
        seconds=report.seconds,
    )


_SHRINKINGS: tuple[_Shrinking, ...] = (
    *(_with_buckets(count) for count in (32, 16, 8, 4, 1)),
    *(_with_message_of(characters) for characters in (3000, 2000, 1500, 1000, 600, 300)),
    _without(note=None),
    _without(metrics={}),
    _without(communication=None),
    _without(measured=None),
    _with_message_of(128),
    _bare,
)
