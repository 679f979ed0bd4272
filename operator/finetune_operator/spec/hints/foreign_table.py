"""Other tools' names for fields and values of a FineTuneJob, for messages and docs: `spec/tables/foreign_names.yaml`.

Nothing here is accepted in place of our own names: `checks/copied_settings.py` lists the accepted ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import JsonValue

from finetune_operator.spec import tables
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.hint_values import Drop, Hint, ReplaceBy, SetTo
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.tables.machine_types import TYPE_LABEL, gpus_of

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
        values = convert(self.convert, given, beside) if self.convert else {}
        sliced = any(name.startswith("spec.dataset.splits.") and "[" in str(value) for name, value in values.items())
        return {} if sliced and not on_hub else values


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
        ValueRow("spec.launcher", launcher.foreign_names, launcher.foreign_tools, launcher.name)
        for launcher in SUPPORTED
        if launcher.foreign_names
    )
    return (*(ValueRow(**row) for row in _table()["values"]), *launchers)


@cache
def _rows_by_name() -> Mapping[str, tuple[NameRow, ...]]:
    rows: dict[str, tuple[NameRow, ...]] = {}
    for row in name_rows():
        for name in row.names:
            rows[plain(name)] = (*rows.get(plain(name), ()), row)
    return rows


@cache
def _rows_by_value() -> Mapping[tuple[str, str], ValueRow]:
    return {(row.field, plain(str(value))): row for row in value_rows() for value in row.values}


def find_name(name: str, parent: str) -> NameRow | None:
    """Return the row of a name in the object `parent` (empty: the document); one with `under` takes precedence."""
    fitting = [row for row in _rows_by_name().get(plain(name), ()) if not row.under or parent in row.under]
    return min(fitting, key=lambda row: not row.under, default=None)


def find_value(path: str, value: JsonValue) -> ValueRow | None:
    """Return the row of a value that the field at the dotted `path` does not accept."""
    if not isinstance(value, str | bool | int):
        return None
    word = plain(str(value))
    return _rows_by_value().get((path, word)) or _rows_by_value().get((path, _SWITCHES.get(word, "")))


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
        column: [name for entry in names for name in ([entry] if isinstance(entry, str) else entry)]
        for column, names in columns.items()
    }


def column_called(task: JsonValue, name: str) -> str | None:
    """Return the column of a task that another tool, or another task, calls `name`; None: there is none."""
    bare = plain(name)
    for ending in ("columnname", "column", "field"):
        bare = bare.removesuffix(ending)
    return next((column for column, others in columns_of(task).items() if bare in map(plain, (column, *others))), None)


def marks_of_tools() -> Mapping[str, Sequence[str]]:
    """Return the names that identify a configuration of another tool, by tool."""
    marks: Mapping[str, Sequence[str]] = _table()["marks"]
    return marks


def other_metric_names() -> Mapping[str, str]:
    """Return the names of metrics in Hugging Face's `evaluate` by other common ones."""
    names: Mapping[str, str] = _table()["metrics"]
    return names


# ------------------------------------------------------------------------------------- values under another tool's name

Values = Mapping[str, JsonValue]
_SPLITS = "spec.dataset.splits."
_GPUS = "spec.resources.gpusPerNode"
_COLUMNS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    "chattemplate": {"messages": "messages"}, "sharegpt": {"messages": "conversations"},
    "completion": {"text": "text"},
}  # fmt: skip
"""Type of a data set in axolotl -> its columns. Rows of alpaca have two of input, which a job joins first."""
_CLAIM_NAME = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"


def convert(conversion: str, given: JsonValue, beside: Values) -> Values:
    """Return the values by dotted path that a conversion, with its arguments, makes of one; empty: it has none."""
    name, *arguments = conversion.split()
    return _CONVERSIONS[name](given, beside, *arguments)


