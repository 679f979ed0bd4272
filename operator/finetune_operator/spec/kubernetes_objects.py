"""Parts common to Kubernetes objects of all kinds, as typed models.

The objects may come from newer programs: unknown fields are ignored, and every field that is read has a default, as a
new object has no status at all.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel


def _utc(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def empty(value: object) -> object:
    """Return an empty tuple for null: Go writes an empty list as null."""
    return () if value is None else value


Time = Annotated[datetime, AfterValidator(_utc)]
EPOCH = datetime.fromtimestamp(0, UTC)


class GroupKind(NamedTuple):
    """Kind of objects within its API group. The version is left out: one object can be read at several of them."""

    group: str
    """Empty for Kubernetes' core kinds."""
    name: str

    @classmethod
    def of(cls, api_version: str, kind: str) -> Self:
        """Return the kind of objects with these two fields."""
        return cls(api_version.rpartition("/")[0], kind)


class Raw(BaseModel):
    """Base of objects from the API server."""

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
    """End of the grace period, not the time of the deletion request."""
    deletion_grace_period_seconds: int = 0


class RawCondition(Raw):
    """Entry of `status.conditions`, of any kind of object."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: Time | None = None

    @property
    def holds(self) -> bool:
        return self.status == "True"


Conditions = Annotated[tuple[RawCondition, ...], BeforeValidator(empty)]
