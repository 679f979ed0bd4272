"""Hint for a value that a field does not accept, or for a missing field; `name_hints` has those for unknown names.

A hint names only features that this version serves and the settings allow: a user who follows it has solved the
problem. Values of other tools are answered from `foreign_names`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from pydantic import JsonValue

from finetune_contract.metrics import METRICS, metrics_of
from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import ForeignName, find_name, find_value, written
from finetune_operator.api.hint_parts import (
    GLOBAL_BATCH,
    NOTHING_AROUND,
    Around,
    further_hint,
    rows_of_a_step,
    settings_instead,
    shape_at,
    shown_value,
    uri_of,
)
from finetune_operator.api.meant_columns import columns_in_order, task_by_words
from finetune_operator.api.meant_uris import as_uri, is_uri, listed, rows_in_files, uri_hint
from finetune_operator.api.meant_values import NAMING, form_hint, in_other_form, plain_meaning
from finetune_operator.api.meant_words import meaning
from finetune_operator.api.name_index import (
    MEANINGLESS_ALONE,
    places_elsewhere,
    words_by_place,
)
from finetune_operator.api.problems import PathPart, format_path, presentable
from finetune_operator.api.shapes import (
    Boolean,
    Fields,
    Items,
    Map,
    Number,
    Shape,
    Text,
    accepts,
    find,
    sentence,
    spec_shape,
)
from finetune_operator.api.support import served_schemes, served_words, works

_MOST_INSIDE = 16
"""Maximum number of an object's names that a message translates."""
_UNITS = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(?:(i|ibi|ebi|obi)|ilo|ega|iga|era|eta|xa)?(?:b|bytes?)?", re.IGNORECASE
)
_CORES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*v?(?:cores?|cpus?)", re.IGNORECASE)
_CONTAINERS = ("template", "spec", "metadata", "containers")
"""Objects of Kubernetes that give no meaning to their content."""
_STOPPING_METRIC = "spec.training.earlyStopping.metric"
COLUMNS = "spec.dataset.columns."


# --------------------------------------------------------------------------------------------------------- unknown name


def places_by_words(path: Sequence[PathPart], value: JsonValue) -> tuple[str, ...] | None:
    """Return the one field whose path has all words of an unknown name, such as `gateMinimum` and `adapterRank`; first
    below the object with the name, then anywhere. None: there is none, or several.
    """
    words, above = meaning(str(path[-1])), tuple(map(str, path[:-1]))
    if not words:
        return None
    for inside in (True, False) if above else (False,):
        found = [
            place
            for place, (whole, last) in words_by_place().items()
            if words & last
            and words <= whole
            and could_hold(place, value)
            and not _is_free(place)
            and (
                place[: len(above)] == above
                if inside
                else len(words) > 1 or (words == last and isinstance(value, dict))
            )
        ]
        least = min(map(len, found), default=0)
        nearest = [place for place in found if len(place) == least]
        if len(nearest) == 1:
            return nearest[0]
    return None


def owned_key(field: str, value: JsonValue) -> str:
    """Return the hint for a key or argument that the field at the dotted path (from `spec`) decides."""
    if not works(field):
        return f"leave it out: spec.{field} is not supported in this version"
    return f"{set_field(f'spec.{field}', value)}, and leave this out"


def could_hold(place: tuple[str, ...], value: JsonValue) -> bool:
    """Return True if a place of the spec accepts the value's kind (object, list or scalar), whatever its content."""
    shape = shape_at(".".join(place))
    match None if shape is None else shape.body:
        case Fields() | Map():
            if isinstance(value, dict) or (shape is not None and value in shape.words):
                return True
            field = ".".join(place)
            return shape is not None and bool(shape.words) and _meant(field, shape, value) is not None
        case Items():
            return isinstance(value, list) or (shape is not None and value in shape.words)
        case None if isinstance(value, str) and shape is not None:
            field = ".".join(place)
            known = find_value(field, value) is not None or form_hint(shape, field, value, shown_value) is not None
            return known or accepts(shape, value)
        case _:
            return not isinstance(value, dict | list)


def is_block(place: tuple[str, ...]) -> bool:
    """Return True if the spec has an object or a list at this place."""
    shape = shape_at(".".join(place))
    return shape is not None and isinstance(shape.body, Fields | Map | Items)


def _is_free(place: tuple[str, ...]) -> bool:
    """Return True if the spec has an object at this place whose names are the user's."""
    shape = shape_at(".".join(place))
    return shape is not None and isinstance(shape.body, Map)


