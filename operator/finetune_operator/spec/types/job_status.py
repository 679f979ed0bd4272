"""The status of a FineTuneJob, as the operator writes it."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_contract.choices import Stage
from finetune_operator.spec.status_times import OptionalTime, StatusTime
from finetune_operator.spec.types.field_types import StatusModel
from finetune_operator.spec.types.status_endpoint import EndpointStatus
from finetune_operator.spec.types.status_plan import AdaptationStatus, MeasuredStatus, PlanCheckStatus, PlanStatus
from finetune_operator.spec.types.status_stages import StageStatus, StageText

Phase: TypeAlias = Literal[
    "Pending",
    "Queued",
    "Preparing",
    "Training",
    "Evaluating",
    "Predicting",
    "Serving",
    "Suspended",
    "Succeeded",
    "Failed",
]
ConditionType: TypeAlias = Literal[
    "Accepted", "Planned", "Admitted", "Running", "Ready", "Stalled", "Succeeded", "Failed"
]


MOST_NOTE = 1024
"""Maximum length of a remark."""


class Condition(StatusModel):
    """Condition of the job, in the form of metav1.Condition."""

    type: ConditionType = Field(description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Status of the condition: True, False or Unknown.")
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)] = (
        Field(description="CamelCase reason for the last transition.")
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="Human-readable details of the last transition."
    )
    last_transition_time: StatusTime = Field(description="Time of the last change of status, RFC 3339.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that the condition was set for."
    )


class ProgressStatus(StatusModel):
    """Progress of the running stage."""

    step: int | None = Field(default=None, ge=0, description="Optimizer step, or row, of the running stage.")
    total_steps: int | None = Field(default=None, ge=0, description="Total steps, or rows, of the running stage.")
    epoch: float | None = Field(default=None, ge=0, description="Passes over the training split so far.")
    percent: int | None = Field(
        default=None, ge=0, le=100, description="Completed share of the running stage, in percent."
    )
    loss: float | None = Field(
        default=None, description="Training loss: for the built-in loop its mean over the last 20 steps."
    )
    samples_per_second: float | None = Field(
        default=None, ge=0, description="Throughput over all processes, in rows per second."
    )
    tokens_per_second: float | None = Field(
        default=None, ge=0, description="Throughput over all processes, in tokens per second."
    )
    remaining_seconds: float | None = Field(default=None, ge=0, description="Expected remaining time in seconds.")
    complete: str | None = Field(default=None, max_length=20, description="`percent` as text, e.g. 42%.")
    remaining: str | None = Field(default=None, max_length=20, description="`remainingSeconds` as text, e.g. 3h20m.")
    replaced_pods: int | None = Field(
        default=None, ge=0, description="Spark executors that were lost and replaced, a count. Unset if not known."
    )
    last_update_time: OptionalTime = Field(default=None, description="Time of this report, RFC 3339.")


class FailureStatus(StatusModel):
    """First cause of a failure."""

    failure_class: str = Field(alias="class", description="Class of the failure, e.g. DataError or OutOfMemory.")
    reason: str = Field(description="CamelCase reason within the class.")
    message: str = Field(description="Human-readable cause: field, value and rule.")
    hint: str | None = Field(default=None, description="Suggested fix.")
    stage: StageText | None = Field(default=None, description="Stage that failed.")
    attempt: int | None = Field(default=None, ge=0, description="Attempt that failed.")
    pod: str | None = Field(default=None, description="Pod that failed first.")
    node: str | None = Field(default=None, description="Node of that pod.")
    rank: int | None = Field(default=None, ge=0, description="Rank of the process that failed.")
    exit_code: int | None = Field(default=None, description="Exit code of the process.")
    log_tail: str | None = Field(default=None, max_length=4096, description="End of the pod's log, at most 4 KiB.")


class CommunicationStatus(StatusModel):
    """Transports between the processes of the training, by NCCL's log."""

    inside: str | None = Field(
        default=None,
        description="Slowest transport between GPUs of one node: nvlink, p2p (PCIe), shm (host memory) or network. "
        "Unset if there is none.",
    )
    between: str | None = Field(
        default=None,
        description="Slowest transport between nodes: ib, roce, efa, socket, nvlink, or the name of another plugin of "
        "NCCL. Unset with one node.",
    )
    gpudirect: bool | None = Field(
        default=None, description="Whether adapters access all GPUs' memory directly. Unset without adapters."
    )
    adapters: tuple[str, ...] = Field(
        default=(), max_length=16, description="Adapters or interfaces between nodes, e.g. mlx5_0:1/IB or eth0."
    )


