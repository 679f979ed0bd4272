"""Small files whose rows are large: read in pieces or refused by name, never by the machine's memory."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.file_formats import Parquet, fits_memory, read
from finetune_trainer.data.row_shards import FileRows
from finetune_trainer.data.sources import ColumnNeed, FileSplit, FsFile

ROWS, LONG = 3_000, 1 << 20
"""Rows of one repeated text, of 3 GB together."""


class _Disk:
    """The part of an fsspec file system that files use."""

    def open(self, name: str, mode: str) -> object:
        return Path(name).open(mode)

    def size(self, name: str) -> int:
        return Path(name).stat().st_size


def file_at(path: Path) -> FsFile:
    return FsFile(_Disk(), str(path))


def repeated(form: str, rows: int = ROWS) -> pa.Array:
    text = pa.array(["a" * LONG])
    places = pa.array(np.zeros(rows, np.int32))
    if form == "dictionary":
        return pa.DictionaryArray.from_arrays(places, text)
    if form == "list":
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32))
        return pa.ListArray.from_arrays(offsets, pa.DictionaryArray.from_arrays(places, text))
    view = text.cast(pa.string_view())
    one = view.buffers()[1].to_pybytes()[:16]
    return pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(one * rows), view.buffers()[2]])


def write(folder: Path, form: str, rows: int = ROWS) -> Path:
    """Write the rows to a file of at most 2 MB."""
    column = repeated("dictionary" if form.startswith("parquet") else form, rows)
    table = pa.table({"text": column})
    if form.startswith("parquet"):
        path = folder / "train.parquet"
        schema = {"parquet": False, "parquet of categories": True}[form]
        pq.write_table(table, path, compression="zstd", store_schema=schema, row_group_size=rows)
    else:
        path = folder / "train.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert path.stat().st_size < 2 << 20
    return path


FORMS = ("parquet", "parquet of categories", "dictionary", "list", "view")


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_repeat_a_long_text_come_in_small_pieces(form: str, tmp_path: Path) -> None:
    pieces = [len(table) for table in read(file_at(write(tmp_path, form)), ["text"], {})]
    assert sum(pieces) == ROWS
    assert max(pieces) == 16  # of 1 MiB, in 16 MiB


@pytest.mark.parametrize("form", FORMS)
def test_repeated_texts_are_written_without_holding_them(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from finetune_trainer.data.sources import *\n"
        "import fsspec\n"
        "split = FileSplit('train', (FsFile(fsspec.filesystem('file'), sys.argv[1]),))\n"
        "spool = Spool(Path(sys.argv[2]))\n"
        "from finetune_trainer.data.file_formats import read\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for table, _ in zip(read(split.files[0], ['text'], {}), range(10)): spool.write(table)\n"
        "print(spool.rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path), str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows, grown = map(int, ended.stdout.split())
    assert rows == 160
    assert grown < 200  # MiB; 1,024 rows of the batch would be 1,024


def test_nulls_before_a_repeated_text_do_not_hide_it(tmp_path: Path) -> None:
    places = pa.array([None] * 50 + [0] * 200, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(places, pa.array(["a" * LONG]))})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd", store_schema=False)
    with (tmp_path / "x.parquet").open("rb") as stream:
        assert [len(batch) for batch in Parquet(stream).batches(0, ["text"], 1024)] == [64, 64, 64, 58]


class _Counted(io.FileIO):
    """File that counts the bytes that are read from it."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        found: bytes = super().read(size)
        self.count += len(found)
        return found


def test_texts_that_differ_are_read_once_and_in_whole_batches(tmp_path: Path) -> None:
    draw = random.Random(0)
    texts = [draw.randbytes(1000).hex() for _ in range(8192)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="none")
    stream = _Counted(path)
    batches = list(Parquet(stream).batches(0, ["text"], 1024))
    assert [len(batch) for batch in batches] == [1024] * 8
    assert [text for batch in batches for text in batch["text"].to_pylist()] == texts
    assert all(batch.schema.types == [pa.string()] for batch in batches)
    # One page of the column, of 1 MiB beside its dictionary, is read before the rest.
    assert stream.count < path.stat().st_size + (4 << 20)


def test_a_shard_of_repeated_texts_is_refused_by_name(tmp_path: Path) -> None:
    split = FileSplit("test", (file_at(write(tmp_path, "parquet", 70_000)),))
    shard = next(FileRows(split=split, needs=(ColumnNeed("dataset.columns.text", "text"),)).shards())
    with pytest.raises(StageError) as error:
        shard.read()
    assert (error.value.failure_class, error.value.reason) == (FailureClass.DATA, "RowsTooLarge")
    found = re.search(r"([0-9,]+) rows from row 1 of a row group have ([0-9,]+) bytes", error.value.message)
    assert found is not None
    rows, size = (int(number.replace(",", "")) for number in found.groups())
    assert size == rows * LONG > 1 << 30


def test_predicted_rows_of_categories_are_plain_texts(tmp_path: Path) -> None:
    texts = ["a", None, "b", "a"]
    pq.write_table(pa.table({"text": pa.array(texts).dictionary_encode()}), tmp_path / "test.parquet")
    split = FileSplit("test", (file_at(tmp_path / "test.parquet"),))
    (shard,) = FileRows(split=split, needs=(ColumnNeed("dataset.columns.text", "text"),)).shards()
    table = shard.read().table_of([0, 1, 2, 3])
    assert table.schema.field("text").type == pa.string()
    assert table["text"].to_pylist() == texts


def test_memory_that_a_file_exceeds_is_a_failure_of_the_data() -> None:
    with pytest.raises(StageError) as error, fits_memory(file_at(Path("train.arrow"))):
        raise pa.ArrowMemoryError("malloc of size 20971520000 failed")
    assert (error.value.failure_class, error.value.reason) == (FailureClass.DATA, "RowsTooLarge")
    assert "train.arrow" in error.value.message
