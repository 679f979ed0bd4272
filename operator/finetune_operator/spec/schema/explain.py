"""Description of a FineTuneJob field as in `kubectl explain`, without a cluster: both read the CRD's schema.

kubectl calls every value of no single type an Object; here it is `integer or string` or `any`.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.hints.field_lookup import free_arguments, namesakes
from finetune_operator.spec.hints.foreign_table import find_name
from finetune_operator.spec.schema.crd import Schema, crd
from finetune_operator.spec.types import API_VERSION, GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION

WIDTH = 80
"""Columns of text, as in kubectl."""
_PARTS = re.compile(r"\[[^\]]*\]|\.")
_KUBERNETES = {
    "apiVersion": f"API group and version of the object: {API_VERSION}.",
    "kind": f"Kind of the object: {KIND}.",
    "metadata": "Standard object's metadata: name, namespace, labels and annotations.",
}
"""Fields that the API server describes itself."""


class NoSuchFieldError(Exception):
    """Error of an unknown field; the text suggests a similar one."""


@dataclass(frozen=True)
class Field:
    """A field and the fields inside it."""

    path: str
    """Path from the object's root: `spec.training.epochs`; empty for the object itself."""
    type: str
    description: str
    required: bool
    schema: Schema
    fields: tuple[Field, ...] = ()

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    def data(self, *, recursive: bool) -> dict[str, JsonValue]:
        """Return the field for `-o json`, with its inner fields: recursively, or without their own fields."""
        bounds = ("default", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
        entry: dict[str, JsonValue] = {
            "field": self.path,
            "type": self.type,
            "required": self.required,
            "description": self.description,
            **{name: self.schema[name] for name in bounds if name in self.schema},
        }
        if self.fields:
            entry["fields"] = [
                field.data(recursive=True) if recursive else _without_fields(field) for field in self.fields
            ]
        return entry


def _without_fields(field: Field) -> dict[str, JsonValue]:
    return {name: value for name, value in field.data(recursive=False).items() if name != "fields"}


def find_field(written: str) -> Field:
    """Return the field written as `spec.training.epochs`, `training.epochs` or `finetunejob.spec...`, ignoring indices
    such as `[0]`. Raise NoSuchFieldError if there is none.
    """
    parts = [part for part in _PARTS.split(written) if part]
    if parts and parts[0].lower() in (SINGULAR, PLURAL, SHORT_NAME, f"{PLURAL}.{GROUP}"):
        parts = parts[1:]
    current = _root()
    top = {field.name for field in current.fields}
    if parts and parts[0] not in top:
        parts = ["spec", *parts]
    for place, part in enumerate(parts):
        inner = {field.name: field for field in current.fields}
        if part not in inner:
            raise NoSuchFieldError(_not_found(current, part, [*parts[:place]], top))
        current = inner[part]
    return current


@cache
def _root() -> Field:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return _field("", schema, required=False)


def _field(path: str, schema: Schema, *, required: bool) -> Field:
    node = schema
    while "properties" not in node:
        inner = node.get("items") or node.get("additionalProperties")
        if not isinstance(inner, Mapping):
            node = {}
            break
        node = dict(inner)
    required_names = node.get("required", ())
    fields = tuple(
        _field(f"{path}.{name}" if path else name, inner, required=name in required_names)
        for name, inner in sorted(node.get("properties", {}).items())
    )
    description = schema.get("description") or _KUBERNETES.get(path, "")
    return Field(path, _type(schema), description, required, schema, fields)


def _type(schema: Schema) -> str:
    match schema.get("type"):
        case "array":
            return f"[]{_type(schema['items'])}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"map[string]{_type(schema['additionalProperties'])}"
        case "object":
            return "Object"
        case str(name):
            return name
        case _:
            return "integer or string" if schema.get("x-kubernetes-int-or-string") else "any"


def _not_found(parent: Field, name: str, parents: list[str], top: set[str]) -> str:
    """Return the message for a field that its parent does not have, with a suggestion."""
    path = ".".join([*parents, name])
    names = [field.name for field in parent.fields]
    near = difflib.get_close_matches(name, [*names, *(top if parents == ["spec"] else ())], n=1)
    if near:
        suggestion = near[0] if near[0] not in names else ".".join([*parents, near[0]])
        return f"there is no field {path}; did you mean {suggestion}?"
    row = find_name(name, parents[-1] if parents else "")
    places = namesakes((*parents, name))
    argument = free_arguments().get(plain(name))
    elsewhere = places[0] if len(places) == 1 else f"spec.training.arguments.{argument}" if argument else ""
    elsewhere = elsewhere or (row.field if row is not None else "")
    if elsewhere:
        return f"there is no field {path}; did you mean {elsewhere}?"
    if not names:
        article = "an" if parent.type[0] in "aio" else "a"
        return f"there is no field {path}: {'.'.join(parents)}, {article} {parent.type}, has no fields"
    return f"there is no field {path}; {'.'.join(parents) or KIND} has the fields {', '.join(names)}"


# ------------------------------------------------------------------------------------------------------------ as text


def as_text(field: Field, *, recursive: bool) -> str:
    """Return the text of `kubectl explain`: the field, and the fields in it or all of those below it."""
    return "\n".join(line.rstrip() for line in _lines(field, recursive=recursive)) + "\n"


def _lines(field: Field, *, recursive: bool) -> Iterator[str]:
    yield f"GROUP:      {GROUP}"
    yield f"KIND:       {KIND}"
    yield f"VERSION:    {VERSION}"
    yield ""
    if field.path:
        yield f"FIELD: {field.name} <{field.type}>{_required_mark(field)}"
        if "enum" in field.schema:
            yield "ENUM:"
            yield from (f"    {word}" for word in field.schema["enum"])
        yield ""
    yield "DESCRIPTION:"
    yield from _wrapped(field.description or "<empty>")
    if field.fields:
        yield ""
        yield "FIELDS:"
        yield from _tree(field, 2) if recursive else _field_list(field)


def _field_list(field: Field) -> Iterator[str]:
    for inner in field.fields:
        yield f"  {inner.name}\t<{inner.type}>{_required_mark(inner)}"
        if "enum" in inner.schema:
            yield f"  enum: {', '.join(map(str, inner.schema['enum']))}"
        yield from _wrapped(inner.description or "<no description>")
        yield ""


def _tree(field: Field, indent: int) -> Iterator[str]:
    for inner in field.fields:
        yield f"{' ' * indent}{inner.name}\t<{inner.type}>{_required_mark(inner)}"
        if "enum" in inner.schema:
            yield f"{' ' * indent}enum: {', '.join(map(str, inner.schema['enum']))}"
        yield from _tree(inner, indent + 2)


def _required_mark(field: Field) -> str:
    return " -required-" if field.required else ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
