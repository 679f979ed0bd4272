"""Hints for a missing value, and for one of a wrong form whose meaning needs no look at other fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from pydantic import JsonValue

from finetune_contract.metrics import METRICS, metrics_of
from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_value
from finetune_operator.api.hint_parts import (
    Around,
    shown_value,
)
from finetune_operator.api.meant_columns import columns_in_order
from finetune_operator.api.meant_uris import as_uri, is_uri, listed, rows_in_files, uri_hint
from finetune_operator.api.problems import PathPart, format_path
from finetune_operator.api.shapes import (
    Fields,
    Items,
    Shape,
    Text,
    accepts,
    find,
    sentence,
    spec_shape,
)
from finetune_operator.api.support import served_schemes, served_words

_UNITS = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(?:(i|ibi|ebi|obi)|ilo|ega|iga|era|eta|xa)?(?:b|bytes?)?", re.IGNORECASE
)
_CORES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*v?(?:cores?|cpus?)", re.IGNORECASE)


def served(shape: Shape, path: Sequence[PathPart]) -> Shape:
    """Return the shape of a spec field without the words that have no behaviour yet."""
    field = ".".join(str(part) for part in path[1:])
    return replace(shape, words=served_words(field, shape.words)) if path[:1] == ("spec",) else shape


def wrong_text(
    shape: Shape, path: Sequence[PathPart], value: JsonValue, schemes: Sequence[str] | None, around: Around
) -> tuple[str, str] | None:
    """Return the rule (empty: that of the shape) and the hint for a wrong value of a text field; None: no answer."""
    match shape.body:
        case Text() if is_uri(shape) and not isinstance(value, dict | list):
            prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
            at = ".".join(map(str, path))
            return f"must be a URI that begins with {listed(prefixes)}", uri_hint(at, value, prefixes)
        case Text(quantity=True) if isinstance(value, str) and (found := _UNITS.fullmatch(value.strip())):
            number, unit, binary = found.groups()
            decimal = f"write {number}{'k' if unit in 'kK' and not binary else unit.upper()}{'i' if binary else ''}"
            return "", decimal + ("" if binary else f", or {number}{unit.upper()}i for powers of 1024")
        case Text(quantity=True) if isinstance(value, str) and (found := _CORES.fullmatch(value.strip())):
            return "", f"write {found[1]}"
        case Text() if path[-2:-1] == ("splits",) and around.hub and (percent := _percent(value)):
            if path[-1] == "train":
                return "must be the name of a split", f"write train[:{percent}%]"
            rest = "" if "train" in around.beside else f", and train[:{100 - percent}%] for spec.dataset.splits.train"
            return "must be the name of a split", f"write train[{100 - percent}%:]{rest}"
        case Text() if isinstance(value, int | float) and path[:3] == ("spec", "dataset", "splits"):
            return (
                "must be the name of a split, or a file name without its extension",
                "leave it out: 5 % of train are held out; another fraction is a slice such as train[90%:]"
                if around.hub
                else rows_in_files(str(path[-1]), around.data),
            )
        case Text() if isinstance(value, int) and path[1:3] == ("dataset", "labels") and not _is_number(path[-1]):
            return "must be text", f'write "{int(value)}": {path[-1]}, with the value of the data on the left'
        case Text(quantity=False) if isinstance(value, int | float):
            return "must be text", "put it in quotes"
    return None


def _is_number(part: PathPart) -> bool:
    return re.fullmatch(r"[+-]?[0-9.]+", str(part)) is not None


def in_place_of_object(shape: Shape, path: Sequence[PathPart], value: JsonValue, around: Around) -> str | None:
    """Return the hint for a value in place of an object, or of a list of columns; None: no answer."""
    leaf = path[-1] if path else ""
    match shape.body:
        case Fields() if leaf == "gate" and isinstance(value, int | float):
            metrics = next((metrics_of(task) for task in METRICS if task == around.task), ())
            return f"write {{metric: {metrics[0]}, minimum: {value}}}" if metrics else None
        case Fields(fields) if "textPair" in fields and (columns := columns_in_order(value, around.task)):
            return f"write {{{', '.join(f'{name}: {shown_value(given, name)}' for name, given in columns)}}}"
        case Fields(fields) if isinstance(value, list) and len(value) > 1 and "splits" in fields:
            return (
                "only one dataset is supported: write all rows, with the same column names, to one folder, and set "
                f"{format_path(path)}.uri to file://FOLDER"
            )
        case Fields(fields) if isinstance(value, str) and "uri" in fields:
            return f"write the URI one level deeper, as uri: {shown_value(as_uri(value) or value, 'uri')}"
        case Items() if isinstance(value, dict) and leaf == "columns" and "dataset" not in around.beside:
            return f"write {json.dumps([each for each in value.values() if isinstance(each, str)])}"
        case Items() if isinstance(value, dict) and value and set(value) <= set(_column_names()) and leaf == "columns":
            return "move it below spec.predict.dataset, as columns"
        case Fields(fields) if "uri" in fields and (value == [] or not isinstance(value, str | list | dict)):
            return (
                "leave it out" if value is False and tuple(path) != ("spec", "dataset") else missing(shape, path, None)
            )
        case Text() if is_uri(shape) and isinstance(value, list) and len(value) > 1 and "dataset" in path:
            return "write one URI: a folder with all files, or a glob such as file://data/*.csv"
        case Fields(fields) if "entryPoint" in fields and isinstance(value, str):
            program = shown_value(value, "entryPoint")
            given = f"{{git: {{url: REPOSITORY}}, entryPoint: {program}}}"
            return f"write {given}, with the https:// address of its git repository"
        case Fields(fields) if leaf == "adapter" and isinstance(value, str) and "/" in value:
            return "leave it out: training cannot continue from an adapter; spec.model.uri is a whole model"
        case Fields(fields) if isinstance(value, bool) and "enabled" in fields:
            return f"write {{enabled: {json.dumps(value)}}}"
        case Fields() if value is False and not shape.required:
            return "leave it out"
        case Fields(fields) if value is True and (implied := _implied_by_true(fields, path)):
            return f"write {{{implied}}}"
        case Fields(fields) if value is True and not any(field.required for field in fields.values()):
            return "write {} to take the defaults"
        case Fields(fields) if isinstance(value, str | int | float) and (name := _only_accepting_field(fields, value)):
            return f"write {{{name}: {shown_value(value, name)}}}"
        case Fields(fields) if isinstance(value, str) and (implied := _implied_by_word(fields, path, value)):
            return f"write {{{implied}}}"
    return None


def _percent(value: JsonValue) -> int:
    """Return a fraction of rows in percent; 0: the value is none."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    percent = round(100 * number) if 0 < number < 1 else 0
    return percent if 0 < percent < 100 else 0


