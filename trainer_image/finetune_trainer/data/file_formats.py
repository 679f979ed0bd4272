"""Reads one raw file, in each of its formats, into Arrow columns, strictly.

Text arrives byte for byte: nothing is inferred from it (no dates, numbers or nulls out of CSV words like `NA`), which
is why JSON lines and CSV are parsed here and not by Arrow's readers. A line that cannot be read is an error with its
number; no row is skipped. Text in another encoding than UTF-8 is refused with the command that converts it, as an
encoding can only be guessed. Only the columns that the job uses are converted, a chunk of rows at a time.

Lines and CSV records have a largest length: a few KB of a compressed file can be many GB without a newline, which would
otherwise all be one line in memory.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import eq
from typing import IO, Any, Literal, NoReturn, Protocol, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

_CHUNK_ROWS = 65_536
"""Limit of rows in one Arrow chunk."""
_CHUNK_BYTES = 16 << 20
"""Bytes of rows, as written in the file, after which a chunk ends: limits live memory to some tens of MB, however long
the rows are.
"""
_BATCH_ROWS = 1024
"""Rows read from Parquet at once: reading more is no faster."""
_DECODED_BYTES = 64 << 20
"""Most bytes that the rows of a batch of Parquet may take by repeating the texts of a dictionary."""
_PEEK_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20
"""Size of one read from a file."""
LINE_BYTES = 64 << 20
"""Largest line, in bytes; of CSV the largest record, in characters. A book has 1 MB of text, and the largest of
Wikipedia's articles 2 MB; parsing a line takes some ten times its length.
"""
ARRAY_BYTES = 1 << 30
"""Largest file that is one JSON array, in bytes without compression: it is read whole, and parsing takes some 5 GB."""
TEXT = "text"
"""Column of a plain text file."""


@dataclass
class Unread:
    """Columns that a job does not read, in one or several files."""

    rows: int = 0
    filled: dict[str, int | None] = field(default_factory=dict)
    """Name -> number of cells that are neither null nor empty; None: not known."""

    def count(self, name: str, filled: int | None) -> None:
        """Add cells of a column."""
        before = self.filled.get(name, 0)
        self.filled[name] = None if before is None or filled is None else before + filled

    def add(self, other: Unread) -> None:
        """Add other files."""
        self.rows += other.rows
        for name, filled in other.filled.items():
            self.count(name, filled)


class RawFile(Protocol):
    """A file that can be opened repeatedly."""

    @property
    def name(self) -> str:
        """Name in errors."""

    def open(self) -> IO[bytes]:
        """Open the content, from the start."""


def corrupt(file: RawFile, line: int, why: str) -> StageError:
    """Return the error for a line that cannot be read; lines count from 1."""
    return StageError(
        FailureClass.DATA,
        "CorruptLine",
        f"{file.name}, line {line}: {why}",
        "Correct or remove this line; no line is skipped silently.",
    )


def unreadable(file: RawFile, why: object) -> StageError:
    """Return the error for a file that cannot be read at all."""
    return StageError(FailureClass.DATA, "CorruptFile", f"{file.name} cannot be read: {why}", "Write the file again.")


def rows_too_large(file: RawFile, why: str) -> StageError:
    """Return the error for rows that do not fit the memory, however small their file is."""
    return StageError(
        FailureClass.DATA,
        "RowsTooLarge",
        f"{file.name} cannot be read: {why}",
        "Divide its longest rows and write several smaller files; of Parquet and Arrow, smaller row groups or batches.",
    )


@contextmanager
def fits_memory(file: RawFile) -> Iterator[None]:
    """Raise StageError DATA `RowsTooLarge` where reading the file, but not the caller, runs out of memory."""
    try:
        yield
    except MemoryError as error:  # Arrow's is one, too
        raise rows_too_large(file, f"its rows exceed the memory. {error}".strip()) from error


@dataclass(frozen=True)
class Rejected:
    """A row of text that cannot be read."""

    line: int
    """Last line of the row, from 1."""
    why: str
    content: str
    """Excerpt for people."""
    size: int
    """Bytes in the file, approximately."""
    of: Literal["line", "encoding", "array"] = "line"


ReadRow: TypeAlias = tuple[int, dict[str, object], int]
"""Line, columns, and approximate number of bytes in the file."""


def open_decompressed(file: RawFile) -> IO[bytes]:
    ending, stream = compression_of(file.name), file.open()
    if not ending:
        # Files of remote file systems return only whole lines, however long they are.
        return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK_BYTES))
    if ending == ".xz":
        return cast(IO[bytes], lzma.open(stream))
    return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(stream, COMPRESSIONS[ending])))


def compression_of(name: str) -> str:
    return next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")


COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
"""Ending -> codec; all are pyarrow's but xz, which the standard library has."""


