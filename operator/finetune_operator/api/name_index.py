"""Places of names in the API, and of words that mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from finetune_contract.arguments import FREE
from finetune_operator.api.field_names import plain
from finetune_operator.api.meant_words import meaning
from finetune_operator.api.problems import PathPart
from finetune_operator.api.shapes import (
    Fields,
    Shape,
    leaves,
    spec_shape,
)
from finetune_operator.api.support import served_words, works

MEANINGLESS_ALONE = ("name", "key", "path", "url", "ref", "enabled", "degree")
"""Names of fields that are meaningless without their object."""


@cache
def _word_places() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return, by plain word, the fields of the spec that have it among their fixed words."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for place, shape in leaves(spec_shape()).items():
        for word in served_words(place, shape.words):
            if word not in ("auto", "none") and works(place):
                found[plain(word)] = (*found.get(plain(word), ()), (f"spec.{place}", word))
    return found


def place_of_word(value: str) -> tuple[str, str] | None:
    """Return the one field with a word of this value, and the word; None: there is none, or several."""
    found = _word_places().get(plain(value), ())
    return found[0] if len(found) == 1 else None


@cache
def words_by_place() -> Mapping[tuple[str, ...], tuple[frozenset[str], frozenset[str]]]:
    """Return, by the path of each field of the spec, the words of the whole path and those of its last part."""
    places = {place for each in places_by_name().values() for place in each if place != ("spec",)}
    return {place: (frozenset().union(*map(meaning, place[1:])), meaning(place[-1])) for place in sorted(places)}


@cache
def places_by_name() -> Mapping[str, tuple[tuple[str, ...], ...]]:
    """Return the paths of the spec's fields by their plain names, without those that have no behaviour yet."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}

    def walk(shape: Shape, path: tuple[str, ...]) -> None:
        for name, inner in shape.body.fields.items() if isinstance(shape.body, Fields) else ():
            if name in MEANINGLESS_ALONE or not works(".".join((*path, name)[1:])):
                continue
            found[plain(name)] = (*found.get(plain(name), ()), (*path, name))
            walk(inner, (*path, name))

    walk(spec_shape(), ("spec",))
    found["spec"] = (("spec",),)
    return found


def places_elsewhere(name: str, path: Sequence[PathPart]) -> tuple[tuple[str, ...], ...]:
    """Return the highest places of the spec with a field of that name, without the one that was tried; those inside the
    object with the name take precedence.
    """
    above = tuple(path[:-1])
    places = tuple(place for place in places_by_name().get(plain(name), ()) if place[:-1] != above)
    inside = tuple(place for place in places if place[: len(above)] == above) if len(above) > 1 else ()
    places = inside or places
    least = min((len(place) for place in places), default=0)
    return tuple(place for place in places if len(place) == least)


def place_of(name: str, above: Sequence[PathPart]) -> str | None:
    """Return the dotted path of the one field of the spec with this name, misplaced in the object at `above`."""
    places = places_elsewhere(name, (*above, name))
    if len(places) == 1:
        return ".".join(places[0])
    argument = free_argument(name)
    return None if argument is None else f"spec.training.arguments.{argument}"


def free_argument(name: str) -> str | None:
    """Return the free field of TrainingArguments with that name."""
    return _free_arguments().get(plain(name))


@cache
def _free_arguments() -> Mapping[str, str]:
    return {plain(name): name for name in FREE}
