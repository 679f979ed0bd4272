"""Input and output of this package: `Observed` and `Decision`.

They are plain and frozen, so that a test can state a situation as one row. Times are aware datetimes in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from finetune_contract.choices import Stage
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import Communication, TrainerReport
from finetune_operator.jobs.launchers.launcher_status import ChildState
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.plan.hardware.gpu_nodes import Node
from finetune_operator.plan.types.plan_types import EndpointRuntime, LearnedRatios
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.launcher_rows import BUILT_IN, LauncherName
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.types import Capacity, FineTuneJob, FineTuneJobStatus, ProgressStatus


@dataclass(frozen=True)
class ObjectRef:
    """Reference to one object in the job's namespace."""

    api_version: str
    kind: str
    name: str
    uid: str | None = None
    """If given, only this very object is meant, and not a later one of the same name."""

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the reference to a rendered object, without a uid."""
        metadata = manifest["metadata"]
        assert isinstance(metadata, dict), "a manifest without metadata was rendered"
        return cls(str(manifest["apiVersion"]), str(manifest["kind"]), str(metadata["name"]))

    @property
    def group_kind(self) -> GroupKind:
        """Return the kind without its version, as the store knows it."""
        return GroupKind.of(self.api_version, self.kind)


@dataclass(frozen=True)
class JobView:
    """FineTuneJob as read from the API server."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    deleting: bool
    managed_by: str | None
    """`runPolicy.managedBy` as written, readable also when the rest of the spec is not."""
    job: FineTuneJob | None
    """Parsed job; None: it cannot be run, for the reasons in `problems`."""
    problems: tuple[Problem, ...]
    status: FineTuneJobStatus
    """Status that was stored last; it holds everything that has to survive a restart of the operator."""
    marks: str = ""
    """Digest of labels and annotations, which validation reads beside the spec."""
    rollback: str | None = None
    """Annotation that requests an earlier revision of the endpoint, as written."""

    @property
    def id(self) -> tuple[str, str]:
        """Namespace and uid, the key of the job's objects."""
        return self.namespace, self.uid


@dataclass(frozen=True)
class ChildView:
    """The object that runs one attempt of a stage, whatever its kind."""

    ref: ObjectRef
    stage: Stage
    attempt: int
    created: datetime
    state: ChildState
    reason: str = ""
    """Reason of a failure, as the kind's own controller reports it."""
    message: str = ""
    started: datetime | None = None
    finished: datetime | None = None
    deleting: bool = False
    configuration: str | None = None
    """sha256 of the configuration of its pods, from its pod template."""
    capacity: Capacity | None = None
    """Nodes that its pods ask for, from its label."""
    replaces_pods: bool = False
    """True if its controller creates another pod in place of a lost one."""


@dataclass(frozen=True)
class Ended:
    """End of the trainer's container."""

    exit_code: int
    reason: str
    """Reason from the kubelet: Completed, Error, OOMKilled, ContainerStatusUnknown, ..."""
    finished: datetime | None
    report: TrainerReport | None
    """Termination message, if it is a report of the trainer."""
    message: str = ""
    """Raw termination message, if it is no report: from the container runtime, or a user's program."""


@dataclass(frozen=True)
class Waiting:
    """Reason why a container does not start, from the kubelet: ImagePullBackOff, CreateContainerConfigError, ..."""

    reason: str
    message: str


@dataclass(frozen=True)
class StartEvent:
    """Newest event about an object that keeps an attempt from starting."""

    kind: str
    name: str
    reason: str
    message: str
    warning: bool = True


