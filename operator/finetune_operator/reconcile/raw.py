"""The parts of Kubernetes objects that are read, as typed models: the door through which raw JSON comes in.

Machines wrote these objects, and newer ones than we know: unknown fields are ignored, and every field that is read has
a default, as an object that is seen in its first moment has no status at all.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

Item = TypeVar("Item")


def _utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _empty(value: object) -> object:
    """Go writes an empty list as null."""
    return () if value is None else value


Time = Annotated[datetime, AfterValidator(_utc)]
EPOCH = datetime.fromtimestamp(0, UTC)


class Raw(BaseModel):
    """Base of what the API server sends."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_alias=True, validate_by_name=True
    )


class Meta(Raw):
    """`metadata`."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 1
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: Time = EPOCH
    deletion_timestamp: Time | None = None
    """When the grace period is over, and not when the deletion was asked for."""
    deletion_grace_period_seconds: int = 0


class RawCondition(Raw):
    """One entry of `status.conditions`, of whatever kind."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: Time | None = None

    @property
    def holds(self) -> bool:
        return self.status == "True"


Conditions = Annotated[tuple[RawCondition, ...], BeforeValidator(_empty)]


class RunPolicy(Raw):
    """What kubeflow's kinds call `runPolicy`."""

    suspend: bool | None = None


class TemplateMeta(Raw):
    """`metadata` of a pod template, which has no name."""

    annotations: dict[str, str] = Field(default_factory=dict)


class PodTemplate(Raw):
    """What is read of the pod template of a batch/v1 Job, or of a SparkApplication's driver."""

    metadata: TemplateMeta = TemplateMeta()


class Driver(Raw):
    """What is read of `spec.driver` of a SparkApplication."""

    template: PodTemplate = PodTemplate()


class ApplicationState(Raw):
    """`status.applicationState` of a SparkApplication."""

    state: str = ""
    error_message: str = ""


class ChildSpec(Raw):
    """What is read of the spec of any kind that runs a stage."""

    suspend: bool | None = None
    """Of batch/v1 Job; the others have it in their run policy."""
    template: PodTemplate = PodTemplate()
    driver: Driver = Driver()
    run_policy: RunPolicy = RunPolicy()


class ChildStatus(Raw):
    """What is read of the status of any kind that runs a stage."""

    conditions: Conditions = ()
    start_time: Time | None = None
    completion_time: Time | None = None
    ready: int | None = None
    """Of a batch/v1 Job."""
    application_state: ApplicationState = ApplicationState()
    """Of a SparkApplication, as are the two below."""
    last_submission_attempt_time: Time | None = None
    termination_time: Time | None = None


class RawChild(Raw):
    """A batch/v1 Job, a PyTorchJob, an MPIJob or a SparkApplication."""

    api_version: str
    kind: str
    metadata: Meta
    spec: ChildSpec = ChildSpec()
    status: ChildStatus = ChildStatus()

    def condition(self, type_: str) -> RawCondition | None:
        """The condition of that type, when it holds."""
        return next((one for one in self.status.conditions if one.type == type_ and one.holds), None)


class Terminated(Raw):
    """`state.terminated` of a container."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: Time | None = None
    finished_at: Time | None = None


class RunningState(Raw):
    """`state.running` of a container."""

    started_at: Time | None = None


class WaitingState(Raw):
    """`state.waiting` of a container."""

    reason: str = ""
    message: str = ""


class ContainerState(Raw):
    """Exactly one of the three is there."""

    waiting: WaitingState | None = None
    running: RunningState | None = None
    terminated: Terminated | None = None


class ContainerStatus(Raw):
    """One container."""

    name: str
    state: ContainerState = ContainerState()


Statuses = Annotated[tuple[ContainerStatus, ...], BeforeValidator(_empty)]


class PodSpec(Raw):
    """What is read of a pod's spec."""

    node_name: str | None = None


class PodStatus(Raw):
    """What is read of a pod's status."""

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: Conditions = ()
    container_statuses: Statuses = ()
    init_container_statuses: Statuses = ()


class RawPod(Raw):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, type_: str) -> RawCondition | None:
        """The condition of that type, whether it holds or not."""
        return next((one for one in self.status.conditions if one.type == type_), None)
