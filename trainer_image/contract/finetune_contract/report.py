"""What a stage says while it runs (`Progress`) and when it ends (`TrainerReport`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message
from finetune_contract.facts import DataFacts, ModelFacts
from finetune_contract.layout import EXIT_CODES, REPORT_LIMIT_BYTES, FailureClass

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
"""What a training spends its time with. `start`: until the first step (model, spreading, reading a checkpoint); `data`:
waiting for batches and moving them to the device; `forward_backward`: both, where a pipeline runs them interleaved;
`communication`: collectives that nothing else runs beside, with the wait for the slowest process; `optimizer`: clipping
and the update; `rest`: what is between them, such as gathering the loss; `finish`: gathering and writing the model.
"""


class TimeSplit(Message):
    """How the wall-clock time of a training divides, on rank 0, over the attempts whose steps count."""

    total_seconds: float
    parts: dict[TimePart, float]
    """Seconds. They add up to the total."""
    with_communication: tuple[TimePart, ...] = ()
    """Parts that hold exchange between processes which cannot be told apart from what they compute."""
    clock: Literal["host", "cuda-events"] = "host"
    """Where a part ends: on GPUs when the device comes by, not when the host has asked it to."""


def shortened(text: str, limit: int) -> str:
    """The text in at most `limit` characters: of a longer one the middle goes."""
    half = limit // 2 - 3
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


class Progress(Message):
    """Where a stage is. `step` counts optimizer steps in training and rows elsewhere."""

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
    time: float
    """Unix time in seconds."""

    @property
    def percent(self) -> int:
        """Share done, 0 to 100, rounded down."""
        return min(100, 100 * self.step // self.total_steps) if self.total_steps else 0


class KubeflowMetric(Message):
    """One metric in the Kubeflow protocol, which carries values as text."""

    name: str
    value: str


class KubeflowStatus(Message):
    """`trainerStatus` of the protocol of Kubeflow Trainer 2.3 (`pkg/runtime/framework/plugins/trainjobstatus`)."""

    progress_percentage: int | None = Field(default=None, ge=0, le=100)
    estimated_remaining_seconds: int | None = Field(default=None, ge=0)
    metrics: tuple[KubeflowMetric, ...] = ()
    last_updated_time: str
    """RFC 3339 with seconds, in UTC."""


class KubeflowUpdate(Message):
    """The body of a progress POST."""

    trainer_status: KubeflowStatus


class FailureReport(Message):
    """Why a stage failed on this rank."""

    failure_class: FailureClass
    reason: str = Field(max_length=64)
    """CamelCase word for the exact case, e.g. `MissingColumn`."""
    message: str
    """One or two sentences: path, value, rule."""
    hint: str = ""
    """The way out."""
    time: float = 0.0
    """Unix time in seconds at which it happened: the earliest over all ranks is the cause."""

    @property
    def known_time(self) -> float:
        """`time`, for finding the earliest: one without a time comes last."""
        return self.time or math.inf

    @property
    def exit_code(self) -> int:
        """Exit code of the process that reports this."""
        return EXIT_CODES[self.failure_class]


class MeasuredFacts(Message):
    """What prepare measured, small enough for a report: no label names, no counts of labels."""

    model: ModelFacts | None = None
    data: DataFacts | None = None


class TrainerReport(Message):
    """The last word of one process. It fits into a Kubernetes termination message."""

    schema_version: Literal[1] = 1
    job: str
    stage: Stage
    rank: int = Field(ge=0, default=0)
    world_size: int = Field(ge=1, default=1)
    outcome: Literal["succeeded", "failed"]
    failure: FailureReport | None = None
    metrics: dict[str, JsonValue] = Field(default_factory=dict)
    """What the stage adds to metrics.json (small: numbers and short words)."""
    artifacts: dict[str, str] = Field(default_factory=dict)
    """Name (model, predictions, report, prepared) -> path relative to the job's folder, or URI."""
    fingerprint: str | None = None
    """Of the prepared data."""
    model_revision: str | None = None
    """Commit of the Hub that the model was at. Only from prepare: the later stages are told to take the same."""
    measured: MeasuredFacts | None = None
    """Only from prepare: what a plan of the later stages rests on."""
    seconds: float = Field(ge=0, default=0.0)

    def to_termination_message(self) -> str:
        """One line of JSON below `REPORT_LIMIT_BYTES`, whatever the fields hold.

        What is needed least goes first: buckets of histograms, then of a long failure message the middle, then the
        metrics, the measured facts, and at last the hint and the paths.
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
    """Only what tells job, stage and outcome. A character can take 12 bytes once JSON has escaped it."""
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
    _without(metrics={}),
    _without(measured=None),
    _with_message_of(128),
    _bare,
)
