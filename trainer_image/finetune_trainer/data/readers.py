"""Reads one raw file into Arrow columns, strictly.

Text arrives byte for byte: nothing is guessed from it (no dates, numbers or nulls out of CSV words like `NA`), which
is why JSON lines and CSV are parsed here and not by Arrow's readers. A line that cannot be read is an error with its
number; no row is skipped. Only the columns that the job uses are converted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NoReturn, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError

_CHUNK_ROWS = 65_536
"""Rows turned into one Arrow chunk: bounds the Python objects alive at a time to some tens of MB."""


class RawFile(Protocol):
    """A file that can be opened again and again."""

    @property
    def name(self) -> str:
        """How errors call it."""

    def open(self) -> IO[bytes]:
        """The content, from the start."""


def corrupt(file: RawFile, line: int, why: str) -> StageError:
    """The error for a line that cannot be read; lines count from 1."""
    return StageError(
        FailureClass.DATA,
        "CorruptLine",
        f"{file.name}, line {line}: {why}",
        "Correct or remove this line; no line is skipped silently.",
    )


def unreadable(file: RawFile, why: object) -> StageError:
    """The error for a file that cannot be read at all."""
    return StageError(FailureClass.DATA, "CorruptFile", f"{file.name} cannot be read: {why}", "Write the file again.")


# -------------------------------------------------------------------------------------------------- columns of rows


def _as_table(
    file: RawFile, rows: Iterator[tuple[int, dict[str, object]]], wanted: Sequence[str], seen: dict[str, None]
) -> Iterator[pa.Table]:
    """Chunks of the wanted columns; a key that a row lacks is null. Adds every key met to `seen`, in order."""
    chunk: list[dict[str, object]] = []
    lines: list[int] = []
    for line, row in rows:
        seen.update(dict.fromkeys(row))
        chunk.append(row)
        lines.append(line)
        if len(chunk) == _CHUNK_ROWS:
            yield _table(file, chunk, lines, wanted)
            chunk, lines = [], []
    if chunk:
        yield _table(file, chunk, lines, wanted)


def _table(file: RawFile, rows: list[dict[str, object]], lines: list[int], wanted: Sequence[str]) -> pa.Table:
    return pa.table({name: _array(file, name, [row.get(name) for row in rows], lines) for name in wanted})


def _array(file: RawFile, name: str, values: list[object], lines: list[int]) -> pa.Array:
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
            f"{file.name}: column {name!r} cannot become one type: {error}",
            "Give all rows one type.",
        ) from error


def _refuse_mixed(file: RawFile, name: str, values: list[object], lines: list[int]) -> NoReturn:
    first = next(i for i, value in enumerate(values) if value is not None)
    other = next(i for i, value in enumerate(values) if value is not None and type(value) is not type(values[first]))
    raise StageError(
        FailureClass.DATA,
        "MixedTypes",
        f"{file.name}, line {lines[other]}: column {name!r} is {_short(values[other])}, a {_kind(values[other])}, "
        f"where line {lines[first]} has a {_kind(values[first])}.",
        "Give all rows of the column one type.",
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    return {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}.get(
        type(value), "value"
    )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------------------------------ the formats


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_lines(file: RawFile, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            row = _DECODER.decode(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise corrupt(file, number, f"not UTF-8 at byte {error.start + 1} of the line.") from None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise corrupt(file, number, f"not a JSON object: {why}: {_excerpt(line)}") from None
        if not isinstance(row, dict):
            raise corrupt(file, number, f"a JSON {_kind(row)}, where each line must be an object: {_excerpt(line)}")
        yield number, row


def _json_array(file: RawFile, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, object]]]:
    """A file that is one JSON array of objects; `line` of its rows is the index from 1, for the parser tells no
    lines.
    """
    try:
        rows = _DECODER.decode(stream.read().decode("utf-8-sig").strip())
    except UnicodeDecodeError:
        raise _not_utf8(file) from None
    except json.JSONDecodeError as error:
        raise corrupt(file, error.lineno, f"not JSON: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise unreadable(file, error) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise unreadable(file, f"element {number} of its array is a {_kind(row)}, not an object.")
        yield number, row


def _separated(delimiter: str) -> Callable[[RawFile, IO[bytes]], Iterator[tuple[int, dict[str, object]]]]:
    def rows(file: RawFile, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, object]]]:
        # The default limit of 128 KiB for one field is below real documents. It is a setting of the whole module, and
        # only grows.
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(
            io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True
        )
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise corrupt(file, 1, f"the header names a column twice: {', '.join(header)}.")
            for row in reader:
                if len(row) == len(header):
                    yield reader.line_num, dict(zip(header, row, strict=True))
                elif row:
                    raise corrupt(file, reader.line_num, f"{len(row)} fields, where the header has {len(header)}.")
        except UnicodeDecodeError:
            raise _not_utf8(file) from None
        except csv.Error as error:
            raise corrupt(file, max(reader.line_num, 1), f"not CSV: {error}.") from None

    return rows


def _not_utf8(file: RawFile) -> StageError:
    """Finds the line by decoding line after line; the parsers read ahead and do not know it."""
    with _decompressed(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return corrupt(file, number, f"not UTF-8 at byte {error.start + 1} of the line.")
    return unreadable(file, "it is not UTF-8.")


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _decompressed(file: RawFile) -> IO[bytes]:
    stream = file.open()
    return cast(IO[bytes], gzip.open(stream)) if file.name.endswith(".gz") else stream


def _opens_array(stream: IO[bytes]) -> bool:
    while byte := stream.read(1):
        if byte not in b" \t\r\n\xef\xbb\xbf":
            return byte == b"["
    return False


# -------------------------------------------------------------------------------------------------- the entry point

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
"""What `read` understands."""


def format_of(name: str) -> str | None:
    """The format by the file's name: `jsonl`, `json`, `csv`, `tsv`, `parquet`; None for others."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    return suffix.removesuffix(".gz").removeprefix(".") if suffix else None


