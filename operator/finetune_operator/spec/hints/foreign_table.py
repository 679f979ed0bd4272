"""Other tools' names for fields and values of a FineTuneJob, for messages and docs: `spec/tables/foreign_names.yaml`.

Nothing here is accepted in place of our own names: `copied` lists the accepted ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import JsonValue

from finetune_operator.spec import tables
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.hint_values import Drop, Hint, ReplaceBy, SetTo
from finetune_operator.spec.hints.conversions import convert
from finetune_operator.spec.launcher_rows import SUPPORTED

_EVERYBODY = "Hugging Face, axolotl, LLaMA-Factory"


@dataclasses.dataclass(frozen=True)
class NameRow:
    """Names for one setting, and the field with its meaning."""

    names: Sequence[str]
    tools: str = _EVERYBODY
    under: Sequence[str] = ()
    """Names of the object that must contain it (empty text: the document); empty: any."""
    field: str = ""
    """Dotted path from the document; empty: there is no counterpart, and `none` or `advice` says why."""
    value: JsonValue = None
    """Value to write there, if the name itself implies it; None: the given value, if the field accepts it."""
    same: bool = True
    """True if the given value can be written there."""
    convert: str = ""
    """Conversion in `conversions`, with its arguments, of the given value into values by field."""
    note: str = ""
    none: str = ""
    """Reason to leave it out."""
    advice: str = ""

    @property
    def answer(self) -> Hint:
        """Hint where the row has no field."""
        return Drop(self.none) if self.none else self.advice

    def converted(self, given: JsonValue, beside: Mapping[str, JsonValue], on_hub: bool) -> Mapping[str, JsonValue]:
        """Return values by field for the given one; empty: there is no conversion, or it has none for this value.

        `beside`: the object that contains the name. `on_hub`: the data are on the Hub, whose splits have slices.
        """
        found = convert(self.convert, given, beside) if self.convert else {}
        sliced = any(name.startswith("spec.dataset.splits.") and "[" in str(value) for name, value in found.items())
        return {} if sliced and not on_hub else found


@dataclasses.dataclass(frozen=True)
class ValueRow:
    """Values that a field does not accept, and their equivalents."""

    field: str
    values: Sequence[str | bool]
    tools: str = _EVERYBODY
    value: JsonValue = None
    """Accepted value of the field; None: there is none."""
    set: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    """Values by dotted path, if it takes several fields or another one."""
    note: str = ""
    none: str = ""
    advice: str = ""

    @property
    def sets(self) -> Mapping[str, JsonValue]:
        """Values by dotted path."""
        return self.set if self.value is None else {self.field: self.value}

    @property
    def answer(self) -> Hint:
        """Hint for one of the values in the field."""
        if self.value is not None:
            return ReplaceBy(self.value, self.note)
        return SetTo(self.set, self.note) if self.set else Drop(self.none) if self.none else self.advice


def _table() -> Mapping[str, Any]:
    return tables.document("foreign_names.yaml")


@cache
def name_rows() -> tuple[NameRow, ...]:
    return tuple(NameRow(**row) for row in _table()["names"])


@cache
def value_rows() -> tuple[ValueRow, ...]:
    launchers = (
        ValueRow("spec.launcher", each.foreign_names, each.foreign_tools, each.name)
        for each in SUPPORTED
        if each.foreign_names
    )
    return (*(ValueRow(**row) for row in _table()["values"]), *launchers)


@cache
def _names() -> Mapping[str, tuple[NameRow, ...]]:
    found: dict[str, tuple[NameRow, ...]] = {}
    for row in name_rows():
        for name in row.names:
            found[plain(name)] = (*found.get(plain(name), ()), row)
    return found


@cache
def _values() -> Mapping[tuple[str, str], ValueRow]:
    return {(row.field, plain(str(value))): row for row in value_rows() for value in row.values}


def find_name(name: str, parent: str) -> NameRow | None:
    """Return the row of a name in the object `parent` (empty: the document); one with `under` takes precedence."""
    fitting = [row for row in _names().get(plain(name), ()) if not row.under or parent in row.under]
    return min(fitting, key=lambda row: not row.under, default=None)


def find_value(path: str, value: JsonValue) -> ValueRow | None:
    """Return the row of a value that the field at the dotted `path` does not accept."""
    if not isinstance(value, str | bool | int):
        return None
    word = plain(str(value))
    return _values().get((path, word)) or _values().get((path, _SWITCHES.get(word, "")))


_SWITCHES: Mapping[str, str] = {
    **dict.fromkeys(("enabled", "enable", "on", "yes"), "true"),
    **dict.fromkeys(("disabled", "disable", "off", "no", "never"), "false"),
}
"""Word -> the boolean that it stands for, as `plain` writes it."""


def columns_of(task: JsonValue) -> Mapping[str, Sequence[str]]:
    """Return the columns that a task reads, in the order of the data, with other tools' names for each; empty: it is no
    task.
    """
    columns: Mapping[str, Sequence[str | Sequence[str]]] = _table()["columns"].get(str(task), {})
    return {
        own: [name for each in names for name in ([each] if isinstance(each, str) else each)]
        for own, names in columns.items()
    }


def column_called(task: JsonValue, name: str) -> str | None:
    """Return the column of a task that another tool, or another task, calls `name`; None: there is none."""
    bare = plain(name)
    for ending in ("columnname", "column", "field"):
        bare = bare.removesuffix(ending)
    return next((own for own, others in columns_of(task).items() if bare in map(plain, (own, *others))), None)


def marks_of_tools() -> Mapping[str, Sequence[str]]:
    """Return the names that identify a configuration of another tool, by tool."""
    found: Mapping[str, Sequence[str]] = _table()["marks"]
    return found
