"""Reads one raw file into Arrow columns, strictly.

Text arrives byte for byte: nothing is inferred from it (no dates, numbers or nulls out of CSV words like `NA`), which
is why JSON lines and CSV are parsed here and not by Arrow's readers. A line that cannot be read is an error with its
number; no row is skipped. Text in another encoding than UTF-8 is refused with the command that converts it, as an
encoding can only be guessed. Only the columns that the job uses are converted, a chunk of rows at a time.

Lines and CSV records have a largest length: a few KB of a compressed file can be many GB without a newline, which would
otherwise all be one line in memory.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator, Sequence
from typing import IO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.raw_files import (
    COMPRESSIONS,
    LINE_BYTES,
    RawFile,
    ReadRow,
    Rejected,
    compression_of,
    corrupt,
    open_decompressed,
    unreadable,
)
from finetune_trainer.data.text_formats import (
    BYTE_ORDER_MARK,
    json_array,
    json_lines,
    kind_of,
    lines_of,
    no_utf8,
    not_binary,
    refuse_other_content,
    separated,
    shortened_value,
    text_lines,
)

_CHUNK_ROWS = 65_536
"""Limit of rows in one Arrow chunk."""
_CHUNK_BYTES = 16 << 20
"""Bytes of rows, as written in the file, after which a chunk ends: limits live memory to some tens of MB, however long
the rows are.
"""
_BATCH_ROWS = 1024
"""Rows read from Parquet at once: reading more is no faster."""


def _strict(file: RawFile, rows: Iterator[ReadRow | Rejected]) -> Iterator[ReadRow]:
    """Yield the rows. Raise StageError DATA for the first one that cannot be read."""
    for row in rows:
        if isinstance(row, Rejected):
            match row.of:
                case "line":
                    raise corrupt(file, row.line, row.why)
                case "encoding":
                    raise no_utf8(file)
                case "array":
                    raise unreadable(file, row.why)
        yield row


# -------------------------------------------------------------------------------------------------- columns of rows


def _as_tables(
    file: RawFile, rows: Iterator[ReadRow], wanted: Sequence[str], seen: dict[str, None]
) -> Iterator[pa.Table]:
    """Yield chunks of the wanted columns; a key that a row lacks is null. Adds every key found to `seen`, in order."""
    chunk: list[dict[str, object]] = []
    lines: list[int] = []
    size = 0
    for line, row, length in rows:
        if not row.keys() <= seen.keys():
            seen.update(dict.fromkeys(row))
        chunk.append(row)
        lines.append(line)
        size += length
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield _table(file, chunk, lines, wanted)
            chunk, lines, size = [], [], 0
    if chunk:
        yield _table(file, chunk, lines, wanted)


def _table(file: RawFile, rows: list[dict[str, object]], lines: list[int], wanted: Sequence[str]) -> pa.Table:
    return pa.table({name: as_column(file, name, [row.get(name) for row in rows], lines) for name in wanted})


def as_column(file: RawFile, name: str, values: list[object], lines: Sequence[int]) -> pa.Array:
    """Convert values to a column of one type. Raise StageError DATA `MixedTypes` or `CorruptLine`; `lines`: of each."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) > 1 and not kinds <= {int, float}:
        _refuse_mixed(file, name, values, lines)
    try:
        return pa.array(values, pa.string() if kinds == {str} else None, from_pandas=False)
    except UnicodeEncodeError:
        at = next(i for i, value in enumerate(values) if isinstance(value, str) and not _encodable(value))
        raise corrupt(
            file, lines[at], f"column {name!r} holds half of a surrogate pair (\\ud800 to \\udfff alone)."
        ) from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise StageError(
            FailureClass.DATA,
            "MixedTypes",
            f"{file.name}: the values of column {name!r} have no common type: {error}",
            "Use one type in all rows.",
        ) from error


