"""Arrow data on disk: rows are written a chunk at a time and read by mapping the file, so that neither side ever holds
all of them in memory.

The files are IPC streams, the format of `datasets` for its own data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import datasets
import pyarrow as pa


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


class Spool:
    """Writer of tables whose columns may turn out to have another type than in the first rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._parts: list[Path] = []
        self._schemas: list[pa.Schema] = []
        self._writer: pa.RecordBatchStreamWriter | None = None
        self.rows = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, table: pa.Table) -> pa.Schema:
        """Append the rows and return the schema they are kept with: categories (dictionaries) become their values,
        views plain text.
        """
        table = _plain(table)
        if table.num_rows:
            if self._writer is None or not self._schemas[-1].equals(table.schema):
                self._finish()
                self._parts.append(self._folder / f"{len(self._parts)}.arrow")
                self._schemas.append(table.schema)
                self._writer = pa.ipc.new_stream(self._parts[-1], table.schema)
            self._writer.write_table(table)
            self.rows += table.num_rows
        return table.schema

    def close(self, schema: pa.Schema) -> datasets.Dataset:
        """Return all rows; columns of `schema` that rows lack are null. Raise pa.ArrowInvalid for a value that does not
        fit its type.
        """
        self._finish()
        if any(not each.equals(schema) for each in self._schemas):
            whole = self._folder / "whole.arrow"
            write_tables(whole, (_promoted(batch, schema) for part in self._parts for batch in batches(part)))
            for part in self._parts:
                part.unlink()
            self._parts = [whole]
        return datasets.Dataset.from_file(str(self._parts[0]))


def _plain(table: pa.Table) -> pa.Table:
    fields = [f.with_type(_plain_type(f.type)) for f in table.schema]
    huggingface = {k: v for k, v in (table.schema.metadata or {}).items() if k == b"huggingface"}
    columns = [c.cast(f.type) if c.type != f.type else c for c, f in zip(table.columns, fields, strict=True)]
    return pa.table(columns, schema=pa.schema(fields, huggingface or None))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries and views, which not every function supports."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) and (plain := _plain_type(kind.value_type)) != kind.value_type:
        return pa.list_(plain)
    return kind


def _promoted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    table = pa.Table.from_batches([batch])
    has = table.column_names
    columns = [table[f.name] if f.name in has else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, names=schema.names).cast(schema)