def _implied_by_true(fields: Mapping[str, Shape], path: Sequence[PathPart]) -> str:
    """Return the first field of an object, with its value, that `true` in the object's place stands for."""
    return _implied_by_word(fields, path, True)


def _implied_by_word(fields: Mapping[str, Shape], path: Sequence[PathPart], value: str | bool) -> str:
    """Return the first field of an object that has a word of its own for a value in the object's place, with it."""
    for name, inner in fields.items():
        field = ".".join(map(str, (*path, name)))
        row = find_value(field, value)
        word = row.instead.get(field) if row is not None else None
        if word == "auto" and value is True:
            continue  # the default of a field says nothing about the object
        beside = {each.rpartition(".")[2]: given for each, given in row.instead.items()} if row is not None else {}
        if len(beside) > 1 and set(beside) <= set(fields):
            return ", ".join(f"{each}: {shown_value(given, each)}" for each, given in beside.items())
        if word is None and isinstance(value, str):
            word = next((each for each in inner.words if each != "none" and plain(each) == plain(value)), None)
        if word is not None:
            return f"{name}: {shown_value(word, name)}"
    return ""


@cache
def _column_names() -> tuple[str, ...]:
    shape = find(spec_shape(), ("dataset", "columns"))
    assert shape is not None
    assert isinstance(shape.body, Fields)
    return tuple(shape.body.fields)


def _only_accepting_field(fields: Mapping[str, Shape], value: JsonValue) -> str | None:
    """Return the field of an object that accepts a value written in the object's place: by its word, or as the only
    one; steps take precedence over minutes.
    """
    by_choice = [name for name, inner in fields.items() if isinstance(value, str) and value in inner.words]
    if by_choice and value not in ("auto", "none"):
        return by_choice[0]
    accepting = by_choice or [name for name, inner in fields.items() if not inner.words and accepts(inner, value)]
    return accepting[0] if len(accepting) == 1 or "steps" in accepting[:1] else None


_EXAMPLES = ("hf://org/name", "pvc://claim/path", "file:///path")


def missing(shape: Shape, path: Sequence[PathPart], schemes: Sequence[str] | None) -> str:
    """Return the hint for a missing required field."""
    shape = served(shape, path)
    if shape.words:
        return f"write one of {', '.join(shape.words)}"
    if isinstance(shape.body, Fields):
        needed = [name for name, field in shape.body.fields.items() if field.required]
        example = ", e.g. {uri: hf://org/name}" if needed == ["uri"] else ""
        return f"write it with {' and '.join(needed)} below it{example}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
        example = next((each for each in _EXAMPLES if each.startswith(tuple(prefixes))), "")
        return f"set it to a URI that begins with {listed(prefixes)}" + (f", e.g. {example}" if example else "")
    meaning = shape.description.removesuffix("Required.").strip().removesuffix(".")
    begin = meaning[:1] if meaning[1:2].isupper() else meaning[:1].lower()
    return f"set it: {begin}{meaning[1:]}" if meaning else f"set it to {sentence(shape)}"
