"""Files whose content does not quite match their name: read correctly with a note, or refused with a hint."""

from __future__ import annotations

import codecs
import gzip
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.sources import ColumnNeed, FileSplit, FsFile, RawSplit

ROWS = [("A fine, warm café of a film", "1"), ("dull; overlong", "0"), ("tabs\tand | bars", "1")]
COLUMNS = ("text", "label")


def content(delimiter: str, header: bool = True) -> str:
    lines = [COLUMNS, *ROWS] if header else ROWS
    return "".join(delimiter.join(f'"{value}"' for value in line) + "\r\n" for line in lines)


def read(path: Path, written: bytes, columns: tuple[str, ...] = COLUMNS, most: int | None = None) -> RawSplit:
    path.write_bytes(written)
    scratch = path.with_name("scratch")
    scratch.mkdir(exist_ok=True)
    needs = [ColumnNeed(f"dataset.columns.{name}", name) for name in columns]
    return FileSplit("train", (FsFile(fsspec.filesystem("file"), str(path)),)).read(needs, scratch, most)


def rows_of(split: RawSplit) -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in split.rows.to_list()]


@pytest.mark.parametrize(
    ("name", "written", "note"),
    [
        ("a.csv", content(","), ""),
        ("a.csv", "\ufeff" + content(","), ""),
        ("a.csv", content(";"), "read with semicolons as separators"),
        ("a.csv", "\ufeff" + content(";"), "read with semicolons as separators"),
        ("a.csv", content("\t"), "read with tabs as separators"),
        ("a.csv", content("|"), "read with vertical bars as separators"),
        ("a.tsv", content("\t"), ""),
        ("a.tsv", content(","), "read with commas as separators"),
    ],
    ids=["usual", "BOM", "semicolons", "BOM and semicolons", "tabs", "bars", "tsv", "tsv with commas"],
)
def test_columns_are_found_with_any_separator(name: str, written: str, note: str, tmp_path: Path) -> None:
    split = read(tmp_path / name, written.encode())
    assert rows_of(split) == ROWS
    assert bool(split.notes) == bool(note)
    assert all(note in each for each in split.notes)


@dataclass(frozen=True)
class Bad:
    name: str
    written: bytes
    reason: str
    texts: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS


BAD = {
    "Latin-1": Bad("a.csv", content(",").encode("cp1252"), "CorruptLine", ("line 2", "café", "iconv -f WINDOWS-1252")),
    "Latin-1 in JSON lines": Bad(
        "a.jsonl", '{"text": "café", "label": 1}\n'.encode("cp1252"), "CorruptLine", ("line 1", "café", "iconv")
    ),
    "Latin-1 in plain text": Bad("a.txt", "café\n".encode("cp1252"), "CorruptLine", ("café", "iconv"), ("text",)),
    "one damaged byte in UTF-8": Bad(
        "a.csv", content(",").encode() + b'"\xff",1\n', "CorruptLine", ("line 5", "other letters before it are")
    ),
    "UTF-16 as Excel saves it": Bad("a.csv", content("\t").encode("utf-16"), "OtherEncoding", ("iconv -f UTF-16 -t",)),
    "UTF-16 without its mark": Bad("a.csv", content(",").encode("utf-16-le"), "OtherEncoding", ("-f UTF-16LE",)),
    "big-endian UTF-16 without its mark": Bad(
        "a.csv", content(",").encode("utf-16-be"), "OtherEncoding", ("UTF-16BE",)
    ),
    "UTF-16 in JSON lines": Bad("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "OtherEncoding", ("iconv -f UTF-16",)),
    "UTF-16 in plain text": Bad("a.txt", "a text".encode("utf-16-le"), "OtherEncoding", ("UTF-16LE",), ("text",)),
    "UTF-32": Bad("a.csv", codecs.BOM_UTF32_LE + content(",").encode("utf-32-le"), "OtherEncoding", ("-f UTF-32",)),
    "no header": Bad("a.csv", content(",", header=False).encode(), "NoHeader", ("line 1", "2 columns", "'text,label'")),
    "no header, and words as labels": Bad(
        "a.csv", b"good film,pos\nbad film,neg\nfine,pos\n", "NoHeader", ("'good film,pos'", "'text,label'")
    ),
    "no header, and semicolons": Bad(
        "a.csv", b"good film;1\nbad film;0\n", "NoHeader", ("'good film;1'", "'text;label'")
    ),
    "no header, and the same word twice": Bad("a.csv", b"1,1\n0,0\n", "NoHeader", ("'1,1'",)),
    "other names of columns": Bad(
        "a.csv", b"comment;stars\nfine;1\n", "MissingColumn", ("has the columns comment, stars",)
    ),
    "a column without its label": Bad("a.csv", b"text;stars\nfine;1\n", "MissingColumn", ("columns text, stars",)),
    "an Excel workbook": Bad("a.csv", b"PK\x03\x04\x14\x00\x06\x00", "OtherFormat", ("Excel workbook", "CSV UTF-8")),
    "Parquet": Bad("a.csv", b"PAR1\x15\x04", "OtherFormat", ("Parquet", ".parquet")),
    "a pointer of Git LFS": Bad(
        "a.csv", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "OtherFormat", ("git lfs pull",)
    ),
    "a pointer in place of Parquet": Bad(
        "a.parquet", b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "OtherFormat", ("git lfs pull",)
    ),
    "text in place of Parquet": Bad("a.parquet", content(",").encode(), "CorruptFile", ("is text", ".csv or .jsonl")),
    "text in place of Arrow": Bad("a.arrow", content(",").encode(), "CorruptFile", ("is text", "Arrow IPC")),
    "a damaged Parquet file": Bad("a.parquet", b"PAR1 is cut", "CorruptFile", ("cannot be read",)),
    "a web page": Bad("a.csv", b"\n<!DOCTYPE html><html>", "OtherFormat", ("web page", "Download the file itself")),
    "an array in JSON lines": Bad(
        "a.jsonl", b'[\n{"text": "a", "label": 1}]', "OtherFormat", ("array", "end in .json")
    ),
    "colons between columns": Bad("a.csv", b"text:label\nfine:1\n", "OtherFormat", ("':' separates", "semicolons")),
    "gzip": Bad("a.csv", gzip.compress(content(",").encode()), "OtherFormat", ("compressed", ".gz")),
}


@pytest.mark.parametrize("case", BAD)
def test_unreadable_file_is_refused_with_a_hint(case: str, tmp_path: Path) -> None:
    bad = BAD[case]
    with pytest.raises(StageError) as caught:
        read(tmp_path / bad.name, bad.written, bad.columns)
    error = caught.value
    assert (error.failure_class, error.reason) == (FailureClass.DATA, bad.reason), error.message
    whole = f"{error.message} {error.hint}"
    assert [text for text in bad.texts if text not in whole] == [], whole


@pytest.mark.parametrize(("encoding", "delimiter"), [("utf-16", "\t"), ("utf-16-le", ","), ("cp1252", ";")])
def test_the_conversion_that_a_refusal_names_makes_the_file_readable(
    encoding: str, delimiter: str, tmp_path: Path
) -> None:
    with pytest.raises(StageError) as caught:
        read(tmp_path / "my data.csv", content(delimiter).encode(encoding))
    (command,) = re.findall("mv .*csv'(?=\\.)", caught.value.hint)
    subprocess.run(command, shell=True, check=True)
    path = tmp_path / "my data.csv"
    assert rows_of(read(path, path.read_bytes())) == ROWS


def test_row_limit_reads_only_the_first_rows(tmp_path: Path) -> None:
    split = read(tmp_path / "a.csv", content(",").encode(), most=2)
    assert (rows_of(split), split.partial) == (ROWS[:2], True)
    assert not read(tmp_path / "a.csv", content(",").encode(), most=3).partial
    table = pa.table({"text": ["a"] * 5, "label": [1] * 5, "other": [0] * 5})
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    split = read(tmp_path / "b.arrow", (tmp_path / "b.arrow").read_bytes(), most=3)
    assert (len(split.rows), split.partial, split.has) == (3, True, ("text", "label", "other"))
