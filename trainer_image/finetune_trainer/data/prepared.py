"""The prepared data of a job, as the later stages read it. Raw files are not read here.

The files are Arrow IPC streams, the format of `datasets` for its own data. They are written a chunk at a time, and
mapped, not read: a process touches only the features that it uses, so no rank reads those of another, and features
already used may leave memory again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from finetune_contract.choices import Task
from finetune_contract.contract_models import Message
from finetune_contract.facts import DataFacts
from finetune_contract.layout import COMPLETION_MARKER, FACTS_FILE, FailureClass, JobPaths
from finetune_trainer.core.failures import StageError

INPUTS_FILE = "inputs.json"
ROW = "row"
"""Column: index of a feature's row in the raw split."""
POSITION = "position"
"""Column: index of a feature's row among the rows of its role."""


def shard_name(role: str, number: int, of: int) -> str:
    """Return the file name of some features of a role."""
    return f"{role}-{number:05}-of-{of:05}.arrow"


def raw_name(role: str) -> str:
    """Return the file name of the rows that results need."""
    return f"{role}.raw.arrow"


class PreparedInputs(Message):
    """Inputs of the prepared data, and the files they are in."""

    key: str
    """Digest of everything that the folder's content depends on."""
    pad_token_id: int = Field(ge=0)
    task: Task
    inputs: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Role of a split -> role of an encoded column -> its name in the data."""
    shards: dict[str, int] = Field(default_factory=dict)
    """Role of a split -> number of its feature files."""


@dataclass(frozen=True)
class FeatureBatch:
    """Consecutive features, in memory or as views of their file."""

    lists: dict[str, tuple[NDArray[np.int32], NDArray[np.int32]]]
    """Column of lists -> all its values, and the start of each feature in them, with the end behind the last one."""
    numbers: dict[str, NDArray[Any]]
    """Column of numbers -> its values."""

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> FeatureBatch:
        """View a batch without copying."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        lists = {name: column for name, column in columns.items() if pa.types.is_list(column.type)}
        return cls(
            {name: (column.values.to_numpy(), column.offsets.to_numpy()) for name, column in lists.items()},
            {name: column.to_numpy() for name, column in columns.items() if name not in lists},
        )

    def feature(self, at: int) -> dict[str, Any]:
        """Return all columns but those of its origin."""
        feature: dict[str, Any] = {
            name: values[starts[at] : starts[at + 1]] for name, (values, starts) in self.lists.items()
        }
        numbers = {name: values[at].item() for name, values in self.numbers.items() if name not in (ROW, POSITION)}
        return feature | numbers

    def part(self, start: int, stop: int, row: int) -> FeatureBatch:
        """Return some of the features, as those of the single row with that number."""
        at = np.full(stop - start, row, np.int64)
        numbers = {name: values[start:stop] for name, values in self.numbers.items()}
        lists = {name: (values, starts[start : stop + 1]) for name, (values, starts) in self.lists.items()}
        return FeatureBatch(lists, {**numbers, POSITION: at, ROW: at})

    def head(self, count: int) -> FeatureBatch:
        """Return the first features, or all."""
        lists = {name: (values, starts[: count + 1]) for name, (values, starts) in self.lists.items()}
        return FeatureBatch(lists, {name: values[:count] for name, values in self.numbers.items()})


@dataclass(frozen=True)
class FeatureSet:
    """All features of one role."""

    batches: tuple[FeatureBatch, ...]
    first: NDArray[np.int64]
    """Index of the first feature of each batch, with the end behind the last one."""

    @classmethod
    def of(cls, parts: Iterable[FeatureBatch]) -> FeatureSet:
        """Join the parts, in order."""
        joined = tuple(parts)
        return cls(joined, np.cumsum([0, *(len(batch.numbers[POSITION]) for batch in joined)], dtype=np.int64))

    def __len__(self) -> int:
        return int(self.first[-1])

    def place(self, at: int) -> tuple[FeatureBatch, int]:
        """Return the batch that a feature is in, and its index there."""
        number = int(np.searchsorted(self.first, at, "right")) - 1
        return self.batches[number], at - int(self.first[number])

    def numbers(self, column: str) -> NDArray[Any]:
        """Return the column of all features, in memory."""
        return np.concatenate([batch.numbers[column] for batch in self.batches])

    def lengths(self) -> NDArray[np.int64]:
        """Return the lengths of all features."""
        return np.concatenate([np.diff(batch.lists["input_ids"][1]) for batch in self.batches], dtype=np.int64)


