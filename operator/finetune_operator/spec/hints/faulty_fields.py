"""Faults of one object: their problems, and what can be read of the object without them.

The messages come from the shape of the model. Faulty fields are removed until the rest can be read, so that rules
across fields can still be checked, except those that read a removed field. A hint that leaves no choice is followed in
the copy that is read: one check of a job also finds problems that following the hint would reveal.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue, ValidationError

from finetune_operator.spec.fields.field_values import Model, Path, Read, read_json, value_at
from finetune_operator.spec.fields.shapes import Fields, Items, Map, Shape, find
from finetune_operator.spec.fields.uri_hints import is_uri
from finetune_operator.spec.hint_values import Drop, Hint, Move, Rename, ReplaceBy, SetTo, changes
from finetune_operator.spec.hints.field_lookup import FieldContext, around, dotted
from finetune_operator.spec.hints.mounted_claims import in_claim, on_claim
from finetune_operator.spec.hints.unknown_names import content, unknown_name
from finetune_operator.spec.hints.wrong_values import missing, takes, wrong_value
from finetune_operator.spec.problems import MOST_PROBLEMS, PathPart, Problem, Reason, describe_value, format_path

_DEEPEST = 16
"""Maximum passes over one object; each removes at least one level of nesting, and no model has that many."""


def read_faulty(
    model: type[Model],
    shape: Shape,
    value: JsonValue,
    prefix: Path,
    placeholders: Mapping[str, JsonValue],
    schemes: Sequence[str] | None,
) -> Read[Model]:
    """Read what is left of a value without its faulty fields; the arguments are those of `read_fields`."""
    remainder = copy.deepcopy(value)
    faults: dict[Path, Problem] = {}
    removed: set[Path] = set()
    corrected: set[Path] = set()
    unwrapped: set[Path] = set()
    """Objects that were written as lists: the problems of their fields are reported, too."""

    def result(read: Model | None) -> Read[Model]:
        return Read(read, tuple(faults.values()), tuple(faults), frozenset(removed), frozenset(corrected))

    for _ in range(_DEEPEST):
        try:
            return result(read_json(model, remainder))
        except ValidationError as error:
            entries = [
                (_document_path(shape, entry["loc"]), entry["type"]) for entry in error.errors(include_url=False)
            ]
        parents = {path[:length] for path, _ in entries for length in range(len(path))}
        # Names first: one that stands for a required field says so, and the field is not missing as well.
        entries.sort(key=lambda entry: prefix == ("spec",) and entry[1] == "missing")
        for path, kind in entries:
            # `auto` or an object: if a field of the object is wrong, the error that it is not `auto` is noise.
            if path in parents or (kind == "missing" and value_at(remainder, path) is not None):
                continue
            seen = value if value_at(value, path) is not None else remainder
            above = {path[:length] for length in range(len(path))}
            if path not in faults and not above & faults.keys() - unwrapped:
                faults[path] = _field_problem(shape, path, kind, seen, prefix, schemes)
            if not path or not isinstance(remainder, dict) or len(faults) >= MOST_PROBLEMS:
                return result(None)
            problem = faults.get(path)
            if problem is None:  # It is below a faulty field, which is reported.
                removed.add(_remove(shape, remainder, path, placeholders))
                continue
            given, field = value_at(seen, path), dotted((*prefix, *path))
            followed = prefix == ("spec",) and not any(isinstance(part, int) for part in path)
            changed = changes(problem.remedy, field, given) if followed else {}
            wanted = {place: new for place, new in changed.items() if _accepted(shape, problem.remedy, place, new)}
            if field in wanted and path not in corrected and _set(remainder, path, wanted[field]):
                corrected.add(path)
                unwrapped |= {path} if isinstance(given, list) else set()
                continue
            gone = _remove(shape, remainder, path, placeholders)
            written = [_put(remainder, tuple(place.split(".")[1:]), new) for place, new in wanted.items()]
            # A name that is simply left out is no reason to skip a rule on its object.
            if not any(written) and not (kind == "extra_forbidden" and isinstance(problem.remedy, Drop)):
                removed.add(gone)
    return result(None)


def _accepted(root: Shape, hint: Hint, place: str, value: JsonValue) -> bool:
    """Return True if the place that a hint names exists, and accepts the value that the hint itself writes."""
    shape = find(root, place.split(".")[1:])
    if shape is None or isinstance(hint, Rename | Move):
        return shape is not None
    # An item without its list is read on, and its own problems are reported.
    return takes(shape, value) or (isinstance(hint, ReplaceBy) and bool(hint.words) and isinstance(value, dict))


def _document_path(shape: Shape, location: Sequence[PathPart]) -> Path:
    """Return pydantic's location without the names of union branches: only steps that a document has."""
    path: Path = ()
    branches = 0
    for part in location:
        if shape.words and shape.body is not None and not branches:
            branches = 1
            continue
        match shape.body:
            case Fields(fields):
                shape = fields.get(str(part), Shape())
            case Items(item):
                shape = item
            case Map(value):
                shape = value
            case _:
                break  # the rest names the branch of a union of scalars
        path, branches = (*path, part), 0
    return path


