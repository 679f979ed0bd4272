"""Other tools' names for the fields and values of a FineTuneJob: one table, for messages and for documentation.

People bring configurations of Hugging Face (transformers, TRL, peft, accelerate), axolotl, LLaMA-Factory, DeepSpeed and
Kubernetes. A name of theirs that is no field here, or a value that a field does not accept, is answered with its
replacement. Each row points to an existing field, or gives an instruction if there is no counterpart; a test checks
both. Nothing here is accepted in place of our own names: `copied` lists the accepted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_cluster_names import CLUSTER_NAMES
from finetune_operator.api.foreign_data_names import DATA_NAMES
from finetune_operator.api.foreign_rows import NOTHING, SPLITS, ForeignName, ForeignValue
from finetune_operator.api.foreign_training_names import TRAINING_NAMES
from finetune_operator.api.foreign_values import VALUES

NAMES: tuple[ForeignName, ...] = (*DATA_NAMES, *TRAINING_NAMES, *CLUSTER_NAMES)


@cache
def _names() -> Mapping[str, tuple[ForeignName, ...]]:
    found: dict[str, tuple[ForeignName, ...]] = {}
    for row in NAMES:
        for name in row.names:
            found[plain(name)] = (*found.get(plain(name), ()), row)
    return found


@cache
def _values() -> Mapping[tuple[str, str], ForeignValue]:
    return {(row.field, plain(str(name))): row for row in VALUES for name in row.names}


def written(
    row: ForeignName, given: JsonValue, *, hub: bool, beside: Mapping[str, JsonValue] = NOTHING
) -> Mapping[str, JsonValue]:
    """Convert the value given under the name of a row into values by field.

    `hub`: the data are on the Hub, whose splits have slices. `beside`: the object that contains the name. Empty result:
    it cannot be converted.
    """
    if row.writes_beside is not None and (found := row.writes_beside(given, beside)):
        return found
    converted = row.writes(given) if row.writes is not None else {}
    sliced = any(field.startswith(SPLITS) and "[" in str(value) for field, value in converted.items())
    return {} if sliced and not hub else converted


def find_name(name: str, parent: str) -> ForeignName | None:
    """Return the row of a name in the object `parent` (empty: the document); one with `under` takes precedence."""
    rows = _names().get(plain(name), ())
    fitting = [row for row in rows if not row.under or parent in row.under]
    return min(fitting, key=lambda row: not row.under, default=None)


def find_value(path: str, value: JsonValue) -> ForeignValue | None:
    """Return the row of a value that the field at the dotted `path` does not accept."""
    if not isinstance(value, str | bool | int):
        return None
    found = _values().get((path, plain(str(value))))
    if found is None and isinstance(value, str) and (switched := _SWITCHES.get(plain(value))) is not None:
        return _values().get((path, switched))
    return found


_SWITCHES: Mapping[str, str] = {
    **dict.fromkeys(("enabled", "enable", "on", "yes"), "true"),
    **dict.fromkeys(("disabled", "disable", "off", "no", "never"), "false"),
}
"""Word -> the boolean that it stands for, as `plain` writes it."""