class CostStatus(StatusModel):
    """Resources that the job has used."""

    node_seconds: float = Field(default=0, ge=0, description="Node seconds in which all pods of an attempt ran.")
    billable_seconds: float = Field(
        default=0,
        ge=0,
        description="Node seconds in which pods were scheduled to nodes. They include the pulling of images, but not "
        "the wait for a node.",
    )
    currency: str | None = Field(default=None, description="ISO 4217 code of the currency.")
    amount: float | None = Field(
        default=None, ge=0, description="Cost so far, at the prices of the operator's settings."
    )
    saved: float | None = Field(
        default=None,
        ge=0,
        description="Amount saved so far: the cost of the same node seconds on demand, less their cost on spot nodes.",
    )


class SpotStatus(StatusModel):
    """State of the training on spot nodes."""

    since: OptionalTime = Field(
        default=None,
        description="Time from which spot.maxWaitSeconds counts, RFC 3339. Unset while the job is suspended, as it "
        "does not count then.",
    )
    waited_seconds: float = Field(
        default=0, ge=0, description="Seconds before `since` that count towards spot.maxWaitSeconds."
    )
    ran_seconds: float = Field(
        default=0, ge=0, description="Seconds in which all pods ran, over the finished attempts."
    )
    preemptions: int = Field(
        default=0, ge=0, description="Attempts that ended because a spot node was reclaimed, a count."
    )


class ArtifactsStatus(StatusModel):
    """Results of the job."""

    model: str | None = Field(default=None, description="URI of the model.")
    report: str | None = Field(default=None, description="URI of report.html.")
    checkpoints: str | None = Field(
        default=None, description="URI of the checkpoints. The operator does not delete them."
    )
    predictions: str | None = Field(default=None, description="URI of the predictions.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Final metrics.")
    result: str | None = Field(
        default=None,
        max_length=128,
        description="Metric of the gate with its limit, or the first of the task's metrics, as text.",
    )
    judged_optimization: str | None = Field(
        default=None,
        max_length=63,
        description="Optimization of inference that the gate was judged with, and that servers use. Unset if the model "
        "was evaluated as it is.",
    )
    script: str | None = Field(
        default=None, description="Repository and commit of training.script, as https://host/path@commit."
    )
    endpoint_url: str | None = Field(default=None, description="URL of the server.")
    model_revision: str | None = Field(default=None, description="Commit of the downloaded model.")
    dataset_fingerprint: str | None = Field(default=None, description="Fingerprint of the prepared data.")


class FineTuneJobStatus(StatusModel):
    """Observed state of the job."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this status was set for."
    )
    phase: Phase | None = Field(default=None, description="Summary of the job's state in one word.")
    stage: Stage | None = Field(default=None, description="Stage that runs, or ran last.")
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, description="Conditions of the job.")
    stages: tuple[StageStatus, ...] = Field(default=(), max_length=8, description="Stages in their order.")
    plan: PlanStatus | None = Field(default=None, description="Resolved plan of the job.")
    progress: ProgressStatus | None = Field(default=None, description="Progress of the running stage.")
    failure: FailureStatus | None = Field(default=None, description="Cause of the job's failure.")
    restarts: int = Field(default=0, ge=0, description="Restarts so far, a count.")
    counted_restarts: int = Field(
        default=0, ge=0, description="Restarts that count against runPolicy.maxRestarts, a count."
    )
    start_time: OptionalTime = Field(
        default=None, description="Time at which the job started, or resumed after a suspension, RFC 3339."
    )
    completion_time: OptionalTime = Field(
        default=None, description="Time at which the job succeeded or failed, RFC 3339."
    )
    plan_check: PlanCheckStatus | None = Field(
        default=None, description="Comparison of the plan with the finished training. Unset before."
    )
    adaptation: AdaptationStatus | None = Field(default=None, description="Changes of the plan after failures.")
    measured: MeasuredStatus | None = Field(
        default=None, description="Measurements of the prepare stage and of the nodes, on which the plan rests."
    )
    communication: CommunicationStatus | None = Field(
        default=None,
        description="Transports between the processes of the last training attempt that reported them. Unset if NCCL "
        "was not used or its log is not known.",
    )
    note: str | None = Field(
        default=None,
        max_length=MOST_NOTE,
        description="Remark of the last training attempt that changes no result, e.g. on a tracker that it left out. "
        "Unset if there is none.",
    )
    spot: SpotStatus | None = Field(
        default=None, description="State of the training on spot nodes. Unset if the job does not use spot nodes."
    )
    cost: CostStatus | None = Field(default=None, description="Resources that the job has used.")
    artifacts: ArtifactsStatus | None = Field(default=None, description="Results of the job.")
    endpoint: EndpointStatus | None = Field(
        default=None, description="Revisions of the endpoint. Unset if the job has none."
    )
