"""Hints as values: the change of a document that solves a problem. `problems` writes them as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import JsonValue


@dataclass(frozen=True)
class Rename:
    """Give the field another name where it stands."""

    name: str
    note: str = ""


@dataclass(frozen=True)
class Move:
    """Move the field with its value."""

    places: tuple[str, ...]
    """Dotted paths to choose from, each with the name that the field has there."""


@dataclass(frozen=True)
class SetTo:
    """Set fields in place of this one."""

    fields: Mapping[str, JsonValue]
    """Dotted path from the document -> value."""
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """Leave the field out."""

    reason: str = ""


@dataclass(frozen=True)
class ReplaceBy:
    """Write another value into the field."""

    value: JsonValue
    note: str = ""
    words: str = ""
    """Instruction in place of the value, where that may be long."""


Hint: TypeAlias = Rename | Move | SetTo | Drop | ReplaceBy | str
"""Change that solves a problem. Text is advice that leaves a choice to the author: no code reads it."""


def changes(hint: Hint, path: str, value: JsonValue) -> Mapping[str, JsonValue]:
    """Return the values by dotted path that a document has after the hint for `value` at the dotted `path` was
    followed. Empty: the hint only removes the field, or leaves a choice.
    """
    match hint:
        case Rename(name):
            above = path.rpartition(".")[0]
            return {f"{above}.{name}" if above else name: value}
        case Move((place,)):
            return {place: value}
        case SetTo(fields):
            return fields
        case ReplaceBy(instead):
            return {path: instead}
    return {}
