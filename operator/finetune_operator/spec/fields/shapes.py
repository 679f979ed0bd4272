"""The API as a tree of plain shapes, read once from the pydantic models.

CRD, editor schema, documentation and error messages all read a field's values here, so that none of them has its own
idea of a bound or a default. `$ref`, unions with None and titles are resolved: a field is a set of words, a body, or
both (`auto` or an integer).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from pydantic import BaseModel, JsonValue
from pydantic.json_schema import GenerateJsonSchema

from finetune_operator.spec.problems import PathPart
from finetune_operator.spec.types import (
    MAX_INT,
    PATTERN_DESCRIPTIONS,
    QUANTITY_MARK,
    FineTuneJobSpec,
    FineTuneJobStatus,
)


@dataclass(frozen=True)
class Text:
    """Text; lengths are in characters."""

    pattern: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    quantity: bool = False
    """True for a Kubernetes quantity, which may be written as a number (`cpu: 8`)."""


@dataclass(frozen=True)
class Number:
    """A number within bounds; `exclusive_minimum` and `exclusive_maximum` exclude the bound itself."""

    integer: bool
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False


@dataclass(frozen=True)
class Boolean:
    """true or false."""


@dataclass(frozen=True)
class Items:
    """A list."""

    item: Shape
    minimum: int | None = None
    maximum: int | None = None


@dataclass(frozen=True)
class Map:
    """An object whose field names are the user's."""

    value: Shape
    maximum: int | None = None


@dataclass(frozen=True)
class Fields:
    """An object with fields of the API."""

    fields: Mapping[str, Shape]


@dataclass(frozen=True)
class Scalars:
    """Text, a number or a boolean."""


@dataclass(frozen=True)
class Anything:
    """Any JSON value."""


Body: TypeAlias = Text | Number | Boolean | Items | Map | Fields | Scalars | Anything


@dataclass(frozen=True)
class Shape:
    """Values that one field accepts."""

    words: tuple[str, ...] = ()
    """Fixed words that it accepts, e.g. `auto`."""
    body: Body | None = None
    """Other values that it accepts; None: only the words."""
    description: str = ""
    required: bool = False
    default: JsonValue = None
    """Default value. None: no default, an omitted field is absent. A block whose fields have the defaults has `{}`."""
    group: str = field(default="", compare=False)
    """Docstring of an object's model."""


@cache
def spec_shape() -> Shape:
    """Return the shape of `spec`."""
    return shape_of(FineTuneJobSpec, "Desired state of the job. Required.")


@cache
def status_shape() -> Shape:
    """Return the shape of `status`."""
    return shape_of(FineTuneJobStatus, "Observed state of the job. Written only by the operator.")


def find(shape: Shape, path: Sequence[PathPart]) -> Shape | None:
    """Return the shape at a path, or None if the API has no such field."""
    current: Shape | None = shape
    for part in path:
        match current.body if current else None:
            case Fields(fields):
                current = fields.get(str(part))
            case Map(value):
                current = value
            case Items(item):
                current = item
            case _:
                return None
    return current


def leaves(shape: Shape, prefix: str = "") -> dict[str, Shape]:
    """Return the dotted path and shape of each field that holds a user's value, in the order of the models.

    A field that accepts a word or an object counts as one, and so do lists and maps.
    """
    if not isinstance(shape.body, Fields) or shape.words:
        return {prefix: shape}
    shapes: dict[str, Shape] = {}
    for name, inner in shape.body.fields.items():
        shapes |= leaves(inner, f"{prefix}.{name}" if prefix else name)
    return shapes


def accepts(shape: Shape, value: JsonValue) -> bool:
    """Return True if the value has the form that the field accepts; an object must be empty."""
    if isinstance(value, str) and value in shape.words:
        return True
    match shape.body:
        case Number(integer, minimum, maximum, exclusive_minimum, exclusive_maximum):
            if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
                return False
            low = minimum is None or (value > minimum if exclusive_minimum else value >= minimum)
            return low and (maximum is None or (value < maximum if exclusive_maximum else value <= maximum))
        case Text(pattern, minimum, maximum, quantity):
            text = str(value) if quantity and isinstance(value, int) and not isinstance(value, bool) else value
            if not isinstance(text, str) or not (minimum or 0) <= len(text) <= (maximum or len(text)):
                return False
            return pattern is None or re.search(pattern, text) is not None
        case Boolean():
            return isinstance(value, bool)
        case Items(item, minimum, _):
            return isinstance(value, list) and len(value) >= (minimum or 0) and all(accepts(item, e) for e in value)
        case Map():
            return value == {}
        case Fields(fields):
            return value == {} and not any(inner.required for inner in fields.values())
        case Anything():
            return True
        case _:
            return False


def sentence(shape: Shape) -> str:
    """Describe the accepted values, to follow "must be"."""
    if shape.body is None:
        # The empty text is visible only in quotes.
        words = ['""' if word == "" else word for word in shape.words]
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    return " or ".join([*shape.words, _body_sentence(shape.body)])


