"""Applies the hint of a message literally, like a user without other knowledge of the product.

`mend` follows the hint of a problem: the change that it is, or the advice that a reader here can parse. Others are
looked up in a table of edits that were written by hand from the message alone.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from finetune_operator.spec.fields.shapes import find, spec_shape
from finetune_operator.spec.hint_values import Drop, Move, Rename, ReplaceBy, SetTo
from finetune_operator.spec.problems import PathPart, Problem, format_path

GONE = None
"""Value that removes the field."""
_FREE = ("deepspeedConfig", "arguments")
"""Fields with free content for other tools: they contain no names of ours."""
_PART = re.compile(r"""\.?([A-Za-z_][\w-]*)|\[([0-9]+)\]|\["((?:[^"\\]|\\.)*)"\]""")
_VALUE = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|\"[^\"]*\"|\w+\[[0-9:%]+\]|[\w.:/+-]*[\w/}])"
_FIELD = r"(it|(?:spec|metadata)\.[\w.\[\]]*[\w\]]|[a-z][\w.]*\w)"
_END = r"(?=$|[,;:.]| \(| or | and | to take|\?)"


@dataclass(frozen=True)
class Edit:
    """One change: a field that gets a value, is removed (GONE), or moves to another place."""

    field: str
    value: Any = GONE
    moved: str | None = None


def parts(path: str) -> tuple[PathPart, ...]:
    """Return the steps of a path in the form of `format_path`."""
    return tuple(
        int(number) if number else name or quoted.encode().decode("unicode_escape")
        for name, number, quoted in _PART.findall(path)
    )


def alternatives(problem: Problem) -> list[list[Edit]]:
    """Return the alternatives in a problem's hint that can be followed, each as its edits."""
    path = problem.path
    match problem.remedy:
        case Rename(name):
            *above, _ = parts(path)
            return [[Edit(path, moved=format_path((*above, name)))]]
        case Move(places):
            return [[Edit(path, moved=place)] for place in places]
        case SetTo(fields):
            return [_instead(problem, [Edit(field, value) for field, value in fields.items()])]
        case Drop():
            return [[Edit(path)]]
        case ReplaceBy(value):
            return [[Edit(path, value)]]
    text = problem.hint
    for reader in (_renamed, _quoted, _metrics, _left_or_set, _written):
        found = reader(problem, text)
        if found:
            return [_instead(problem, edits) for edits in found]
    return []


def _instead(problem: Problem, edits: list[Edit]) -> list[Edit]:
    """Remove an unknown field if the edits put another one in its place."""
    there = any(problem.path in (edit.field, edit.moved) for edit in edits)
    return edits if problem.reason != "Unknown" or there else [Edit(problem.path), *edits]


def _renamed(problem: Problem, text: str) -> list[list[Edit]]:
    found = re.match(rf"[Dd]id you mean {_VALUE}\?", text)
    if not found:
        return []
    if problem.reason == "Unknown":
        *above, _ = parts(problem.path)
        return [[Edit(problem.path, moved=format_path((*above, found[1])))]]
    return [[Edit(problem.path, _number(found[1]))]]


def _quoted(problem: Problem, text: str) -> list[list[Edit]]:
    if re.match(r"put (it|the value) in quotes", text):
        return [[Edit(problem.path, str(yaml.safe_load(problem.value or "")))]]
    return []


def _metrics(problem: Problem, text: str) -> list[list[Edit]]:
    """Parse `write f1 for 'f1-macro', leave 'x' out`: the metrics that remain."""
    written = [name for names in re.findall(r"write ([\w, ]+?) for '", text) for name in names.split(", ")]
    return [[Edit(problem.path, written)]] if written and problem.path == "spec.evaluation.metrics" else []


def _number(text: str) -> Any:
    """Parse like our reader and kubectl's: 1e-05 is a number, which PyYAML does not recognize."""
    value = yaml.safe_load(text)
    if isinstance(value, str) and not text.startswith('"') and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value):
        return float(value)
    return value


def _field(problem: Problem, name: str) -> str:
    """Resolve a field in a message: the full path, `it`, a path from `spec` on, or a name below the blamed field,
    beside it, or beside one of its parents.
    """
    if name == "it" or name.startswith(("spec.", "metadata.")):
        return problem.path if name == "it" else name
    own, _, leaf = problem.path.rpartition(".")
    if name == leaf:
        return problem.path
    if "." in name and find(spec_shape(), name.split(".")) is not None:
        return f"spec.{name}"
    declared = problem.path
    for free in _FREE:
        declared = f"{declared}.".partition(f".{free}.")[0].rstrip(".")
    while declared:
        if find(spec_shape(), (*parts(declared)[1:], *name.split("."))) is not None:
            return f"{declared}.{name}"
        declared = declared.rpartition(".")[0]
    shape = find(spec_shape(), (*parts(problem.path)[1:], *name.split(".")))
    return f"{problem.path}.{name}" if shape is not None else f"{own}.{name}"


