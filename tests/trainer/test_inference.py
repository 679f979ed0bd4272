"""`evaluate` and `predict` with a tiny real model: whole, in order, and nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData, PreparedSplit
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.predict.runner import answers_of
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.report.reporting import CONFUSION_FILE, SAMPLES_FILE, merge_metrics
from finetune_trainer.tasks.task_registry import task_of, task_parts
from finetune_trainer.training.rank_shards import RankShards, ShardedSplit
from trainer_support.tasks import predictions, training_of, write_lines

SMALL: dict[str, Any] = {"device": "cpu", "batch_tokens": 64}
LABELS = ("bad", "so-so", "good")
ROWS = [
    {"text": " ".join(["word"] * (1 + 7 * i % 23)) + f" {i}", "label": LABELS[i % 3], "id": f"r{i}", "score": i / 2}
    for i in range(41)
]


class Recorder(NoProgress):
    """Records a stage's progress."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int]] = []

    def update(self, step: int, total: int, **values: float) -> None:
        self.updates.append((step, total))


def a_job(model: Path, data: Path | None, **changes: Any) -> TrainerJob:
    body: dict[str, Any] = {
        "name": "job",
        "task": "text-classification",
        "model": {"uri": f"file://{model}"},
        "evaluation": SMALL,
    }
    if data is not None:
        body["dataset"] = {"uri": f"file://{data}", "columns": {"text": "text", "label": "label"}}
    return TrainerJob.model_validate({**body, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    """A tiny model with a head for LABELS that knows the words of ROWS; its weights are so large that rows differ."""
    words = (word for row in ROWS for word in row["text"].split())
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=words, labels=LABELS, initializer_range=0.5)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "data" / "test.jsonl", ROWS)


def ready(model: Path, data: Path, paths: JobPaths) -> tuple[TrainerJob, Any, PreparedSplit]:
    """Return the job, its model and its prepared test split."""
    job = a_job(model, data)
    prepare(job, paths, NoProgress())
    network = task_parts(job.task).head.load_model(job, str(model), {}, torch.float32)
    return job, network, PreparedData.open(paths).of("test")


def one_by_one(model: Path, texts: list[str]) -> np.ndarray:
    """Return logits without padding, batches or any code of ours."""
    tokenizer = load_tokenizer(a_job(model, None))
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.inference_mode():
        rows = [network(**tokenizer(text, return_tensors="pt", padding=False)).logits[0].numpy() for text in texts]
    return np.stack(rows)


def test_logits_are_in_row_order_and_independent_of_padding(model, data, paths):
    job, network, split = ready(model, data, paths)
    network.train()
    progress = Recorder()
    answers = answers_of(Stage.PREDICT, job, network, split, **SMALL, progress=progress)
    logits = np.stack([answer["logits"] for answer in answers])
    np.testing.assert_allclose(logits, one_by_one(model, [row["text"] for row in ROWS]), rtol=1e-4, atol=1e-5)
    assert progress.updates[-1] == (41, 41)
    assert [step for step, _ in progress.updates] == sorted({step for step, _ in progress.updates})
    assert network.training