# ---------------------------------------------------------------------------------------------------------- any format

_COLUMNAR = (".parquet", ".arrow")
_CONLL = (".conll", ".iob", ".bio")
_TEXTUAL = (".jsonl", ".json", ".csv", ".tsv", ".txt", *_CONLL)
SUFFIXES = (*_TEXTUAL, *_COLUMNAR, *(kind + ending for ending in COMPRESSIONS for kind in _TEXTUAL))
"""File name endings that `read` supports."""
ENDINGS = f"{', '.join(_TEXTUAL)} (also with {', '.join(COMPRESSIONS)} behind them), {', '.join(_COLUMNAR)}"
"""The same endings as a text for people."""


def format_of(name: str) -> str | None:
    """Return the format by the file's name: its ending, `conll` for those of words and tags; or None."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    if suffix is not None and suffix.startswith(_CONLL):
        return "conll"
    return suffix.removesuffix(compression_of(name)).removeprefix(".") if suffix else None


def read(
    file: RawFile,
    wanted: Sequence[str],
    seen: dict[str, None],
    notes: list[str] | None = None,
    nested: Collection[str] = (),
    unread: Unread | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows in chunks of the wanted columns; add the names of all columns of the file to `seen`, in its order,
    to `notes` remarks for people on how it is read, and to `unread` the other columns of the chunks read so far.
    `nested`: columns whose lists and objects are kept as JSON.

    A wanted column that the file lacks may be present, with nulls only. The types of a column may differ from chunk to
    chunk where the format has none. Raise StageError DATA: `CorruptLine`, `CorruptFile`, `MixedTypes`, `RowsTooLarge`.
    """
    kind = format_of(file.name)
    with fits_memory(file):
        if kind in ("parquet", "arrow"):
            batches = (_read_parquet if kind == "parquet" else _read_arrow)(file, wanted, seen, unread)
            yield from (with_json(table, nested) for batch in batches for table in _pieces(batch))
        else:
            rows = text_rows(file, wanted, [] if notes is None else notes)
            yield from _as_tables(file, _strict(file, rows), wanted, seen, nested, unread)


def text_rows(file: RawFile, wanted: Sequence[str], notes: list[str]) -> Iterator[ReadRow | Rejected]:
    """Yield the rows of a text file, including those that cannot be read. Raise StageError DATA for a file that cannot
    be read any further.
    """
    kind = format_of(file.name)
    with fits_memory(file), open_decompressed(file) as stream:
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


def first_rows(file: RawFile, count: int) -> list[dict[str, Any]]:
    """Return the first readable rows with all their columns. Raise StageError DATA as `read`."""
    if format_of(file.name) in ("parquet", "arrow"):
        names: dict[str, None] = {}
        next(read(file, (), names), None)
        table = next(read(file, list(names), {}), None)
        return [] if table is None else rows_of(table.slice(0, count))
    rows = (row[1] for row in text_rows(file, (), []) if not isinstance(row, Rejected))
    return list(islice(rows, count))