def meant_inside(field: str, value: dict[str, JsonValue], *, own: str = "", with_value: bool = False) -> Iterator[str]:
    """Yield names inside an unknown object at `field`, called `own`, with our fields and their values.

    `with_value`: only those for which a row of the table gives a value. A field that corresponds to several of them is
    named without a value: replicas of masters and of workers are added up.
    """
    found = list(dict.fromkeys(named_inside(["", *field.split(".")][-2], "", value, own)))
    counted_at: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    for name, place, given in found:
        if not place:
            left_out.setdefault(given, []).append(name)
            if not with_value and len(left_out[given]) == 1:
                names = " and ".join(dict.fromkeys(n for n, p, other in found if not p and other == given))
                yield f"{names}: {given}"
            continue
        if with_value and not given and not place.startswith("spec.template."):
            continue
        values = {other for _, other_place, other in found if other_place == place}
        counts = [
            other[2:]
            for other_name, other_place, other in found
            if other_place == place and "auncher" not in other_name
        ]
        if place == "spec.resources.nodes" and len(counts) > 1 and all(count.isdigit() for count in counts):
            if name == counted_at.setdefault(place, name):
                yield f"{' and '.join(n for n, p, _ in found if p == place)} are {place}: {sum(map(int, counts))}"
            continue
        yield f"{name} is {place}" + (given if len(values) == 1 else "")


_MOVED_WHOLE = ("volumes", "volumeMounts")
"""Lists of a pod that stay as they are: a claim in a volume is not that of the workspace."""


