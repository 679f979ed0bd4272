"""Typed models of the fields of pods that are read: raw JSON is parsed here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from finetune_operator.api.objects import Conditions, Meta, Raw, RawCondition, Time, empty


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
    """State of a container; exactly one of the three is set."""

    waiting: WaitingState | None = None
    running: RunningState | None = None
    terminated: Terminated | None = None


class ContainerStatus(Raw):
    """Status of one container."""

    name: str
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    """State before its last restart."""


Statuses = Annotated[tuple[ContainerStatus, ...], BeforeValidator(empty)]


class PodSpec(Raw):
    """Fields that are read from a pod's spec."""

    node_name: str | None = None


class PodStatus(Raw):
    """Fields that are read from a pod's status."""

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: Conditions = ()
    pod_ip: str = Field(default="", alias="podIP")
    container_statuses: Statuses = ()
    init_container_statuses: Statuses = ()


class RawPod(Raw):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, type_: str) -> RawCondition | None:
        """Return the condition of that type, whether it holds or not."""
        return next((one for one in self.status.conditions if one.type == type_), None)
