"""The status of a FineTuneJob, as the operator writes it."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue, StringConstraints, WithJsonSchema

from finetune_contract.choices import Stage
from finetune_operator.api.status_times import OptionalTime, StatusTime
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
StageText: TypeAlias = Annotated[Stage, WithJsonSchema({"type": "string"})]
"""Stage of a field whose schema is any text: the CRD of an earlier version has no list of stages there."""


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


Capacity: TypeAlias = Literal["spot", "onDemand"]
"""Kinds of nodes: those that can be reclaimed, and any."""


class ChildReference(StatusModel):
    """The object that runs a stage."""

    api_version: str = Field(description="API group and version.")
    kind: str = Field(description="Kind.")
    name: str = Field(description="Name in the job's namespace.")


class StageStatus(StatusModel):
    """State of one stage."""

    name: Stage = Field(description="Name of the stage.")
    state: Literal["Pending", "Running", "Succeeded", "Failed", "Suspended"] = Field(description="State of the stage.")
    attempt: int = Field(ge=0, description="Number of the current attempt, from 1; 0 before the first.")
    start_time: OptionalTime = Field(default=None, description="Start of the current attempt, RFC 3339.")
    completion_time: OptionalTime = Field(default=None, description="End of the stage, RFC 3339.")
    child: ChildReference | None = Field(default=None, description="Object that runs the current attempt.")
    next_attempt_time: OptionalTime = Field(
        default=None, description="Start of the next attempt after a failure, RFC 3339."
    )
    failures_in_row: int = Field(
        default=0, ge=0, description="Failed attempts since one ran for long, a count. The back-off grows with it."
    )
    blocked_since: OptionalTime = Field(
        default=None,
        description="Time since which a container of the current attempt cannot start because of its image or mounts, "
        "RFC 3339.",
    )
    furthest_step: int | None = Field(
        default=None, ge=0, description="Furthest step that a failed attempt of the stage reported."
    )
    free_restarts: int = Field(
        default=0,
        ge=0,
        description="Restarts since freeSince that do not count against runPolicy.maxRestarts, a count; limited by the "
        "operator's settings.",
    )
    free_since: OptionalTime = Field(default=None, description="Time of the first of those restarts, RFC 3339.")
    avoided_nodes: tuple[str, ...] = Field(
        default=(), max_length=16, description="Nodes on which an attempt failed; later pods prefer other nodes."
    )
    capacity: Capacity | None = Field(
        default=None,
        description="Kind of nodes of the current attempt, or of the next one after a fallback. Unset if the job does "
        "not use spot nodes.",
    )
    nodes_since: OptionalTime = Field(
        default=None, description="Time since which pods of the current attempt are scheduled to nodes, RFC 3339."
    )
    running_since: OptionalTime = Field(
        default=None, description="Time since which all pods of the current attempt run, RFC 3339."
    )
    replaced_pods: int = Field(
        default=0, ge=0, description="Pods of the current attempt that were lost and replaced, a count."
    )


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


class ProgressStatus(StatusModel):
    """Progress of the running stage."""

    step: int | None = Field(default=None, ge=0, description="Optimizer step, or row, of the running stage.")
    total_steps: int | None = Field(default=None, ge=0, description="Total steps, or rows, of the running stage.")
    epoch: float | None = Field(default=None, ge=0, description="Passes over the training split so far.")
    percent: int | None = Field(
        default=None, ge=0, le=100, description="Completed share of the running stage, in percent."
    )
    loss: float | None = Field(default=None, description="Training loss.")
    samples_per_second: float | None = Field(
        default=None, ge=0, description="Throughput over all processes, in rows per second."
    )
    tokens_per_second: float | None = Field(
        default=None, ge=0, description="Throughput over all processes, in tokens per second."
    )
    remaining_seconds: float | None = Field(default=None, ge=0, description="Expected remaining time in seconds.")
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


class RevisionStatus(StatusModel):
    """One revision of the endpoint."""

    number: int = Field(
        ge=1, description="Number of the revision, from 1; part of the name of the servers' Deployment."
    )
    state: Literal["Starting", "Serving", "Ended"] = Field(description="State of the revision.")
    digest: str = Field(description="sha256 digest of the content of its pods.")
    model: str | None = Field(default=None, description="URI of the model.")
    endpoint: dict[str, JsonValue] = Field(
        default_factory=dict, description="spec.endpoint of this revision, without the number of servers."
    )
    start_time: StatusTime = Field(description="Creation time of its servers, RFC 3339.")
    ready_time: OptionalTime = Field(default=None, description="Time at which the URL first led to it, RFC 3339.")
    end_time: OptionalTime = Field(default=None, description="End of the revision, RFC 3339.")
    reason: str | None = Field(default=None, description="CamelCase reason why it ended or is not ready yet.")
    message: str | None = Field(default=None, max_length=1024, description="Human-readable details of the reason.")
    canary_time: OptionalTime = Field(
        default=None, description="Start of its canary, RFC 3339. Unset if it had none yet, or needed none."
    )
    canary_result: str | None = Field(
        default=None,
        description="Result of its canary: Running, Passed, Failed, or Aborted by a suspension or another change.",
    )
    canary_message: str | None = Field(
        default=None, max_length=1024, description="Requests, failures and latency during its canary."
    )


class RequestsStatus(StatusModel):
    """Requests that the servers of one revision have answered."""

    requests: int = Field(default=0, ge=0, description="Requests to the model, a count.")
    errors: int = Field(default=0, ge=0, description="Requests that were answered with 429 or 5xx, a count.")
    seconds: float = Field(default=0, ge=0, description="Sum of their latencies in seconds.")


class CanaryStatus(StatusModel):
    """Canary of the desired revision, while it lasts."""

    revision: int = Field(ge=1, description="Number of the revision that gets a share of the requests.")
    servers: int = Field(ge=1, description="Number of its servers.")
    weight: int | None = Field(
        default=None,
        ge=1,
        le=99,
        description="Share of the requests that the HTTPRoute gives it, in percent. Unset if its share is that of its "
        "servers.",
    )
    start_time: StatusTime = Field(description="Time since which it gets requests, RFC 3339.")
    read_time: OptionalTime = Field(
        default=None, description="Time of the last reading of the servers' metrics, RFC 3339. Unset before the first."
    )
    measured_seconds: float = Field(
        default=0, ge=0, description="Time covered by readings, which counts towards canarySeconds, in seconds."
    )
    passed_time: OptionalTime = Field(
        default=None,
        description="Time at which it passed, RFC 3339. It takes over once it has as many servers as the serving "
        "revision.",
    )
    serving: RequestsStatus = Field(
        default=RequestsStatus.model_construct(), description="Requests to the serving revision during the canary."
    )
    canary: RequestsStatus = Field(default=RequestsStatus.model_construct(), description="Requests to the canary.")
    problem: str | None = Field(
        default=None, max_length=1024, description="Reason why the servers' metrics cannot be read. Unset if they can."
    )
    problem_time: OptionalTime = Field(default=None, description="Time since which this is so, RFC 3339.")


class EndpointStatus(StatusModel):
    """Revisions of the endpoint."""

    revision: int | None = Field(default=None, ge=1, description="Number of the revision that the URL leads to.")
    name: str | None = Field(default=None, description="Name in the URL. Unset if it is the name of the job.")
    taken_over_from: str | None = Field(
        default=None, description="Job that the endpoint was taken over from. Unset if it was not, or not yet."
    )
    taken_over_by: str | None = Field(
        default=None, description="Job that has taken the endpoint over. Unset if the URL leads to this job."
    )
    target: int | None = Field(
        default=None, ge=1, description="Number of the desired revision, which takes over once it is ready."
    )
    rolled_back_from: int | None = Field(
        default=None, ge=1, description="Revision of spec.endpoint that a rollback holds back. Unset if there is none."
    )
    observed_rollback: str | None = Field(
        default=None, description="Value of the annotation finetune.dev/rollback that this status was set for."
    )
    rollback: str | None = Field(default=None, max_length=1024, description="Result of that rollback.")
    canary: CanaryStatus | None = Field(
        default=None, description="Canary of the desired revision. Unset if none is in progress."
    )
    idle_since: OptionalTime = Field(
        default=None,
        description="Time since which the endpoint has no server for lack of requests, RFC 3339. Unset otherwise.",
    )
    revisions: tuple[RevisionStatus, ...] = Field(
        default=(),
        max_length=8,
        description="History of revisions, oldest first: the newest five, and those of a rollback.",
    )


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
    spot: SpotStatus | None = Field(
        default=None, description="State of the training on spot nodes. Unset if the job does not use spot nodes."
    )
    cost: CostStatus | None = Field(default=None, description="Resources that the job has used.")
    artifacts: ArtifactsStatus | None = Field(default=None, description="Results of the job.")
    endpoint: EndpointStatus | None = Field(
        default=None, description="Revisions of the endpoint. Unset if the job has none."
    )
