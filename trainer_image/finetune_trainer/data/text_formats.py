"""Rows of text files: lines, JSON and tables with delimiters, and what is wrong with a file that is none of them."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import eq
from typing import IO, Any, NoReturn

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.raw_files import (
    LINE_BYTES,
    RawFile,
    ReadRow,
    Rejected,
    compression_of,
    corrupt,
    open_decompressed,
    unreadable,
)

ARRAY_BYTES = 1 << 30
"""Largest file that is one JSON array, in bytes without compression: it is read whole, and parsing takes some 5 GB."""
TEXT = "text"
"""Column of a plain text file."""


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


def _wrong_encoding(number: int, line: bytes) -> Rejected:
    return Rejected(number, "not UTF-8.", _excerpt(line), len(line), of="encoding")


def json_array(file: RawFile, stream: IO[bytes]) -> Iterator[ReadRow | Rejected]:
    """Read a file that is one JSON array of objects, as a whole; `line` of its rows is the index from 1, because the
    parser reports no lines.
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
        rows = _DECODER.decode(content.decode("utf-8-sig").strip())
    except UnicodeDecodeError:
        raise no_utf8(file) from None
    except json.JSONDecodeError as error:
        raise corrupt(file, error.lineno, f"not JSON: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise unreadable(file, error) from None
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
    headers = {each: set(_fields(line.decode("utf-8", "replace"), each)) for each in _DELIMITERS}
    if headers[usual] & set(wanted):
        return usual
    best = max(_DELIMITERS, key=lambda each: (len(headers[each] & set(wanted)), len(headers[each]), each == usual))
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
