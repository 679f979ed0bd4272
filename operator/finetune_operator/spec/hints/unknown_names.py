"""Hints for an unknown field: its name in this API, or its place.

A field of ours in another spelling or place is answered from the spec itself, a name of another tool from
`foreign_names.yaml`, and an object of another tool from the names in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from pydantic import JsonValue

from finetune_contract.metrics import LOWER_IS_BETTER, METRICS, metrics_of
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.fields.shapes import Fields, Items, Map, Number
from finetune_operator.spec.fields.support import works
from finetune_operator.spec.fields.uri_hints import CLAIM, as_uri, is_uri
from finetune_operator.spec.hint_values import Drop, Hint, Move, Rename, SetTo, changes
from finetune_operator.spec.hints.field_lookup import (
    MEANINGLESS_ALONE,
    FieldContext,
    dotted,
    field_by_words,
    fields_by_name,
    free_arguments,
    has_fields,
    is_block,
    namesakes,
    shape_at,
    shares_fields,
    words_of,
)
from finetune_operator.spec.hints.foreign_table import NameRow, column_called, columns_of, find_name, find_value
from finetune_operator.spec.hints.wrong_values import fitting, meant
from finetune_operator.spec.problems import PathPart, aside, is_secret_name

_CLOSE, _CLOSER = 0.6, 0.84
"""Similarity above which a name counts as a misspelt one: of the same object, and of another, where letters alone are
weaker evidence.
"""
_ALIKE = 0.72
"""The same for columns, whose names are words of their own."""
_MOST_INSIDE = 16
"""Maximum number of an object's names that a message translates."""
_MOST_PLACES = 3
_CONTAINERS = ("template", "spec", "metadata", "containers")
"""Objects of Kubernetes that give no meaning to their content."""
_NODES = "spec.resources.nodes"
_COLUMNS = "spec.dataset.columns"
_REFERENCES = ("secretKeyRef", "secretRef", "valueFrom", "secret")
"""Names of Kubernetes for the reference to an entry of a Secret."""
_LOADERS = ("csv", "json", "jsonl", "parquet", "text", "arrow", "tsv")
"""Names of `datasets`' readers of files."""
_LIMIT_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("min", "minimum", "threshold", "least", "target", "required"), "minimum"),
    **dict.fromkeys(("max", "maximum", "most"), "maximum"),
}
_METRIC_NAMES = {plain(name): name for task in METRICS for name in metrics_of(task)}


def unknown_name(path: Sequence[PathPart], value: JsonValue, names: Sequence[str], around: FieldContext | None) -> Hint:
    """Return the hint for a field that the object at the path's parent, which has `names`, does not have.

    `around`: other fields of the job; None: the object belongs to no job.
    """
    name = str(path[-1])
    spellings = {plain(known): known for known in names}
    if plain(name) in spellings:
        return Rename(spellings[plain(name)])
    hint = None
    if around is not None:
        try:
            hint = _in_job(path, value, names, around)
        except OverflowError:  # The value is a number too large for the unit of any field.
            hint = None
    elif near := difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE):
        hint = Rename(near[0])
    return hint or _names_here(names)


def _names_here(names: Sequence[str]) -> str:
    return f"rename it, or leave it out: the fields here are {', '.join(names)}"


def _in_job(path: Sequence[PathPart], value: JsonValue, names: Sequence[str], around: FieldContext) -> Hint | None:
    name, parent = str(path[-1]), str(path[-2]) if len(path) > 1 else ""
    row = find_name(name, parent)
    if (special := _by_value(path, value, names, around)) is not None:
        return _relocated(special, path)
    if row is not None and row.under:
        return _relocated(_by_row(row, path, value, around), path)
    if parent == "columns" and "textPair" in names:
        return _column(name, names, around) or _names_here(names)
    if row is None and (misspelt := _misspelt(path, value, names)) is not None:
        return misspelt
    places = _near(path, value)
    if fitting_places := tuple(place for place in places if could_hold(place, value)):
        return _moved(fitting_places, value)
    if row is not None:
        return _relocated(_by_row(row, path, value, around), path)
    if places and (not isinstance(value, dict) or any(map(is_block, places))):
        return _moved(places, value)
    place = field_by_words(path)
    if place is not None and could_hold(place, value) and (not isinstance(value, dict) or shares_fields(place, value)):
        above, _, leaf = place.rpartition(".")
        return Rename(leaf) if above == dotted(path[:-1]) else _moved((place,), value)
    near = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    if near and _resembles(near[0], path, value):
        return Rename(near[0])
    if isinstance(value, dict) and (inside := content(path, value, around)) is not None:
        return inside
    if argument := free_arguments().get(plain(name)):
        return Move((f"spec.training.arguments.{argument}",))
    if far := difflib.get_close_matches(plain(name), fields_by_name(), n=1, cutoff=_CLOSER):
        places = tuple(place for place in namesakes((*path[:-1], far[0])) if could_hold(place, value))
        return _moved(places, value) if places else None
    return None