def _held_out(given: JsonValue, _beside: Values, role: str) -> Values:
    """Split the rows of a role, given as a fraction (0.2) or a percentage (20), off the end of the split train."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return {}
    percent = round(100 * given) if given < 1 else round(given)
    if not 0 < percent < 100:
        return {}
    kept = 100 - percent
    return {f"{_SPLITS}train": f"train[:{kept}%]", f"{_SPLITS}{role}": f"train[{kept}%:]"}


_DATA_FILE = re.compile(
    r"(?P<scheme>file://|pvc://)?(?![A-Za-z][\w+.-]*:)(?P<folder>.*/)?(?P<stem>[^/]+?)"
    r"\.(?:jsonl?|csv|tsv|txt|parquet|arrow)(?:\.\w+)?"
)
"""Path of a file with rows, of no other scheme."""
_OTHER_FILES = re.compile(r"(?:validation|valid|val|dev|eval|evaluation|test)(?:file|files|data|dataset|path|uri|set)?")
"""Names of the files beside that of the train split, as `plain` writes them."""


def _data_file(given: JsonValue, beside: Values, role: str) -> Values:
    """Convert the file of a split into the folder of all files and the split's name there, and a train file alone into
    its address.
    """
    match = _DATA_FILE.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        return {}
    split: Values = {f"{_SPLITS}{role}": match["stem"]}
    if role != "train":
        return split
    scheme = match["scheme"] or "file://"
    if not any(_OTHER_FILES.fullmatch(plain(name)) for name in beside):
        return {"spec.dataset.uri": f"{scheme}{str(given).removeprefix(scheme).removeprefix('./')}"}
    folder = (match["folder"] or "").removeprefix("./").removesuffix("/") or ("/" if match["folder"] == "/" else "./")
    return {"spec.dataset.uri": f"{scheme}{folder}", **split}


def _data_sets(given: JsonValue, _beside: Values) -> Values:
    """Convert axolotl's list of one data set: its address, and the columns that its type means."""
    match given:
        case [{"path": str(path), **others}]:
            kind = str(others.get("type", "")).split(".")[0].split(":")[0]
            columns = dict(_COLUMNS_OF_TYPES.get(plain(kind), {}))
            if isinstance(named := others.get("field_messages"), str) and "messages" in columns:
                columns["messages"] = named
            uri = path if "://" in path else f"hf://{path}"
            return {"spec.dataset.uri": uri} | {f"spec.dataset.columns.{role}": name for role, name in columns.items()}
    return {}


def _config_name(given: JsonValue, beside: Values) -> Values:
    """Convert the name of a data set whose address stands beside it: it is that of its configuration."""
    named = any(isinstance(beside.get(address), str) for address in ("uri", "path", "id", "repo", "repo_id"))
    return {"spec.dataset.config": given} if named and isinstance(given, str) and "/" not in given else {}


_CLAIM_NAMES = frozenset({"pvc", "pvcname", "claim", "claimname", "persistentvolumeclaim", "volumeclaim"})
_CLAIM_PATHS = frozenset({"path", "subpath", "folder", "dir", "directory", "file", "pathinclaim"})


def _claim_of(given: JsonValue, beside: Values, block: str) -> Values:
    """Convert a claim, with a path beside or below it, into the URI of a block."""
    if isinstance(given, dict):
        beside = {"claimName": given.get("name")} | given
    claim = next((value for name, value in beside.items() if plain(name) in _CLAIM_NAMES), None)
    if not isinstance(claim, str) or not re.fullmatch(_CLAIM_NAME, claim):
        return {}
    rest = str(next((value for name, value in beside.items() if plain(name) in _CLAIM_PATHS), "")).strip("/")
    return {f"spec.{block}.uri": f"pvc://{claim}/{rest}".rstrip("/")} if "://" not in rest else {}


def _on_instances(given: JsonValue, beside: Values) -> Values:
    """Convert a type of machine into a selector of its nodes, and into their GPUs where its name tells them."""
    named = given.removeprefix("ml.") if isinstance(given, str) else ""  # Nodes outside SageMaker have no such prefix.
    selector: Values = {"spec.template.nodeSelector": {TYPE_LABEL: named}} if named else {}
    gpus = gpus_of(named)
    told = any(plain(name).startswith("gpu") or plain(name) in ("numgpus", "ngpus") for name in beside)
    return selector if gpus is None or told else {**selector, _GPUS: gpus}


_CONVERSIONS: Mapping[str, Callable[..., Values]] = {
    "held_out": _held_out, "data_file": _data_file, "data_sets": _data_sets, "config_name": _config_name,
    "claim_of": _claim_of, "on_instances": _on_instances,
}  # fmt: skip
