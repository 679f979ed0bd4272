"""Column of tags, one for each word of a row: its checks, names and class ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import RawSplit
from finetune_trainer.tasks.label_names import names_in, positions
from finetune_trainer.tasks.row_checks import class_names, is_list, is_text, row_error, shown_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTSIDE = "O"
"""Tag of words outside of all entities."""


def check_tags(split: RawSplit, column: str, words: str) -> None:
    """Check that each word has a tag: a name or a class id."""
    path, table = "dataset.columns.tags", split.table
    values = table[column]
    kind = values.type.value_type if is_list(values.type) else None
    if kind is None or not (is_text(kind) or pa.types.is_integer(kind)):
        rule = f"the column is of type {values.type}, not a list of words or of class ids"
        raise row_error("NotTags", split, 0, path, column, values[0].as_py(), rule)
    sizes = [pc.fill_null(pc.list_value_length(table[name]), 0) for name in (column, words)]
    uneven = pc.not_equal(*sizes)
    if pc.any(uneven).as_py():
        row = pc.index(uneven, True).as_py()
        tags, count = (size[row].as_py() for size in sizes)
        rule = f"it has {tags} tags for {count} words"
        raise row_error("TagsAndWords", split, row, path, column, values[row].as_py(), rule)
    flat = pc.list_flatten(values)
    if flat.null_count:
        row = pc.list_parent_indices(values)[pc.index(pc.is_null(flat), True).as_py()].as_py()
        raise row_error("NullLabel", split, row, path, column, values[row].as_py(), "each word needs its tag")


def tag_names(split: RawSplit, column: str) -> tuple[str, ...]:
    """Return the names of all tags, `OUTSIDE` first; class ids as text. Raise StageError DATA for ids with gaps."""
    distinct = pc.unique(pc.list_flatten(split.table[column])).to_pylist()
    if not isinstance(distinct[0], int):
        return tuple(sorted(distinct, key=lambda name: (name != OUTSIDE, name)))
    count = next(i for i in range(len(distinct) + 1) if i not in distinct)
    if count < len(distinct):
        odd = next(value for value in distinct if not 0 <= value < count)
        rule = f"it holds the class id {odd}; ids count from 0 without gaps, and no word has {count}"
        raise _tag_error(split, column, odd, rule)
    return tuple(str(i) for i in range(count))


def tag_ids(split: RawSplit, column: str, names: Sequence[str]) -> NDArray[Any]:
    """Return one array of ids for each row."""
    values = split.table[column].combine_chunks()
    flat = values.flatten()
    distinct = pc.unique(flat).to_pylist()
    known = positions(split, column, distinct, names)
    strange = [value for value in distinct if value not in known]
    if strange:
        classes = dict(enumerate(class_names(split, column) or ()))
        rule = f"the tag {classes.get(strange[0], strange[0])!r} is not one of {shown_names(names)}"
        raise _tag_error(split, column, strange[0], rule)
    codes = np.asarray([known[value] for value in distinct], np.int32)
    ids = codes[np.asarray(pc.index_in(flat, pa.array(distinct, flat.type)).to_numpy())]
    starts = np.cumsum(pc.list_value_length(values).to_numpy())[:-1]
    rows = np.empty(len(values), object)
    rows[:] = np.split(ids, starts)
    return rows


def known_tag_ids(split: RawSplit, column: str, head: Sequence[str]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the ids by a `head` that is not trained on these rows, and a note as `names_in`."""
    names, notes = names_in(split, column, pc.unique(pc.list_flatten(split.table[column])).to_pylist(), head)
    return tag_ids(split, column, names), notes


def _tag_error(split: RawSplit, column: str, value: object, rule: str) -> StageError:
    """Return the error for the first row that has the tag."""
    values = split.table[column]
    row = next(number for number, tags in enumerate(values.to_pylist()) if value in tags)
    return row_error("LabelOutOfRange", split, row, "dataset.columns.tags", column, values[row].as_py(), rule)