def _near(path: Sequence[PathPart], value: JsonValue) -> tuple[str, ...]:
    """Return the namesakes of a name, without those of stages that the job may not have: a number of replicas of
    training pods is none of servers.
    """
    others = tuple(f"spec.{stage}." for stage in ("endpoint", "predict") if stage != str(path[1:2] and path[1]))
    deep = len(path) > 2 or isinstance(value, dict)
    return tuple(place for place in namesakes(path) if not (deep and place.startswith(others)))


def _misspelt(path: Sequence[PathPart], value: JsonValue, names: Sequence[str]) -> Hint | None:
    """Return the hint for a name that is almost one of the same object, which takes the value; None: it is not."""
    for near in difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=_CLOSER):
        field = dotted((*path[:-1], near))
        if could_hold(field, value):
            return Rename(near)
        if (accepted := fitting(field, value)) is not None:
            return SetTo({field: accepted})
    return None


def could_hold(field: str, value: JsonValue) -> bool:
    """Return True if a field of the spec accepts the value's kind (object, list or scalar), whatever its content."""
    shape = shape_at(field)
    match None if shape is None else shape.body:
        case Fields() | Map():
            worded = shape is not None and bool(shape.words)
            return isinstance(value, dict) or (worded and fitting(field, value) is not None)
        case Items():
            return isinstance(value, list) or (shape is not None and value in shape.words)
        case None if isinstance(value, str):
            return fitting(field, value) is not None or find_value(field, value) is not None
        case Number() if isinstance(value, bool):
            return fitting(field, value) is not None
    return not isinstance(value, dict | list)


def _resembles(name: str, path: Sequence[PathPart], value: JsonValue) -> bool:
    """Return False for a text in place of a number or an object, and for an object that has no field of the one, with a
    name that is only somewhat similar.
    """
    field = dotted((*path[:-1], name))
    shape = shape_at(field)
    if difflib.SequenceMatcher(None, name, str(path[-1])).ratio() >= _CLOSER:
        return True
    if not isinstance(value, dict):
        text = isinstance(value, str) and shape is not None and isinstance(shape.body, Number | Fields | Map)
        return not text or fitting(field, value) is not None
    return shares_fields(field, value)


def _moved(places: Sequence[str], value: JsonValue) -> Hint:
    row = find_value(places[0], value) if len(places) == 1 else None
    return SetTo(row.sets, row.note) if row is not None and row.sets else Move(tuple(places[:_MOST_PLACES]))


def _relocated(hint: Hint, path: Sequence[PathPart]) -> Hint:
    """Return the hint with columns and splits of `predict.dataset`, if the field stands there."""
    if not isinstance(hint, SetTo) or tuple(path[:2]) != ("spec", "predict"):
        return hint
    prefix = "spec.dataset." if len(path) > 3 else _COLUMNS
    if path[2] == "dataset" and "spec.dataset.splits.train" in hint.fields and str(path[-1]) == "split":
        return SetTo({"spec.predict.dataset.splits.test": hint.fields["spec.dataset.splits.train"]})
    fields = {
        f"spec.predict.{field.removeprefix('spec.')}" if field.startswith(prefix) else field: value
        for field, value in hint.fields.items()
    }
    return replace(hint, fields=fields)


