"""Values of an object's fields by their paths, and what reading an object gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel, JsonValue

from finetune_operator.spec.problems import PathPart, Problem

Path: TypeAlias = tuple[PathPart, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Read(Generic[Model]):
    """Result of reading an object."""

    value: Model | None
    """Object without its faulty fields; None if the remainder cannot be read either, or is not worth reading."""
    problems: tuple[Problem, ...]
    """Problems, one for each faulty field."""
    faults: tuple[Path, ...] = ()
    """Paths of the faulty fields, from the object."""
    gone: frozenset[Path] = frozenset()
    """Paths that were removed because of them."""
    placed: frozenset[Path] = frozenset()
    """Paths of faulty fields whose plain meaning was read instead."""


def read_json(model: type[Model], value: JsonValue) -> Model:
    """Return the value as `model`. Raise ValidationError."""
    # JSON text, because pydantic's strict mode takes lists for tuples there only.
    return model.model_validate_json(json.dumps(value))


def value_at(value: JsonValue, path: Path) -> JsonValue:
    for part in path:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value
