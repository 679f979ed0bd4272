"""The gate of an endpoint: judged with the optimization that is served, and a server with another one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.backends.served_backend import backend_to_serve
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.serving.request_rows import Form
from finetune_trainer.serving.serving_engine import ServingEngine
from trainer_support.tasks import write_lines

BACKEND = "bf16"
LABELS = ("bad", "so-so", "good")
ROWS = [{"text": " ".join(["word"] * (1 + 7 * at % 23)) + f" {at}", "label": LABELS[at % 3]} for at in range(41)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    vocabulary = [part for row in ROWS for part in row["text"].split()]
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=vocabulary, labels=LABELS, initializer_range=0.5)


def job_of(model: Path, data: Path, *, judged: str = "none", served: str | None = None, **gate: Any) -> TrainerJob:
    evaluation = {"device": "cpu", "batch_tokens": 512, "optimization": judged, "tolerance": 0.8}
    if gate:
        evaluation["gate"] = gate
    body: dict[str, Any] = {
        "name": "job",
        "task": "text-classification",
        "model": {"uri": f"file://{model}"},
        "dataset": {"uri": f"file://{data}", "columns": {"text": "text", "label": "label"}},
        "evaluation": evaluation,
    }
    if served is not None:
        serving = {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 512, "optimization": served}
        body["serving"] = serving if served == "none" else {**serving, "tolerance": 0.8}
    return TrainerJob.model_validate(body)


class Judged:
    """A job whose gate was judged with `BACKEND`."""

    def __init__(
        self, model: Path, data: Path, paths: JobPaths, sections: dict[str, Any], plain: dict[str, Any]
    ) -> None:
        self.model, self.data, self.paths, self.sections, self.plain = model, data, paths, sections, plain

    def server(self, served: str) -> ServingEngine:
        return ServingEngine.load(job_of(self.model, self.data, served=served, metric="loss", maximum=1e6), self.paths)


@pytest.fixture(scope="module")
def judged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("judged")
    data, paths = write_lines(folder / "data" / "test.jsonl", ROWS), JobPaths(folder / "job")
    job = job_of(model, data, judged=BACKEND, metric="loss", maximum=1e6)
    prepare(job, paths, NoProgress())
    plain = evaluate(job_of(model, data, metric="loss", maximum=1e6), paths, NoProgress())
    try:
        sections = evaluate(job, paths, NoProgress())
    except StageError as error:
        if error.reason != "BackendNotAvailable":
            raise
        pytest.skip(error.message)
    return Judged(model, data, paths, sections, plain)


def test_evaluation_computes_with_the_served_optimization(judged: Judged) -> None:
    found = json.loads(judged.paths.metrics.read_text())["evaluate"]

    assert found["optimization"] == BACKEND
    assert found == judged.sections["evaluate"]
    assert "optimization" not in judged.plain["evaluate"]
    assert found["loss"] != judged.plain["evaluate"]["loss"]
    assert found["loss"] == pytest.approx(judged.plain["evaluate"]["loss"], rel=0.1)
    assert not judged.paths.optimization.exists()  # it is about predictions


def test_gate_fails_by_the_metric_of_the_served_optimization(judged: Judged) -> None:
    losses = [each["evaluate"]["loss"] for each in (judged.plain, judged.sections)]
    between = sum(losses) / 2
    job = job_of(judged.model, judged.data, judged=BACKEND, metric="loss", maximum=between)
    if losses[1] > losses[0]:
        with pytest.raises(StageError, match="loss is"):
            evaluate(job, judged.paths, NoProgress())
    else:
        evaluate(job, judged.paths, NoProgress())


@pytest.mark.parametrize("served", [BACKEND, "measured"])
def test_server_computes_with_the_judged_optimization(judged: Judged, served: str) -> None:
    engine = judged.server(served)
    form, rows = Form(("text",), engine.generation), [{"text": row["text"]} for row in ROWS[:8]]
    plain = ServingEngine.load(job_of(judged.model, judged.data), JobPaths(judged.paths.root / "other"))

    found, unchanged = (each.answer(form, each.encode(form, rows)) for each in (engine, plain))

    assert engine.answerer.forward is not None
    assert [row["score"] for row in found] != [row["score"] for row in unchanged]


def test_server_with_another_optimization_is_refused(judged: Judged) -> None:
    with pytest.raises(
        StageError, match=r"endpoint.optimization is none, and evaluation.gate was judged with bf16"
    ) as e:
        judged.server("none")

    assert (e.value.failure_class, e.value.reason) == (FailureClass.CONFIG, "GateJudgedOtherwise")
    assert "Set endpoint.optimization to bf16" in e.value.hint


def test_plain_gate_allows_a_plain_server_only(model: Path, tmp_path: Path) -> None:
    data, paths = write_lines(tmp_path / "data" / "test.jsonl", ROWS), JobPaths(tmp_path / "job")
    gate = {"metric": "loss", "maximum": 1e6}
    with pytest.raises(StageError, match=r"has no evaluation, and evaluation.gate is set"):
        ServingEngine.load(job_of(model, data, served="none", **gate), paths)
    prepare(job_of(model, data, **gate), paths, NoProgress())
    evaluate(job_of(model, data, **gate), paths, NoProgress())

    for served in ("none", "measured"):
        engine = ServingEngine.load(job_of(model, data, served=served, **gate), paths)
        assert engine.answerer.forward is None
    with pytest.raises(StageError, match="was judged with none"):
        ServingEngine.load(job_of(model, data, served=BACKEND, **gate), paths)
    assert ServingEngine.load(job_of(model, data, served="none"), JobPaths(tmp_path / "ungated")).models


def test_unavailable_optimization_is_reported_with_the_endpoint_s_field(model: Path, tmp_path: Path) -> None:
    data, paths = write_lines(tmp_path / "data" / "test.jsonl", ROWS), JobPaths(tmp_path / "job")
    job = job_of(model, data, judged="fp8", metric="loss", maximum=1e6)
    prepare(job, paths, NoProgress())

    with pytest.raises(StageError, match=r"endpoint.optimization fp8 is not available here") as error:
        evaluate(job, paths, NoProgress())
    assert "predict." not in error.value.message + error.value.hint


def test_server_of_a_family_computes_with_the_judged_member(model: Path, tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "job")
    paths.root.mkdir()
    paths.metrics.write_text(json.dumps({"evaluate": {"loss": 0.5, "optimization": "onnx-int8"}}))
    job = job_of(model, tmp_path, metric="loss", maximum=1.0)

    assert [backend_to_serve(job, paths, name) for name in ("int8", "onnx-int8", "measured")] == ["onnx-int8"] * 3
    with pytest.raises(StageError, match="was judged with onnx-int8"):
        backend_to_serve(job, paths, "openvino-int8")
