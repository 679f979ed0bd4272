"""Rule on a spec, in CEL and in Python, and the terms that rules of all topics use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

from pydantic import BaseModel, JsonValue
from pydantic.alias_generators import to_camel, to_snake
from pydantic.fields import FieldInfo

from finetune_operator.spec.rules.cel import predicate
from finetune_operator.spec.types import FineTuneJobSpec

Holds = Callable[[FineTuneJobSpec], bool]


@dataclass(frozen=True)
class Rule:
    """A rule on `spec`."""

    name: str
    path: str
    """Field to report, from `spec`."""
    cel: str | None
    """CEL that is true if the rule holds; `self` is spec, after defaults. None: see the package's docstring."""
    text: str
    """Rule as a sentence without its full stop."""
    hint: str
    test: Holds | None = None
    """Test in Python in place of CEL, or beside CEL where a job's own arithmetic goes further."""
    advice: Callable[[FineTuneJobSpec], str] | None = None
    """Hint with the job's own numbers, if arithmetic helps."""
    reads: tuple[str, ...] = ()
    """Fields that the Python reads; omitted if the CEL names them."""
    schema: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords at `path` that express as much of the rule as possible."""
    schema_around: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords of the object around the field, if CEL cannot look into the field."""

    @cached_property
    def holds(self) -> Holds:
        """Test of a spec."""
        if self.test is not None:
            return self.test
        assert self.cel is not None, f"{self.name} has CEL or a test"
        return predicate(self.cel)

    @property
    def fields_read(self) -> tuple[str, ...]:
        """Paths from `spec` that the rule depends on."""
        return self.reads or tuple(
            dict.fromkeys(re.findall(r"self\.([A-Za-z.]*[A-Za-z])(?![A-Za-z(])", self.cel or ""))
        )


def loops(spec: FineTuneJobSpec) -> bool:
    """Return True if the built-in loop trains."""
    return spec.training is not None and spec.script is None


NO_LOOP = "!has(self.training) || has(self.training.script)"
"""CEL of `not loops(spec)`."""


UNREADABLE = ("training.arguments", "checkpoints.every", "model.adapter.targetModules")
"""Fields that CEL cannot read: objects without declared fields, and fields of no fixed type."""
_FORMER_DEFAULTS = {"model.adapter.dropout": 0.05}
"""Field without a default -> the one that an earlier CRD wrote into stored jobs: no choice of theirs."""


def value_of(spec: FineTuneJobSpec, path: str) -> Any:
    """Return the value of a field; None if a block above it is absent."""
    value: object = spec
    for name in path.split("."):
        value = getattr(value, to_snake(name), None)
    return value


def chosen_cel(path: str, *values: str | bool) -> str:
    """Return CEL: the field has one of these values; without values, any but its default, of a block in some field."""
    steps = _steps(path)
    place, field = steps[-1]
    terms = [f"has({step})" for step, info in steps if info.default is None or isinstance(info.default, tuple | dict)]
    if values:
        terms.append(f"{place} in [{', '.join(_literal(value) for value in values)}]")
    elif isinstance(field.default, BaseModel):
        inner = (f"{path}.{name}" for name in map(to_camel, type(field.default).model_fields))
        terms.append(f"({' || '.join(chosen_cel(nested) for nested in inner if nested not in UNREADABLE)})")
    elif isinstance(field.default, tuple | dict):
        terms.append(f"size({place}) > 0")
    elif path in _FORMER_DEFAULTS:
        terms.append(f"{place} != {_literal(_FORMER_DEFAULTS[path])}")
    elif field.default is not None and not field.is_required():
        terms.append(f"{place} != {_literal(float(field.default) if field.annotation is float else field.default)}")
    return " && ".join(terms) or "true"


def _steps(path: str) -> list[tuple[str, FieldInfo]]:
    """Return the CEL and the declaration of each field on the way to the one at `path`."""
    model: type[BaseModel] = FineTuneJobSpec
    steps: list[tuple[str, FieldInfo]] = []
    place = "self"
    for name in path.split("."):
        place, info = f"{place}.{name}", model.model_fields[to_snake(name)]
        steps.append((place, info))
        kinds = (info.annotation, *get_args(info.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return steps


def _literal(value: str | bool | float) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)