def _refuse_mixed(file: RawFile, name: str, values: list[object], lines: Sequence[int]) -> NoReturn:
    first = next(i for i, value in enumerate(values) if value is not None)
    other = next(i for i, value in enumerate(values) if value is not None and type(value) is not type(values[first]))
    raise StageError(
        FailureClass.DATA,
        "MixedTypes",
        f"{file.name}, line {lines[other]}: column {name!r} is {shortened_value(values[other])}, "
        f"a {kind_of(values[other])}, where line {lines[first]} has a {kind_of(values[first])}.",
        "Use one type in all rows of the column.",
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------ the formats


def _opens_array(stream: IO[bytes]) -> bool:
    for _ in range(LINE_BYTES):
        byte = stream.read(1)
        if not byte or byte not in b" \t\r\n\xef\xbb\xbf":
            return byte == b"["
    return False


# -------------------------------------------------------------------------------------------------- the entry point

_COLUMNAR = (".parquet", ".arrow")
_TEXTUAL = (".jsonl", ".json", ".csv", ".tsv", ".txt")
SUFFIXES = (*_TEXTUAL, *_COLUMNAR, *(kind + ending for ending in COMPRESSIONS for kind in _TEXTUAL))
"""File name endings that `read` supports."""
ENDINGS = f"{', '.join(_TEXTUAL)} (also with {', '.join(COMPRESSIONS)} behind them), {', '.join(_COLUMNAR)}"
"""The same endings as a text for people."""


def format_of(name: str) -> str | None:
    """Return the format by the file's name: `jsonl`, `json`, `csv`, `tsv`, `txt`, `parquet`, `arrow`; or None."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    return suffix.removesuffix(compression_of(name)).removeprefix(".") if suffix else None


def read(
    file: RawFile, wanted: Sequence[str], seen: dict[str, None], notes: list[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows in chunks of the wanted columns; add the names of all columns of the file to `seen`, in its order,
    and to `notes` remarks for people on how it is read.

    A wanted column that the file lacks may be present, with nulls only. The types of a column may differ from chunk to
    chunk where the format has none. Raise StageError DATA: `CorruptLine`, `CorruptFile`, `MixedTypes`.
    """
    kind = format_of(file.name)
    if kind == "parquet":
        yield from _read_parquet(file, wanted, seen)
    elif kind == "arrow":
        yield from _read_arrow(file, wanted, seen)
    else:
        rows = text_rows(file, wanted, [] if notes is None else notes)
        yield from _as_tables(file, _strict(file, rows), wanted, seen)


def text_rows(file: RawFile, wanted: Sequence[str], notes: list[str]) -> Iterator[ReadRow | Rejected]:
    """Yield the rows of a text file, including those that cannot be read. Raise StageError DATA for a file that cannot
    be read any further.
    """
    kind = format_of(file.name)
    with open_decompressed(file) as stream:
        try:
            refuse_other_content(file)
            yield from _rows(file, stream, kind, wanted, notes)
        except (EOFError, lzma.LZMAError) as error:
            raise unreadable(file, error) from error
        except OSError as error:
            # Errors with a number are the storage's; the codecs' have none.
            if error.errno is not None or not is_compressed(file):
                raise
            raise unreadable(file, error) from error


def has_lines(file: RawFile) -> bool:
    """Return True if each row is a line of text, so that reading can start at any byte of the decompressed file."""
    kind = format_of(file.name)
    if kind == "json":
        with open_decompressed(file) as ahead:
            return not _opens_array(ahead)
    return kind in ("jsonl", "txt")


def is_compressed(file: RawFile) -> bool:
    """Return True if the file can only be read from its start."""
    return bool(compression_of(file.name))


def rows_between(file: RawFile, start: int, stop: int) -> Iterator[ReadRow | Rejected]:
    """Yield the rows of the lines that begin in a range of bytes of an uncompressed file that `has_lines`, including
    those that cannot be read; lines are counted from the range's first one.
    """
    if start == 0:
        refuse_other_content(file)
    with open_decompressed(file) as stream:
        at, mark = start, 0
        if start:
            stream.seek(start - 1)
            at = start - 1 + len(stream.readline(LINE_BYTES + 1))  # behind the rest of a line that begins before
        elif cast(io.BufferedReader, stream).peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            mark = len(BYTE_ORDER_MARK)

        def lines() -> Iterator[tuple[int, bytes]]:
            nonlocal at
            for number, line in lines_of(file, stream, first=start == 0):
                if at >= stop:
                    return
                at += len(line) + (mark if number == 1 else 0)
                yield number, line

        yield from (text_lines if format_of(file.name) == "txt" else json_lines)(lines())


def _rows(
    file: RawFile, stream: IO[bytes], kind: str | None, wanted: Sequence[str], notes: list[str]
) -> Iterator[ReadRow | Rejected]:
    if kind == "json" and not has_lines(file):
        return json_array(file, stream)
    if kind in ("json", "jsonl"):
        return json_lines(lines_of(file, stream))
    if kind == "txt":
        return text_lines(lines_of(file, stream))
    return separated("\t" if kind == "tsv" else ",", wanted, notes)(file, stream)


def _read_parquet(file: RawFile, wanted: Sequence[str], seen: dict[str, None]) -> Iterator[pa.Table]:
    try:
        with file.open() as stream:
            parquet = pq.ParquetFile(stream)
            names = _column_names(file, parquet.schema_arrow)
            seen.update(dict.fromkeys(names))
            columns = [name for name in wanted if name in names]
            for batch in parquet.iter_batches(_batch_rows(parquet.metadata), columns=columns):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise not_binary(file, "Parquet", error) from error


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Return the number of rows in a chunk of the longest ones, at most `_BATCH_ROWS`."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(_BATCH_ROWS, _CHUNK_BYTES // max(longest, 1)))


def _read_arrow(file: RawFile, wanted: Sequence[str], seen: dict[str, None]) -> Iterator[pa.Table]:
    """Read an IPC file, or an IPC stream, the format that `datasets` writes."""
    try:
        with file.open() as stream:
            is_file = stream.read(len(_IPC_FILE)) == _IPC_FILE
            stream.seek(0)
            names = _column_names(file, (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream).schema)
            seen.update(dict.fromkeys(names))
            stream.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=[at for at, name in enumerate(names) if name in wanted])
            if is_file:
                reader = pa.ipc.open_file(stream, options=options)
                batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(stream, options=options))
            for batch in batches:
                yield pa.Table.from_batches([batch])
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise not_binary(file, "Arrow IPC", error) from error


def _column_names(file: RawFile, schema: pa.Schema) -> list[str]:
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        raise unreadable(file, f"it has a column twice: {', '.join(names)}.")
    return names


_IPC_FILE = b"ARROW1"
"""First bytes of an IPC file; a stream has none."""
