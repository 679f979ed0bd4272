"""What is wrong with a row or a column, in the same words for all tasks."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from finetune_contract.job import Columns
from finetune_contract.layout import FailureClass
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.failures import StageError


def is_text(kind: pa.DataType) -> bool:
    """Whether Arrow holds text in it."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether Arrow holds lists in it."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def not_set(path: str, what: str) -> StageError:
    """The error for a column that has to be named."""
    return StageError(FailureClass.CONFIG, "MissingSetting", f"{path} is not set; it names {what}.", f"Set {path}.")


def refuse_other_columns(columns: Columns, setting: str, own: Collection[str], rule: str) -> None:
    """StageError CONFIG for columns that belong to other tasks: nothing would read them. `rule` says what is read."""
    for name, value in columns:
        if value is not None and name not in own:
            path = f"{setting}.columns.{name}"
            raise StageError(
                FailureClass.CONFIG, "ColumnOfAnotherTask", f"{path} is {value!r}; {rule}.", f"Leave {path} out."
            )


def row_error(reason: str, split: RawSplit, row: int, path: str, column: str, value: object, rule: str) -> StageError:
    """StageError DATA for one value; `row` counts from 0 here and from 1 in the message."""
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    return StageError(
        FailureClass.DATA,
        reason,
        f"Split {split.name} ({split.origin}), row {row + 1}: column {column!r} is {shown}; {rule}.",
        f"Correct the row, or check {path}.",
    )
