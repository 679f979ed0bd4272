"""Names of labels: as the rows have them, and as the job maps them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from finetune_trainer.core.failures import first_of
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.tasks.head_labels import assumed_note, spelled, unnamed
from finetune_trainer.tasks.row_checks import class_names, is_text, row_error

PATH = "dataset.columns.label"
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,8}")


def names_of(split: RawSplit, column: str, every: Sequence[Any], values: Sequence[Any]) -> tuple[str, ...]:
    """Return the names by all labels of the split; `values`: those of each row, for an error."""
    distinct = set(every)
    numbers = {label: int(label) for label in distinct if isinstance(label, int) or _WHOLE_NUMBER.fullmatch(label)}
    if len(numbers) < len(distinct):
        return tuple(sorted(distinct))
    ids = set(numbers.values())
    count = next(i for i in range(len(ids) + 1) if i not in ids)
    if 1 < count < len(ids) and ids != _SIGNS:
        odd = [
            any(not 0 <= numbers[one] < count for one in (value if isinstance(value, list) else [value]))
            for value in values
        ]
        row = odd.index(True)
        rule = f"class ids count from 0 without gaps, and no row has {count}"
        raise row_error("LabelOutOfRange", split, row, PATH, column, values[row], rule, _labels_hint(sorted(ids)))
    return tuple(str(number) for number in sorted(ids))


_SIGNS = {-1, 0, 1}
"""Labels of opinions: against, neutral, for."""


def _labels_hint(labels: Sequence[object]) -> str:
    example = ", ".join(f'"{label}": NAME' for label in labels[:3]) + (", ..." if len(labels) > 3 else "")
    return f"Correct the row, or name all values in dataset.labels: {{{example}}}."


def numbers_note(split: RawSplit, column: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note that whole numbers which are no class ids are taken as names."""
    ids = names[0] == "0" and names[-1] == str(len(names) - 1)
    if ids or not all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        return ()
    example = ", ".join(f'"{name}": NAME' for name in names[:2]) + (", ..." if len(names) > 2 else "")
    return (
        f"Split {split.name} ({split.origin}): the labels {first_of(names, 8)} in column {column!r} are used as names "
        f"of classes. Set dataset.labels to rename them: {{{example}}}.",
    )