def _by_value(path: Sequence[PathPart], value: JsonValue, names: Sequence[str], around: FieldContext) -> Hint | None:
    """Return the hint for an unknown name whose value or place gives its meaning; None: neither does."""
    name, above = str(path[-1]), dotted(path[:-1])
    if name == "enabled" and above and isinstance(value, bool):
        return Drop(f"{above} is in effect if it is set") if value else f"leave {above} out"
    if name in _REFERENCES and isinstance(value, dict):
        inner = value.get("secretKeyRef", value)
        match inner:
            case {"name": str(secret), **others} if CLAIM.fullmatch(secret):
                place = f"{above}.hubToken" if above == "spec.secrets" else above
                return SetTo({f"{place}.name": secret, f"{place}.key": str(others.get("key", "token"))})
    if above in ("spec.model", "spec.dataset") and "uri" not in around.beside and "/" in str(value):
        uri = as_uri(value)
        if uri is not None and uri.startswith("hf://") and find_name(name, str(path[-2])) is None:
            return SetTo({f"{above}.uri": uri})
    if above == "spec.dataset" and name in ("path", "name", "type") and value in _LOADERS:
        return Drop("the extension of a file determines its format")
    if above in ("spec.evaluation", "spec.evaluation.gate") and (gate := _gate(name, value)) is not None:
        return gate
    if above.endswith(".columns") and "textPair" in names:
        if (column := column_called(around.task, name)) is not None:
            return Rename(column)
        if isinstance(value, str) and value in names and not around.beside.keys() & set(names):
            return SetTo({f"{above}.{value}": name}, "our name is on the left, that of the data right")
        return None
    if above == "spec.dataset" and (column := column_called(around.task, name)) is not None:
        # A name of another setting, such as `source`, is one of a column only if it says so.
        listed = find_name(name, "dataset")
        said = words_of(name)[-1:] in (["column"], ["field"]) or (listed is None and not isinstance(value, dict | list))
        return SetTo({f"{_COLUMNS}.{column}": value}) if said and isinstance(value, str) else None
    return None


def _gate(name: str, value: JsonValue) -> SetTo | None:
    """Return the hint for a metric with its limit in one name, such as `minAccuracy`; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    limits = [_LIMIT_WORDS[word] for word in words_of(name) if word in _LIMIT_WORDS]
    metric = _METRIC_NAMES.get("".join(word for word in words_of(name) if word not in _LIMIT_WORDS))
    if metric is None:
        return None
    limit = "maximum" if "maximum" in limits[:1] or metric in LOWER_IS_BETTER else "minimum"
    return SetTo({"spec.evaluation.gate.metric": metric, f"spec.evaluation.gate.{limit}": value})


def _column(name: str, names: Sequence[str], around: FieldContext) -> Hint | None:
    """Return the hint for a column that no task reads."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE)
    near = near or [known for known in names if known.lower() in words_of(name)]
    read = list(columns_of(around.task))
    return Rename(near[0]) if near else Drop(f"{around.task} reads {', '.join(read)}") if read else None


# --------------------------------------------------------------------------------------------------- names of the table


def argument(name: str, value: JsonValue, field: str | None = None) -> Hint | None:
    """Return the hint for a name below `training.arguments` that is not free there: that of the table, or the dotted
    `field` (from `spec`) that decides it. None: neither is known.
    """
    row = find_name(name, "arguments")
    if row is not None:
        return _by_row(row, ("spec", "training", "arguments", name), value, FieldContext())
    return None if field is None else owned(field, value)


def owned(field: str, value: JsonValue) -> Hint:
    """Return the hint for a key of another tool that the field at the dotted path (from `spec`) decides."""
    if not works(field):
        return Drop(f"spec.{field} is not supported in this version")
    accepted = fitting(f"spec.{field}", value)
    return f"set spec.{field} in place of this" if accepted is None else SetTo({f"spec.{field}": accepted}, "instead")


