"""The prepared data of a job, as the later stages read it. Nothing here looks at raw files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


class PreparedInputs(Message):
    """What the prepared data were made from."""

    key: str
    """Digest of everything that the folder's content depends on."""
    pad_token_id: int = Field(ge=0)
    task: Task


@dataclass(frozen=True)
class _Shard:
    """The file of one role, ready for access by row."""

    table: pa.Table
    lists: dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
    """Token column -> all its values, and where each row starts in them, with the end behind the last row."""
    labels: NDArray[np.int64] | None

    @classmethod
    def of(cls, table: pa.Table) -> _Shard:
        """Flattens the token columns."""
        names = [name for name in ("input_ids", "token_type_ids") if name in table.column_names]
        labels = np.asarray(table["label"].to_numpy()) if "label" in table.column_names else None
        return cls(table, {name: _flat(table[name]) for name in names}, labels)


@dataclass(frozen=True)
class PreparedData:
    """Token rows, lengths and facts of every role."""

    folder: Path
    facts: DataFacts
    pad_token_id: int
    task: Task
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
        return cls(paths.prepared, facts, inputs.pad_token_id, inputs.task)

    def split(self, role: str) -> datasets.Dataset:
        """Columns `input_ids`, `token_type_ids` with pairs, `label` when known, `row` (index into the raw split)."""
        return datasets.Dataset(self._shard(role).table)

    def raw(self, role: str) -> datasets.Dataset:
        """The text columns and those that predictions copy, in the order of `split`; not kept for train."""
        return datasets.Dataset(_table(self.folder / f"{role}.raw.parquet"))

    def lengths(self, role: str) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self._shard(role).lists["input_ids"][1])

    def labels(self, role: str) -> NDArray[np.int64] | None:
        """Label id of each row; None when the split has no labels."""
        return self._shard(role).labels

    def features(self, role: str, rows: Iterable[int]) -> list[dict[str, Any]]:
        """Rows as `collate` takes them, as views of the columns: many times faster than indexing `split`."""
        shard = self._shard(role)
        found = []
        for row in rows:
            feature: dict[str, Any] = {name: flat[at[row] : at[row + 1]] for name, (flat, at) in shard.lists.items()}
            if shard.labels is not None:
                feature["label"] = int(shard.labels[row])
            found.append(feature)
        return found

    def _shard(self, role: str) -> _Shard:
        if role not in self._read:
            self._read[role] = _Shard.of(_table(self.folder / f"{role}.parquet"))
        return self._read[role]


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
