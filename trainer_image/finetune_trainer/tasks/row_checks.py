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
from finetune_trainer.tasks.conversations import (
    ARGUMENTS,
    BESIDE,
    TOOLS,
    ConversationError,
    arguments_of,
    messages_of,
    tools_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_text(kind: pa.DataType) -> bool:
    """Return whether it is a text type of Arrow."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether it is a list type of Arrow."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def class_names(split: RawSplit, column: str) -> tuple[str, ...] | None:
    """Return the names of the classes that the data set declares for a column, or for the items of its lists."""
    feature = split.rows.features[column]
    feature = getattr(feature, "feature", feature)
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


def is_json(kind: pa.DataType) -> bool:
    """Return whether it is Arrow's type of JSON, in which conversations are kept."""
    return isinstance(kind, pa.JsonType)


def refuse_not_messages(split: RawSplit, path: str, column: str) -> None:
    """Raise StageError DATA for the first row whose column holds no conversation, or whose tools are none."""
    table = split.table
    values = table[column]
    if not (is_json(values.type) or is_text(values.type) or pa.types.is_null(values.type)):
        rule = f"the column is of type {values.type}, not a list of messages with role and content"
        raise row_error("NotMessages", split, 0, path, column, values[0].as_py(), rule)
    read = {column: messages_of, TOOLS: tools_of, ARGUMENTS: arguments_of}
    for name, reader in read.items():
        for row, cell in enumerate(table[name].to_pylist() if name in table.column_names else ()):
            try:
                reader(cell)
            except ConversationError as fault:
                raise row_error(fault.reason, split, row, path, name, cell, str(fault)) from fault


def beside_needs(setting: str) -> tuple[ColumnNeed, ...]:
    """Return the columns that are read beside a conversation where the data have them."""
    return tuple(ColumnNeed(f"{setting}.columns.{name}", name, required=False, nested=True) for name in BESIDE)


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