def _field_problem(
    root: Shape, path: Path, kind: str, document: JsonValue, prefix: Path, schemes: Sequence[str] | None
) -> Problem:
    full = (*prefix, *path)
    value, shape = value_at(document, path), find(root, path)
    near = around(path, document)
    if kind == "extra_forbidden" or shape is None:
        parent = find(root, path[:-1])
        names = tuple(parent.body.fields) if parent and isinstance(parent.body, Fields) else ()
        of_job = prefix == ("spec",)
        hint = unknown_name(full, value, names, near if of_job else None)
        hint = _in_document(hint, path, value, document) if of_job else hint
        return _unknown(full, value, hint)
    if kind == "missing":
        return Problem(format_path(full), None, "is required", missing(shape, full, schemes), reason="Required")
    rule, hint = wrong_value(shape, full, value, schemes, near)
    if is_uri(shape) and prefix == ("spec",) and (claim := on_claim(value, document)) is not None:
        hint = in_claim(claim)
    if isinstance(hint, ReplaceBy) and isinstance(value, dict) and not isinstance(shape.body, Fields | Items | Map):
        others = {name: inner for name, inner in value.items() if inner != hint.value}
        rest = content(full, others, near) if prefix == ("spec",) else None
        if rest is not None and rest.fields.keys() - {dotted(full)}:
            hint = SetTo({**rest.fields, dotted(full): hint.value}, rest.note)
    reason: Reason = "NotSupported" if shape.body is None and isinstance(value, str) else "Invalid"
    return Problem(format_path(full), describe_value(value, full), rule, hint, reason=reason)


def unknown_field(path: Path, value: JsonValue, names: Sequence[str]) -> Problem:
    """Return the problem of an unknown field of a job's document, outside of its spec."""
    return _unknown(path, value, unknown_name(path, value, names, FieldContext()))


def _unknown(path: Path, value: JsonValue, hint: Hint) -> Problem:
    return Problem(format_path(path), describe_value(value, path), "there is no such field", hint, reason="Unknown")


def _in_document(hint: Hint, path: Path, value: JsonValue, spec: JsonValue) -> Hint:
    """Return the hint for an unknown field of a spec, some of whose places are taken."""

    def given_at(field: str) -> JsonValue:
        return value_at(spec, tuple(field.split(".")[1:])) if field.startswith("spec.") else None

    if isinstance(hint, Move) and len(hint.places) > 1:
        free = tuple(place for place in hint.places if given_at(place) is None)
        hint = Move(free) if free else hint
    if isinstance(hint, SetTo) and len(hint.fields) > 1:
        # An address that the job gives stays.
        kept = {field: new for field, new in hint.fields.items() if not (field.endswith(".uri") and given_at(field))}
        hint = replace(hint, fields=kept) if kept else hint
    here, target = dotted(("spec", *path)), changes(hint, dotted(("spec", *path)), value)
    taken = {field: given_at(field) for field in target}
    inside = any(here.startswith(f"{field}.") for field in taken)
    if not taken or None in taken.values() or inside or isinstance(value, dict):
        return hint
    (field, given), *others = taken.items()
    same = taken == dict(target)
    # A value that the hint makes of another setting replaces the one that is there, but an address does not.
    if isinstance(hint, SetTo) and not same and (others or not field.endswith(".uri") or given == "auto"):
        return hint
    return Drop(f"{field} is already {describe_value(given, (field,))}{'' if same else '; or replace that value'}")


def _set(document: JsonValue, path: Path, value: JsonValue) -> bool:
    """Replace the value at `path`; return False if no field of an object is there."""
    parent = value_at(document, path[:-1])
    if not isinstance(parent, dict) or path[-1] not in parent:
        return False
    parent[str(path[-1])] = copy.deepcopy(value)
    return True


def _put(document: JsonValue, place: Path, value: JsonValue) -> bool:
    """Write a value at an empty place; return False if the place is taken."""
    for part in place[:-1]:
        if not isinstance(document, dict):
            return False
        document = document.setdefault(str(part), {})
    if not isinstance(document, dict) or str(place[-1]) in document:
        return False
    document[str(place[-1])] = copy.deepcopy(value)
    return True


def _remove(root: Shape, value: JsonValue, path: Path, placeholders: Mapping[str, JsonValue]) -> Path:
    """Remove the field at `path`, or its parent if that requires it; required fields get a placeholder. Return the
    removed path.
    """
    shape = find(root, path)
    while len(path) > 1 and ((shape is not None and shape.required) or isinstance(path[-1], int)):
        path = path[:-1]
        shape = find(root, path)
    parent = value_at(value, path[:-1])
    if isinstance(parent, dict):
        parent.pop(str(path[-1]), None)
        if len(path) == 1 and path[0] in placeholders:
            parent[str(path[0])] = copy.deepcopy(placeholders[str(path[0])])
    return path