def _by_row(row: NameRow, path: Sequence[PathPart], value: JsonValue, around: FieldContext) -> Hint:
    if converted := row.converted(value, around.beside, around.hub):
        return SetTo(converted)
    instead = find_value(row.field, value)
    if instead is not None and (row.field not in instead.sets or (row.value is not None and len(instead.sets) > 1)):
        return SetTo(instead.sets, instead.note) if instead.sets else instead.answer
    if value is None or (row.value is not None and (value is False or value == "")):
        return Drop()
    if row.advice:
        return row.advice
    first = value[0] if isinstance(value, list) and value else value
    # The content of an object that stands for one of ours is that of ours.
    within = tuple(row.field.split(".")) if row.value == {} else path
    inside = content(within, first, around) if isinstance(first, dict) else None
    if not row.field:
        return row.answer if inside is None else inside
    if isinstance(value, str) and is_secret_name(str(path[-1])):
        return f"set {row.field}"  # The value is not repeated.
    above, _, leaf = row.field.rpartition(".")
    places = [place for place in (row.field, above) if not dotted(path).startswith(f"{place}.")]
    counterpart = next((place for place in places if isinstance(value, dict) and has_fields(place, value)), None)
    if counterpart is not None and (row.value is None or row.value == {}):
        return _placed(counterpart, path, row)
    if row.value is not None and row.value != {}:
        fields = {row.field: row.value, **(inside.fields if inside else {})}
        return SetTo(fields, inside.note if inside else row.note)
    if inside is not None:
        return inside
    if row.value == {} and isinstance(value, dict | bool):
        return _placed(row.field, path, row) if isinstance(value, dict) and value else SetTo({row.field: {}}, row.note)
    accepted, shape = fitting(row.field, value) if row.same else None, shape_at(row.field)
    elsewhere = meant(shape, row.field, value) if shape is not None and accepted is None and row.same else None
    if isinstance(elsewhere, SetTo):
        return elsewhere
    if accepted is None:
        return f"set {row.field}{aside(row.note)}"
    note = "" if shape is not None and is_uri(shape) else row.note
    if accepted == value and type(accepted) is type(value) and above == dotted(path[:-1]):
        return Rename(leaf, note)
    return SetTo({row.field: accepted}, note)


def _placed(place: str, path: Sequence[PathPart], row: NameRow) -> Hint:
    """Return the hint to give an object at `path` the place and name of ours."""
    above, _, leaf = place.rpartition(".")
    return Rename(leaf) if above == dotted(path[:-1]) else Move((place,))


def content(path: Sequence[PathPart], value: Mapping[str, JsonValue], around: FieldContext) -> SetTo | None:
    """Return our fields, with their values, for the names inside an object that is none of ours; None: it has none.

    Replicas of masters and of workers are added up.
    """
    fields: dict[str, JsonValue] = {}
    left: list[str] = []
    for name, given in islice(value.items(), _MOST_INSIDE):
        translation = translated((*path, name), given, replace(around, beside=value))
        for field, new in translation.items():
            total = fields.get(field)
            counted = field == _NODES and isinstance(total, int) and isinstance(new, int) and "Launcher" not in path
            fields[field] = total + new if counted and isinstance(total, int) and isinstance(new, int) else new
        if not translation:
            left.append(name)
    note = f"not translated: {', '.join(left)}" if left else ""
    return SetTo(fields, note) if fields else None


def translated(path: Sequence[PathPart], given: JsonValue, around: FieldContext) -> Mapping[str, JsonValue]:
    """Return our fields, with their values, for a name in an object of another tool."""
    name, above = str(path[-1]), str(path[-2])
    if path[1:2] == ("evaluation",) and (gate := _gate(name, given)) is not None:
        return gate.fields
    if name.startswith("nvidia.com/mig-"):
        return {"spec.resources.accelerator.resource": name, "spec.resources.gpusPerNode": given}
    first = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else given
    ours = next((str(path[at - 1]) for at in range(len(path) - 1, 0, -1) if shape_at(dotted(path[:at]))), "")
    here = dotted(path)
    if shape_at(here) is not None and (accepted := fitting(here, given)) is not None:
        return {here: accepted}
    joined = find_name(f"{above}_{name}", "") if above not in _CONTAINERS else None
    row = find_name(name, above)
    row = row if row is not None and row.under else joined or row
    row = row or (None if name in MEANINGLESS_ALONE else find_name(name, ours))
    if row is not None:
        return changes(_relocated(_by_row(row, path, given, around), path), dotted(path), given)
    places = () if name in MEANINGLESS_ALONE else _near(path, given)
    place = places[0] if len(places) == 1 else field_by_words((f"{above}_{name}",))
    if place is not None and isinstance(given, list) and could_hold(place, given):
        return {place: given}
    shape = None if place is None else shape_at(place)
    if place is not None and shape is not None and isinstance(first, dict) and isinstance(shape.body, Map):
        return {place: first}
    fits = place is not None and isinstance(first, dict) and has_fields(place, first)
    if isinstance(first, dict) and not fits:
        inner = content(path, first, around)
        return {} if inner is None else inner.fields
    accepted = first if fits else None if place is None else fitting(place, given)
    if place is not None and shape is not None and isinstance(accepted, dict) and not shape.words:
        return {f"{place}.{field}": part for field, part in accepted.items()}
    return {} if place is None or accepted is None else {place: accepted}
