"""Faults of one object: their problems, and what can be read of the object without them.

The messages come from the shape of the model. Faulty fields are removed until the rest can be read, so that rules
across fields can still be checked, except those that read a removed field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from pydantic import JsonValue, ValidationError

from finetune_operator.api.field_values import Model, Path, Read, read_json, value_at
from finetune_operator.api.foreign_names import find_value
from finetune_operator.api.hint_parts import Around
from finetune_operator.api.hints import wrong_value
from finetune_operator.api.meant_columns import meant_task
from finetune_operator.api.meant_uris import is_uri
from finetune_operator.api.meant_values import named_settings, plain_meaning
from finetune_operator.api.mounted_claims import in_claim, on_claim
from finetune_operator.api.name_hints import NameHint, unknown_name
from finetune_operator.api.problems import MOST_PROBLEMS, PathPart, Problem, Reason, describe_value, format_path
from finetune_operator.api.shapes import Fields, Items, Map, Shape, accepts, find
from finetune_operator.api.value_hints import missing

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
    for _ in range(_DEEPEST):
        try:
            return Read(
                read_json(model, remainder),
                tuple(faults.values()),
                tuple(faults),
                frozenset(removed),
                frozenset(corrected),
            )
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
                    return Read(None, tuple(faults.values()), tuple(faults), frozenset(removed), frozenset(corrected))
                problem = faults.get(path)
                if problem is None:  # It is below a faulty field, which is reported.
                    removed.add(_remove(shape, remainder, path, placeholders))
                    continue
                listed = isinstance(value_at(seen, path), list)
                place, intended = _intended(shape, path, kind, seen, prefix, problem)
                if place == path and path not in corrected and _set(remainder, path, intended):
                    corrected.add(path)
                    unwrapped |= {path} if listed else set()
                    continue
                settings = _settings(shape, path, kind, seen, prefix, problem)
                settings += [] if place is None else [(place, intended)]
                removed_path = _remove(shape, remainder, path, placeholders)
                written = [_put(remainder, field, setting) for field, setting in settings]
                # A name that is simply left out is no reason to skip a rule on its object.
                left_out = kind == "extra_forbidden" and re.fullmatch(r"leave it out(:.*)?", problem.hint)
                if not any(written) and not left_out:
                    removed.add(removed_path)
    return Read(None, tuple(faults.values()), tuple(faults), frozenset(removed), frozenset(corrected))


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
    value = value_at(document, path)
    shape = find(root, path)
    if kind == "extra_forbidden" or shape is None:
        return _unknown(full, value, _name_hint(root, path, document, prefix))
    if kind == "missing":
        return Problem(format_path(full), None, "is required", missing(shape, full, schemes), reason="Required")
    rule, hint = wrong_value(shape, full, value, schemes, _around(path, document))
    if is_uri(shape) and prefix == ("spec",) and (claim := on_claim(value, document)) is not None:
        hint = in_claim(claim)
    reason: Reason = "NotSupported" if shape.body is None and isinstance(value, str) else "Invalid"
    return Problem(format_path(full), describe_value(value, full), rule, hint, reason=reason)


def _mounted_anyway(spec: JsonValue) -> str | None:
    """Return the URI in whose place pods mount the claims of all volumes of a spec; None: some volume has another use.

    The paths are those of `dataset.uri` and `model.uri`, in a folder where the volumes are mounted.
    """
    volumes = value_at(spec, ("volumes",))
    uris = [on_claim(value_at(spec, (block, "uri")), spec) for block in ("dataset", "model")]
    named = {uri.removeprefix("pvc://").partition("/")[0]: uri for uri in uris if uri is not None}
    for volume in volumes if isinstance(volumes, list) else [None]:
        claim = value_at(volume, ("persistentVolumeClaim", "claimName"))
        if not isinstance(claim, str) or claim not in named:
            return None
    return next(iter(named.values()), None)


def unknown_field(path: Path, value: JsonValue, names: Sequence[str], *, of_job: bool = False) -> Problem:
    """Return the problem of an unknown field; `of_job`: it belongs to a FineTuneJob, not to an object of Kubernetes."""
    return _unknown(path, value, unknown_name(path, value, names, of_job=of_job))


def _unknown(path: Path, value: JsonValue, hint: NameHint) -> Problem:
    return Problem(
        format_path(path), describe_value(value, path), "there is no such field", hint.text, reason="Unknown"
    )


_SETTING_HINT = re.compile(r"set spec\.(model\.uri|dataset\.uri) to (\S+)")
"""Hint that sets one of these fields to a value."""


def _name_hint(root: Shape, path: Path, document: JsonValue, prefix: Path) -> NameHint:
    """Find the hint for the unknown field at `path` of a document located at `prefix`."""
    parent = find(root, path[:-1])
    names = tuple(parent.body.fields) if parent and isinstance(parent.body, Fields) else ()
    value = value_at(document, path)
    around = _around(path, document)
    hint = unknown_name((*prefix, *path), value, names, of_job=prefix == ("spec",), around=around)
    if path in (("volumes",), ("volumeMounts",)) and prefix == ("spec",) and (uri := _mounted_anyway(document)):
        return NameHint(f"leave it out: pods mount the claim of {uri} themselves")
    hint = _at_its_place(hint, path, value, document)
    setting = _SETTING_HINT.fullmatch(hint.text)
    given = value_at(document, tuple(setting[1].split("."))) if setting is not None else None
    if setting is None or not isinstance(given, str) or given == "auto" or setting[2] == given:
        return hint
    if path == ("model", "checkpoint"):
        return NameHint(
            "leave it out: with spec.checkpoints.resume auto, a run resumes from the newest checkpoint in "
            "spec.storage.workspace"
        )
    current = describe_value(given, path)
    return NameHint(f"leave it out: spec.{setting[1]} is already {current}; or replace that value")


_TWO_PLACES = re.compile(r"move it below (spec[\w.]*) or (spec[\w.]*)")


def _at_its_place(hint: NameHint, path: Path, value: JsonValue, document: JsonValue) -> NameHint:
    """Return the hint for a field whose place is taken, or of whose two places one is."""
    two = _TWO_PLACES.fullmatch(hint.text)
    if two is not None:
        name = str(path[-1])
        free = [each for each in two.groups() if value_at(document, (*each.split(".")[1:], name)) is None]
        return NameHint(f"move it below {free[0]}", f"{free[0]}.{name}") if len(free) == 1 else hint
    place = tuple(hint.place.split(".")[1:]) if hint.place is not None else ()
    given = value_at(document, place) if place else None
    set_already = [value_at(document, tuple(field.split(".")[1:])) == each for field, each in hint.settings.items()]
    if set_already and all(set_already) and hint.text.startswith("set "):
        (field, each), *_ = hint.settings.items()
        return NameHint(f"leave it out: {field} is already {describe_value(each, tuple(field.split('.')))}")
    if given is None or place == path[: len(place)] or isinstance(value, dict):
        return hint
    other = "" if given == value else "; or replace that value"
    return NameHint(f"leave it out: {hint.place} is already {describe_value(given, place)}{other}")


def _around(path: Path, document: JsonValue) -> Around:
    """Return the fields of a spec on which the meaning of the field at `path` depends."""
    task = document.get("task") if isinstance(document, dict) else None
    columns = value_at(document, ("dataset", "columns"))
    if task == "question-answering" and isinstance(columns, dict) and "context" not in columns and "prompt" in columns:
        task = "text-generation"  # A prompt and its answer, from a data set without texts that contain the answer.
    above = value_at(document, path[:-1])
    data = value_at(document, ("dataset", "uri"))
    return Around(meant_task(task), data, above if isinstance(above, dict) else {}, _processes(document))


def _processes(document: JsonValue) -> int | None:
    """Return the number of training processes as far as a spec gives it; None: the plan decides."""
    resources = value_at(document, ("resources",))
    given = resources if isinstance(resources, dict) else {}
    nodes, gpus, here = given.get("nodes", 1), given.get("gpusPerNode"), given.get("processesPerNode")
    of_node = here if _is_count(here) else gpus
    return nodes * of_node if _is_count(nodes) and _is_count(of_node) else None


def _is_count(value: JsonValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _intended(
    root: Shape, path: Path, kind: str, document: JsonValue, prefix: Path, problem: Problem
) -> tuple[Path | None, JsonValue]:
    """Return the correct path and value of a field with a wrong name, place or value.

    They are read there, so that one check of a job also finds problems that following the hint would reveal. Return
    (None, None) if the hint leaves a choice.
    """
    value = value_at(document, path)
    if prefix != ("spec",) or any(isinstance(part, int) for part in path):
        return None, None
    if kind != "extra_forbidden":
        shape, field = find(root, path), format_path((*prefix, *path))
        row = find_value(field, value)
        if shape is None or kind == "missing":
            return None, None
        if row is not None:
            return (path, row.instead[field]) if list(row.instead) == [field] else (None, None)
        intended = plain_meaning(shape, value, problem.hint)
        return (None, None) if intended is None else (path, intended)
    hint = _name_hint(root, path, document, prefix)
    place = tuple(hint.place.split(".")[1:]) if hint.place is not None else ()
    return (place, value) if place and find(root, place) is not None else (None, None)


def _settings(
    root: Shape, path: Path, kind: str, document: JsonValue, prefix: Path, problem: Problem
) -> list[tuple[Path, JsonValue]]:
    """Return the fields and values that a hint asks to set instead of the field at `path`."""
    if prefix != ("spec",) or any(isinstance(part, int) for part in path) or kind == "missing":
        return []
    unknown = kind == "extra_forbidden"
    settings = _name_hint(root, path, document, prefix).settings if unknown else named_settings(problem.hint)
    found = []
    for field, value in settings.items():
        place: Path = tuple(field.split(".")[1:])
        shape = find(root, place)
        if shape is not None and accepts(shape, value):
            found.append((place, value))
    return found


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
