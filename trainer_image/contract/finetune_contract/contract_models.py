"""The two base models of the contract: one for orders, one for data that is only read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MOST = 2**53
"""Bound of counts and bytes in messages: JSON holds integers up to it exactly, and sums and products of a few of them
still are floats and integers of the Kubernetes API.
"""
Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST)]
Positive: TypeAlias = Annotated[int, Field(gt=0, le=MOST)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
"""Duration of at most 300 years, or a Unix time until then."""


class Order(BaseModel):
    """Base of documents that the receiver must obey (`job.json`).

    Unknown fields are refused: a setting unknown to the trainer would otherwise be accepted and ignored.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_json(self) -> str:
        """Return this value as indented JSON with camelCase names and a final newline; equal values give equal text."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


class Message(BaseModel):
    """Base of documents that inform the other side (facts, progress, reports).

    Unknown fields are ignored, so that an older reader understands a newer writer.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_json(self) -> str:
        """Return this value as indented JSON with camelCase names and a final newline; equal values give equal text."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"