def named_inside(parent: str, above: str, value: JsonValue, own: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each name in an object called `above`, our field with its meaning, and the accepted value: `: VALUE`.

    A name without a counterpart has an empty field, and the hint in place of the value.

    `parent` is our object in which the outermost one is looked up, `own` the outermost one's name.
    """
    beside = value if isinstance(value, dict) else {}
    for name, given in list(beside.items())[:_MOST_INSIDE]:
        if name.startswith("nvidia.com/mig-"):
            yield name, "spec.resources.accelerator.resource", f": {name}"
            yield name, "spec.resources.gpusPerNode", accepted_field_value("spec.resources.gpusPerNode", given)
            continue
        if name in _MOVED_WHOLE and isinstance(given, list):
            yield name, f"spec.template.{name}", ""
            continue
        row = _row_inside(name, above or own, parent)
        places = places_elsewhere(name, ()) if row is None else ()
        outer = above or own
        if row is None and not places and outer and (same := places_by_words((f"{outer}_{name}",), given)) is not None:
            places = (same,)
        first = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else given
        inside = list(_own_inside(places, name, given) or named_inside(parent, name, first))
        shown = f"{above}.{name}" if above and above not in _CONTAINERS else name
        if row is not None and (converted := written(row, given, hub=False, beside=beside)):
            yield from ((shown, field, f": {shown_value(each, field)}") for field, each in converted.items())
        elif row is not None and row.field is None and not inside and row.hint.startswith("leave it out"):
            yield shown, "", row.hint
        elif row is not None and row.field is not None and (row.value is not None or not inside):
            rows = rows_of_a_step(beside, None)[1] if row.field == GLOBAL_BATCH and not row.same else ""
            yield shown, row.field, f": {rows}" if rows else accepted_value(row, given)
        elif inside:
            yield from inside
        elif len(places) == 1 and name not in _CONTAINERS:
            place = ".".join(places[0])
            shape = shape_at(place)
            yield shown, place, "" if shape is None else accepted_field_value(place, given)


def _row_inside(name: str, above: str, parent: str) -> ForeignName | None:
    """Return the row of a name in the object `above` of another tool: of both names together, as `gpu_type` for `type`
    below `gpu`, or of the name alone.
    """
    row = find_name(name, above or parent)
    if row is not None and row.under:
        return row
    joined = find_name(f"{above}_{name}", parent) if above and above not in _CONTAINERS else None
    return joined or row or (None if name in MEANINGLESS_ALONE else find_name(name, parent))


def _own_inside(places: Sequence[tuple[str, ...]], name: str, given: JsonValue) -> list[tuple[str, str, str]]:
    """Return the same for an object with the name and fields of one of ours."""
    if len(places) != 1 or not isinstance(given, dict):
        return []
    found = []
    for child, value in given.items():
        shape = shape_at(".".join((*places[0], child)))
        if shape is not None:
            place = ".".join((*places[0], child))
            found.append((f"{name}.{child}", place, accepted_field_value(place, value)))
        elif (row := find_name(child, name)) is not None and row.field is not None:
            found.append((f"{name}.{child}", row.field, accepted_value(row, value)))
    return found


def accepted_value(row: ForeignName, given: JsonValue) -> str:
    """Return the value that a row's field accepts for the given one, as `: VALUE`; empty: it has to be found."""
    if row.field is None or given is None or given is False:
        return ""
    if row.value is not None:
        return f": {shown_value(row.value, row.field)}"
    if isinstance(given, dict) and row.field.endswith(".name") and isinstance(given.get("name"), str):
        return f": {shown_value(given['name'], row.field)}"
    shape = shape_at(row.field)
    instead = find_value(row.field, given)
    if instead is not None and row.field in instead.instead:
        return f": {shown_value(instead.instead[row.field], row.field)}"
    if shape is None or not row.same or isinstance(given, dict):
        return ""
    if is_uri(shape):
        uri = uri_of(row.field, shape, given)
        return f": {uri}" if uri else ""
    word = {plain(each): each for each in shape.words}.get(plain(given)) if isinstance(given, str) else None
    if word or accepts(shape, given):
        return f": {shown_value(word or given, row.field)}"
    meant = _meant(row.field, shape, given)
    return "" if meant is None else f": {shown_value(meant, row.field)}"


_LEAST_SIZE = 2**20
"""Bytes below which a size without a unit is meant in GiB."""


def _is_size(field: str) -> bool:
    return field.endswith((".memory", ".size", ".sharedMemory"))


def _meant(field: str, shape: Shape, given: JsonValue) -> JsonValue:
    """Return the value that the field at the dotted path accepts for one in another form, such as "2"; None: none."""
    if isinstance(given, dict | list):
        return None
    return plain_meaning(shape, given, wrong_value(shape, field.split("."), given, None)[1])


def accepted_field_value(field: str, given: JsonValue) -> str:
    """Return the value that our field accepts for one given under a similar name, as `: VALUE`; else empty."""
    return accepted_value(ForeignName((), "", field), given)


def set_field(field: str, value: JsonValue) -> str:
    """Return `set FIELD to VALUE`, without the value if the field does not accept it."""
    instead = find_value(field, value)
    if instead is not None:
        return settings_instead(instead)
    shape = shape_at(field)
    if shape is None:
        return f"set {field}"
    if field == _STOPPING_METRIC and isinstance(value, str):
        value = value.removeprefix("eval_")
    if is_uri(shape):
        uri = uri_of(field, shape, value)
        return f"set {field} to {uri}" if uri else f"set {field}"
    if isinstance(value, str) and (word := {plain(each): each for each in shape.words}.get(plain(value))):
        return f"set {field} to {word}"
    if _is_size(field) and isinstance(value, int) and value < _LEAST_SIZE:
        value = f"{value}Gi"
    if accepts(shape, value) and not isinstance(value, dict):
        return f"set {field} to {shown_value(value, field)}"
    meant = _meant(field, shape, value)
    return f"set {field}" if meant is None else f"set {field} to {shown_value(meant, field)}"


# ---------------------------------------------------------------------------------------------------------- wrong value


def served(shape: Shape, path: Sequence[PathPart]) -> Shape:
    """Return the shape of a spec field without the words that have no behaviour yet."""
    field = ".".join(str(part) for part in path[1:])
    return replace(shape, words=served_words(field, shape.words)) if path[:1] == ("spec",) else shape


def wrong_value(
    shape: Shape,
    path: Sequence[PathPart],
    value: JsonValue,
    schemes: Sequence[str] | None,
    around: Around = NOTHING_AROUND,
) -> tuple[str, str]:
    """Return the rule that a value breaks at `path`, and the hint; `schemes` are those that the settings allow."""
    try:
        rule, hint = _wrong_value(shape, path, value, schemes, around)
    except OverflowError:  # As in `unknown_name`.
        shape = served(shape, path)
        rule, hint = f"must be {sentence(shape)}", _general_hint(shape)
    return rule, presentable(hint)


def _general_hint(shape: Shape) -> str:
    return "change it" if shape.required else "change it, or leave it out"


def _wrong_value(
    shape: Shape, path: Sequence[PathPart], value: JsonValue, schemes: Sequence[str] | None, around: Around
) -> tuple[str, str]:
    shape = served(shape, path)
    rule = f"must be {sentence(shape)}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
        if not prefixes:
            return "is not supported in this version", "leave it out"
        rule = f"must be a URI that begins with {listed(prefixes)}"
    row = find_value(".".join(str(part) for part in path), value)
    if row is not None and not isinstance(shape.body, Boolean):
        same = list(row.instead) == [row.field]
        hint = further_hint(row.hint)
        return rule, f"write {shown_value(row.instead[row.field], row.field)}{hint}" if same else settings_instead(row)
    if (instead := in_other_form(shape, ".".join(map(str, path)), value)) is not None:
        return rule, instead
    if (scalar := _wrong_text(shape, path, value, schemes, around)) is not None:
        return scalar[0] or rule, scalar[1]
    meant = _in_place_of_object(shape, path, value, around) or _form_hint(shape, path, value)
    if meant is None and tuple(path) == ("spec", "task") and (by_words := task_by_words(value)) is not None:
        meant = f"write {by_words}"
    return rule, meant or _general_hint(shape)


def _wrong_text(
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


def _in_place_of_object(shape: Shape, path: Sequence[PathPart], value: JsonValue, around: Around) -> str | None:
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


def _form_hint(shape: Shape, path: Sequence[PathPart], value: JsonValue) -> str | None:
    """Return the hint for a value that means another one, and for the fields inside it; None: it means none."""
    field = ".".join(str(part) for part in path)
    hint = form_hint(shape, field, value, shown_value)
    if isinstance(shape.body, Text) and isinstance(value, dict):
        value = {name: each for name, each in value.items() if name not in NAMING}
    if hint is not None and isinstance(value, dict) and len(path) > 1 and not isinstance(shape.body, Items | Number):
        hint = "; ".join(
            [
                hint,
                *(
                    part
                    for part in meant_inside(field, value)
                    if not re.search(rf" is {re.escape(field)}(?![\w.])", part)
                ),
            ]
        )
    return hint


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
