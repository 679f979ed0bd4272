"""Status of the endpoint of a FineTuneJob: its revisions and their canary."""

from typing import Literal

from pydantic import Field, JsonValue

from finetune_operator.spec.status_times import OptionalTime, StatusTime
from finetune_operator.spec.types.field_types import StatusModel


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


class CanaryStatus(StatusModel):
    """Canary of the desired revision, while it lasts."""

    revision: int = Field(ge=1, description="Number of the revision that gets a share of the requests.")
    servers: int = Field(ge=1, description="Number of its servers.")
    weight: int | None = Field(
        default=None,
        ge=1,
        le=99,
        description="Share of the Gateway's requests that the HTTPRoute gives it, in percent.",
    )
    gateway: str | None = Field(default=None, description="Gateway whose requests these are.")
    hostnames: tuple[str, ...] = Field(default=(), max_length=16, description="Host names of these requests.")
    start_time: StatusTime = Field(description="Time since which it gets requests, RFC 3339.")


class EndpointStatus(StatusModel):
    """Revisions of the endpoint."""

    revision: int | None = Field(default=None, ge=1, description="Number of the revision that the URL leads to.")
    name: str | None = Field(default=None, description="Name in the URL. Unset if it is the name of the job.")
    taken_over_by: str | None = Field(
        default=None,
        description="Job that took the endpoint over while spec.endpoint.takesOver had an effect. This job serves "
        "again once spec.endpoint was removed and set again.",
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
