"""Hint for a value that a field does not accept, or for a missing field; `name_hints` has those for unknown names.

A hint names only features that this version serves and the settings allow: a user who follows it has solved the
problem. Values of other tools are answered from `foreign_names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_name, find_value, written
from finetune_operator.api.foreign_rows import ForeignName
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
from finetune_operator.api.meant_columns import task_by_words
from finetune_operator.api.meant_uris import is_uri, listed
from finetune_operator.api.meant_values import NAMING, form_hint, in_other_form, plain_meaning
from finetune_operator.api.meant_words import meaning
from finetune_operator.api.name_index import (
    MEANINGLESS_ALONE,
    places_elsewhere,
    words_by_place,
)
from finetune_operator.api.problems import PathPart, presentable
from finetune_operator.api.shapes import (
    Boolean,
    Fields,
    Items,
    Map,
    Number,
    Shape,
    Text,
    accepts,
    sentence,
)
from finetune_operator.api.support import served_schemes, works
from finetune_operator.api.value_hints import in_place_of_object, served, wrong_text

_MOST_INSIDE = 16
"""Maximum number of an object's names that a message translates."""
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
    if (scalar := wrong_text(shape, path, value, schemes, around)) is not None:
        return scalar[0] or rule, scalar[1]
    meant = in_place_of_object(shape, path, value, around) or _form_hint(shape, path, value)
    if meant is None and tuple(path) == ("spec", "task") and (by_words := task_by_words(value)) is not None:
        meant = f"write {by_words}"
    return rule, meant or _general_hint(shape)


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
