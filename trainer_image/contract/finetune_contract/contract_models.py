"""The two base models of the contract: one for what is obeyed, one for what is only read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Order(BaseModel):
    """Base of what one side obeys (`job.json`).

    Unknown fields are refused: a setting that the trainer does not know would otherwise be accepted and ignored.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_json(self) -> str:
        """This value as indented JSON with camelCase names, ending in a newline; equal values give equal text."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


class Message(BaseModel):
    """Base of what one side tells the other (facts, progress, reports).

    Unknown fields are ignored, so that an older reader understands a newer writer.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_json(self) -> str:
        """This value as indented JSON with camelCase names, ending in a newline; equal values give equal text."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"
