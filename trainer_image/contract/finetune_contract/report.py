"""What a stage says while it runs (`Progress`) and when it ends (`TrainerReport`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from finetune_contract.base import Message
from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, ModelFacts
from finetune_contract.layout import EXIT_CODES, REPORT_LIMIT_BYTES, FailureClass


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
    measured: MeasuredFacts | None = None
    """Only from prepare: what a plan of the later stages rests on."""
    seconds: float = Field(ge=0, default=0.0)

    def to_termination_message(self) -> str:
        """One line of JSON below `REPORT_LIMIT_BYTES`; the middle of a long failure message is cut, its ends
        are kept.
        """
        text = self.model_dump_json(by_alias=True, exclude_none=True)
        excess = len(text.encode()) - (REPORT_LIMIT_BYTES - 1)
        if excess <= 0:
            return text
        if self.failure is None:
            return self.model_copy(update={"metrics": {}}).to_termination_message() if self.metrics else text
        message = self.failure.message
        if len(message) < 64:
            smaller = self.failure.model_copy(update={"hint": self.failure.hint[:200]})
            return self.model_copy(update={"failure": smaller, "metrics": {}, "artifacts": {}}).model_dump_json(
                by_alias=True, exclude_none=True
            )
        # A character can take 12 bytes once JSON has escaped it; cutting a quarter at a time ends quickly and loses
        # little.
        half = max(len(message) * 3 // 8, 16)
        shorter = self.failure.model_copy(update={"message": f"{message[:half]} ... {message[-half:]}"})
        return self.model_copy(update={"failure": shorter}).to_termination_message()
