"""Rows to predict in shards: together they are all rows, once and in order, in every format."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.data import row_shards
from finetune_trainer.data.file_formats import Rejected, rows_between
from finetune_trainer.data.row_shards import FileRows, ShardRows
from finetune_trainer.data.sources import ColumnNeed, FileSplit, FsFile

NEEDS = (ColumnNeed("predict.dataset.columns.text", "text"),)
ROWS = [{"text": f"{i} " + "é" * (i % 37), "more": i} for i in range(3000)]


def shards_of(*paths: Path) -> list[tuple[str, ShardRows]]:
    files = tuple(FsFile(fsspec.filesystem("file"), str(path)) for path in paths)
    return [(str(shard.key), shard.read()) for shard in FileRows(FileSplit("predict", files), NEEDS).shards()]


def texts(shards: list[tuple[str, ShardRows]]) -> list[str]:
    return [text for _, rows in shards for text in rows.table_of(range(len(rows.numbers)))["text"].to_pylist()]


def as_csv() -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["text", "more"])
    writer.writeheader()
    writer.writerows({**row, "text": row["text"] + "\nline"} for row in ROWS)
    return out.getvalue().encode()


def lines() -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


def parquet(**how: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out, **how)
    return out.getvalue()


def arrow() -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return out.getvalue()


CONTENTS: dict[str, Callable[[], bytes]] = {
    "x.jsonl": lines,
    "bom.jsonl": lambda: b"\xef\xbb\xbf" + lines(),
    "crlf.jsonl": lambda: lines().replace(b"\n", b"\r\n"),
    "no-end.jsonl": lambda: lines().removesuffix(b"\n"),
    "blank.jsonl": lambda: lines().replace(b"\n", b"\n\n"),
    "x.json": lines,
    "array.json": lambda: json.dumps(ROWS).encode(),
    "x.jsonl.gz": lambda: gzip.compress(lines()),
    "x.csv": as_csv,
    "x.parquet": parquet,
    "groups.parquet": lambda: parquet(row_group_size=100),
    "x.arrow": arrow,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_shards_of_a_file_are_all_its_rows_in_order(name, tmp_path, monkeypatch):
    monkeypatch.setattr(row_shards, "LEAST_BYTES", 1024)
    path = tmp_path / name
    path.write_bytes(CONTENTS[name]())
    found = shards_of(path)
    ending = "\nline" if name.endswith("csv") else ""
    assert texts(found) == [row["text"] + ending for row in ROWS]
    assert sum(rows.count for _, rows in found) == len(ROWS)
    assert len({key for key, _ in found}) == len(found) > 3
    assert [key for key, _ in found] == sorted(key for key, _ in found)
    assert [key for key, _ in shards_of(path)] == [key for key, _ in found], "shards depend on the content alone"


def test_files_are_read_one_after_the_other(tmp_path):
    for name, row in (("a.jsonl", "first"), ("b.jsonl", "second")):
        (tmp_path / name).write_text(json.dumps({"text": row}) + "\n")
    assert texts(shards_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl")) == ["first", "second"]


_LINE = st.one_of(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), st.just(b'{"text": "x"}'))


@settings(max_examples=60, deadline=None)
@given(st.lists(_LINE, max_size=12), st.booleans(), st.integers(1, 40), st.booleans())
def test_any_cut_through_a_file_of_lines_gives_each_line_once(tmp_path_factory, found, end, step, mark):
    content = (b"\xef\xbb\xbf" if mark else b"") + b"\n".join(found) + (b"\n" if end else b"")
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_bytes(content)
    file = FsFile(fsspec.filesystem("file"), str(path))

    def cut(step: int) -> list[object]:
        return [
            row.content if isinstance(row, Rejected) else row[1]
            for start in range(0, len(content), step)
            for row in rows_between(file, start, min(start + step, len(content)))
        ]

    try:
        whole = cut(len(content) + 1)
    except Exception as error:  # a file that looks like another format is refused however it is cut
        with pytest.raises(type(error)):
            cut(step)
        return
    assert cut(step) == whole
    assert len(whole) == len([line for line in content.split(b"\n") if line]) + content.split(b"\n")[:-1].count(b"")


def test_unreadable_lines_become_bad_rows_with_their_line_number(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "cut\n\n[1]\n{"text": "\xff"}\n{"text": "b"}\n')
    [(_, rows)] = shards_of(path)
    assert texts([("", rows)]) == ["a", "b"]
    assert (rows.count, rows.numbers.tolist()) == (5, [0, 4])
    assert [(row.number, row.line) for row in rows.bad_rows] == [(1, 2), (2, 4), (3, 5)]
    assert "not a JSON object" in rows.bad_rows[0].message
    assert "where each line must be an object" in rows.bad_rows[1].message
    assert "not UTF-8" in rows.bad_rows[2].message


def test_unreadable_csv_records_become_bad_rows(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('text,more\na,1\nonly one\n"x"y,2\nb,2\n')
    [(_, rows)] = shards_of(path)
    assert texts([("", rows)]) == ["a", "b"]
    assert [(row.number, row.line) for row in rows.bad_rows] == [(1, 3), (2, 4)]


def test_shards_of_one_row_group_decode_it_once(tmp_path, monkeypatch):
    decoded: list[int] = []
    batches = row_shards.Parquet.batches

    def counted(self: row_shards.Parquet, group: int, columns: Sequence[str], most: int) -> Iterator[pa.RecordBatch]:
        decoded.append(group)
        return batches(self, group, columns, most)

    monkeypatch.setattr(row_shards.Parquet, "batches", counted)
    monkeypatch.setattr(row_shards, "_ROWS", 200)
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet(row_group_size=1000))
    assert texts(shards_of(path)) == [row["text"] for row in ROWS]
    assert decoded == [0, 1, 2]
