"""Fields of the spec by their names, by the words of their paths, and beside a field of a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from pydantic import JsonValue

from finetune_contract.arguments import FREE
from finetune_contract.metrics import METRICS
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.fields.shapes import Fields, Items, Map, Shape, find, spec_shape
from finetune_operator.spec.fields.support import works
from finetune_operator.spec.fields.uri_hints import on_hub
from finetune_operator.spec.hints.foreign_table import find_value
from finetune_operator.spec.problems import PathPart

MEANINGLESS_ALONE = ("name", "key", "path", "url", "ref", "enabled", "degree")
"""Names of fields that are meaningless without their object."""
_SYNONYMS: Mapping[str, str] = {
    "interval": "every", "frequency": "every", "num": "", "number": "", "of": "", "the": "", "last": "", "count": "",
    "quality": "",
}  # fmt: skip
"""Word of a name -> the word of ours; empty: it has no meaning by itself."""


def dotted(path: Sequence[PathPart]) -> str:
    return ".".join(map(str, path))


def shape_at(field: str) -> Shape | None:
    """Return the shape of a field of the spec by its dotted path from the document; None: there is none."""
    head, *rest = field.split(".")
    return find(spec_shape(), rest) if head == "spec" else None


def is_block(field: str) -> bool:
    """Return True if the spec has an object or a list there."""
    shape = shape_at(field)
    return shape is not None and isinstance(shape.body, Fields | Map | Items)


def words_of(name: str) -> list[str]:
    """Return the words of a name in either spelling, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]


def _meaning(name: str) -> frozenset[str]:
    """Return the words of a name by which it is compared with others."""
    words = (_SYNONYMS.get(word, word) for word in words_of(name))
    return frozenset(word.removesuffix("s") for word in words if word)


@cache
def fields_by_name() -> Mapping[str, tuple[str, ...]]:
    """Return the dotted paths of the spec's fields by their plain names, without those that have no behaviour yet."""
    places_by_name: dict[str, list[str]] = {"spec": ["spec"]}
    for place, _ in _below(spec_shape(), "spec"):
        places_by_name.setdefault(plain(place.rpartition(".")[2]), []).append(place)
    return {name: tuple(places) for name, places in places_by_name.items()}


def _below(shape: Shape, path: str) -> Iterator[tuple[str, Shape]]:
    for name, inner in shape.body.fields.items() if isinstance(shape.body, Fields) else ():
        place = f"{path}.{name}"
        if name not in MEANINGLESS_ALONE and works(place.removeprefix("spec.")):
            yield place, inner
            yield from _below(inner, place)


def namesakes(path: Sequence[PathPart]) -> tuple[str, ...]:
    """Return the dotted paths of the spec's fields with the name at the end of a path, but not in the same object: the
    nearest ones, that is, those that share most steps with the path, and of these the highest ones.
    """
    *above, name = map(str, path)
    places = [place for place in fields_by_name().get(plain(name), ()) if place.split(".")[:-1] != above]
    return _nearest(places, above)


def _nearest(places: Sequence[str], above: Sequence[str]) -> tuple[str, ...]:
    def shared(place: str) -> int:
        steps = place.split(".")
        return next((at for at, pair in enumerate(zip(steps, above, strict=False)) if pair[0] != pair[1]), len(above))

    # A field beside `spec`, or right below it, is near to none.
    def order(place: str) -> tuple[int, int]:
        return (-shared(place) if shared(place) >= 2 else 0, place.count("."))

    best = min(map(order, places), default=None)
    return tuple(place for place in places if order(place) == best)


def field_by_words(path: Sequence[PathPart]) -> str | None:
    """Return the one field whose path has all words of the name at the end of a path, such as `gateMinimum` and
    `adapterRank`: below the object with the name, or anywhere. None: there is none, or several, or the one word is in
    the names of several fields.
    """
    words, above = _meaning(str(path[-1])), tuple(map(str, path[:-1]))
    for inside in (True, False) if len(above) > 1 else (False,):
        places = [
            place
            for steps, place, whole, last in _words_of_fields()
            if words & last and words <= whole and (not inside or steps[: len(above)] == above)
        ]
        if not inside and len(words) == 1 and len(places) > 1:
            return None
        least = min((place.count(".") for place in places), default=0)
        nearest = [place for place in places if place.count(".") == least]
        if len(nearest) == 1:
            return nearest[0]
    return None


@cache
def _words_of_fields() -> tuple[tuple[tuple[str, ...], str, frozenset[str], frozenset[str]], ...]:
    """Return, for each field that is no object of names of the user's: steps, dotted path, words of the path and of its
    last part.
    """
    return tuple(
        (steps, place, frozenset[str]().union(*map(_meaning, steps[1:])), _meaning(steps[-1]))
        for place, shape in _below(spec_shape(), "spec")
        if not isinstance(shape.body, Map)
        for steps in (tuple(place.split(".")),)
    )


@cache
def free_arguments() -> Mapping[str, str]:
    """Return the names that `training.arguments` takes, by their plain names."""
    return {plain(name): name for name in FREE}


def has_fields(field: str, value: Mapping[str, JsonValue]) -> bool:
    """Return True if an object consists of fields that ours at the dotted path has."""
    shape = shape_at(field)
    if not value or shape is None:
        return False
    free = isinstance(shape.body, Map) and field.endswith(".hyperparameters")
    return free or (isinstance(shape.body, Fields) and value.keys() <= shape.body.fields.keys())


def shares_fields(field: str, value: Mapping[str, JsonValue]) -> bool:
    """Return True if an object has a field, in any spelling, that ours at the dotted path has."""
    shape = shape_at(field)
    fields = shape.body.fields if shape is not None and isinstance(shape.body, Fields) else {}
    return bool(set(map(plain, fields)) & set(map(plain, value)))


@dataclass(frozen=True)
class FieldContext:
    """Other fields of a job."""

    task: JsonValue = None
    """Task that the job means: column names depend on it."""
    data: JsonValue = None
    """URI of the data."""
    beside: Mapping[str, JsonValue] = field(default_factory=dict)
    """Object with the field."""

    @property
    def hub(self) -> bool:
        """True if the data are on the Hub, whose splits have slices."""
        return on_hub(self.data)


NOTHING_AROUND = FieldContext()


def around(path: Path, spec: JsonValue) -> FieldContext:
    """Return the fields of a spec on which the meaning of the field at `path` depends."""
    task, columns = value_at(spec, ("task",)), value_at(spec, ("dataset", "columns"))
    if task == "question-answering" and isinstance(columns, dict) and "context" not in columns and "prompt" in columns:
        task = "text-generation"  # A prompt and its answer, from a data set without texts that contain the answer.
    above = value_at(spec, path[:-1])
    beside = above if isinstance(above, dict) else {}
    return FieldContext(meant_task(task), value_at(spec, ("dataset", "uri")), beside)


def meant_task(task: JsonValue) -> JsonValue:
    """Return the task that a foreign or misspelt one, or one word of a name such as `llm-finetuning`, means; the same
    value if there is none.
    """
    row = find_value("spec.task", task)
    if row is not None:
        return row.sets.get("spec.task", task)
    words = task.lower() if isinstance(task, str) else ""
    rows = [find_value("spec.task", word) for word in re.split(r"[^a-z0-9]+", words)]
    tasks = {str(row.value) for row in rows if row is not None and row.value is not None}
    near = difflib.get_close_matches(words, METRICS, n=1, cutoff=0.6 if len(tasks) != 1 else 0.8)
    return near[0] if near else tasks.pop() if len(tasks) == 1 else task
