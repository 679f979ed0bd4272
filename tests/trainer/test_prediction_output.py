"""Forms of the predictions: a file or a folder of parts, here or behind fsspec, with an identity of the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data import row_shards
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import predictions, write_lines

LABELS = ("bad", "good")
COUNTS = (30, 7)
"""Rows of each of two files."""


def rows_of(file: int) -> list[dict[str, Any]]:
    texts = (f"word {file} {number} " + "more " * (number % 5) for number in range(COUNTS[file]))
    return [{"text": text, "key": f"{file}-{number // 2}"} for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    words = ["word", "more", *map(str, range(30))]
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=words, labels=LABELS, initializer_range=0.5)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two files of several shards."""
    monkeypatch.setattr(row_shards, "LEAST_BYTES", 500)
    for number in range(2):
        write_lines(tmp_path / "data" / f"rows-{number}.jsonl", rows_of(number))
    return tmp_path / "data"


@pytest.fixture
def bucket() -> Iterator[str]:
    """Yield the URI of a store that keeps files in memory."""
    filesystem = fsspec.filesystem("memory")
    yield "memory://bucket"
    filesystem.rm("/bucket", recursive=True)


def a_job(model: Path, data: Path, **changes: Any) -> TrainerJob:
    dataset = {"uri": f"file://{data}/rows-*.jsonl", "columns": {"text": "text"}}
    settings = {"dataset": dataset, "device": "cpu", "batch_tokens": 64, **changes}
    body = {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "predict": settings}
    return TrainerJob.model_validate(body)


def in_folder(folder: Path) -> list[dict[str, Any]]:
    manifest = json.loads((folder / "_manifest.json").read_text())
    rows: list[dict[str, Any]] = []
    for part in manifest["parts"]:
        content = (folder / part["name"]).read_bytes()
        assert (len(content), sha256(content).hexdigest()) == (part["bytes"], part["sha256"])
        own = (
            pq.read_table(folder / part["name"]).to_pylist()
            if manifest["format"] == "parquet"
            else [json.loads(line) for line in content.splitlines()]
        )
        assert len(own) == part["rows"]
        rows += own
    assert manifest["rows"] == len(rows)
    return rows


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_folder_has_parts_with_file_and_position_and_a_manifest(form, model, data, tmp_path, paths):
    out = tmp_path / "answers"
    result = predict(a_job(model, data, output=f"file://{out}/", format=form), paths, NoProgress())
    assert (result["rows"], result["path"]) == (37, f"{out}/")
    names = sorted(path.name for path in out.iterdir())
    assert names == ["_manifest.json", *(f"part-{number:05}.{form}" for number in range(result["parts"]))]
    assert result["parts"] >= 4
    rows = in_folder(out)
    assert [(row["file"], row["position"]) for row in rows] == [
        (str(data / f"rows-{file}.jsonl"), position) for file in range(2) for position in range(COUNTS[file])
    ]
    predict(a_job(model, data), paths, NoProgress())
    rest = [{name: value for name, value in row.items() if name not in ("file", "position")} for row in rows]
    assert rest == [{name: value for name, value in row.items() if name != "row"} for row in predictions(paths)]


def test_a_folder_loses_the_parts_of_an_earlier_result_and_no_other_file(model, data, tmp_path, paths):
    out = tmp_path / "answers"
    job = a_job(model, data, output=f"file://{out}/")
    before = predict(job, paths, NoProgress())["parts"]
    (out / "notes.txt").write_text("mine")
    write_lines(data / "rows-0.jsonl", rows_of(0)[:3])
    (data / "rows-1.jsonl").unlink()
    after = predict(job, paths, NoProgress())["parts"]
    assert after < before
    assert sorted(path.name for path in out.iterdir()) == [
        "_manifest.json",
        "notes.txt",
        *(f"part-{number:05}.jsonl" for number in range(after)),
    ]
    assert len(in_folder(out)) == 3