def small_memory(network: torch.nn.Module, tokens: int) -> list[int]:
    """Make passes over more padded tokens fail as on a GPU with too little memory; return a list that gets the tokens
    of each attempted pass.
    """
    tried: list[int] = []

    def look(_module: torch.nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tried.append(named["input_ids"].numel())
        if tried[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    network.register_forward_pre_hook(look, with_kwargs=True)
    return tried


def test_batches_that_exceed_memory_are_halved_and_all_rows_answered(model, data, paths, caplog):
    job, network, split = ready(model, data, paths)
    tried, progress = small_memory(network, 160), Recorder()
    settings = {**SMALL, "batch_tokens": 500}
    with caplog.at_level("WARNING"):
        answers = answers_of(Stage.PREDICT, job, network, split, **settings, progress=progress)
    logits = np.stack([answer["logits"] for answer in answers])
    np.testing.assert_allclose(logits, one_by_one(model, [row["text"] for row in ROWS]), rtol=1e-4, atol=1e-5)
    assert progress.updates[-1] == (41, 41)
    # Each size that does not fit is tried once, not again with every batch.
    assert [each > 160 for each in tried] == [True, True, *[False] * (len(tried) - 2)]
    warnings = [record.getMessage() for record in caplog.records if "do not fit" in record.getMessage()]
    assert len(warnings) == 2
    assert warnings[0].endswith("rows at once do not fit the GPU's memory: halving the batch size from here on.")


def sharded_split(model: Path, data: Path, paths: JobPaths, *, halves: bool, rank: int = 0) -> tuple[Any, ShardedSplit]:
    """Return the model, and its test rows as a validation between the steps of a training deals them to one rank."""
    job, network, _ = ready(model, data, paths)
    return network, RankShards(PreparedData.open(paths), task_of(job), 500, rank, 1 + rank, halves=halves).split("test")


@pytest.mark.parametrize("ranks", [3, 5])
def test_each_batch_is_dealt_once_and_only_the_last_is_repeated(ranks: int, model, data, paths):
    job, _, _ = ready(model, data, paths)
    prepared, task = PreparedData.open(paths), task_of(job)
    whole = [list(each) for each in RankShards(prepared, task, 100, 0, 1).split("test").mine]
    assert len(whole) % ranks, "the last round has fewer batches than ranks"
    shares = [RankShards(prepared, task, 100, rank, ranks).split("test").mine for rank in range(ranks)]
    dealt_out = [list(each) for round_of_ranks in zip(*shares, strict=True) for each in round_of_ranks]
    more = len(dealt_out) - len(whole)
    assert dealt_out == whole + [whole[-1]] * more
    assert 0 < more < ranks


def test_validation_halves_batches_that_exceed_the_memory(model, data, paths, caplog):
    network, split = sharded_split(model, data, paths, halves=True)
    cpu = torch.device("cpu")
    expected = {at: row for wanted, rows in split.answers(network, cpu) for at, row in zip(wanted, rows, strict=True)}
    tried = small_memory(network, 160)
    with caplog.at_level("WARNING"):
        found = {at: row for wanted, rows in split.answers(network, cpu) for at, row in zip(wanted, rows, strict=True)}
    assert found.keys() == expected.keys() == set(range(41))
    for at, row in found.items():
        np.testing.assert_allclose(row["logits"], expected[at]["logits"], rtol=1e-4, atol=1e-5)
    assert [each > 160 for each in tried] == [True, True, *[False] * (len(tried) - 2)]
    assert caplog.text.count("do not fit a GPU's memory: halving this validation.") == 2


def test_ranks_halve_their_batches_when_one_of_them_ran_out(model, data, paths, monkeypatch):
    from finetune_trainer.training import rank_shards

    network, split = sharded_split(model, data, paths, halves=True, rank=1)
    full, flags = iter([1.0]), []

    def of_all(mine: list[float]) -> list[float]:
        flags.append(mine[0])
        return [mine[0] + next(full, 0.0)]  # the other one ran out in the first round

    monkeypatch.setattr(rank_shards, "summed", of_all)
    batches, sizes = len(split.mine), [len(each) for each in split.mine]
    found = [wanted for wanted, _ in split.answers(network, torch.device("cpu"))]
    assert len(found) == 2 * batches == len(flags) - 1, "as many for each rank, whatever its rows"
    assert [len(each) for each in found] == [half for size in sizes for half in ((size + 1) // 2, size // 2 or 1)]
    assert not any(flags), "this one had enough"


def test_validation_that_cannot_be_halved_ends_with_the_error(model, data, paths):
    network, split = sharded_split(model, data, paths, halves=False)
    small_memory(network, 160)
    with pytest.raises(torch.OutOfMemoryError):
        list(split.answers(network, torch.device("cpu")))


def test_row_too_long_for_the_memory_is_reported_with_a_hint(model, data, paths):
    job, network, split = ready(model, data, paths)
    small_memory(network, 8)
    with pytest.raises(StageError) as caught:
        answers_of(Stage.PREDICT, job, network, split, **SMALL, progress=NoProgress())
    error = caught.value
    assert (error.failure_class, error.reason) == (FailureClass.OUT_OF_MEMORY, "RowTooLong")
    assert "A single row of 26 tokens does not fit" in error.message
    assert "preparation.maxLength" in error.hint


def test_evaluation_equals_a_plain_loop(model, data, paths):
    job = a_job(model, data)
    prepare(job, paths, NoProgress())
    merge_metrics(paths, {"train": {"loss_first": 1.0}})
    sections = evaluate(job, paths, NoProgress())
    logits = one_by_one(model, [row["text"] for row in ROWS])
    truth = np.asarray([LABELS.index(row["label"]) for row in ROWS])
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(truth)).item()
    measured = sections["evaluate"]
    assert measured["accuracy"] == pytest.approx((logits.argmax(axis=1) == truth).mean())
    assert measured["loss"] == pytest.approx(loss, rel=1e-4)
    assert (measured["rows"], measured["split"]) == (41, "test")
    assert sections["majority"] == {
        "accuracy": pytest.approx(14 / 41),
        "f1": pytest.approx(2 * 14 / (41 + 14) / 3),
        "precision": pytest.approx(14 / 41 / 3),
        "recall": pytest.approx(1 / 3),
    }
    assert json.loads(paths.metrics.read_text()) == {"train": {"loss_first": 1.0}, **sections}


def test_without_a_test_split_validation_is_used_and_named(model, data, paths):
    data.rename(data.parent / "validation.jsonl")
    job = a_job(model, data.parent)
    prepare(job, paths, NoProgress())
    assert evaluate(job, paths, NoProgress())["evaluate"]["split"] == "validation"


def test_evaluation_needs_no_raw_data(model, data, paths):
    job = a_job(model, data)
    prepare(job, paths, NoProgress())
    data.unlink()
    assert evaluate(job, paths, NoProgress())["evaluate"]["rows"] == 41


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that the plan counts on")
@pytest.mark.parametrize(("stage", "run"), [("evaluation", evaluate), ("predict", predict)])
def test_plan_for_a_gpu_is_refused_without_one(model, data, paths, stage, run):
    job = a_job(model, data, **{stage: {**SMALL, "device": "cuda"}})
    prepare(job, paths, NoProgress())
    with pytest.raises(StageError) as caught:
        run(job, paths, NoProgress())
    error = caught.value
    assert (error.failure_class, error.reason) == (FailureClass.STRATEGY_NOT_IN_EFFECT, "DeviceMissing")
    assert not paths.predictions_jsonl.exists()
    assert not paths.metrics.exists()


def test_a_gate_that_is_not_met_fails_after_the_metrics_are_written(model, data, paths):
    gate = {"metric": "accuracy", "minimum": 0.999}
    job = a_job(model, data, evaluation={**SMALL, "metrics": ["f1"], "gate": gate})
    prepare(job, paths, NoProgress())
    with pytest.raises(StageError) as caught:
        evaluate(job, paths, NoProgress())
    measured = json.loads(paths.metrics.read_text())["evaluate"]
    assert (caught.value.failure_class, set(measured)) == (
        FailureClass.GATE_NOT_MET,
        {"accuracy", "f1", "loss", "rows", "split", "baseline"},
    )
    assert f"{measured['accuracy']:.4f}" in caught.value.message
    assert "0.999" in caught.value.message


def reason_of(call: Any, *arguments: Any) -> tuple[FailureClass, str]:
    with pytest.raises(StageError) as caught:
        call(*arguments, NoProgress())
    return caught.value.failure_class, caught.value.reason


@pytest.mark.parametrize("named", [{"metrics": ["mse"]}, {"gate": {"metric": "mse", "maximum": 0.5}}], ids=str)
def test_a_metric_of_other_labels_is_refused_by_prepare(named, model, data, paths):
    job = a_job(model, data, evaluation={**SMALL, **named})
    assert reason_of(prepare, job, paths) == (FailureClass.CONFIG, "UnknownMetric")
    right = a_job(model, data, evaluation=SMALL)
    made = (paths.prepared / "data.json").stat().st_mtime_ns
    prepare(right, paths, NoProgress())
    assert (paths.prepared / "data.json").stat().st_mtime_ns == made, "what was prepared is kept"


def test_a_gate_on_the_loss_has_a_maximum(model, data, paths):
    job = a_job(model, data, evaluation={**SMALL, "gate": {"metric": "loss", "maximum": 1e-6}})
    prepare(job, paths, NoProgress())
    with pytest.raises(StageError, match=r"loss is .* on the .* split; evaluation.gate.maximum is 1e-06") as caught:
        evaluate(job, paths, NoProgress())
    assert "raise evaluation.gate.maximum" in caught.value.hint
    evaluate(a_job(model, data, evaluation={**SMALL, "gate": {"metric": "loss", "maximum": 100}}), paths, NoProgress())


def test_report_samples_hold_texts_but_no_copied_column(model, data, paths):
    job = a_job(model, data, predict={**SMALL, "columns": ["id"]})
    prepare(job, paths, NoProgress())
    evaluate(job, paths, NoProgress())
    samples = json.loads((paths.root / SAMPLES_FILE).read_text(encoding="utf-8"))
    assert len(samples) == 20
    assert [sample["text"] for sample in samples] == [[ROWS[sample["row"]]["text"]] for sample in samples]


def test_confusion_matrix_counts_each_row_once_and_matches_accuracy(model, data, paths):
    job = a_job(model, data)
    prepare(job, paths, NoProgress())
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    kept = json.loads((paths.root / CONFUSION_FILE).read_text(encoding="utf-8"))
    counts = np.array(kept["counts"])
    assert kept["labels"] == list(LABELS)
    assert counts.sum(axis=1).tolist() == [sum(row["label"] == label for row in ROWS) for label in LABELS]
    assert counts.trace() / counts.sum() == pytest.approx(measured["accuracy"])
    assert sum(count for _, _, count in kept["mistakes"]) == counts.sum() - counts.trace()


def test_rows_without_labels_cannot_be_evaluated(model, tmp_path, paths):
    job = a_job(model, write_lines(tmp_path / "test.jsonl", [{"text": "x"}]))
    prepare(job, paths, NoProgress())
    assert reason_of(evaluate, job, paths) == (FailureClass.DATA, "NoLabels")


def test_label_unknown_to_the_model_is_refused(model, tmp_path, paths):
    job = a_job(model, write_lines(tmp_path / "test.jsonl", [{"text": "x", "label": "terrible"}]))
    assert reason_of(prepare, job, paths) == (FailureClass.DATA, "LabelOutOfRange")


def test_predictions_are_complete_in_order_and_hold_the_copied_columns(model, data, paths):
    job = a_job(model, data, predict={**SMALL, "columns": ["id", "label", "score"]})
    prepare(job, paths, NoProgress())
    result = predict(job, paths, NoProgress())
    rows = predictions(paths)
    logits = torch.from_numpy(one_by_one(model, [row["text"] for row in ROWS]))
    probabilities = logits.softmax(dim=1).numpy()
    assert result == {"rows": 41, "path": str(paths.predictions_jsonl), "split": "test"}
    assert [list(row) for row in rows] == [["row", "id", "input_label", "input_score", "label", "score", "scores"]] * 41
    assert [(r["row"], r["id"], r["input_label"], r["input_score"]) for r in rows] == [
        (i, row["id"], row["label"], row["score"]) for i, row in enumerate(ROWS)
    ]
    assert [row["label"] for row in rows] == [LABELS[i] for i in probabilities.argmax(axis=1)]
    np.testing.assert_allclose([list(row["scores"].values()) for row in rows], probabilities, atol=1e-5)
    assert all(row["score"] == max(row["scores"].values()) and tuple(row["scores"]) == LABELS for row in rows)


def test_a_data_set_of_its_own_goes_to_the_named_parquet_file(model, tmp_path, paths):
    rows = [{"text": f"new {i}", "when": None if i < 3 else f"day {i}"} for i in range(5)]
    uri = f"file://{write_lines(tmp_path / 'new.jsonl', rows)}"
    out = tmp_path / "out" / "answers.parquet"
    settings = {"dataset": {"uri": uri, "columns": {"text": "text"}}, "columns": ["when"], **SMALL}
    body = {"predict": {**settings, "output": f"file://{out}"}, "evaluation": None}
    job = a_job(model, None, **body)
    prepare(job, paths, NoProgress())
    assert predict(job, paths, NoProgress()) == {"rows": 5, "path": str(out), "split": "predict"}
    as_parquet = pq.read_table(out).to_pylist()
    lines = a_job(model, None, predict=settings, evaluation=None)
    predict(lines, paths, NoProgress())
    assert as_parquet == predictions(paths)
    assert [row["when"] for row in as_parquet] == [row["when"] for row in rows]
    assert sorted(path.name for path in out.parent.iterdir()) == ["answers.parquet"]


def test_a_failed_prediction_leaves_the_earlier_file(model, data, paths):
    job = a_job(model, data, predict=SMALL)
    prepare(job, paths, NoProgress())
    predict(job, paths, NoProgress())
    before = paths.predictions_jsonl.read_bytes()
    (paths.prepared / "test.raw.arrow").write_bytes(b"damaged")
    assert reason_of(predict, job, paths) == (FailureClass.DATA, "PreparedDataDamaged")
    assert paths.predictions_jsonl.read_bytes() == before
    assert [path.name for path in paths.root.glob(".predictions*")] == []


ODD = [
    b'{"text": "word 1", "id": 0}',
    b'{"text": "word',
    b'{"id": 2}',
    b'{"text": 3, "id": 3}',
    b'{"text": "", "id": 4}',
    b'{"text": "one\\u0000two \xf0\x9f\x98\x80\\r\\n", "id": 5}',
    b'{"text": "half \\ud800", "id": 6}',
    b'{"text": "' + b"word " * 200_000 + b'", "id": 0}',
]


def predict_job(model: Path, data: Path, **changes: Any) -> TrainerJob:
    dataset = {"uri": f"file://{data}", "columns": {"text": "text"}}
    return a_job(model, None, evaluation=None, predict={"dataset": dataset, "columns": ["id"], **SMALL, **changes})


def test_unanswerable_rows_are_listed_separately_and_others_answered(model, tmp_path, paths, caplog):
    data = tmp_path / "odd.jsonl"
    data.write_bytes(b"\n".join(ODD) + b"\n")
    with caplog.at_level("WARNING"):
        result = predict(predict_job(model, data, max_bad_rows=4), paths, NoProgress())
    bad_rows_file = paths.predictions_jsonl.with_name("predictions.bad-rows.jsonl")
    assert result == {
        "rows": 8,
        "path": str(paths.predictions_jsonl),
        "split": "predict",
        "bad_rows": 4,
        "bad_rows_path": str(bad_rows_file),
    }
    rows = predictions(paths)
    assert [(row["row"], row["id"]) for row in rows] == [(0, 0), (4, 4), (5, 5), (7, 0)]
    bad = [json.loads(line) for line in bad_rows_file.read_text().splitlines()]
    assert [(row["row"], row["line"], row["reason"]) for row in bad] == [
        (1, 2, "CorruptLine"),
        (2, 3, "NotText"),
        (3, 4, "NotText"),
        (6, 7, "CorruptLine"),
    ]
    assert all(row["file"] == str(data) for row in bad)
    assert "column 'text' is 3; the column is of type int64, not text" in bad[2]["message"]
    assert "1 of 8 rows exceed" in caplog.text
    assert one_by_one(model, ["word 1"])[0].argmax() == LABELS.index(rows[0]["label"])


def test_too_many_bad_rows_fail_the_stage_and_answered_rows_are_kept(model, tmp_path, paths, caplog):
    data = tmp_path / "odd.jsonl"
    data.write_bytes(b"\n".join(ODD) + b"\n")
    with pytest.raises(StageError) as caught:
        predict(predict_job(model, data, max_bad_rows=3), paths, NoProgress())
    error = caught.value
    assert (error.failure_class, error.reason) == (FailureClass.DATA, "TooManyBadRows")
    assert error.message.startswith("4 of 8 rows cannot be answered, and predict.maxBadRows allows 3; ")
    assert "line 2: not a JSON object" in error.message
    assert not paths.predictions_jsonl.exists()
    with caplog.at_level("INFO"):
        assert predict(predict_job(model, data, max_bad_share=0.5), paths, NoProgress())["bad_rows"] == 4
    assert "8 of 8 rows were answered by an earlier attempt" in caplog.text
    assert not (paths.root / "predictions.parts").exists()


class Killed(NoProgress):
    """Ends the predicting process, as a signal does, after so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def update(self, step: int, total: int, **values: float) -> None:
        if step >= self.rows:
            raise KeyboardInterrupt


def test_predictions_go_on_where_they_were_killed_and_are_the_same(model, tmp_path, paths, caplog):
    count = 3000
    rows = [{"text": " ".join(["word"] * (1 + i % 9)) + f" {i % 41}", "id": i} for i in range(count)]
    data = write_lines(tmp_path / "many.jsonl", rows)
    job = predict_job(model, data, output=f"file://{tmp_path}/out.jsonl", batch_tokens=2048)
    predict(job, paths, NoProgress())
    undisturbed = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    for rows_done in (1, 1200, 2500):
        with pytest.raises(KeyboardInterrupt):
            predict(job, paths, Killed(rows_done))
        assert not (tmp_path / "out.jsonl").exists()
    recorder = Recorder()
    with caplog.at_level("INFO"):
        predict(job, paths, recorder)
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed
    assert [json.loads(line)["id"] for line in undisturbed.splitlines()] == list(range(count))
    assert " of 3,000 rows were answered by an earlier attempt" in caplog.text
    assert recorder.updates[-1] == (count, count)
    assert all(count / 2 < total < 2 * count for _, total in recorder.updates), "the number of rows is estimated"
    assert all(step <= total for step, total in recorder.updates)


def test_changed_data_or_model_restarts_the_prediction(model, tmp_path, paths, caplog):
    data = write_lines(tmp_path / "some.jsonl", [{"text": "word 1", "id": 1}, {"text": None, "id": 2}])
    with pytest.raises(StageError, match="1 of 2 rows cannot be answered"):
        predict(predict_job(model, data), paths, NoProgress())
    write_lines(data, [{"text": "word 2", "id": 1}, {"text": "word 3", "id": 2}, {"text": "word 4", "id": 3}])
    with caplog.at_level("INFO"):
        assert predict(predict_job(model, data), paths, NoProgress())["rows"] == 3
    assert "earlier attempt" not in caplog.text


@pytest.mark.parametrize(
    ("output", "reason"),
    [("file://out.txt", "OutputFormat"), ("out.jsonl", "BadUri"), ("nope://x/out.jsonl", "DriverMissing")],
)
def test_an_output_that_cannot_be_written_is_refused(output, reason, model, data, paths):
    job = a_job(model, data, predict={**SMALL, "output": output})
    prepare(job, paths, NoProgress())
    assert reason_of(predict, job, paths) == (FailureClass.CONFIG, reason)


TRAINING = training_of(steps=1, batch=2, micro=2, threads=1, seed=42)


def test_a_job_that_trains_is_judged_by_its_trained_model_only(model, data, paths):
    write_lines(data.parent / "train.jsonl", ROWS)
    job = a_job(model, data.parent, training=TRAINING)
    facts = prepare(job, paths, NoProgress())
    assert reason_of(evaluate, job, paths) == (FailureClass.MODEL, "ModelNotTrained")
    task_parts(job.task).head.build_model(job, facts).save_pretrained(paths.model)
    paths.state.mkdir()
    (paths.state / "train.json").write_text("{}")
    assert evaluate(job, paths, NoProgress())["evaluate"]["rows"] == 41
    assert (paths.model / "README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name: transformers\n")
    write_lines(
        data.parent / "train.jsonl", [{**row, "label": "good"} for row in ROWS] + [{"text": "x", "label": "bad"}]
    )
    write_lines(data, [{**row, "label": "good"} for row in ROWS])
    prepare(a_job(model, data.parent, training=TRAINING), paths, NoProgress())
    assert reason_of(evaluate, job, paths) == (FailureClass.MODEL, "LabelsChanged")


def test_new_head_is_independent_of_earlier_random_draws(tiny_model, data, paths):
    write_lines(data.parent / "train.jsonl", [{"text": row["text"], "label": i % 2} for i, row in enumerate(ROWS)])
    write_lines(data, [{"text": "x", "label": 0}])
    job = a_job(tiny_model, data.parent, training=TRAINING)
    facts = prepare(job, paths, NoProgress())
    first = task_parts(job.task).head.build_model(job, facts)
    torch.rand(17)
    after = torch.get_rng_state()
    second = task_parts(job.task).head.build_model(job, facts)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert (first.config.id2label, first.dtype) == ({0: "0", 1: "1"}, torch.float32)


def test_a_head_of_another_size_is_replaced(model, data, paths):
    write_lines(data.parent / "train.jsonl", [{"text": row["text"], "label": i % 4} for i, row in enumerate(ROWS)])
    write_lines(data, [{"text": "x", "label": 3}])
    job = a_job(model, data.parent, training=TRAINING)
    network = task_parts(job.task).head.build_model(job, prepare(job, paths, NoProgress()))
    assert network.classifier.out_features == 4


@pytest.mark.parametrize("damage", ["cut", "foreign", "gone"])
def test_weights_that_are_no_weights_of_this_model_are_refused(damage, model, data, paths, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    match damage:
        case "cut":
            os.truncate(weights, weights.stat().st_size // 2)
        case "foreign":
            save_file({"some.other": torch.zeros(3)}, weights, metadata={"format": "pt"})
        case "gone":
            weights.unlink()
    write_lines(data.parent / "train.jsonl", ROWS)
    job = a_job(folder, data.parent, training=TRAINING)
    facts = prepare(job, paths, NoProgress())
    with pytest.raises(StageError) as caught:
        task_parts(job.task).head.build_model(job, facts)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.MODEL, "NotAModel")
