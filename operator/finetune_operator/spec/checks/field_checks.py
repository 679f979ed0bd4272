"""Check of one object against its model, field by field, with messages in the API's terms.

pydantic finds the faults. What is written about them, and what can be read without them, is `hints.faulty_fields`,
which is imported for an object with faults only: its tables of hints take as long as the check of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue, ValidationError

from finetune_operator.spec.fields.field_values import Model, Path, Read, read_json
from finetune_operator.spec.fields.shapes import Fields, Items, Map, Shape, Text


def read_fields(
    model: type[Model],
    shape_of_model: Callable[[], Shape],
    value: JsonValue,
    prefix: Path = (),
    placeholders: Mapping[str, JsonValue] | None = None,
    schemes: Sequence[str] | None = None,
) -> Read[Model]:
    """Read `value`, located at `prefix` in its document, as `model`.

    `shape_of_model` returns the model's shape; it is called only if there are faults. `placeholders` stand in for
    required fields of the object that are missing or wrong; `schemes` are those that a message may offer for a URI,
    None: all of them.
    """
    try:
        return Read(read_json(model, value), ())
    except ValidationError:
        from finetune_operator.spec.hints.faulty_fields import read_faulty

        return read_faulty(model, shape_of_model(), value, prefix, placeholders or {}, schemes)


def without_nulls(value: JsonValue, shape_of_value: Callable[[], Shape]) -> JsonValue:
    """Return the value as the API server stores it: a null field of the API is omitted. Free objects keep theirs.

    `shape_of_value` is called only for a value with a null in it.
    """
    return _without_nulls(value, shape_of_value()) if _has_null(value) else value


def _has_null(value: JsonValue) -> bool:
    match value:
        case dict():
            return any(map(_has_null, value.values()))
        case list():
            return any(map(_has_null, value))
        case _:
            return value is None


def _without_nulls(value: JsonValue, shape: Shape) -> JsonValue:
    match shape.body:
        case Fields(fields) if isinstance(value, dict):
            return {
                name: _without_nulls(inner, fields[name]) if name in fields else inner
                for name, inner in value.items()
                if inner is not None or name not in fields
            }
        case Map(Shape(body=Text())) if isinstance(value, dict):
            return {name: inner for name, inner in value.items() if inner is not None}
        case Items(item) if isinstance(value, list):
            return [_without_nulls(inner, item) for inner in value]
        case _:
            return value
