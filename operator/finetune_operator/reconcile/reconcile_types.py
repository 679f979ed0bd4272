"""The two values between which everything of this package happens: `Observed` in, `Decision` out.

They are plain and frozen, so that a situation can be written down as a row of a test. Times are aware datetimes in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from finetune_contract.choices import Stage
from finetune_contract.report import TrainerReport
from finetune_operator.api.problems import Problem
from finetune_operator.api.types import Capacity, FineTuneJob, FineTuneJobStatus, ProgressStatus
from finetune_operator.launchers.kinds.launcher_status import ChildState
from finetune_operator.launchers.launcher_rows import BUILT_IN, LauncherName
from finetune_operator.planning.gpu_nodes import Node
from finetune_operator.planning.plan_types import EndpointRuntime
from finetune_operator.rendering.pod_parts import CONTAINER_NAME
from finetune_operator.rendering.render_types import Manifest


@dataclass(frozen=True)
class ObjectRef:
    """One object in the job's namespace."""

    api_version: str
    kind: str
    name: str
    uid: str | None = None
    """Given: only this very object is meant, and not a later one of the same name."""


@dataclass(frozen=True)
class JobView:
    """The FineTuneJob as it was read."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    deleting: bool
    managed_by: str | None
    """`runPolicy.managedBy` as written, readable also when the rest of the spec is not."""
    job: FineTuneJob | None
    """None when `problems` tells why it cannot be run."""
    problems: tuple[Problem, ...]
    status: FineTuneJobStatus
    """What was stored last; everything that has to survive a restart of the operator is in it."""
    marks: str = ""
    """Digest of labels and annotations, which validation reads beside the spec."""
    rollback: str | None = None
    """The annotation that asks for an earlier revision of the endpoint, as written."""

    @property
    def id(self) -> tuple[str, str]:
        """Namespace and uid: what objects of the job are kept under."""
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
    """Of a failure, in the words of the kind's own controller."""
    message: str = ""
    started: datetime | None = None
    finished: datetime | None = None
    deleting: bool = False
    configuration: str | None = None
    """sha256 of what its pods are told to do, as its pod template has it."""
    capacity: Capacity | None = None
    """Nodes that its pods ask for, as its label has it."""
    replaces_pods: bool = False
    """Whether its controller creates another pod in the place of one that is lost."""


@dataclass(frozen=True)
class Ended:
    """How the trainer's container ended."""

    exit_code: int
    reason: str
    """In the kubelet's words: Completed, Error, OOMKilled, ContainerStatusUnknown, ..."""
    finished: datetime | None
    report: TrainerReport | None
    """The termination message, when it is one of ours."""
    message: str = ""
    """The termination message as it is, when it is none of ours: the container runtime's word, or a user's."""


@dataclass(frozen=True)
class Waiting:
    """Why a container does not start, in the kubelet's words: ImagePullBackOff, CreateContainerConfigError, ..."""

    reason: str
    message: str


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
    scheduled: datetime | None = None
    """When it got its node."""
    began: datetime | None = None
    """When the trainer's container started."""
    unschedulable: str | None = None
    """The scheduler's message."""
    waiting: Waiting | None = None
    ended: Ended | None = None
    disruption: str | None = None
    """Reason of the condition DisruptionTarget (PreemptionByScheduler, DeletionByTaintManager, EvictionByEvictionAPI,
    TerminationByKubelet, ...).
    """
    status_reason: str | None = None
    """`status.reason` of the pod: Evicted, NodeLost, NodeShutdown, Preempting, UnexpectedAdmissionError, ..."""
    status_message: str | None = None
    changed: datetime | None = None
    """When a condition of it changed last: the end of a pod whose container never ran, or is not told of."""
    deleting_until: datetime | None = None
    """When its grace period is over; None: it is not being deleted."""
    deleting_since: datetime | None = None
    """When somebody asked for its deletion, in whole seconds."""
    container: str = CONTAINER_NAME
    """Name of the trainer's container."""
    gone: bool = False
    """It is not there any more: this is the last that was seen of it."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.gone or self.phase in ("Succeeded", "Failed")

    @property
    def spare(self) -> bool:
        """Whether its attempt ends well without it: the first pod that prepares or predicts does what the others
        leave.
        """
        return self.stage in (Stage.PREPARE, Stage.PREDICT) and bool(self.index)


@dataclass(frozen=True)
class EndpointView:
    """What runs the servers of one revision of the endpoint: a Deployment of ours, or an InferenceService with the
    Deployment that KServe makes of it.
    """

    ref: ObjectRef
    revision: int
    created: datetime
    replicas: int
    """Servers that it asks for."""
    runtime: EndpointRuntime = "deployment"
    most: int | None = None
    """Servers that it may come to, of an InferenceService."""
    available: int = 0
    """Servers that answer."""
    updated: int = 0
    """Pods that are made as it says now; 0 while its controller has not seen its last change."""
    digest: str | None = None
    """Of all objects of the endpoint that were applied with it."""
    made_of: str | None = None
    """Digest of what its pods are made of."""
    stuck: str | None = None
    """Its controller's word when its servers have not become available in time."""
    deleting: bool = False
    made: bool = True
    """Whether there is a Deployment; False: KServe has not made it yet, or its controller does not run."""
    trouble: tuple[str, str] | None = None
    """Reason and message of KServe where something cannot be done."""
    url: str | None = None
    """Where KServe says that clients from outside of the cluster reach it."""

    @property
    def ready(self) -> bool:
        """Whether all servers that it asks for answer, after their warm-up."""
        return not self.deleting and min(self.available, self.updated) >= self.replicas


