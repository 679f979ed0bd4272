"""Parts of the API without behaviour: fields marked `Supported` in the models.

Such a field stays in the schema, and a value that would need the behaviour is refused with reason `NotYetSupported`,
by the API server with the same sentence. A test finds fields that have no mark and that nothing reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel, JsonValue

from finetune_operator.spec.fields.shapes import Fields, Items, Shape, find, spec_shape
from finetune_operator.spec.hint_values import Drop, Hint
from finetune_operator.spec.problems import Problem, any_of, describe_value, hint_text
from finetune_operator.spec.types import FineTuneJobSpec, Scheme
from finetune_operator.spec.types.field_types import Supported


@dataclass(frozen=True)
class Row:
    """A field that is not supported yet, in whole or in part."""

    path: str
    """Path from `spec`; a block stands for everything in it."""
    values: tuple[JsonValue, ...] = ()
    """Values that are supported, in addition to the default."""
    schemes: tuple[str, ...] = ()
    """Supported schemes of a URI."""

    @property
    def works(self) -> str:
        """Supported values, as a sentence for documentation."""
        return f"use {', '.join(f'{scheme}://' for scheme in self.schemes)}" if self.schemes else self.text(())

    def text(self, schemes: Sequence[str]) -> str:
        """Return the hint as text."""
        return hint_text(self.hint(schemes), self.path)

    def hint(self, schemes: Sequence[str]) -> Hint:
        """Return the hint with the supported values, if these schemes may be used."""
        if self.schemes:
            from finetune_operator.spec.fields.uri_hints import copy_hint  # only a problem needs it

            return copy_hint(self.path, [f"{scheme}://" for scheme in schemes])
        if self.values:
            return f"use {any_of(self.values)}"
        return Drop()


def _marked(model: type[BaseModel], above: str = "") -> Iterator[Row]:
    """Yield the rows of the marked fields of a model and of those inside it, by their paths."""
    for name, field in model.model_fields.items():
        path = f"{above}{field.alias or name}"
        yield from (Row(path, mark.values, mark.schemes) for mark in field.metadata if isinstance(mark, Supported))
        for inner in _models(field.annotation):
            yield from _marked(inner, f"{path}.")


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


ROWS: tuple[Row, ...] = tuple(_marked(FineTuneJobSpec))
"""In the order of the spec."""

_RULE = "is not supported in this version"
_POSITION = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")
"""A position in a list, as messages and as paths have it."""


def admission_rules() -> Iterator[Mapping[str, str]]:
    """Yield the rules of the marked fields for the API server, in CEL on `spec`."""
    for row in ROWS:
        listed = next((at for at, part in _shapes_to(row.path) if isinstance(part.body, Items)), row.path)
        yield {
            "rule": _cel(spec_shape(), "self", row.path.split("."), row),
            "message": f"{row.path} {_RULE}: {row.text(row.schemes)}",
            "fieldPath": f".{listed}",
        }


def _shapes_to(path: str) -> Iterator[tuple[str, Shape]]:
    """Yield each prefix of the path up to the first list, with its shape."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        if (shape := find(spec_shape(), parts[:length])) is not None:
            yield ".".join(parts[:length]), shape


def _cel(shape: Shape, expression: str, parts: Sequence[str], row: Row) -> str:
    """Return CEL that is true if the field at `parts` below the value of `expression` is absent or supported."""
    if not parts:
        starts = [f"{expression}.startsWith('{scheme}://')" for scheme in row.schemes]
        values = [f"{expression} == {json.dumps(value)}" for value in row.values]
        return " || ".join((*starts, *values)) or "false"
    if isinstance(shape.body, Items):
        return f"{expression}.all(item, {_cel(shape.body.item, 'item', parts, row)})"
    assert isinstance(shape.body, Fields)
    name, *rest = parts
    inner, field = shape.body.fields[name], f"{expression}.{name}"
    holds = _cel(inner, field, rest, row)
    if inner.required or inner.default not in (None, []):
        return holds
    return f"!has({field})" if holds == "false" else f"!has({field}) || ({holds})"


def row_of(path: str) -> Row | None:
    """Return the row of a field, or of the block that contains it; positions in lists do not matter."""
    path = _POSITION.sub("", path)
    return next((row for row in ROWS if path == row.path or path.startswith(f"{row.path}.")), None)


def works(path: str) -> bool:
    """Return True if the field at `path` (from `spec`) may be set to anything but its default."""
    row = row_of(path)
    return row is None or bool(row.values or row.schemes)


def served_words(path: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return those words of the field at `path` (from `spec`) that have behaviour."""
    row = row_of(path)
    return words if row is None or not row.values else tuple(word for word in words if word in row.values)


def served_schemes(path: str, allowed: Sequence[str] | None) -> tuple[str, ...]:
    """Return the allowed schemes (None: any) that the URI at `path` may have in this version."""
    row = row_of(path)
    schemes = get_args(Scheme) if row is None else row.schemes
    return tuple(scheme for scheme in schemes if allowed is None or scheme in allowed)


def unsupported(spec: FineTuneJobSpec, schemes: Sequence[str] | None = None) -> list[Problem]:
    """Return a problem for each field set to a value without behaviour; the hint names only `schemes`."""
    value = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    problems: list[Problem] = []
    for row in ROWS:
        for path, given in _values(value, row.path.split(".")):
            if not _is_supported(row, given):
                problems.extend(_problems(row, path, given, schemes))
    return problems


def _is_supported(row: Row, value: JsonValue) -> bool:
    """Return True if the value is supported whatever the default is, which is read from shapes: they take long."""
    scheme = value.partition("://")[0] if isinstance(value, str) else None
    return value is None or value in row.values or scheme in row.schemes


def _values(value: JsonValue, parts: list[str], before: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield path and value of the field; for a field of a list's elements, of each of them."""
    if isinstance(value, list) and parts:
        for at, item in enumerate(value):
            yield from _values(item, parts, f"{before}[{at}]")
    elif not parts:
        yield before, value
    else:
        inner = value.get(parts[0]) if isinstance(value, Mapping) else None
        yield from _values(inner, parts[1:], f"{before}.{parts[0]}" if before else parts[0])


def _problems(row: Row, path: str, value: JsonValue, schemes: Sequence[str] | None) -> list[Problem]:
    """Refuse a block that is there by default field by field, an optional one as a whole."""
    shape = find(spec_shape(), _POSITION.sub(".0", path).split("."))
    if shape is None:
        raise LookupError(f"the API has no field spec.{path}")
    if isinstance(shape.body, Fields) and isinstance(value, Mapping) and shape.default is not None:
        return [
            problem
            for name in shape.body.fields
            for problem in _problems(row, f"{path}.{name}", value.get(name), schemes)
        ]
    if value == shape.default or _is_supported(row, value):
        return []
    return [
        Problem(
            f"spec.{path}",
            describe_value(value, path.split(".")),
            _RULE,
            row.hint(served_schemes(row.path, schemes)),
            reason="NotYetSupported",
        )
    ]