def similar_note(split: RawSplit, column: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on labels that are different classes by capitals or spaces at their ends alone."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.strip().casefold(), []).append(name)
    similar = next((group for group in alike.values() if len(group) > 1), None)
    if similar is None:
        return ()
    shown = ", ".join(map(repr, similar[:4]))
    example = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {similar[0].strip()}" for name in similar[:4])
    return (
        f"Split {split.name} ({split.origin}): the labels {shown} in column {column!r} differ only in "
        "capitals or spaces and are different classes. If they are one, set dataset.labels for all values: "
        f"{{{example}, ...}}.",
    )


def whole_numbers_note(split: RawSplit, column: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note that whole numbers with a decimal point, `names` as `dataset.labels` would have them, are learnt as
    numbers.
    """
    example = ", ".join(f'"{name}": NAME' for name in names[:2]) + (", ..." if len(names) > 2 else "")
    return (
        f"Split {split.name} ({split.origin}): column {column!r} holds {len(names)} whole numbers as fractions, which "
        f"are learnt as numbers (regression). For classes, set dataset.labels: {{{example}}}.",
    )


def mapped_names(given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names in `dataset.labels`, in the order of their ids: that of the values, whole numbers by size."""
    whole = all(_WHOLE_NUMBER.fullmatch(value) for value in given)
    return tuple(dict.fromkeys(given[value] for value in sorted(given, key=int if whole else str)))


def mapped(split: RawSplit, column: str, values: Sequence[Any], given: Mapping[str, str]) -> list[Any]:
    """Map labels to their names in `dataset.labels`; raise StageError DATA `UnknownLabel` for the first row whose value
    it lacks.
    """
    classes = class_names(split, column)

    def name(row: int, value: Any) -> str:
        text = str(value)
        if classes is not None and text not in given and isinstance(value, int) and 0 <= value < len(classes):
            text = classes[value]
        if text not in given:
            rule = f"dataset.labels names {first_of(sorted(given), 8)}"
            hint = f"Add {json.dumps(text, ensure_ascii=False)} to dataset.labels, or correct the row."
            raise row_error("UnknownLabel", split, row, PATH, column, value, rule, hint)
        return given[text]

    return [
        list(dict.fromkeys(name(row, one) for one in value)) if isinstance(value, list) else name(row, value)
        for row, value in enumerate(values)
    ]


def unused_note(split: RawSplit, column: str, values: Sequence[Any], given: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on names in `dataset.labels` that no row has; `values`: the result of `mapped`."""
    there = set(flat(values))
    unused = [name for name in mapped_names(given) if name not in there]
    if not unused:
        return ()
    return (
        f"Split {split.name} ({split.origin}): dataset.labels has {first_of(unused, 8)}, and no row has such a "
        f"label in column {column!r}: the model cannot learn it.",
    )


def separated(split: RawSplit, column: str, separator: str) -> RawSplit:
    """Return the labels alone, with the list of its labels for each text: parts without blanks around them, each once.

    Raise StageError DATA `LabelType` for a column that is not text.
    """
    values = split.table[column]
    if not is_text(values.type):
        rule = f"dataset.labelSeparator separates labels in a text, and the column is of type {values.type}"
        raise row_error(
            "LabelType", split, 0, PATH, column, values[0].as_py(), rule, "Leave dataset.labelSeparator out."
        )
    lists = [None if text is None else [*dict.fromkeys(_parts(text, separator))] for text in values.to_pylist()]
    return replace(split, source=pa.table({column: pa.array(lists, pa.list_(pa.string()))}))


def separator_hint(names: Sequence[str]) -> str:
    """Return advice on names that consist of fewer labels, which they repeat, by a common separator; else nothing."""
    for separator in ",;|":
        parts = {part for name in names for part in _parts(name, separator)}
        if any(separator in name for name in names) and len(parts) < len(names):
            return f'If a text holds several labels, set dataset.labelSeparator: "{separator}".'
    return ""


def separator_note(split: RawSplit, column: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on classes whose names seem to be several labels each."""
    hint = separator_hint(names)
    if not hint:
        return ()
    return (
        f"Split {split.name} ({split.origin}): the {len(names)} labels in column {column!r} repeat each other's parts, "
        f"and are different classes: {first_of(names, 8)}. {hint}",
    )


def _parts(text: str, separator: str) -> list[str]:
    return [part for part in map(str.strip, text.split(separator)) if part]


def absent_note(split: RawSplit, counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note on labels without rows in a split with `counts` of each, on which the model is measured."""
    absent = [name for name, count in counts.items() if not count]
    if not absent or len(absent) == len(counts):
        return ()
    return (
        f"Split {split.name} ({split.origin}): {len(absent)} of {len(counts)} labels have no row, "
        f"{first_of(absent, 8)}. f1, precision and recall are means without those that are not predicted either.",
    )


def flat(values: Sequence[Any]) -> list[Any]:
    """Return the labels of all rows, which may be lists."""
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def positions(split: RawSplit, column: str, every: Sequence[Any], names: Sequence[str]) -> dict[Any, int]:
    """Return label as given -> its id. The number of a class that the data set names has the id of that name."""
    place: dict[Any, int] = {name: i for i, name in enumerate(names)}
    distinct, classes = set(every), class_names(split, column)
    if all(isinstance(label, str) for label in distinct):
        if distinct & place.keys() or not distinct <= {str(i) for i in range(len(names))}:
            return place
        return {str(i): i for i in range(len(names))}  # class ids as in a CSV file
    if classes is not None and (place.keys() & {*classes} or not _numbered(names)):
        return {number: place[name] for number, name in enumerate(classes) if name in place}
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        return {int(name): i for i, name in enumerate(names)}
    return {i: i for i in range(len(names))}


def names_in(
    split: RawSplit, column: str, every: Sequence[Any], head: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels of a `head` that is not trained as the data spell them, and a note if their order alone says
    which label a class id is. `every`: the labels of all rows.
    """
    words = {label for label in every if isinstance(label, str)}
    classes = () if words else class_names(split, column) or ()
    names = spelled(head, classes or words)
    are_numbers = len(every) > 0 and all(map(_WHOLE_NUMBER.fullmatch, words))
    if not are_numbers or {*names} & {*classes, *words} or _numbered(head) != bool(classes):
        return names, ()
    return names, (assumed_note(head, classes),)


def _numbered(names: Sequence[str]) -> bool:
    """Return whether labels have no names beyond numbers."""
    return unnamed(names) or all(map(_WHOLE_NUMBER.fullmatch, names))