@dataclass(frozen=True)
class PreparedData:
    """Token rows, lengths and facts of every role."""

    folder: Path
    facts: DataFacts
    pad_token_id: int
    task: Task
    inputs: Mapping[str, Mapping[str, str]]
    """Role of a split -> role of an encoded column -> its name in the data."""
    shards: Mapping[str, int]
    """Role of a split -> number of its feature files."""
    _read: dict[str, FeatureSet] = field(default_factory=dict, repr=False, compare=False)
    """Roles mapped so far: training reads rows at every micro-batch."""
    _raw: dict[str, datasets.Dataset] = field(default_factory=dict, repr=False, compare=False)
    """Raw rows mapped so far, which predictions read by chunks."""
    _tables: dict[str, pa.Table] = field(default_factory=dict, repr=False, compare=False)
    """Raw rows without a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the paths: another process maps the files itself, as views would be copied with all rows."""
        return PreparedData, (self.folder, self.facts, self.pad_token_id, self.task, self.inputs, self.shards)

    @classmethod
    def open(cls, paths: JobPaths) -> PreparedData:
        """Open the prepared data. Raise StageError DATA `NotPrepared` when the stage has not ended,
        `PreparedDataDamaged` when its files are not readable.
        """
        if not (paths.prepared / COMPLETION_MARKER).is_file():
            raise StageError(
                FailureClass.DATA,
                "NotPrepared",
                f"There are no prepared data in {paths.prepared}.",
                "Run the stage prepare first.",
            )
        try:
            facts = DataFacts.model_validate_json((paths.prepared / FACTS_FILE).read_bytes())
            inputs = PreparedInputs.model_validate_json((paths.prepared / INPUTS_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise _damaged(paths.prepared, error) from error
        return cls(paths.prepared, facts, inputs.pad_token_id, inputs.task, inputs.inputs, inputs.shards)

    @classmethod
    def in_memory(
        cls,
        role: str,
        features: FeatureSet,
        raw: pa.Table,
        facts: DataFacts,
        pad_token_id: int,
        task: Task,
        inputs: Mapping[str, str],
    ) -> PreparedData:
        """Return data from features of one role and their rows, without files; `inputs`: those of the role."""
        return cls(Path(), facts, pad_token_id, task, {role: inputs}, {}, {role: features}, _tables={role: raw})

    def split(self, role: str) -> datasets.Dataset:
        """Return all columns: the inputs of `collate`, `row` and `position`."""
        self._features(role)
        return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in self._files(role)])

    def of(self, role: str) -> PreparedSplit:
        """Return one role's features and rows."""
        features = self._features(role)
        return PreparedSplit(self, role, features.numbers(POSITION), features)

    def raw(self, role: str) -> datasets.Dataset:
        """Return the inputs and the columns that predictions copy, one entry a row of the role; not kept for train."""
        if role not in self._raw and role in self._tables:
            self._raw[role] = dataset_of(self._tables[role])
        if role not in self._raw:
            file = self.folder / raw_name(role)
            try:
                self._raw[role] = datasets.Dataset.from_file(str(file))
            except (pa.ArrowInvalid, OSError) as error:
                raise _damaged(file, error) from error
        return self._raw[role]

    def raw_values(self, role: str, name: str, rows: range) -> list[Any]:
        """Return one column of some neighbouring raw rows. A table is not wrapped in a `Dataset`, whose creation takes
        longer than a small model takes for a row.
        """
        table = self._tables.get(role)
        if table is None:
            return list(self.raw(role).select(rows)[name])
        values: list[Any] = table[name].slice(rows.start, len(rows)).to_pylist()
        return values

    def lengths(self, role: str) -> NDArray[np.int64]:
        """Return the tokens of each feature."""
        return self._features(role).lengths()

    def features(self, role: str, wanted: Iterable[int]) -> list[dict[str, Any]]:
        """Return features for `collate`, as views of the columns: many times faster than indexing a table."""
        features = self._features(role)
        return [batch.feature(at) for batch, at in map(features.place, wanted)]

    def _features(self, role: str) -> FeatureSet:
        if role not in self._read:
            files = self._files(role)
            try:
                features = FeatureSet.of(FeatureBatch.of(batch) for file in files for batch in batches(file))
            except (pa.ArrowInvalid, OSError) as error:
                raise _damaged(files[0], error) from error
            if len(features) != self.facts.splits[role].rows:
                raise _damaged(files[0], f"{len(features)} features where {self.facts.splits[role].rows} were written")
            self._read[role] = features
        return self._read[role]

    def _files(self, role: str) -> list[Path]:
        of = self.shards[role]
        return [self.folder / shard_name(role, number, of) for number in range(of)]


