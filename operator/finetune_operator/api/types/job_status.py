"""The status of a FineTuneJob, as the operator writes it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue, StringConstraints

from finetune_contract.choices import Stage
from finetune_operator.api.types.field_types import StatusModel

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


class Condition(StatusModel):
    """One aspect of the job, in the form of metav1.Condition."""

    type: ConditionType = Field(description="Aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)] = (
        Field(description="CamelCase word for the cause.")
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="The cause in sentences."
    )
    last_transition_time: str = Field(description="When status changed last, RFC 3339.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this speaks of."
    )


Capacity: TypeAlias = Literal["spot", "onDemand"]
"""Kinds of nodes: those that can be taken away, and any."""


class ChildReference(StatusModel):
    """The object that runs a stage."""

    api_version: str = Field(description="API group and version.")
    kind: str = Field(description="Kind.")
    name: str = Field(description="Name in the job's namespace.")


class StageStatus(StatusModel):
    """One stage."""

    name: Literal["prepare", "train", "evaluate", "predict", "serve"] = Field(description="Stage.")
    state: Literal["Pending", "Running", "Succeeded", "Failed", "Suspended"] = Field(description="State.")
    attempt: int = Field(ge=0, description="Number of the current try, from 1; 0 before the first.")
    start_time: str | None = Field(default=None, description="When the current attempt started, RFC 3339.")
    completion_time: str | None = Field(default=None, description="When the stage ended, RFC 3339.")
    child: ChildReference | None = Field(default=None, description="Object of the current attempt.")
    next_attempt_time: str | None = Field(
        default=None, description="When the next attempt starts after a failure, RFC 3339."
    )
    failures_in_row: int = Field(
        default=0, ge=0, description="Failed attempts since one ran for long; the delay before the next grows with it."
    )
    blocked_since: str | None = Field(
        default=None,
        description="Since when a container of the current attempt cannot start, for its image or for what it mounts, "
        "RFC 3339.",
    )
    furthest_step: int | None = Field(
        default=None, ge=0, description="The furthest step that a failed attempt of the stage had told."
    )
    free_restarts: int = Field(
        default=0, ge=0, description="Restarts free of charge since freeSince, a count; the settings bound them."
    )
    free_since: str | None = Field(default=None, description="When the first of those restarts was, RFC 3339.")
    avoided_nodes: tuple[str, ...] = Field(
        default=(), max_length=16, description="Nodes on which an attempt broke; later pods prefer others."
    )
    capacity: Capacity | None = Field(
        default=None,
        description="Nodes of the current attempt, or after a fallback those of the next. Left out: any, as the job "
        "does not ask for spot.",
    )
    nodes_since: str | None = Field(
        default=None, description="Since when pods of the current attempt have nodes, RFC 3339."
    )
    running_since: str | None = Field(
        default=None, description="Since when all pods of the current attempt run, RFC 3339."
    )
    replaced_pods: int = Field(
        default=0, ge=0, description="Pods of the current attempt that were lost and replaced, a count."
    )


class EstimateStatus(StatusModel):
    """Estimates of the plan."""

    duration_seconds: float | None = Field(default=None, ge=0, description="Training time in seconds.")
    cost: float | None = Field(default=None, ge=0, description="Cost of the training in `currency`.")
    currency: str | None = Field(default=None, description="ISO 4217 code.")


class PlanStatus(StatusModel):
    """Resolved plan, without any auto."""

    strategy: str = Field(description="Strategy in words, e.g. deepspeed-zero2.")
    launcher: str = Field(description="Launcher.")
    capacity: Capacity | None = Field(default=None, description="Nodes that it trains on first. Left out: any.")
    world_size: int = Field(ge=1, description="Processes over all nodes.")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="Rows that one process computes at once. Left out: a script decides."
    )
    gradient_accumulation: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches of one process in one optimizer step. Left out: a script decides.",
    )
    memory_per_device: dict[str, int] = Field(default_factory=dict, description="Bytes by term, and their total.")
    estimated: EstimateStatus = Field(default=EstimateStatus(), description="Expected time and cost.")
    data_parallel: int | None = Field(
        default=None,
        ge=1,
        description="Replicas of the model, when several processes hold one. Left out: each process holds one.",
    )
    predict_workers: int | None = Field(
        default=None, ge=1, description="Pods that share the rows to predict. Left out: one pod predicts."
    )
    reasons: tuple[str, ...] = Field(default=(), max_length=64, description="One sentence for each decision.")


class AdaptationStatus(StatusModel):
    """Changes of the plan after failures."""

    micro_batch_limit: int | None = Field(
        default=None, ge=1, description="Largest micro-batch that is tried after memory ran out."
    )
    skipped_strategies: tuple[str, ...] = Field(
        default=(), max_length=128, description="Strategies that ran out of memory at their smallest micro-batch."
    )
    checkpoint_form: str | None = Field(
        default=None,
        description="What wrote the checkpoints when memory ran out, e.g. ddp or deepspeed-zero2: only strategies that "
        "go on from them are tried. Left out: there was none yet.",
    )
    reasons: tuple[str, ...] = Field(default=(), max_length=32, description="One sentence for each change.")


class MeasuredStatus(StatusModel):
    """Measured facts, on which the plan rests."""

    model: dict[str, JsonValue] | None = Field(default=None, description="Shape of the model.")
    data: dict[str, JsonValue] | None = Field(default=None, description="Rows and lengths of the prepared data.")
    nodes: dict[str, JsonValue] | None = Field(
        default=None, description="What the cluster's nodes told of their GPUs before the first stage began."
    )


class ProgressStatus(StatusModel):
    """Progress of the running stage."""

    step: int | None = Field(default=None, ge=0, description="Optimizer step, or row.")
    total_steps: int | None = Field(default=None, ge=0, description="Steps, or rows, in all.")
    epoch: float | None = Field(default=None, ge=0, description="Passes over the training split so far.")
    percent: int | None = Field(default=None, ge=0, le=100, description="Share done in percent.")
    loss: float | None = Field(default=None, description="Training loss.")
    samples_per_second: float | None = Field(default=None, ge=0, description="Rows a second over all processes.")
    tokens_per_second: float | None = Field(default=None, ge=0, description="Tokens a second over all processes.")
    remaining_seconds: float | None = Field(default=None, ge=0, description="Expected time left in seconds.")
    replaced_pods: int | None = Field(
        default=None, ge=0, description="Executors that Spark has lost and replaced, a count. Left out: none is known."
    )
    last_update_time: str | None = Field(default=None, description="When this was reported, RFC 3339.")


class FailureStatus(StatusModel):
    """The first cause of a failure."""

    failure_class: str = Field(alias="class", description="Class of the failure, e.g. DataError or OutOfMemory.")
    reason: str = Field(description="CamelCase word for the exact case.")
    message: str = Field(description="What is wrong: path, value, rule.")
    hint: str | None = Field(default=None, description="The way out.")
    stage: str | None = Field(default=None, description="Stage that failed.")
    attempt: int | None = Field(default=None, ge=0, description="Its attempt.")
    pod: str | None = Field(default=None, description="Pod that failed first.")
    node: str | None = Field(default=None, description="Node it ran on.")
    rank: int | None = Field(default=None, ge=0, description="Rank of the process.")
    exit_code: int | None = Field(default=None, description="Its exit code.")
    log_tail: str | None = Field(default=None, max_length=4096, description="End of its log, at most 4 KiB.")


class CostStatus(StatusModel):
    """Resources that the job has used."""

    node_seconds: float = Field(
        default=0, ge=0, description="Seconds in which all pods of an attempt ran, times its nodes."
    )
    billable_seconds: float = Field(
        default=0,
        ge=0,
        description="Seconds in which pods had nodes, times the nodes: those are paid, also while images are pulled. "
        "Waiting for a node is in neither.",
    )
    currency: str | None = Field(default=None, description="ISO 4217 code.")
    amount: float | None = Field(default=None, ge=0, description="Cost so far, at the prices of the settings.")
    saved: float | None = Field(
        default=None, ge=0, description="What the same node seconds would have cost more on demand than on spot nodes."
    )


class SpotStatus(StatusModel):
    """State of the training on spot nodes."""

    since: str | None = Field(
        default=None,
        description="Since when spot.maxWaitSeconds counts, RFC 3339. Left out: it does not count now, as the job is "
        "suspended.",
    )
    waited_seconds: float = Field(
        default=0, ge=0, description="Seconds that had counted towards spot.maxWaitSeconds before that."
    )
    ran_seconds: float = Field(
        default=0, ge=0, description="Seconds in which all pods ran, over the attempts that are over."
    )
    preemptions: int = Field(default=0, ge=0, description="Attempts that ended as a spot node was taken away.")


class ArtifactsStatus(StatusModel):
    """Results of the job."""

    model: str | None = Field(default=None, description="URI of the model.")
    report: str | None = Field(default=None, description="URI of report.html.")
    checkpoints: str | None = Field(
        default=None, description="URI of the checkpoints, which stay until somebody deletes them."
    )
    predictions: str | None = Field(default=None, description="URI of the predictions.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Final metrics.")
    script: str | None = Field(
        default=None, description="Repository and commit of training.script, as https://host/path@commit."
    )
    endpoint_url: str | None = Field(default=None, description="URL of the server.")
    model_revision: str | None = Field(default=None, description="Commit of the model that was fetched.")
    dataset_fingerprint: str | None = Field(default=None, description="Fingerprint of the prepared data.")


class RevisionStatus(StatusModel):
    """One state of what the endpoint serves."""

    number: int = Field(ge=1, description="Number, from 1; the servers' Deployment has it in its name.")
    state: Literal["Starting", "Serving", "Ended"] = Field(description="State.")
    digest: str = Field(description="sha256 of what its pods are made of.")
    model: str | None = Field(default=None, description="URI of the model.")
    endpoint: dict[str, JsonValue] = Field(
        default_factory=dict, description="spec.endpoint of this revision, without the number of servers."
    )
    start_time: str = Field(description="When its servers were created, RFC 3339.")
    ready_time: str | None = Field(default=None, description="When the URL led to it first, RFC 3339.")
    end_time: str | None = Field(default=None, description="When it ended, RFC 3339.")
    reason: str | None = Field(default=None, description="CamelCase word for why it ended or is not ready yet.")
    message: str | None = Field(default=None, max_length=1024, description="The same in a sentence.")


class EndpointStatus(StatusModel):
    """Revisions of the endpoint."""

    revision: int | None = Field(default=None, ge=1, description="Number of the revision that the URL leads to.")
    target: int | None = Field(
        default=None, ge=1, description="Number of the revision that is wanted; it takes over once it is ready."
    )
    rolled_back_from: int | None = Field(
        default=None, ge=1, description="Revision of spec.endpoint that a rollback holds back. Left out: none."
    )
    observed_rollback: str | None = Field(
        default=None, description="Annotation finetune.dev/rollback that this status speaks of."
    )
    rollback: str | None = Field(default=None, max_length=1024, description="What became of that annotation.")
    revisions: tuple[RevisionStatus, ...] = Field(
        default=(), max_length=8, description="History, the oldest first: the newest five, and those of a rollback."
    )


class FineTuneJobStatus(StatusModel):
    """Observed state of the job."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this status speaks of."
    )
    phase: Phase | None = Field(default=None, description="Where the job is, in one word.")
    stage: Stage | None = Field(default=None, description="Stage that runs or ran last.")
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, description="Aspects of the job.")
    stages: tuple[StageStatus, ...] = Field(default=(), max_length=8, description="The stages in order.")
    plan: PlanStatus | None = Field(default=None, description="What will run.")
    progress: ProgressStatus | None = Field(default=None, description="Progress of the running stage.")
    failure: FailureStatus | None = Field(default=None, description="Why the job failed.")
    restarts: int = Field(default=0, ge=0, description="Restarts so far.")
    counted_restarts: int = Field(
        default=0, ge=0, description="Those among them that count against runPolicy.maxRestarts."
    )
    start_time: str | None = Field(
        default=None, description="When the job began to run, anew after each suspension, RFC 3339."
    )
    completion_time: str | None = Field(default=None, description="When the job succeeded or failed, RFC 3339.")
    adaptation: AdaptationStatus | None = Field(default=None, description="How the plan was changed after failures.")
    measured: MeasuredStatus | None = Field(default=None, description="What prepare measured, and nodes told.")
    spot: SpotStatus | None = Field(
        default=None, description="State of the training on spot nodes. Left out: the job does not ask for them."
    )
    cost: CostStatus | None = Field(default=None, description="Resources that the job has used.")
    artifacts: ArtifactsStatus | None = Field(default=None, description="Results of the job.")
    endpoint: EndpointStatus | None = Field(
        default=None, description="Revisions of the endpoint. Left out: the job has none."
    )
