"""Status of the stages of a FineTuneJob: their attempts, objects and nodes."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, WithJsonSchema

from finetune_contract.choices import Stage
from finetune_operator.spec.status_times import OptionalTime
from finetune_operator.spec.types.field_types import StatusModel

StageText: TypeAlias = Annotated[Stage, WithJsonSchema({"type": "string"})]
"""Stage of a field whose schema is any text: the CRD of an earlier version has no list of stages there."""
Capacity: TypeAlias = Literal["spot", "onDemand"]
"""Kinds of nodes: those that can be reclaimed, and any."""
WaitingFor: TypeAlias = Literal["Person", "Capacity", "Controller"]
"""Ends of a wait that does not end by itself: somebody changes something, others leave nodes or quota free, or a
component of the cluster does its work.
"""


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
    waiting_for: WaitingFor | None = Field(
        default=None,
        description="Who ends the wait of the stage: Person (somebody has to change something), Capacity (other jobs "
        "leave nodes or quota free, or nodes are added), or Controller (a component of the cluster does its work). "
        "Unset while the stage runs or goes on by itself.",
    )
    waiting_since: OptionalTime = Field(default=None, description="Time since which it waits for that, RFC 3339.")
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
