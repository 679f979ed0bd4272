"""Errors of rows and columns, with the same wording for all tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic.alias_generators import to_camel

from finetune_contract.data_settings import Columns
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import ColumnNeed, RawSplit

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_text(kind: pa.DataType) -> bool:
    """Return whether it is a text type of Arrow."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether it is a list type of Arrow."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def class_names(feature: object) -> tuple[str, ...] | None:
    """Return the names of the classes that a Hub data set declares; None for another feature."""
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def shown_names(names: Sequence[str]) -> str:
    """Return the known label names, for an error."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") + f" (ids 0 to {len(names) - 1})"


def not_set(path: str, content: str) -> StageError:
    """Return the error for a column that has to be named."""
    return StageError(FailureClass.CONFIG, "MissingSetting", f"{path} is not set; it names {content}.", f"Set {path}.")


def refuse_other_columns(columns: Columns, setting: str, allowed: Collection[str], rule: str) -> None:
    """Raise StageError CONFIG for columns of other tasks, which nothing reads. `rule` names the task's columns."""
    for name, value in columns:
        if value is not None and name not in allowed:
            path = f"{setting}.columns.{name}"
            raise StageError(
                FailureClass.CONFIG, "ColumnOfAnotherTask", f"{path} is {value!r}; {rule}.", f"Leave {path} out."
            )


def needed_columns(
    columns: Columns,
    setting: str,
    contents: Mapping[str, str | None],
    rule: str,
    *,
    target: str | None = None,
    labelled: bool = True,
) -> tuple[ColumnNeed, ...]:
    """Return the columns to read. `contents`: role -> what its column holds, None for one that need not be named;
    `target`: the role that is needed only when `labelled`.

    Raise StageError CONFIG for a missing column, and as `refuse_other_columns`.
    """
    for role, content in contents.items():
        if content is not None and getattr(columns, role) is None and (labelled or role != target):
            raise not_set(f"{setting}.columns.{role}", f"the column that holds {content}")
    refuse_other_columns(columns, setting, contents, rule)
    named = ((role, getattr(columns, role)) for role in contents)
    return tuple(
        ColumnNeed(f"{setting}.columns.{to_camel(role)}", name, required=labelled or role != target)
        for role, name in named
        if name is not None
    )


def first_row(values: pa.ChunkedArray, is_wrong: Callable[[pa.Array], pa.Array]) -> int | None:
    """Return the index of the first wrong row, None when there is none. Reads a chunk at a time: the result of
    `is_wrong` may be as large as the column.
    """
    before = 0
    for chunk in values.chunks:
        at = pc.index(is_wrong(chunk), True).as_py()
        if at >= 0:
            return before + int(at)
        before += len(chunk)
    return None


def refuse_not_text(split: RawSplit, path: str, column: str, values: pa.ChunkedArray) -> None:
    """Raise StageError DATA for a column that is not text, or for its first row without one."""
    if not is_text(values.type):
        kind = "all null" if pa.types.is_null(values.type) else f"of type {values.type}"
        raise row_error("NotText", split, 0, path, column, values[0].as_py(), f"the column is {kind}, not text")
    row = first_row(values, pc.is_null)
    if row is not None:
        role = path.rpartition(".")[2]
        raise row_error("NullText", split, row, path, column, None, f"a row needs its {role}")


def refuse_not_messages(split: RawSplit, path: str, column: str, values: pa.ChunkedArray) -> None:
    """Raise StageError DATA for a column that is no list of {role, content}, or for its first row without one."""
    kind = values.type
    fields = {field.name for field in kind.value_type} if is_list(kind) and pa.types.is_struct(kind.value_type) else ()
    if not {"role", "content"} <= set(fields):
        rule = f"the column is of type {kind}, not a list of messages with role and content"
        raise row_error("NotMessages", split, 0, path, column, values[0].as_py(), rule)
    empty = pc.fill_null(pc.equal(pc.list_value_length(values), 0), True)
    if pc.any(empty).as_py():
        row = pc.index(empty, True).as_py()
        raise row_error("NoMessages", split, row, path, column, values[row].as_py(), "a conversation needs messages")
    roles = pc.struct_field(pc.list_flatten(values), "role")
    if roles.null_count:
        rows = values.to_pylist()
        row = next(at for at, messages in enumerate(rows) if any(message["role"] is None for message in messages))
        raise row_error("NoRole", split, row, path, column, rows[row], "each message needs its role")


def wanted_texts(split: RawSplit, column: str, role: str = "target") -> NDArray[Any]:
    """Return the texts of `dataset.columns.<role>`, dtype object; raise StageError DATA as `refuse_not_text`."""
    texts = split.table[column]
    refuse_not_text(split, f"dataset.columns.{role}", column, texts)
    return np.array(texts.to_pylist(), object)


def row_error(
    reason: str, split: RawSplit, row: int, path: str, column: str, value: object, rule: str, hint: str = ""
) -> StageError:
    """Return StageError DATA for one value; `row` counts from 0 here and from 1 in the message."""
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    place = "" if split.one_row else f"Split {split.name} ({split.origin}), row {row + 1}: "
    return StageError(
        FailureClass.DATA,
        reason,
        f"{place}column {column!r} is {shown}; {rule}.",
        hint or f"Correct the row, or check {path}.",
    )