def _left_or_set(problem: Problem, text: str) -> list[list[Edit]]:
    """Parse `set A to x and B to y, or leave C out`."""
    ways = []
    for way in re.split(r",? or (?=set |leave |spec\.)|; or ", text):
        edits = []
        for name, other, value in re.findall(rf"(?:set|and|^) ?{_FIELD}(?: and {_FIELD})? to {_VALUE}{_END}", way):
            edits += [Edit(_field(problem, each), _number(value)) for each in (name, other) if each]
        for name, other in re.findall(rf"leave (?:out )?{_FIELD}(?: and {_FIELD})?(?: out)?{_END}", way):
            edits += [Edit(_field(problem, each)) for each in (name, other) if each not in ("this", "one", "out", "")]
        if re.search(r"leave this (?:argument )?out", way):
            edits.append(Edit(problem.path))
        if edits and not (way.startswith("set ") and all(edit.value is GONE for edit in edits)):
            ways.append(edits)
    return ways


def _written(problem: Problem, text: str) -> list[list[Edit]]:
    """Parse `write VALUE`, `use 96 or 112`, and the example of a form."""
    if found := re.match(rf"(?:set it to|write (?:it with|a size|a number)) [^;]*?(?:e\.g\.|such as) {_VALUE}", text):
        return [[Edit(problem.path, _number(found[1]))]]
    if found := re.match(r"write `(\w+): \{\}`", text):
        return [[Edit(f"spec.{found[1]}", {})]]
    found = re.match(
        rf"write (?:one of )?(?:[a-zA-Z]+: (?=\S))?{_VALUE}(?=$|[,;]| to take| for WSL| or | \(|\?|: [a-z])", text
    )
    found = found or re.match(rf"use {_VALUE}(?=,| or |$)", text)
    if (
        not found
        or found[1].endswith(("://", "ORG/NAME", "CLAIM/PATH"))
        or re.match(r"write (the|its|it|a|whatever)\b", text)
    ):
        return []
    return [[Edit(problem.path, _number(found[1]))]]


def apply(document: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """Return a copy of the document with the edits."""
    changed = copy.deepcopy(document)
    for edit in edits:
        if edit.moved is not None:
            there, value = _take(changed, parts(edit.field))
            if there:
                _put(changed, parts(edit.moved), value)
        elif edit.value is GONE:
            _take(changed, parts(edit.field))
        else:
            _put(changed, parts(edit.field), edit.value)
    return changed


def _take(document: Any, path: tuple[PathPart, ...]) -> tuple[bool, Any]:
    for part in path[:-1]:
        if not isinstance(document, dict | list) or (isinstance(document, dict) and part not in document):
            return False, None
        document = document[part]
    if isinstance(document, dict):
        for key in (path[-1], True if path[-1] == "true" else None):
            if key in document:
                return True, document.pop(key)
    if isinstance(document, list) and isinstance(path[-1], int):
        value, document[path[-1]] = document[path[-1]], GONE  # so that other items keep their places
        return True, value
    return False, None


def _put(document: Any, path: tuple[PathPart, ...], value: Any) -> None:
    for part, inner in pairwise(path):
        form = dict | list if isinstance(inner, int) else dict
        if isinstance(document, dict) and not isinstance(document.get(part), form):
            document[part] = {}
        document = document[part]
    document[path[-1]] = value


def without_gone(value: Any) -> Any:
    """Return the document without removed items of lists."""
    if isinstance(value, dict):
        return {name: without_gone(inner) for name, inner in value.items()}
    return [without_gone(each) for each in value if each is not GONE] if isinstance(value, list) else value


def mend(
    document: dict[str, Any], problems: list[Problem], by_hand: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return the document with the first alternative for each problem, and the paths with an edit from `by_hand`."""
    used = set()
    for problem in problems:
        if problem.path in by_hand:
            used.add(problem.path)
            edits = by_hand[problem.path]
            document = apply(document, [Edit(field, value) for field, value in _edits(problem.path, edits).items()])
            continue
        ways = alternatives(problem)
        assert ways, f"no hint can be followed: {problem.path}: {problem.hint}"
        document = apply(document, ways[0])
    return without_gone(document), used


def _edits(path: str, given: Any) -> dict[str, Any]:
    """Return edits by path, from a value for the blamed field or from such edits."""
    by_path = isinstance(given, dict) and given and all(str(name).startswith(("spec.", "metadata.")) for name in given)
    return given if by_path else {path: given}


def job_document(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small job with these fields of its spec; None omits a field."""
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://a/b"},
        "dataset": {"uri": "hf://c/d"},
        "training": {},
        **spec,
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "a"},
        "spec": {name: value for name, value in whole.items() if value is not None},
    }


@contextmanager
def created_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, int]]]:
    """Collect the files and lines that create problems meanwhile."""
    reached: set[tuple[str, int]] = set()
    create = Problem.__init__

    def created(problem: Problem, *values: Any, **named: Any) -> None:
        caller = sys._getframe(1)
        reached.add((caller.f_code.co_filename, caller.f_lineno))
        create(problem, *values, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Problem, "__init__", created)
        yield reached


def missed_calls(module: ModuleType, reached: Collection[tuple[str, int]]) -> list[str]:
    """Return the file and line of each call in the module that creates a problem and was not reached."""
    file = Path(str(module.__file__))
    calls = [
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"
    ]
    assert calls
    lines = [(call.lineno, range(call.lineno, (call.end_lineno or call.lineno) + 1)) for call in calls]
    return [f"{file.name}:{first}" for first, call in lines if not any((str(file), line) in reached for line in call)]