@dataclass(frozen=True)
class Refusal:
    """An object that the API server would not take, or whose name is taken."""

    ref: ObjectRef
    code: int
    """HTTP status; 409: the name belongs to an object that is not this job's."""
    message: str


@dataclass(frozen=True)
class NodesRead:
    """The cluster's nodes, as far as they could be read."""

    nodes: tuple[Node, ...] = ()
    failure: str | None = None
    """Why they could not; None: they could."""


@dataclass(frozen=True)
class Observed:
    """Everything that is known about one job besides the job itself."""

    children: tuple[ChildView, ...] = ()
    pods: tuple[PodView, ...] = ()
    progress: ProgressStatus | None = None
    """Newest report of the running attempt."""
    logs: tuple[tuple[str, str], ...] = ()
    """Name of a pod and the end of its log, for pods that `wanted_logs` asked for; empty text: there is none to be
    had.
    """
    last_logs: tuple[tuple[str, str], ...] = ()
    """The same for pods that `leaving` named, read when their deletion began: with a pod its log goes."""
    served: tuple[LauncherName, ...] = BUILT_IN
    """Launchers whose kinds the API server serves, as `planning.types.Facts.served` takes them."""
    nodes: NodesRead | None = None
    """The cluster's nodes; None: nobody has asked for them."""
    refusals: tuple[Refusal, ...] = ()
    """What went wrong when the decision before this one was carried out."""
    pods_before: tuple[PodView, ...] = ()
    """Of an earlier job of the same name, whose results lie in the same place."""
    endpoints: tuple[EndpointView, ...] = ()
    """What serves the model, by revision."""
    kserve: bool = False
    """Whether the API server serves InferenceServices."""
    moved: datetime | None = None
    """When a report of the running attempt told something new last; None: this operator has heard none."""

    @property
    def ends(self) -> tuple[tuple[str, str], ...]:
        """Return the log ends that are known: those read after a pod's end before those read when it had to go."""
        return tuple((dict(self.last_logs) | {name: text for name, text in self.logs if text}).items())

    heard_since: datetime | None = None
    """Since when no report can have been missed; None: they cannot be heard now."""


@dataclass(frozen=True)
class EventNote:
    """One event to be shown by `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """What to do now, in this order: delete, create, write the status, tell the events. Carrying it out twice changes
    nothing.
    """

    status: FineTuneJobStatus
    """The whole status; equal to the stored one when there is nothing to say."""
    delete: tuple[ObjectRef, ...] = ()
    create: tuple[Manifest, ...] = ()
    """In order; each is created unless it is there already."""
    remove: tuple[ObjectRef, ...] = ()
    """In order, before anything is applied; each is deleted if it is there and belongs to the job."""
    apply: tuple[Manifest, ...] = ()
    """In order, after what is created; each is created or changed, unless it belongs to somebody else."""
    events: tuple[EventNote, ...] = ()
    wake_at: datetime | None = None
    """When to look again though nothing has happened: the end of a delay or a time limit."""
    delete_job: bool = False
    """The job's time to live is over."""