def all_rows(file: RawFile, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a text file. Raise StageError DATA as `read`."""
    return (row for _, row, _ in _strict(file, text_rows(file, wanted, [])))


def has_lines(file: RawFile) -> bool:
    """Return True if each row is a line of text, so that reading can start at any byte of the decompressed file."""
    kind = format_of(file.name)
    if kind == "json":
        with open_decompressed(file) as ahead:
            return not _opens_array(ahead) and not _has_rows_inside(file)
    return kind == "jsonl" or (kind == "txt" and not _is_tagged(file))


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
        if _has_rows_inside(file):
            notes.append(f"{file.name}: read as one object with its rows in data, as SQuAD's own files.")
        return json_array(file, stream)
    if kind in ("json", "jsonl"):
        return json_lines(lines_of(file, stream))
    if kind == "conll" or (kind == "txt" and not has_lines(file)):
        notes.append(f"{file.name}: read as sentences of words and tags, a word a line.")
        return tagged_words(file, lines_of(file, stream))
    if kind == "txt":
        return text_lines(lines_of(file, stream))
    return separated("\t" if kind == "tsv" else ",", wanted, notes)(file, stream)


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


def _opens_array(stream: IO[bytes]) -> bool:
    for _ in range(LINE_BYTES):
        byte = stream.read(1)
        if not byte or byte not in b" \t\r\n\xef\xbb\xbf":
            return byte == b"["
    return False


# -------------------------------------------------------------------------------------------------- columns of rows


def _as_tables(
    file: RawFile,
    rows: Iterator[ReadRow],
    wanted: Sequence[str],
    seen: dict[str, None],
    nested: Collection[str],
    unread: Unread | None,
) -> Iterator[pa.Table]:
    """Yield chunks of the wanted columns; a key that a row lacks is null. Adds every key found to `seen`, in order."""
    chunk: list[dict[str, object]] = []
    lines: list[int] = []
    size = 0

    def table() -> pa.Table:
        if unread is not None:
            unread.rows += len(chunk)
            for at, name in enumerate(name for name in seen if name not in wanted):
                filled = sum(row.get(name) not in _EMPTY for row in chunk) if at < MOST_COUNTED else None
                unread.count(name, filled)
        return _table(file, chunk, lines, wanted, nested)

    for line, row, length in rows:
        if not row.keys() <= seen.keys():
            seen.update(dict.fromkeys(row))
        chunk.append(row)
        lines.append(line)
        size += length
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield table()
            chunk, lines, size = [], [], 0
    if chunk:
        yield table()


MOST_COUNTED = 12
"""Columns of text that are counted: one takes 0.1 us a row, where prepare takes 50 to 100."""
_EMPTY: tuple[object, ...] = ("", None, [], {})
"""Values that fill no cell."""


def _table(
    file: RawFile, rows: list[dict[str, object]], lines: list[int], wanted: Sequence[str], nested: Collection[str]
) -> pa.Table:
    return pa.table(
        {name: as_column(file, name, [row.get(name) for row in rows], lines, nested=name in nested) for name in wanted}
    )


def as_column(
    file: RawFile, name: str, values: list[object], lines: Sequence[int], *, nested: bool = False
) -> pa.Array:
    """Convert values to a column of one type; `nested`: lists and objects to JSON, as they were written. Raise
    StageError DATA `MixedTypes` or `CorruptLine`; `lines`: of each.
    """
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) > 1 and not kinds <= {int, float}:
        _refuse_mixed(file, name, values, lines)
    try:
        if nested and kinds <= _NESTED and kinds:
            return json_column(values)
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


_NESTED = {list, dict}


def json_column(values: Iterable[object]) -> pa.Array:
    """Return lists and objects as JSON text, in Arrow's type of it: a column of structs would give each object the
    keys of all rows.
    """
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(texts, pa.json_())


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return Python's values of a column, also of JSON."""
    values: list[Any] = column.to_pylist()
    return [_as_written(value, column.type) for value in values] if _has_json(column.type) else values


def _has_json(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.JsonType) or any(_has_json(kind.field(at).type) for at in range(kind.num_fields))


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """Return a value with its JSON parsed, and without the nulls of structs, which have the keys of all rows."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(value, list):
        return [_as_written(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {
            field.name: _as_written(value[field.name], field.type) for field in kind if value[field.name] is not None
        }
    return value


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows as Python values, also of JSON."""
    columns = [python_values(column) for column in table.columns]
    return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def with_json(table: pa.Table, nested: Collection[str]) -> pa.Table:
    """Return the table with some of its columns as JSON, where they are nested. Their nulls are left out: objects of a
    column of structs have the keys of all rows.
    """
    for name in nested:
        if name in table.column_names and pa.types.is_nested(table[name].type):
            column = json_column([_as_written(value, table[name].type) for value in table[name].to_pylist()])
            table = table.set_column(table.column_names.index(name), name, column)
            table = table.replace_schema_metadata(_with_json_feature(table.schema.metadata, name))
    return table


def _with_json_feature(metadata: Mapping[bytes, bytes] | None, name: str) -> Mapping[bytes, bytes] | None:
    """Return a schema's metadata with JSON as the type that `datasets` has for the column."""
    if not metadata or b"huggingface" not in metadata:
        return metadata
    described = json.loads(metadata[b"huggingface"])
    described["info"]["features"][name] = {"_type": "Json"}
    return {**metadata, b"huggingface": json.dumps(described).encode()}


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


# ---------------------------------------------------------------------------------------------------------------- text


def kind_of(value: object) -> str:
    return {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}.get(
        type(value), "value"
    )


def shortened_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def lines_of(file: RawFile, stream: IO[bytes], *, first: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield lines numbered from 1, with their ends, without a byte order mark at the start of the file (`first`: the
    stream is at its first line). Raise StageError DATA for one over `LINE_BYTES`.
    """
    for number, line in enumerate(iter(partial(stream.readline, LINE_BYTES + 1), b""), start=1):
        if len(line) > LINE_BYTES:
            raise _too_long(file, number)
        yield number, line.removeprefix(BYTE_ORDER_MARK) if first and number == 1 else line


def _too_long(file: RawFile, line: int, record: str = "the line") -> StageError:
    return StageError(
        FailureClass.DATA,
        "LineTooLong",
        f"{file.name}, line {line}: {record} is longer than {_size(LINE_BYTES)}.",
        "End each row with a newline and divide longer rows; Parquet has no lines.",
    )


def _size(count: int) -> str:
    """Format a number of bytes in the largest unit that divides it."""
    return next((f"{count >> shift} {unit}" for shift, unit in _UNITS if count % (1 << shift) == 0), f"{count} bytes")


_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def json_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[ReadRow | Rejected]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = _DECODER.decode(line.decode("utf-8").strip())
        except UnicodeDecodeError:
            yield _wrong_encoding(number, line)
            continue
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            shown = _excerpt(line)
            yield Rejected(number, f"not a JSON object: {why}: {shown}", shown, len(line))
            continue
        if isinstance(row, dict):
            yield number, row, len(line)
        else:
            shown = _excerpt(line)
            why = f"a JSON {kind_of(row)}, where each line must be an object: {shown}"
            yield Rejected(number, why, shown, len(line))


def text_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[ReadRow | Rejected]:
    """Yield a row for each line, also for an empty one: predictions keep the lines' order and number."""
    for number, line in lines:
        try:
            yield number, {TEXT: line.decode("utf-8").removesuffix("\n").removesuffix("\r")}, len(line)
        except UnicodeDecodeError:
            yield _wrong_encoding(number, line)


TOKENS, TAGS = "tokens", "tags"
"""Columns of a file of words and tags."""
_TAG = re.compile(rb"(?:O|[BIESLU]-\S+)")
_DOCUMENT = b"-DOCSTART-"
_LINES_AHEAD = 100


def _fields_of_word(line: bytes) -> list[bytes]:
    return [field.strip() for field in line.split(b"\t")] if b"\t" in line.strip() else line.split()


def _first_words(file: RawFile) -> list[list[bytes]]:
    """Return the fields of the first lines with a word, without comments."""
    with open_decompressed(file) as ahead:
        lines = [line for _, line in islice(lines_of(file, ahead), _LINES_AHEAD)]
    return [_fields_of_word(line) for line in lines if line.strip() and not line.startswith((b"#", _DOCUMENT))]


def _is_tagged(file: RawFile) -> bool:
    """Return True for a text file whose first lines all have a word and end in a tag such as O or B-PER."""
    first = _first_words(file)
    return bool(first) and all(len(fields) > 1 and _TAG.fullmatch(fields[-1]) for fields in first)


def tagged_words(file: RawFile, lines: Iterable[tuple[int, bytes]]) -> Iterator[ReadRow | Rejected]:
    """Yield a row for each sentence: its words and, unless lines hold words alone, their tags. Empty lines separate
    sentences. Lines of -DOCSTART-, and comments (lines with # and another number of fields), are left out.
    """
    first = _first_words(file)
    width = len(first[0]) if first else 0
    if width == 10 and first[0][0].isdigit():
        raise StageError(
            FailureClass.DATA,
            "OtherFormat",
            f"{file.name} has the ten columns of CoNLL-U, of which no one holds the tags of a sentence alone.",
            "Write word and tag, separated by a tab, to a line each.",
        )
    words: list[list[bytes]] = []
    last = size = 0
    wrong: Rejected | None = None
    for number, line in chain(lines, [(0, b"")]):
        fields = _fields_of_word(line)
        if not line.strip() or line.startswith(_DOCUMENT):
            if words or wrong is not None:
                yield wrong or _sentence(words, last, size)
            words, size, wrong = [], 0, None
            continue
        last, size = number, size + len(line)
        if len(fields) == width:
            words.append(fields)
        elif not line.startswith(b"#"):
            shown = _excerpt(line)
            wrong = wrong or Rejected(number, f"{len(fields)} fields, where others have {width}: {shown}", shown, size)


def _sentence(words: Sequence[Sequence[bytes]], line: int, size: int) -> ReadRow | Rejected:
    try:
        row = {TOKENS: [fields[0].decode() for fields in words]}
        tags = {TAGS: [fields[-1].decode() for fields in words]} if len(words[0]) > 1 else {}
    except UnicodeDecodeError:
        return _wrong_encoding(line, b" ".join(fields[0] for fields in words))
    return line, {**row, **tags}, size


def _wrong_encoding(number: int, line: bytes) -> Rejected:
    return Rejected(number, "not UTF-8.", _excerpt(line), len(line), of="encoding")


_ROWS_INSIDE = re.compile(rb'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[\s*\{')


def _has_rows_inside(file: RawFile) -> bool:
    """Return True for a file that is one object with its rows in a list `data`, as SQuAD's own files."""
    with open_decompressed(file) as stream:
        if not _ROWS_INSIDE.match(stream.read(_START_BYTES).removeprefix(BYTE_ORDER_MARK)):
            return False
    with open_decompressed(file) as stream:
        first, second = (stream.readline(LINE_BYTES + 1).strip() for _ in range(2))
    return not (first.endswith(b"}") and second.startswith(b"{"))  # as rows that begin with a column `data`


def _rows_inside(content: Any) -> Any:
    """Return the rows of such a file, a row for each question of SQuAD's paragraphs; any other content as it is."""
    rows = content["data"] if isinstance(content, dict) else content
    if not rows or not all(isinstance(row, dict) and "paragraphs" in row for row in rows):
        return rows
    return [
        {
            "id": asked.get("id"),
            "title": article.get("title"),
            "context": paragraph["context"],
            "question": asked["question"],
            "answers": {
                "text": [answer["text"] for answer in asked.get("answers", ())],
                "answer_start": [answer["answer_start"] for answer in asked.get("answers", ())],
            },
        }
        for article in rows
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def json_array(file: RawFile, stream: IO[bytes]) -> Iterator[ReadRow | Rejected]:
    """Read a file that is one JSON array of objects, or one object with such an array, as a whole; `line` of its rows
    is the index from 1, because the parser reports no lines.
    """
    content = stream.read(ARRAY_BYTES + 1)
    if len(content) > ARRAY_BYTES:
        raise StageError(
            FailureClass.DATA,
            "ArrayTooLong",
            f"{file.name} is one JSON array of more than {_size(ARRAY_BYTES)}, which must be read at once.",
            "Write it as JSON Lines: one object per line, without brackets and commas around them.",
        )
    try:
        rows = _rows_inside(_DECODER.decode(content.decode("utf-8-sig").strip()))
    except UnicodeDecodeError:
        raise no_utf8(file) from None
    except json.JSONDecodeError as error:
        raise corrupt(file, error.lineno, f"not JSON: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise unreadable(file, error) from None
    except (KeyError, TypeError) as error:
        raise unreadable(file, f"a paragraph is not as in SQuAD: {error!r}.") from None
    for number, row in enumerate(rows, start=1):
        size = len(content) // len(rows)
        if isinstance(row, dict):
            yield number, row, size
        else:
            why = f"element {number} of its array is a {kind_of(row)}, not an object."
            yield Rejected(number, why, shortened_value(row), size, of="array")


def separated(
    usual: str, wanted: Sequence[str], notes: list[str]
) -> Callable[[RawFile, IO[bytes]], Iterator[ReadRow | Rejected]]:
    def rows(file: RawFile, stream: IO[bytes]) -> Iterator[ReadRow | Rejected]:
        # The default limit of 128 KiB for one field is below real documents, and a setting of the whole module.
        # `_Records` has a limit of its own.
        csv.field_size_limit(sys.maxsize)
        delimiter = _delimiter(file, usual, wanted)
        if delimiter != usual:
            notes.append(f"{file.name}: read with {_DELIMITERS[delimiter]} as separators of columns.")
        records = _Records(file, io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
        reader = csv.reader(records, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if wanted and not set(header) & set(wanted) and _is_row(file, header, delimiter):
                raise _no_header(file, header, delimiter, wanted)
            _refuse_other_separator(file, header, wanted)
            if len(set(header)) < len(header):
                raise corrupt(file, 1, f"the header names a column twice: {', '.join(header)}.")
            records.begin()
            for row in _records_of(reader):
                records.begin()
                if isinstance(row, Rejected):
                    yield row
                elif len(row) == len(header):
                    yield reader.line_num, dict(zip(header, row, strict=True)), sum(map(len, row))
                elif row:
                    why = f"{len(row)} fields, where the header has {len(header)}."
                    yield Rejected(reader.line_num, why, _excerpt(delimiter.join(row).encode()), sum(map(len, row)))
        except UnicodeDecodeError:
            raise no_utf8(file) from None
        except csv.Error as error:
            raise corrupt(file, max(reader.line_num, 1), f"not CSV: {error}.") from None

    return rows


def _refuse_other_separator(file: RawFile, header: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise StageError DATA if another character than those of `_DELIMITERS` separates the columns that a job names."""
    if len(header) != 1 or len(wanted) < 2:
        return
    for sign in re.findall(r"[^\w\s]", header[0]):
        if set(wanted) <= {name.strip() for name in header[0].split(sign)}:
            raise StageError(
                FailureClass.DATA,
                "OtherFormat",
                f"{file.name}, line 1: {sign!r} separates the columns.",
                f"Write the file with {', '.join(_DELIMITERS.values())} instead.",
            )


def _records_of(reader: Any) -> Iterator[list[str] | Rejected]:
    """Yield records of a `csv.reader`, which continues at the next line after one that it cannot read."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Rejected(reader.line_num, f"not CSV: {error}.", "", 0)


_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}


def _delimiter(file: RawFile, usual: str, wanted: Sequence[str]) -> str:
    """Return the separator of the columns: `usual`, unless only another character gives the first line columns that the
    job names, or several columns at all.
    """
    with open_decompressed(file) as ahead:
        _, line = next(lines_of(file, ahead), (1, b""))
    headers = {delimiter: set(_fields(line.decode("utf-8", "replace"), delimiter)) for delimiter in _DELIMITERS}
    if headers[usual] & set(wanted):
        return usual
    best = max(
        _DELIMITERS,
        key=lambda delimiter: (len(headers[delimiter] & set(wanted)), len(headers[delimiter]), delimiter == usual),
    )
    return best if headers[best] & set(wanted) or len(headers[usual]) == 1 else usual


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _is_row(file: RawFile, header: Sequence[str], delimiter: str) -> bool:
    """Return True if the first line is no header: it has a number, a long text, or a value of a later row."""
    if any(_is_number(name) or len(name.split()) > _NAME_WORDS for name in header):
        return True
    with open_decompressed(file) as ahead:
        following = [line.decode("utf-8", "replace") for _, line in islice(lines_of(file, ahead), 1, 1 + _ROWS_AHEAD)]
    rows = [_fields(line, delimiter) for line in following]
    return any(len(row) == len(header) and any(map(eq, row, header)) for row in rows)


_NAME_WORDS = 5
"""Limit of words in a column's name, where a file may be without a header."""
_ROWS_AHEAD = 100


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _no_header(file: RawFile, header: Sequence[str], delimiter: str, wanted: Sequence[str]) -> StageError:
    names = delimiter.join(wanted)
    return StageError(
        FailureClass.DATA,
        "NoHeader",
        f"{file.name}, line 1: {_excerpt(delimiter.join(header).encode())} looks like a row, and the first line must "
        "name the columns.",
        f"Add a first line with the names of its {len(header)} columns, such as {names!r}.",
    )


class _Records:
    """Lines of a CSV file for its parser, as long as a record is not too long: an unclosed quote takes all lines behind
    it into one field.
    """

    def __init__(self, file: RawFile, text: io.TextIOWrapper) -> None:
        self._file = file
        self._text = text
        self._line = self._taken = 0

    def begin(self) -> None:
        """Count the length of the next record from here."""
        self._taken = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self._line += 1
        self._taken += len(line)
        if self._taken > LINE_BYTES:
            raise _too_long(self._file, self._line, "the record, which may have an open quote before it,")
        return line


def no_utf8(file: RawFile) -> StageError:
    """Return the error, with the line found by decoding line after line; the parsers read ahead and do not know it."""
    utf8 = False
    with open_decompressed(file) as stream:
        for number, line in lines_of(file, stream):
            try:
                utf8 |= not line.decode("utf-8").isascii()
            except UnicodeDecodeError as error:
                return _encoding_error(file, number, line, error.start, utf8 or not line[: error.start].isascii())
    return unreadable(file, "it is not UTF-8.")


def _encoding_error(file: RawFile, number: int, line: bytes, at: int, utf8: bool) -> StageError:
    """Return the error. `utf8`: True if UTF-8 letters come before, so the file is damaged, not in another encoding."""
    why = f"not UTF-8 at byte {at + 1} of the line"
    if utf8:
        return corrupt(file, number, f"{why}, though other letters before it are.")
    shown = line[max(0, at - 20) : at + 20].decode("cp1252", "replace").strip()
    return StageError(
        FailureClass.DATA,
        "CorruptLine",
        f"{file.name}, line {number}: {why}. Read as Windows-1252 (Latin-1), it is {shown!r}.",
        f"If that is right, convert the file: {_conversion(file, 'WINDOWS-1252')}. If not, use its encoding in that "
        "command.",
    )


def _conversion(file: RawFile, encoding: str) -> str:
    """Return the command that writes the file in UTF-8 and keeps the old one under a name that is not read."""
    name = file.name.removesuffix(compression_of(file.name))
    path, old = shlex.quote(name), shlex.quote(f"{name}.old")
    return f"mv {path} {old} && iconv -f {encoding} -t UTF-8 {old} > {path}"


def refuse_other_content(file: RawFile) -> None:
    """Raise StageError DATA for a text file that begins like files of other kinds or in other encodings."""
    with open_decompressed(file) as stream:
        start = stream.read(_START_BYTES)
    for mark, (kind, hint) in _OTHER_CONTENT.items():
        if start.startswith(mark):
            raise StageError(FailureClass.DATA, "OtherFormat", f"{file.name} is {kind}, not text.", hint)
    name = file.name.removesuffix(compression_of(file.name))
    for pattern, (kind, hint, endings) in _OTHER_TEXT.items():
        if name.endswith(endings) and re.match(pattern, start, re.IGNORECASE):
            raise StageError(FailureClass.DATA, "OtherFormat", f"{file.name} is {kind}.", hint)
    encoding = next((name for mark, name in _ENCODING_MARKS.items() if start.startswith(mark)), None)
    if encoding is None and start.count(0) * 4 > len(start):
        encoding = "UTF-16LE" if start[1::2].count(0) > start[::2].count(0) else "UTF-16BE"
    if encoding is not None:
        raise StageError(
            FailureClass.DATA,
            "OtherEncoding",
            f"{file.name} is written in {encoding}; text files must be UTF-8.",
            f"Convert it: {_conversion(file, encoding)}. Excel writes UTF-8 as 'CSV UTF-8'.",
        )


_START_BYTES = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ENCODING_MARKS = {b"\xff\xfe\x00\x00": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_EXCEL = "Save its sheet as 'CSV UTF-8', and use that file."
_OTHER_CONTENT = {
    b"PK\x03\x04": ("an Excel workbook or another zip archive", _EXCEL),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", _EXCEL),
    b"PAR1": ("Parquet", "Rename it to end in .parquet."),
    b"ARROW1": ("an Arrow file", "Rename it to end in .arrow."),
    b"\x1f\x8b": ("compressed", "Add .gz to its name."),
    b"(\xb5/\xfd": ("compressed", "Add .zst to its name."),
    b"BZh": ("compressed", "Add .bz2 to its name."),
    b"\xfd7zXZ": ("compressed", "Add .xz to its name."),
}
"""First bytes of other kinds of files -> the kind, and the hint."""
_POINTER = rb"version https://git-lfs\.github\.com/spec/"
_TABLES = (".csv", ".tsv", ".jsonl")
_OTHER_TEXT = {
    _POINTER: ("a pointer of Git LFS, not the data", "Fetch the content with `git lfs pull`.", (*_TABLES, ".json")),
    rb"\s*<(?:!doctype html|html)": ("a web page, such as a login", "Download the file itself.", _TABLES),
    rb"\s*\[\s*\{": ("a JSON array, not JSON Lines", "Rename the file to end in .json.", (".jsonl",)),
}
"""First bytes of text without a row a line -> the kind, the hint, and the endings of files that cannot be so."""


def not_binary(file: RawFile, kind: str, error: object) -> StageError:
    """Return the error for a file whose ending names a binary format, `kind`, that it does not have."""
    with file.open() as stream:
        start = stream.read(_START_BYTES)
    if re.match(_POINTER, start):
        pointer, hint, _ = _OTHER_TEXT[_POINTER]
        return StageError(FailureClass.DATA, "OtherFormat", f"{file.name} is {pointer}.", hint)
    if start and 0 not in start and not start.startswith((b"PAR1", b"ARROW1")):
        hint = "Name it by its content: .csv or .jsonl."
        return StageError(FailureClass.DATA, "CorruptFile", f"{file.name} is text, not {kind}.", hint)
    return unreadable(file, error)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


# --------------------------------------------------------------------------------------------------- Parquet and Arrow


def _read_parquet(
    file: RawFile, wanted: Sequence[str], seen: dict[str, None], unread: Unread | None
) -> Iterator[pa.RecordBatch]:
    try:
        with file.open() as stream:
            parquet = Parquet(stream)
            names = _column_names(file, parquet.file.schema_arrow)
            seen.update(dict.fromkeys(names))
            columns = [name for name in wanted if name in names]
            if unread is not None:
                _count_by_statistics(parquet.file.metadata, [name for name in names if name not in wanted], unread)
            rows = _batch_rows(parquet.file.metadata)
            for group in range(parquet.file.num_row_groups):
                yield from parquet.batches(group, columns, rows)
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise not_binary(file, "Parquet", error) from error


class Parquet:
    """Parquet file that is decoded in bounded batches: a small file may repeat a long text in any number of rows."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.file = pq.ParquetFile(stream)
        metadata = self.file.metadata
        columns = (metadata.schema.column(at) for at in range(metadata.num_columns))
        texts = [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and "." not in one.path]
        # Of the first row, only the pages that it is in are read.
        self._texts = pq.ParquetFile(
            stream, metadata=metadata, read_dictionary=texts, buffer_size=_PEEK_BYTES, pre_buffer=False
        )

    def batches(self, group: int, columns: Sequence[str], most: int) -> Iterator[pa.RecordBatch]:
        """Yield a row group in batches of at most `most` rows, and of at most `_DECODED_BYTES` of repeated texts."""
        first = next(self._texts.iter_batches(1, row_groups=[group], columns=columns), None)
        texts = [] if first is None else [one for one in first.columns if pa.types.is_dictionary(one.type)]
        longest = sum(pc.max(pc.binary_length(text.dictionary)).as_py() or 0 for text in texts)
        rows = min(most, max(1, _DECODED_BYTES // max(1, longest)))
        yield from self.file.iter_batches(rows, row_groups=[group], columns=columns)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.Table]:
    """Yield the rows in tables of at most `_CHUNK_BYTES` once they are decoded, or of one row."""
    if batch.nbytes <= _CHUNK_BYTES and not any(_is_reference(kind) for kind in batch.schema.types):
        yield pa.Table.from_batches([batch])
        return
    start = size = 0
    for at, more in enumerate(decoded_bytes(pa.Table.from_batches([batch])).tolist()):
        if size and size + more > _CHUNK_BYTES:
            yield _cut(batch, start, at)
            start, size = at, 0
        size += more
    yield _cut(batch, start, len(batch))


def _cut(batch: pa.RecordBatch, start: int, stop: int) -> pa.Table:
    """Return rows without the items of other rows' lists, which Arrow would decode with them."""
    columns = [_own_items(column.slice(start, stop - start)) for column in batch.columns]
    return pa.Table.from_arrays(columns, schema=batch.schema)


def _own_items(column: pa.Array) -> pa.Array:
    if not (pa.types.is_list(column.type) and _is_reference(column.type)):
        return column
    lengths = np.asarray(column.value_lengths().fill_null(0))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, column.flatten(), type=column.type, mask=column.is_null())


def _is_reference(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _is_reference(kind.value_type)
    return bool(pa.types.is_dictionary(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def decoded_bytes(table: pa.Table) -> NDArray[np.int64]:
    """Return the bytes of each row's texts, with dictionaries and views replaced by their values."""
    sizes = np.zeros(len(table), np.int64)
    for column in table.columns:
        if column.num_chunks:
            sizes += np.concatenate([_decoded_bytes(chunk) for chunk in column.chunks])
    return sizes


def _decoded_bytes(values: pa.Array) -> NDArray[np.int64]:
    kind = values.type
    if pa.types.is_dictionary(kind):
        sizes = pa.array(_decoded_bytes(values.dictionary)).take(values.indices)
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # The length is the first of the four numbers of a view.
        lengths = np.frombuffer(values.buffers()[1], np.int32)[::4]
        sizes = pa.array(lengths[values.offset : values.offset + len(values)], mask=np.asarray(values.is_null()))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        parents = np.asarray(pc.list_parent_indices(values))
        sizes = pa.array(np.bincount(parents, _decoded_bytes(values.flatten()), minlength=len(values)))
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        sizes = pc.binary_length(values)
    else:
        return np.zeros(len(values), np.int64)
    return np.asarray(sizes.fill_null(0)).astype(np.int64)


def _count_by_statistics(metadata: pq.FileMetaData, names: Sequence[str], unread: Unread) -> None:
    """Count the cells of columns by the statistics of the file, without reading them."""
    unread.rows += metadata.num_rows
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    places = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}  # only flat columns by name
    for name in names:
        counts = [_filled(group.column(places[name])) if name in places else None for group in groups]
        unread.count(name, None if None in counts else sum(count for count in counts if count is not None))


def _filled(column: pq.ColumnChunkMetaData) -> int | None:
    """Return the cells of a part of a column that are neither null nor empty; None: they are not known."""
    statistics = column.statistics
    if statistics is None or not statistics.has_null_count:
        return None
    filled: int = column.num_values - statistics.null_count
    empty = filled and statistics.physical_type == "BYTE_ARRAY" and (not statistics.has_min_max or not statistics.min)
    return None if empty else filled


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Return the number of rows in a chunk of the longest ones, at most `_BATCH_ROWS`."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(_BATCH_ROWS, _CHUNK_BYTES // max(longest, 1)))


def _read_arrow(
    file: RawFile, wanted: Sequence[str], seen: dict[str, None], unread: Unread | None
) -> Iterator[pa.RecordBatch]:
    """Read an IPC file, or an IPC stream, the format that `datasets` writes."""
    try:
        with file.open() as stream:
            is_file = stream.read(len(_IPC_FILE)) == _IPC_FILE
            stream.seek(0)
            names = _column_names(file, (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream).schema)
            seen.update(dict.fromkeys(names))
            for name in names:
                if unread is not None and name not in wanted:
                    unread.count(name, None)
            stream.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=[at for at, name in enumerate(names) if name in wanted])
            if is_file:
                reader = pa.ipc.open_file(stream, options=options)
                batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(stream, options=options))
            yield from batches
    except (pa.ArrowInvalid, pa.ArrowIOError, OSError) as error:
        raise not_binary(file, "Arrow IPC", error) from error


def _column_names(file: RawFile, schema: pa.Schema) -> list[str]:
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        raise unreadable(file, f"it has a column twice: {', '.join(names)}.")
    return names


_IPC_FILE = b"ARROW1"
"""First bytes of an IPC file; a stream has none."""
