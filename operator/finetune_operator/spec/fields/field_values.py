"""Values of an object's fields by their paths, and what reading an object gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

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


def value_at(value: JsonValue | Mapping[str, JsonValue], path: Path) -> JsonValue:
    """Return the value at `path` in an object or a list; None if there is none."""
    inner: Any = value
    for part in path:
        if isinstance(inner, Mapping):
            inner = inner.get(str(part))
        elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            inner = inner[part]
        else:
            return None
    return cast(JsonValue, inner)