@dataclass(frozen=True)
class PodView:
    """One pod of an attempt."""

    name: str
    uid: str
    stage: Stage
    attempt: int
    created: datetime
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    index: int | None = None
    """Node rank; None for the launcher pod of an MPIJob."""
    lost_before: int = 0
    """Pods of the same index that its Job has lost before it."""
    node: str | None = None
    address: str | None = None
    """IP address."""
    scheduled: datetime | None = None
    """Time when it got its node."""
    started_at: datetime | None = None
    """Start of the trainer's container."""
    unschedulable: str | None = None
    """The scheduler's message."""
    waiting: Waiting | None = None
    node_silent_since: datetime | None = None
    """Time since when its node does not respond; None: it does, or the pod has not started."""
    ended: Ended | None = None
    disruption: str | None = None
    """Reason of the condition DisruptionTarget (PreemptionByScheduler, DeletionByTaintManager, EvictionByEvictionAPI,
    TerminationByKubelet, ...).
    """
    status_reason: str | None = None
    """`status.reason` of the pod: Evicted, NodeLost, NodeShutdown, Preempting, UnexpectedAdmissionError, ..."""
    status_message: str | None = None
    changed: datetime | None = None
    """Last change of one of its conditions: the end of a pod whose container never ran, or is not listed."""
    deleting_until: datetime | None = None
    """End of its grace period; None: it is not being deleted."""
    deleting_since: datetime | None = None
    """Time when its deletion was requested, in whole seconds."""
    container: str = CONTAINER_NAME
    """Name of the trainer's container."""
    claims: tuple[str, ...] = ()
    """PersistentVolumeClaims that it mounts."""
    deleted: bool = False
    """True if it no longer exists: this is its last known state."""

    @property
    def over(self) -> bool:
        """True if nothing of it runs any more."""
        return self.deleted or self.phase in ("Succeeded", "Failed")

    @property
    def optional(self) -> bool:
        """True if its attempt ends well without it: the first pod of prepare or predict does the work that others
        leave.
        """
        return self.stage in (Stage.PREPARE, Stage.PREDICT) and bool(self.index)


@dataclass(frozen=True)
class EndpointView:
    """Object that runs the servers of one revision of the endpoint: a Deployment of ours, or an InferenceService with
    the Deployment that KServe creates for it.
    """

    ref: ObjectRef
    revision: int
    created: datetime
    replicas: int
    """Number of servers that it asks for."""
    runtime: EndpointRuntime = "deployment"
    most: int | None = None
    """Maximum number of servers, of an InferenceService."""
    available: int = 0
    """Number of servers that answer."""
    updated: int = 0
    """Pods with its current template; 0 while its controller has not seen its last change."""
    digest: str | None = None
    """Digest of all objects of the endpoint that were applied with it."""
    revision_digest: str | None = None
    """Digest of the revision that its pods serve."""
    stuck: str | None = None
    """Message of its controller if its servers have not become available in time."""
    deleting: bool = False
    has_deployment: bool = True
    """True if there is a Deployment; False: KServe has not created it yet, or its controller does not run."""
    problem: tuple[str, str] | None = None
    """Reason and message of KServe if something cannot be done."""
    url: str | None = None
    """URL for clients outside of the cluster, as KServe reports it."""

    @property
    def ready(self) -> bool:
        """True if all servers that it asks for answer, after their warm-up."""
        return not self.deleting and min(self.available, self.updated) >= self.replicas


@dataclass(frozen=True)
class AutoscalerView:
    """State of the endpoint's HorizontalPodAutoscaler."""

    active: bool
    """False if it cannot compute a number of servers, mostly for lack of metrics."""
    since: datetime | None
    """Time since when this holds."""
    message: str


@dataclass(frozen=True)
class RouteView:
    """State of the endpoint's HTTPRoute."""

    accepted: bool
    """True if the Gateway leads requests by it."""
    since: datetime
    """Time of its creation."""
    message: str = ""
    """Reason why it is not accepted."""


@dataclass(frozen=True)
class IdleScalingView:
    """State of the endpoint's HTTPScaledObject."""

    ready: bool
    """True if the KEDA HTTP add-on scales the servers by it."""
    since: datetime
    """Time of its creation."""
    message: str = ""
    """Reason why it does not."""


@dataclass(frozen=True)
class Refusal:
    """Object that the API server refused, or whose name is taken."""

    ref: ObjectRef
    code: int
    """HTTP status; 409: the name belongs to an object that is not this job's."""
    message: str


@dataclass(frozen=True)
class NodesRead:
    """The cluster's nodes, as far as they could be read."""

    nodes: tuple[Node, ...] = ()
    failure: str | None = None
    """Reason that they could not be read; None: they could."""