@dataclass(frozen=True)
class PreparedSplit:
    """Features of one role, and their rows."""

    data: PreparedData
    role: str
    position: NDArray[np.int64]
    """Index of each feature's row among the rows of this split; neighbours are of one row or of the next."""
    _features: FeatureSet = field(repr=False)

    @property
    def facts(self) -> DataFacts:
        """Facts of all splits."""
        return self.data.facts

    @property
    def rows(self) -> int:
        """Number of rows; there are as many features, or more."""
        return int(self.position[-1]) + 1 if len(self.position) else 0

    @property
    def columns(self) -> frozenset[str]:
        """Names of the features' columns."""
        batch = self._features.batches[0]
        return frozenset({*batch.lists, *batch.numbers} - {ROW, POSITION})

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a number for each feature."""
        return self._features.numbers(column)

    def lists(self, column: str) -> list[NDArray[np.int32]]:
        """Return a list for each feature."""
        return [self.list_of(column, at) for at in range(len(self.position))]

    def list_of(self, column: str, feature: int) -> NDArray[np.int32]:
        """Return the list of one feature."""
        batch, at = self._features.place(feature)
        values, starts = batch.lists[column]
        return values[starts[at] : starts[at + 1]]

    @cached_property
    def features_by_row(self) -> list[range]:
        """Features of each row."""
        starts = np.searchsorted(self.position, np.arange(self.rows + 1)).tolist()
        return [range(start, end) for start, end in pairwise(starts)]

    def index(self) -> pa.Array:
        """Index of each row in the raw split."""
        first = np.searchsorted(self.position, np.arange(self.rows))
        return pa.array(self._features.numbers(ROW)[first])

    @property
    def inputs(self) -> Mapping[str, str]:
        """Role of an encoded column -> its name in `raw`."""
        return self.data.inputs[self.role]

    def raw(self) -> datasets.Dataset:
        """Return the rows themselves, see `PreparedData.raw`."""
        return self.data.raw(self.role)

    def raw_values(self, name: str, rows: slice) -> list[Any]:
        """Return one column of some neighbouring rows."""
        return self.data.raw_values(self.role, name, range(*rows.indices(self.rows)))

    def head(self, rows: int) -> PreparedSplit:
        """Return the first rows alone."""
        left, parts = int(np.searchsorted(self.position, rows)), []
        for batch in self._features.batches:
            if left > 0:
                parts.append(batch.head(left))
            left -= len(batch.numbers[POSITION])
        raw = arrow_table(self.raw().select(range(min(rows, self.rows))))
        data, features = self.data, FeatureSet.of(parts)
        inputs = (data.facts, data.pad_token_id, data.task, self.inputs)
        return PreparedData.in_memory(self.role, features, raw, *inputs).of(self.role)


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write tables of one schema, at least one, as they come."""
    every = iter(tables)
    first = next(every)
    with pa.ipc.new_stream(path, first.schema) as writer:
        writer.write_table(first)
        for table in every:
            writer.write_table(table)


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as views of it, in the pieces in which they were written; of a truncated file the
    complete pieces.
    """
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield from reader


def arrow_table(rows: datasets.Dataset) -> pa.Table:
    """Return the rows as an Arrow table, also when the Dataset is a selection of its own table."""
    table: pa.Table = rows.with_format("arrow")[:]
    return table


def dataset_of(table: pa.Table) -> datasets.Dataset:
    """Return the rows of a table, without copying them."""
    # An explicit fingerprint: the library's, a digest by pickle, takes longer than a small model takes for a row.
    return datasets.Dataset(datasets.table.InMemoryTable(table.combine_chunks()), fingerprint=uuid.uuid4().hex)


def _damaged(path: Path, why: object) -> StageError:
    return StageError(
        FailureClass.DATA,
        "PreparedDataDamaged",
        f"{path} cannot be read: {why}",
        "Delete the folder of prepared data and run the stage prepare again.",
    )