def read(file: RawFile, wanted: Sequence[str]) -> tuple[pa.Table, tuple[str, ...]]:
    """The wanted columns that the file has, and the names of all its columns in the file's order.

    StageError DATA: `CorruptLine`, `CorruptFile`, `MixedTypes`.
    """
    kind = format_of(file.name)
    if kind == "parquet":
        return _read_parquet(file, wanted)
    seen: dict[str, None] = {}
    with _decompressed(file) as stream:
        try:
            tables = list(_as_table(file, _rows(file, stream, kind), wanted, seen))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise unreadable(file, error) from error
    present = [name for name in wanted if name in seen]
    if not tables:
        return pa.table({}), ()
    try:
        table = pa.concat_tables([table.select(present) for table in tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise StageError(
            FailureClass.DATA,
            "MixedTypes",
            f"{file.name}: a column changes its type: {error}",
            "Give all rows one type.",
        ) from error
    return table, tuple(seen)


def _rows(file: RawFile, stream: IO[bytes], kind: str | None) -> Iterator[tuple[int, dict[str, object]]]:
    if kind == "json":
        with _decompressed(file) as ahead:
            return _json_array(file, stream) if _opens_array(ahead) else _json_lines(file, stream)
    if kind == "jsonl":
        return _json_lines(file, stream)
    return _separated("\t" if kind == "tsv" else ",")(file, stream)


def _read_parquet(file: RawFile, wanted: Sequence[str]) -> tuple[pa.Table, tuple[str, ...]]:
    try:
        with file.open() as stream:
            parquet = pq.ParquetFile(stream)
            names = tuple(parquet.schema_arrow.names)
            return parquet.read(columns=[name for name in wanted if name in names]), names
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise unreadable(file, error) from error