@dataclass(frozen=True)
class Findings:
    """Measurements and the remark of an attempt at train; None: it has reported none."""

    devices: MeasuredDevices | None = None
    communication: Communication | None = None
    note: str | None = None

    def after(self, before: Findings) -> Findings:
        """Return these, with those that they lack as they were `before` in the same attempt."""
        return Findings(
            self.devices or before.devices, self.communication or before.communication, self.note or before.note
        )


NO_FINDINGS = Findings()


@dataclass(frozen=True)
class Observed:
    """Everything known about one job besides the job itself."""

    children: tuple[ChildView, ...] = ()
    pods: tuple[PodView, ...] = ()
    progress: ProgressStatus | None = None
    """Newest report of the running attempt."""
    findings: Findings = NO_FINDINGS
    """Measurements in its reports."""
    logs: tuple[tuple[str, str], ...] = ()
    """Name of a pod and its log tail, for pods that `wanted_logs` asked for; empty text: no log can be read."""
    last_logs: tuple[tuple[str, str], ...] = ()
    """Same for pods that `pods_being_deleted` named, read when their deletion began: a pod's log is deleted with it."""
    start_events: tuple[StartEvent, ...] = ()
    """Newest event of each object that `wanted_events` asked for."""
    served: tuple[LauncherName, ...] = BUILT_IN
    """Launchers whose kinds the API server serves, as `planning.plan_types.Facts.served` takes them."""
    nodes: NodesRead | None = None
    """The cluster's nodes; None: they were not requested."""
    learned: tuple[LearnedRatios, ...] = ()
    """Ratios of the namespace's finished jobs; none unless the settings allow it."""
    refusals: tuple[Refusal, ...] = ()
    """Refusals while the decision before this one was carried out."""
    pods_before: tuple[PodView, ...] = ()
    """Pods of an earlier job of the same name, whose results lie in the same place."""
    endpoints: tuple[EndpointView, ...] = ()
    """Objects that serve the model, by revision."""
    kserve: bool = False
    """True if the API server serves InferenceServices."""
    custom_metrics: bool = False
    """True if the API server serves the custom metrics API."""
    http_routes: bool = False
    """True if the API server serves HTTPRoutes."""
    route: RouteView | None = None
    """HTTPRoute of the endpoint; None: there is none, or it has not been read."""
    http_scaled_objects: bool = False
    """True if the API server serves HTTPScaledObjects."""
    idle_scaling: IdleScalingView | None = None
    """HTTPScaledObject of the endpoint; None: there is none, or it has not been read."""
    autoscaler: AutoscalerView | None = None
    """Autoscaler of the endpoint; None: there is none, or its state is not known."""
    last_progress_at: datetime | None = None
    """Time of the running attempt's last report with anything new; None: this operator has received none."""

    @property
    def log_tails(self) -> tuple[tuple[str, str], ...]:
        """Log tails that are known: one read after a pod's end replaces one read when its deletion began."""
        return tuple((dict(self.last_logs) | {name: text for name, text in self.logs if text}).items())

    plan_wanted_since: datetime | None = None
    """Time since when the job has been waiting for its plan; None: it is not."""
    reports_complete_since: datetime | None = None
    """Time since which no report can have been missed; None: reports cannot be received now."""


@dataclass(frozen=True)
class EventNote:
    """One event to be shown by `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """Actions to take now, in this order: delete, create, write the status, record the events. Carrying them out twice
    changes nothing.
    """

    status: FineTuneJobStatus
    """The whole status; equal to the stored one if nothing has changed."""
    delete: tuple[ObjectRef, ...] = ()
    create: tuple[Manifest, ...] = ()
    """Objects in order; each is created unless it exists already."""
    remove: tuple[ObjectRef, ...] = ()
    """Objects in order, before anything is applied; each is deleted if it exists and belongs to the job."""
    apply: tuple[Manifest, ...] = ()
    """Objects in order, after those to create; each is created or changed, unless it belongs to somebody else."""
    events: tuple[EventNote, ...] = ()
    requeue_at: datetime | None = None
    """Time of the next reconcile even if nothing happens: the end of a delay or a time limit."""
    delete_job: bool = False
    """True if the job's time to live is over."""