def _body_sentence(body: Body) -> str:
    match body:
        case Number(integer, minimum, maximum, exclusive_minimum, exclusive_maximum):
            bounds = _range(minimum, maximum, exclusive_minimum, exclusive_maximum)
            return f"{'an integer' if integer else 'a number'}{bounds}"
        case Text(quantity=True):
            return "a quantity such as 8, 500m or 64Gi"
        case Text(pattern) if pattern in PATTERN_DESCRIPTIONS:
            return PATTERN_DESCRIPTIONS[pattern] + (f", at most {body.maximum} characters" if body.maximum else "")
        case Text(pattern, minimum, maximum):
            length = ""
            if maximum is not None:
                length = f" of {minimum} to {maximum} characters" if minimum else f" of at most {maximum} characters"
            return f"text{length}" + (f" of the form `{pattern}`" if pattern else "")
        case Boolean():
            return "true or false"
        case Items(item, minimum, maximum):
            count = f"{minimum or 0} to {maximum} " if maximum is not None else ""
            return f"a list of {count}items, each {sentence(item)}"
        case Map(_, maximum):
            return "an object" + (f" of at most {maximum} fields" if maximum is not None else "")
        case Fields(fields):
            return f"an object with the fields {', '.join(fields)}"
        case Scalars():
            return "text, a number or a boolean"
        case Anything():
            return "any value"


def _range(minimum: float | None, maximum: float | None, exclusive_minimum: bool, exclusive_maximum: bool) -> str:
    if maximum == MAX_INT:  # bound of the format, not of interest to users
        maximum = None
    if minimum is not None and maximum is not None and not exclusive_minimum and not exclusive_maximum:
        return f" from {_plain(minimum)} to {_plain(maximum)}"
    bounds = []
    if minimum is not None:
        bounds.append(f"{'above' if exclusive_minimum else 'of at least'} {_plain(minimum)}")
    if maximum is not None:
        bounds.append(f"{'below' if exclusive_maximum else 'at most'} {_plain(maximum)}")
    return f" {' and '.join(bounds)}" if bounds else ""


def _plain(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else str(number)


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        """Return a plain value unchanged: pydantic builds a serializer for each, a third of the total time."""
        return dft if dft is None or isinstance(dft, str | int | float) else super().encode_default(dft)


def shape_of(model: type[BaseModel], description: str = "") -> Shape:
    """Return the shape of an object that `model` reads."""
    schema = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    shape = _shape(schema, schema.get("$defs", {}), required=True)
    return Shape(body=shape.body, description=description, required=True, group=shape.group)


def _shape(node: Mapping[str, Any], definitions: Mapping[str, Any], required: bool) -> Shape:
    """Read one node of pydantic's JSON schema."""
    group = ""
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        if name == "JsonValue":
            return Shape(body=Anything(), description=node.get("description", ""), required=required)
        target = definitions[name]
        group = target.get("description", "")
        node = {**{key: value for key, value in target.items() if key != "description"}, **node}
    branches = [branch for branch in node.get("anyOf", [node]) if branch.get("type") != "null"]
    if {branch.get("type") for branch in branches} == {"string", "integer", "number", "boolean"}:
        words: tuple[str, ...] = ()
        body: Body | None = Scalars()
    elif "anyOf" in node:
        parts = [_shape(branch, definitions, required) for branch in branches]
        words = tuple(word for part in parts for word in part.words)
        bodies = [part.body for part in parts if part.body is not None]
        if len(bodies) > 1:
            raise TypeError(f"a field takes words and one other form, not several: {node}")
        body = bodies[0] if bodies else None
        group = next((part.group for part in parts if part.group), "")
    else:
        words = tuple(node["enum"]) if "enum" in node else (node["const"],) if "const" in node else ()
        body = None if words else _body(node, definitions)
        group = group or (node.get("description", "") if isinstance(body, Fields) else "")
    default = node.get("default")
    if isinstance(body, Fields) and isinstance(default, dict):
        default = {}
    return Shape(words, body, node.get("description", ""), required, default, group)


def _body(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Body:
    match node.get("type"):
        case "string":
            return Text(
                node.get("pattern"), node.get("minLength"), node.get("maxLength"), bool(node.get(QUANTITY_MARK))
            )
        case "integer" | "number" as kind:
            return Number(
                kind == "integer",
                node.get("minimum", node.get("exclusiveMinimum")),
                node.get("maximum", node.get("exclusiveMaximum")),
                exclusive_minimum="exclusiveMinimum" in node,
                exclusive_maximum="exclusiveMaximum" in node,
            )
        case "boolean":
            return Boolean()
        case "array":
            return Items(_shape(node["items"], definitions, False), node.get("minItems"), node.get("maxItems"))
        case "object" if "properties" in node:
            required_names = node.get("required", ())
            return Fields(
                {name: _shape(inner, definitions, name in required_names) for name, inner in node["properties"].items()}
            )
        case "object":
            return Map(_shape(node["additionalProperties"], definitions, False), node.get("maxProperties"))
        case _:
            raise TypeError(f"the API has no field of this form: {node}")