def test_a_folder_behind_fsspec_holds_the_same_bytes(model, data, tmp_path, paths, bucket):
    out = tmp_path / "answers"
    predict(a_job(model, data, output=f"file://{out}/"), paths, NoProgress())
    result = predict(a_job(model, data, output=f"{bucket}/out/"), paths, NoProgress())
    filesystem = fsspec.filesystem("memory")
    remote = {Path(name).name: filesystem.cat_file(name) for name in filesystem.find("/bucket/out")}
    assert result["path"] == f"{bucket}/out/"
    assert remote == {path.name: path.read_bytes() for path in out.iterdir()}


def test_rows_without_a_prediction_go_to_a_file_in_the_folder(model, data, tmp_path, paths):
    with (data / "rows-1.jsonl").open("a") as file:
        file.write('{"text": "half\n')
    out = tmp_path / "answers"
    result = predict(a_job(model, data, output=f"file://{out}/", max_bad_rows=1), paths, NoProgress())
    assert result["bad_rows_path"] == f"{out}/_bad-rows.jsonl"
    assert [json.loads(line)["line"] for line in (out / "_bad-rows.jsonl").read_text().splitlines()] == [8]
    assert len(in_folder(out)) == 37


def test_format_setting_overrides_the_file_ending(model, data, tmp_path, paths):
    out = tmp_path / "answers.data"
    predict(a_job(model, data, output=f"file://{out}", format="parquet"), paths, NoProgress())
    assert pq.read_table(out).num_rows == 37
    assert predict(a_job(model, data, format="parquet"), paths, NoProgress())["path"] == str(paths.predictions_parquet)


def test_id_column_is_written_as_id_and_equal_ids_are_all_answered(model, data, paths):
    predict(a_job(model, data, id_column="key", columns=["key", "text"]), paths, NoProgress())
    rows = predictions(paths)
    every = [row for file in range(2) for row in rows_of(file)]
    assert [row["id"] for row in rows] == [row["key"] for row in every]
    assert list(rows[0])[:5] == ["row", "id", "key", "text", "label"]


def test_a_copied_column_that_is_called_id_goes_beside_the_id(model, tmp_path, paths):
    write_lines(tmp_path / "rows-0.jsonl", [{"text": "word 1", "id": 5, "key": "a"}])
    predict(a_job(model, tmp_path, id_column="key", columns=["id"]), paths, NoProgress())
    assert [(row["id"], row["input_id"]) for row in predictions(paths)] == [("a", 5)]


def test_a_missing_id_column_is_refused_before_the_model_is_loaded(data, tmp_path, model, paths, monkeypatch):
    job = a_job(model, data, id_column="identity")
    from finetune_trainer.predict import predict as module

    monkeypatch.setattr(module, "used_model", lambda *given: pytest.fail("the model was loaded"))
    for stage in (prepare, predict):
        with pytest.raises(StageError) as caught:
            stage(job, paths, NoProgress())
        error = caught.value
        assert (error.failure_class, error.reason) == (FailureClass.DATA, "MissingColumn")
        assert "predict.idColumn is 'identity', but" in error.message


def test_prepared_split_without_the_id_column_must_be_prepared_again(model, tmp_path, paths: JobPaths):
    rows = [{"text": f"word {number}", "label": LABELS[number % 2], "key": f"k{number}"} for number in range(6)]
    data = write_lines(tmp_path / "data" / "test.jsonl", rows)
    body = {
        "name": "job",
        "task": "text-classification",
        "model": {"uri": f"file://{model}"},
        "dataset": {"uri": f"file://{data}", "columns": {"text": "text", "label": "label"}},
        "predict": {"device": "cpu", "batch_tokens": 64},
    }
    plain = TrainerJob.model_validate(body)
    named = TrainerJob.model_validate({**body, "predict": {"device": "cpu", "batch_tokens": 64, "id_column": "key"}})
    prepare(plain, paths, NoProgress())
    with pytest.raises(StageError, match=r"predict.idColumn is 'key', but the prepared split test") as caught:
        predict(named, paths, NoProgress())
    assert "Run the stage prepare again" in caught.value.hint
    prepare(named, paths, NoProgress())
    predict(named, paths, NoProgress())
    assert [row["id"] for row in predictions(paths)] == [row["key"] for row in rows]
