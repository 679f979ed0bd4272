"""The prepared data of a job, as the later stages read it. Nothing here looks at raw files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from finetune_contract.base import Message
from finetune_contract.choices import Task
from finetune_contract.facts import DataFacts
from finetune_contract.layout import COMPLETION_MARKER, FailureClass, JobPaths
from finetune_trainer.failures import StageError

FACTS_FILE = "data.json"
INPUTS_FILE = "inputs.json"
ROW = "row"
"""Column: index of a feature's row in the raw split."""
POSITION = "position"
"""Column: index of a feature's row among the rows of its role."""


class PreparedInputs(Message):
    """What the prepared data were made from."""

    key: str
    """Digest of everything that the folder's content depends on."""
    pad_token_id: int = Field(ge=0)
    task: Task
    inputs: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Role of a split -> role of a column that was encoded -> its name in the data."""


@dataclass(frozen=True)
class _Shard:
    """The file of one role, ready for access by row."""

    table: pa.Table
    lists: dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
    """Column of lists -> all its values, and where each feature starts in them, with the end behind the last one."""
    numbers: dict[str, NDArray[Any]]
    """Column of numbers -> its values."""

    @classmethod
    def of(cls, table: pa.Table) -> _Shard:
        """Flattens the columns of lists."""
        names = [name for name in table.column_names if name not in (ROW, POSITION)]
        lists = [name for name in names if pa.types.is_list(table.schema.field(name).type)]
        numbers = {name: np.asarray(table[name].to_numpy()) for name in names if name not in lists}
        return cls(table, {name: _flat(table[name]) for name in lists}, numbers)


@dataclass(frozen=True)
class PreparedData:
    """Token rows, lengths and facts of every role."""

    folder: Path
    facts: DataFacts
    pad_token_id: int
    task: Task
    inputs: Mapping[str, Mapping[str, str]]
    """Role of a split -> role of a column that was encoded -> its name in the data."""
    _read: dict[str, _Shard] = field(default_factory=dict, repr=False, compare=False)
    """Files read so far: training asks for rows at every micro-batch."""

    @classmethod
    def open(cls, paths: JobPaths) -> PreparedData:
        """StageError DATA `NotPrepared` when the stage has not ended, `PreparedDataDamaged` when its files are not
        readable.
        """
        if not (paths.prepared / COMPLETION_MARKER).is_file():
            raise StageError(
                FailureClass.DATA,
                "NotPrepared",
                f"{paths.prepared} holds no prepared data.",
                "Run the stage prepare first.",
            )
        try:
            facts = DataFacts.model_validate_json((paths.prepared / FACTS_FILE).read_bytes())
            inputs = PreparedInputs.model_validate_json((paths.prepared / INPUTS_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise _damaged(paths.prepared, error) from error
        return cls(paths.prepared, facts, inputs.pad_token_id, inputs.task, inputs.inputs)

    def split(self, role: str) -> datasets.Dataset:
        """All columns: what `collate` takes, `row` and `position`."""
        return datasets.Dataset(self._shard(role).table)

    def of(self, role: str) -> PreparedSplit:
        """One role's features and rows."""
        shard = self._shard(role)
        position = np.asarray(shard.table[POSITION].to_numpy())
        return PreparedSplit(self, role, position, shard)

    def raw(self, role: str) -> datasets.Dataset:
        """The inputs and what predictions copy, one row for each of the role's rows; not kept for train."""
        return datasets.Dataset(_table(self.folder / f"{role}.raw.parquet"))

    def lengths(self, role: str) -> NDArray[np.int64]:
        """Tokens of each feature."""
        return np.diff(self._shard(role).lists["input_ids"][1])

    def features(self, role: str, wanted: Iterable[int]) -> list[dict[str, Any]]:
        """Features as `collate` takes them, as views of the columns: many times faster than indexing a table."""
        shard = self._shard(role)
        found = []
        for at in wanted:
            feature: dict[str, Any] = {
                name: flat[start[at] : start[at + 1]] for name, (flat, start) in shard.lists.items()
            }
            feature |= {name: values[at].item() for name, values in shard.numbers.items()}
            found.append(feature)
        return found

    def _shard(self, role: str) -> _Shard:
        if role not in self._read:
            self._read[role] = _Shard.of(_table(self.folder / f"{role}.parquet"))
        return self._read[role]


@dataclass(frozen=True)
class PreparedSplit:
    """The features of one role, and the rows that they were made of."""

    data: PreparedData
    role: str
    position: NDArray[np.int64]
    """Index of each feature's row among the rows of this split; neighbours are of one row or of the next."""
    _shard: _Shard = field(repr=False)

    @property
    def facts(self) -> DataFacts:
        """Of all splits."""
        return self.data.facts

    @property
    def rows(self) -> int:
        """Rows; there are as many features, or more."""
        return int(self.position[-1]) + 1 if len(self.position) else 0

    @property
    def columns(self) -> frozenset[str]:
        """What features hold."""
        return frozenset({*self._shard.lists, *self._shard.numbers})

    def numbers(self, column: str) -> NDArray[Any]:
        """A number for each feature."""
        return self._shard.numbers[column]

    def lists(self, column: str) -> list[NDArray[np.int32]]:
        """A list for each feature."""
        flat, start = self._shard.lists[column]
        return [flat[start[at] : start[at + 1]] for at in range(len(self.position))]

    def features_by_row(self) -> list[range]:
        """The features of each row."""
        starts = np.searchsorted(self.position, np.arange(self.rows + 1)).tolist()
        return [range(start, end) for start, end in pairwise(starts)]

    def index(self) -> pa.ChunkedArray:
        """Of each of the rows, its index in the raw split."""
        first = np.searchsorted(self.position, np.arange(self.rows))
        return self._shard.table[ROW].take(pa.array(first))

    @property
    def inputs(self) -> Mapping[str, str]:
        """Role of a column that was encoded -> its name in `raw`."""
        return self.data.inputs[self.role]

    def raw(self) -> datasets.Dataset:
        """The rows themselves, see `PreparedData.raw`."""
        return self.data.raw(self.role)


def arrow_table(rows: datasets.Dataset) -> pa.Table:
    """The rows as an Arrow table, whatever selection of its own table the Dataset is."""
    table: pa.Table = rows.with_format("arrow")[:]
    return table


def _damaged(path: Path, error: Exception) -> StageError:
    return StageError(
        FailureClass.DATA,
        "PreparedDataDamaged",
        f"{path} cannot be read: {error}",
        f"Delete {path.name} and run the stage prepare again.",
    )


def _table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, error) from error


def _flat(column: pa.ChunkedArray) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Several chunks become one: a list column in Arrow holds at most 2^31 values in a chunk."""
    values = [chunk.flatten().to_numpy() for chunk in column.chunks]
    lengths = [pc.list_value_length(chunk).to_numpy() for chunk in column.chunks]
    offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)
    return np.concatenate([np.empty(0, np.int32), *values]), offsets
