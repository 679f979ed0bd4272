"""Rows to predict, in independently readable shards: a shard is a range of bytes of a text file, some row groups of a
Parquet file, or a range of rows, depending on the format.

The rows of a shard depend on the data alone. So workers share them without communication, and an answered shard is
never read again. Rows are not counted ahead: a shard's number of rows is known when it is read, and rows get their
numbers when all shards are done.

Unlike `prepare`, which refuses data with an unreadable row, a reader here sets the row aside with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Protocol, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.file_formats import (
    ARRAY_BYTES,
    Parquet,
    ReadRow,
    Rejected,
    as_column,
    decoded_bytes,
    fits_memory,
    format_of,
    has_lines,
    is_compressed,
    read,
    rows_between,
    rows_too_large,
    text_rows,
    unreadable,
    with_json,
)
from finetune_trainer.data.prepared import PreparedSplit, arrow_table
from finetune_trainer.data.row_shapes import Shape, ShapedSplit
from finetune_trainer.data.sources import (
    ColumnNeed,
    FileSplit,
    FsFile,
    HubSplit,
    RawSplit,
    SplitSource,
    check_columns,
    nested_columns,
    plain_table,
)

T = TypeVar("T")
MOST_BYTES = 4 << 20
"""Limit of a shard's bytes in the file: some 10,000 short rows, a minute of a small encoder on a core."""
LEAST_BYTES = 64 << 10
"""Least bytes of a shard: about 500 short rows, so that sorting them by length leaves little padding."""
SHARDS = 256
"""Number of shards of smaller data, between these bounds: so many workers can share them."""
_ROWS = 4096
"""Limit of a shard's rows where the format has rows and no lines."""
_LEAST_ROWS = 256
"""Least rows of a shard of prepared rows: a few batches. Generation takes seconds for each, so workers need many."""


@dataclass(frozen=True)
class BadRow:
    """A row that was excluded, with the reason."""

    number: int
    """Index in the shard."""
    reason: str
    message: str
    content: str
    """Excerpt for people."""
    line: int | None = None
    """Last line of the row in the shard, from 1; None: the format has none."""


@dataclass(frozen=True)
class ShardRows:
    """Rows read from one shard."""

    count: int
    """All rows, readable or not."""
    numbers: NDArray[np.int64]
    """Index in the shard of each readable row."""
    table_of: Callable[[Sequence[int]], pa.Table] = field(repr=False)
    """Wanted columns of some of these rows. Raises StageError DATA where a column has several types."""
    lines: NDArray[np.int64] | None = None
    """Last line in the shard of each of these rows, from 1."""
    bad_rows: tuple[BadRow, ...] = ()
    last_line: int = 0
    """Number of lines of the shard, up to its last row."""

    def checked(self, rows: Sequence[int], check: Callable[[RawSplit], None]) -> pa.Table:
        """Return wanted columns of some of the readable rows. Raise StageError DATA when `check` refuses them."""
        table = self.table_of(rows)
        check(RawSplit("", "", table, one_row=len(rows) == 1))
        return table


@dataclass(frozen=True, order=True)
class ShardKey:
    """Position of a shard in the content."""

    file: int
    start: int
    """First byte, or row."""

    def __str__(self) -> str:
        return f"{self.file:05}-{self.start:015}"

    @classmethod
    def parse(cls, text: str) -> ShardKey:
        """Parse the key's text."""
        file, _, start = text.partition("-")
        return cls(int(file), int(start))


@dataclass(frozen=True)
class RowShard:
    """A shard that was not read yet."""

    key: ShardKey
    origin: str
    """File of the shard, for people."""
    weight: int
    """Share of the data, in bytes or rows of the source."""
    read: Callable[[], ShardRows] = field(repr=False, compare=False)


class RowSource(Protocol):
    """Rows to predict."""

    @property
    def origin(self) -> str:
        """Return a name for people."""

    @property
    def weight(self) -> int | None:
        """Return the sum over all shards; None: not known before the last one."""

    def identity(self) -> str:
        """Return a digest of the inputs of the rows, without reading them."""

    def shards(self) -> Iterator[RowShard]:
        """Yield the shards in the order of the rows. Formats readable only from their start are read on the way."""

    def numbered(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of rows in predictions, for rows at these positions among all of them."""


class _AllRows:
    """Rows whose number is their position."""

    def numbered(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions


def row_source(split: SplitSource, needs: Sequence[ColumnNeed]) -> RowSource:
    """Return the rows of a split of raw data, with the columns of `needs`."""
    if isinstance(split, ShapedSplit):
        return ShapedRows(row_source(split.inner, split.shape.needs(needs)), split.shape, tuple(needs))
    if isinstance(split, FileSplit):
        return FileRows(split, tuple(needs))
    if isinstance(split, HubSplit):
        return HubRows(split, tuple(needs))
    raise TypeError(f"rows of a {type(split).__name__} cannot be read")


def most_of(
    rows: list[int], attempt: Callable[[Sequence[int]], T], refused: dict[int, StageError]
) -> tuple[list[int], T | None]:
    """Return the largest set of rows that `attempt` accepts together, and its result; None without any. Other rows are
    added to `refused` with the reason: rows are halved until a single one is refused.
    """
    if not rows:
        return [], None
    try:
        return rows, attempt(rows)
    except StageError as error:
        if len(rows) == 1:
            refused[rows[0]] = error
            return [], None
    half = len(rows) // 2
    before = len(refused)
    kept = most_of(rows[:half], attempt, refused)[0] + most_of(rows[half:], attempt, refused)[0]
    if not kept:
        return [], None
    if len(refused) == before:
        # Each half is accepted by itself: the wrong row cannot be found.
        return rows, attempt(rows)
    return kept, attempt(kept)


def no_rows(source: RowSource) -> StageError:
    """Return the error for a data set without rows to predict."""
    return StageError(
        FailureClass.DATA, "EmptySplit", f"{source.origin} has no rows.", "Add rows, or leave predict out."
    )


def check_first_rows(source: RowSource, check: Callable[[RawSplit], None]) -> None:
    """Raise StageError DATA when there is no row, or when none of the first ones can be read and is accepted by
    `check`: then the data as a whole are wrong, and not a single row.
    """
    shard = next(source.shards(), None)
    rows = None if shard is None else shard.read()
    if rows is None or not rows.count:
        raise no_rows(source)
    refused: dict[int, StageError] = {}
    kept, _ = most_of(list(range(min(len(rows.numbers), _FIRST_ROWS))), partial(rows.checked, check=check), refused)
    if not kept:
        first = next(iter(refused.values()), None)
        raise first or StageError(
            FailureClass.DATA,
            rows.bad_rows[0].reason,
            f"{source.origin}, line {rows.bad_rows[0].line}: {rows.bad_rows[0].message}",
            "Correct the data; none of the first rows can be read.",
        )


_FIRST_ROWS = 100


# -------------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class ShapedRows(_AllRows):
    """Rows that have a shape."""

    inner: RowSource
    shape: Shape
    needs: tuple[ColumnNeed, ...]

    @property
    def origin(self) -> str:
        return self.inner.origin

    @property
    def weight(self) -> int | None:
        return self.inner.weight

    def identity(self) -> str:
        return self.shape.digest(self.inner.identity())

    def shards(self) -> Iterator[RowShard]:
        """Yield the shards of the data, whose rows are converted when they are read."""
        for shard in self.inner.shards():
            yield replace(shard, read=partial(self._read, shard))

    def _read(self, shard: RowShard) -> ShardRows:
        rows = shard.read()
        return replace(rows, table_of=lambda some: self.shape.converted(rows.table_of(some), self.needs))


# ------------------------------------------------------------------------------------------------------------ datasets


@dataclass(frozen=True)
class HubRows(_AllRows):
    """Rows of a data set of the Hub, or of another `Dataset`."""

    split: HubSplit
    needs: tuple[ColumnNeed, ...]

    @property
    def origin(self) -> str:
        return self.split.repository

    @property
    def weight(self) -> int:
        return len(self.split.rows)

    def identity(self) -> str:
        return self.split.digest()

    def shards(self) -> Iterator[RowShard]:
        """Yield the shards. Raise StageError DATA `MissingColumn`."""
        rows = self.split.rows
        check_columns(self.split.name, self.origin, rows.column_names, self.needs)
        names = [name for name in _names(self.needs) if name in rows.column_names]
        yield from _of_dataset(rows.select_columns(names), self.origin, nested_columns(self.needs))


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a prepared split, by their numbers in the raw data."""

    split: PreparedSplit
    fingerprint: str

    @property
    def origin(self) -> str:
        return f"split {self.split.role}"

    @property
    def weight(self) -> int:
        return self.split.rows

    def identity(self) -> str:
        return f"{self.fingerprint} {self.split.role}"

    def shards(self) -> Iterator[RowShard]:
        yield from _of_dataset(self.split.raw(), self.origin, frozenset())

    @cached_property
    def _index(self) -> NDArray[np.int64]:
        index: NDArray[np.int64] = self.split.index().to_numpy()
        return index

    def numbered(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._index[positions]


def _of_dataset(rows: datasets.Dataset, origin: str, nested: Collection[str]) -> Iterator[RowShard]:
    def taken(start: int, stop: int) -> ShardRows:
        return rows_of_table(with_json(arrow_table(rows.select(range(start, stop))), nested))

    step = min(_ROWS, max(_LEAST_ROWS, -(-len(rows) // SHARDS)))
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        yield RowShard(ShardKey(0, start), origin, stop - start, partial(taken, start, stop))


def rows_of_table(table: pa.Table) -> ShardRows:
    """Return all rows of a table, readable by type."""
    return ShardRows(len(table), np.arange(len(table)), partial(_taken, table))


def _slice(table: Callable[[], pa.Table], start: int, count: int) -> ShardRows:
    return rows_of_table(table().slice(start, count))


def _taken(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    return table if len(rows) == len(table) else table.take(pa.array(rows, pa.int64()))


def _names(needs: Sequence[ColumnNeed]) -> list[str]:
    return list(dict.fromkeys(need.name for need in needs))


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileRows(_AllRows):
    """Rows of files, one file after the other."""

    split: FileSplit
    needs: tuple[ColumnNeed, ...]

    @property
    def origin(self) -> str:
        return self.split.origin

    @property
    def weight(self) -> int | None:
        """Return the bytes; None for compressed rows, whose size is not known."""
        return None if any(map(is_compressed, self.split.files)) else sum(file.size for file in self.split.files)

    def identity(self) -> str:
        """Digest names, sizes and versions of the files."""
        return hashlib.sha256("\n".join(file.version for file in self.split.files).encode()).hexdigest()

    def shards(self) -> Iterator[RowShard]:
        """Yield the shards. Raise StageError DATA `MissingColumn`; for text only when a file's first shard is read."""
        sizes = [file.size for file in self.split.files]
        most = min(max(sum(sizes) // SHARDS, LEAST_BYTES), MOST_BYTES)
        for number, (file, size) in enumerate(zip(self.split.files, sizes, strict=True)):
            yield from _FileShards(number, file, size, most, self.split.name, self.needs).all()


@dataclass(frozen=True)
class _FileShards:
    """Shards of one file."""

    number: int
    file: FsFile
    size: int
    most: int
    """Limit of a shard's bytes."""
    split: str
    needs: tuple[ColumnNeed, ...]

    def all(self) -> Iterator[RowShard]:
        kind = format_of(self.file.name)
        if kind == "parquet":
            yield from self._of_parquet()
        elif kind == "arrow":
            yield from self._of_arrow()
        elif not is_compressed(self.file) and has_lines(self.file):
            for start in range(0, self.size, self.most):
                stop = min(start + self.most, self.size)
                yield self._shard(start, stop - start, partial(self._between, start, stop))
        else:
            yield from self._in_order()

    def _shard(self, start: int, weight: int, taken: Callable[[], ShardRows]) -> RowShard:
        return RowShard(ShardKey(self.number, start), self.file.name, weight, taken)

    # ---------------------------------------------------------------------------------------------------------- text

    def _between(self, start: int, stop: int) -> ShardRows:
        return self._collected(rows_between(self.file, start, stop), whole=start == 0)

    def _in_order(self) -> Iterator[RowShard]:
        """Yield the shards of a file that has to be read from its start."""
        start, size = 0, 0
        part: list[ReadRow | Rejected] = []
        for row in text_rows(self.file, _names(self.needs), []):
            part.append(row)
            size += row.size if isinstance(row, Rejected) else row[2]
            if size >= self.most:
                yield self._shard(start, size, partial(self._collected, part, whole=start == 0))
                start, part, size = start + len(part), [], 0
        if part:
            yield self._shard(start, size, partial(self._collected, part, whole=start == 0))

    def _collected(self, rows: Iterable[ReadRow | Rejected], *, whole: bool) -> ShardRows:
        """Collect columns of the rows; `whole`: they begin the file, so that they show which columns it has."""
        values: list[dict[str, object]] = []
        numbers: list[int] = []
        lines: list[int] = []
        bad_rows: list[BadRow] = []
        seen: dict[str, None] = {}
        count = line = 0
        for count, row in enumerate(rows, start=1):
            if isinstance(row, Rejected):
                line = row.line
                bad_rows.append(BadRow(count - 1, "CorruptLine", row.why, row.content, line))
                continue
            line = row[0]
            seen.update(dict.fromkeys(row[1]))
            lines.append(line)
            values.append(row[1])
            numbers.append(count - 1)
        if whole and values:
            check_columns(self.split, self.file.name, list(seen), self.needs)
        names, nested = _names(self.needs), nested_columns(self.needs)

        def table_of(rows: Sequence[int]) -> pa.Table:
            at = [lines[row] for row in rows]
            return pa.table(
                {
                    name: as_column(self.file, name, [values[row].get(name) for row in rows], at, nested=name in nested)
                    for name in names
                }
            )

        return ShardRows(
            count, np.asarray(numbers, np.int64), table_of, np.asarray(lines, np.int64), tuple(bad_rows), line
        )

    # ------------------------------------------------------------------------------------------------------- columns

    def _of_parquet(self) -> Iterator[RowShard]:
        with self._parquet() as parquet:
            groups = [parquet.file.metadata.row_group(at) for at in range(parquet.file.num_row_groups)]
            described = [(group.num_rows, group.total_byte_size) for group in groups]
            check_columns(self.split, self.file.name, parquet.file.schema_arrow.names, self.needs)
        first = 0
        for group, (rows, size) in enumerate(described):
            if not rows:
                continue
            step = -(-rows // max(-(-size // self.most), -(-rows // _ROWS)))
            # A group can only be decoded whole: once, for all shards that are parts of it.
            table = cache(partial(self._group, group))
            for start in range(0, rows, step):
                count = min(step, rows - start)
                taken = partial(_slice, table, start, count)
                yield self._shard(first + start, max(1, size * count // rows), taken)
            first += rows

    def _group(self, group: int) -> pa.Table:
        with fits_memory(self.file), self._parquet() as parquet:
            names = [name for name in _names(self.needs) if name in parquet.file.schema_arrow.names]
            most = max(ARRAY_BYTES, parquet.file.metadata.row_group(group).total_byte_size)
            tables, rows, size = [], 0, 0
            for batch in parquet.batches(group, names, _ROWS):
                tables.append(pa.Table.from_batches([batch]))
                rows, size = rows + len(batch), size + int(decoded_bytes(tables[-1]).sum())
                if size > most:
                    raise rows_too_large(self.file, f"{rows:,} rows from row 1 of a row group have {size:,} bytes.")
            table = plain_table(pa.concat_tables(tables).combine_chunks())
            return with_json(table, nested_columns(self.needs))

    @contextmanager
    def _parquet(self) -> Iterator[Parquet]:
        try:
            with self.file.open() as stream:
                yield Parquet(stream)
        except (pa.ArrowInvalid, pa.ArrowIOError) as error:
            raise unreadable(self.file, error) from error

    def _of_arrow(self) -> Iterator[RowShard]:
        seen: dict[str, None] = {}
        first = 0
        for table in read(self.file, _names(self.needs), seen, nested=nested_columns(self.needs)):
            if not first:
                check_columns(self.split, self.file.name, list(seen), self.needs)
            for start in range(0, len(table), _ROWS):
                part = table.slice(start, _ROWS)
                yield self._shard(first + start, max(1, part.nbytes), partial(rows_of_table, part))
            first += len(table)
