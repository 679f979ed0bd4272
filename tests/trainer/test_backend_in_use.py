"""The stage predict with a backend: the requested backend computes, once chosen for all, and the result names it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_contract.layout import ENV_ATTEMPT, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data import row_shards
from finetune_trainer.predict import predict as stage
from finetune_trainer.predict import runner, shard_claims
from finetune_trainer.predict.backends import backend_in_use, choosing
from finetune_trainer.predict.backends.backend_in_use import FOLDER, BackendInUse
from finetune_trainer.predict.backends.backend_protocol import Machine
from finetune_trainer.predict.backends.backend_table import BackendTable
from finetune_trainer.predict.backends.device_meter import HostMeter
from finetune_trainer.predict.backends.torch_backends import PLAIN
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.report.reporting import write_report
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until

TEXTS = [" ".join(["word"] * (1 + 7 * at % 23)) + f" {at}" for at in range(41)]
LABELS = ("bad", "so-so", "good")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    words = (word for text in TEXTS for word in text.split())
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=words, labels=LABELS, initializer_range=0.5)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return file


def a_job(model: Path, data: Path, **changes: Any) -> TrainerJob:
    rows = {"uri": f"file://{data}", "columns": {"text": "text"}}
    predicts = {"device": "cpu", "batch_tokens": 64, "dataset": rows, **changes}
    return TrainerJob.model_validate(
        {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "predict": predicts}
    )


def answers(paths: JobPaths) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.predictions_jsonl.read_text(encoding="utf-8").splitlines()]


def table(paths: JobPaths) -> BackendTable:
    return BackendTable.model_validate_json(paths.optimization.read_bytes())


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure jobs of any size."""
    monkeypatch.setattr(choosing, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "MEASURING_SHARE", 1e9)


def test_a_backend_by_name_computes_and_the_result_names_it(model: Path, data: Path, paths: JobPaths) -> None:
    pytest.importorskip("onnxruntime")
    assert "optimization" not in predict(a_job(model, data), paths, NoProgress())
    plain = answers(paths)
    result = predict(a_job(model, data, optimization="onnx"), paths, NoProgress())
    assert (result["optimization"], result["rows"]) == ("onnx", len(TEXTS))
    assert [row["label"] for row in answers(paths)] == [row["label"] for row in plain]
    scores = zip(plain, answers(paths), strict=True)
    assert max(abs(one["score"] - other["score"]) for one, other in scores) < 1e-5
    assert list((paths.root / FOLDER).rglob("model.onnx"))
    assert table(paths).chosen == "onnx"


def test_quantized_weights_by_name_answer_rows(model: Path, data: Path, paths: JobPaths) -> None:
    pytest.importorskip("bitsandbytes")
    predict(a_job(model, data), paths, NoProgress())
    plain = answers(paths)
    result = predict(a_job(model, data, optimization="bnb-int8"), paths, NoProgress())
    assert result["optimization"] == "bnb-int8"
    found = answers(paths)
    assert sum(one["label"] == other["label"] for one, other in zip(plain, found, strict=True)) >= 0.9 * len(TEXTS)
    assert [row["score"] for row in found] != [row["score"] for row in plain]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fp8", "predict.optimization fp8 is not available here: a CPU has no fp8 units"),
        ("onnx", "predict.optimization onnx is not available here: it computes on CPUs only"),
    ],
)
def test_backend_for_another_device_is_refused_by_name(
    model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    if name == "onnx":
        monkeypatch.setattr(stage, "settle", lambda _model, _device: None)
    job = a_job(model, data, optimization=name, device="cpu" if name == "fp8" else "cuda")
    with pytest.raises(StageError) as caught:
        predict(job, paths, NoProgress())
    assert (caught.value.reason, caught.value.message.startswith(why)) == ("BackendNotAvailable", True)


def test_small_job_uses_the_plain_model_and_gives_the_reason(
    model: Path, data: Path, paths: JobPaths, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="finetune_trainer")
    assert predict(a_job(model, data, optimization="measured"), paths, NoProgress())["optimization"] == "none"
    assert "too short to gain from measuring" in table(paths).reason
    assert "too short to gain from measuring" in caplog.text
    write_report(a_job(model, data), None, paths)
    assert "too short to gain from measuring" in paths.report.read_text(encoding="utf-8")


def test_later_prediction_by_the_plain_model_removes_the_earlier_table(
    model: Path, data: Path, paths: JobPaths
) -> None:
    predict(a_job(model, data, optimization="measured"), paths, NoProgress())
    assert "predict" in json.loads(paths.metrics.read_bytes())
    predict(a_job(model, data), paths, NoProgress())
    assert not paths.optimization.exists()
    assert "predict" not in json.loads(paths.metrics.read_bytes())


def test_auto_measures_every_backend_and_remembers_the_choice(
    measuring: None, model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without a compiler
    job = a_job(model, data, optimization="measured")
    result = predict(job, paths, NoProgress())
    rows = {row.name: row for row in table(paths).backends}
    assert rows[result["optimization"]].chosen
    assert rows["none"].agreement == 1
    assert "predict.tolerance is not set" in rows["bf16"].why or "units" in rows["bf16"].why
    assert "no C++ compiler" in rows["compile"].why
    assert all(row.why for row in rows.values())
    assert json.loads(paths.metrics.read_bytes())["predict"]["backends"][0]["name"] == "none"
    write_report(job, None, paths)
    page = paths.report.read_text(encoding="utf-8")
    assert "Ways to compute predictions" in page
    assert f"{result['optimization']} (used)" in page
    monkeypatch.setattr(backend_in_use, "choose", lambda *_: pytest.fail("measured again"))
    again = predict(a_job(model, data, optimization="measured"), paths, NoProgress())
    assert again["optimization"] == result["optimization"]


class PretendedGpu(HostMeter):
    """Meter of a CPU that passes for a GPU."""

    def __init__(self, gpu: str) -> None:
        super().__init__()
        self.gpu = gpu
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """Have jobs for a GPU compute on the CPU."""
    gpu = PretendedGpu("NVIDIA L4")
    monkeypatch.setattr(stage, "settle", lambda _model, _device: None)
    monkeypatch.setattr(backend_in_use, "meter_of", lambda device: gpu if device == "cuda" else HostMeter())
    monkeypatch.setattr(choosing, "GPU_SMALL_SECONDS", 0.0)
    return gpu


def test_auto_measures_on_a_gpu_and_remembers_the_choice_for_it(
    measuring: None, pretended: PretendedGpu, model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "backends_of", lambda _name, **_: [Upside()])
    job = a_job(model, data, optimization="measured", device="cuda", tolerance=0.9)
    assert predict(job, paths, NoProgress())["optimization"] == "none"
    rows = {row.name: row for row in table(paths).backends}
    assert "of its labels are equal, less than 90.00%" in rows["bf16"].why
    assert rows["bf16"].rows_per_second is not None
    assert pretended.waits >= 6, "each time begins and ends with a wait"

    measured: list[str] = []

    def seen(*given: Any) -> Any:
        measured.append(given[-1].gpu)
        return choosing.choose(*given)

    monkeypatch.setattr(backend_in_use, "choose", seen)
    predict(job, paths, NoProgress())
    assert measured == []
    pretended.gpu = "NVIDIA H100 80GB HBM3"
    predict(job, paths, NoProgress())
    assert measured == ["NVIDIA H100 80GB HBM3"]


def test_model_on_several_gpus_is_not_measured(
    measuring: None, pretended: PretendedGpu, model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "refuse_missing_gpu", lambda index: None)
    monkeypatch.setattr(runner, "placement", lambda _devices: {})
    monkeypatch.setattr(runner, "refuse_host_memory", lambda _model: None)
    job = a_job(model, data, optimization="measured", device="cuda", devices_per_process=2)
    assert predict(job, paths, NoProgress())["optimization"] == "none"
    assert table(paths).reason == "the model's layers are on 2 GPUs, and backends are for a model on one"
    with pytest.raises(StageError, match="the model's layers are on 2 GPUs") as refused:
        predict(a_job(model, data, optimization="bf16", device="cuda", devices_per_process=2), paths, NoProgress())
    assert refused.value.reason == "BackendNotAvailable"


@dataclass
class Upside:
    """A backend that answers the opposite."""

    name: str = "bf16"
    lossy: bool = True

    def unavailable(self, model: Any, machine: Machine) -> None:
        return None

    def prepare(self, model: Any, sample: Any, folder: Path) -> Any:
        return lambda **inputs: SimpleNamespace(logits=-model(**inputs).logits)


def test_metric_on_labelled_rows_judges_a_backend(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The labels are the model's own answers."""
    monkeypatch.setattr(choosing, "backends_of", lambda _name, **_: [Upside()])
    monkeypatch.setattr(choosing, "backend_by_name", lambda name, *_: PLAIN if name == "none" else Upside())
    paths = JobPaths(tmp_path / "plain")
    predict(a_job(model, data), paths, NoProgress())
    labels = [row["label"] for row in answers(paths)]
    folder = tmp_path / "labelled"
    folder.mkdir()
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS, labels, strict=True)]
    (folder / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def job_of(tolerance: float, **columns: str) -> TrainerJob:
        document = a_job(model, data, optimization="bf16", metric_tolerance=tolerance).model_dump(mode="json")
        document["dataset"] = {"uri": f"file://{folder}", "columns": {"text": "text", **columns}}
        return TrainerJob.model_validate(document)

    paths = JobPaths(tmp_path / "judged")
    prepare(job_of(0.0, label="label"), paths, NoProgress())
    with pytest.raises(
        StageError, match=r"(accuracy|f1|precision|recall) is [01]\.[0-9]+ worse, more than 0\.0000"
    ) as no:
        predict(job_of(0.0, label="label"), paths, NoProgress())
    assert no.value.reason == "BackendNotRightEnough"
    assert predict(job_of(1.0, label="label"), paths, NoProgress())["optimization"] == "bf16"
    rows = {row.name: row for row in table(paths).backends}
    assert (rows["none"].metric_worse_by, rows["bf16"].chosen) == (0.0, True)
    worse = rows["bf16"].metric_worse_by
    assert worse is not None
    assert worse > 0.5
    write_report(job_of(1.0, label="label"), None, paths)
    assert f"{rows['bf16'].metric} {worse:.4f} worse" in paths.report.read_text(encoding="utf-8")

    unlabelled = JobPaths(tmp_path / "unlabelled")
    prepare(job_of(0.0), unlabelled, NoProgress())
    with pytest.raises(StageError, match="Neither test nor validation has labels") as missing:
        predict(job_of(0.0), unlabelled, NoProgress())
    assert missing.value.reason == "NoLabels"


def test_backend_requested_by_name_is_never_replaced(
    model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine())
    with pytest.raises(StageError, match="no bfloat16 units") as refused:
        predict(a_job(model, data, optimization="bf16"), paths, NoProgress())
    assert refused.value.reason == "BackendNotAvailable"
    assert not paths.predictions_jsonl.exists()


def test_attempt_on_a_machine_without_the_backend_of_the_parts_is_refused(
    model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one output are computed in one way; the machine of the first attempt had units that this one lacks."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(bf16=True))

    class Stopped(NoProgress):
        def update(self, step: int, total: int, **values: float) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(a_job(model, data, optimization="bf16"), paths, Stopped())
    monkeypatch.setattr(Machine, "here", lambda: Machine())
    with pytest.raises(StageError, match="no bfloat16 units"):
        predict(a_job(model, data, optimization="bf16"), paths, NoProgress())
    monkeypatch.setattr(Machine, "here", lambda: Machine(bf16=True))
    assert predict(a_job(model, data, optimization="bf16"), paths, NoProgress())["optimization"] == "bf16"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "shared", [{"workers": 2}, {"processes": 2, "device": "cuda"}], ids=["two pods", "two GPUs of a pod"]
)
def test_one_of_two_workers_measures_and_the_other_waits_for_its_choice(
    shared: dict[str, Any],
    fails: bool,
    pretended: PretendedGpu,
    model: Path,
    data: Path,
    paths: JobPaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other takes over if the first is preempted meanwhile."""
    monkeypatch.setattr(shard_claims, "POLL_SECONDS", 0.02)
    began: list[BackendInUse] = []
    waits = threading.Event()
    first = shard_claims.ShardClaimer.first

    def seen(taker: shard_claims.ShardClaimer, name: str, now: float) -> bool:
        mine = first(taker, name, now)
        if not mine:
            waits.set()
        return mine

    def choose(backends: BackendInUse) -> str:
        began.append(backends)
        if len(began) == 1:
            wait_until(lambda: waits.is_set() or len(began) > 1, "the other worker")
            if fails:
                raise StageError(FailureClass.PREEMPTED, "Preempted", "The node goes.", "None is needed.")
        return "none"

    monkeypatch.setattr(shard_claims.ShardClaimer, "first", seen)
    monkeypatch.setattr(BackendInUse, "choose", choose)
    monkeypatch.setattr(row_shards, "LEAST_BYTES", 200)
    job = a_job(model, data, optimization="measured", **shared)

    def work(index: int) -> dict[str, Any]:
        return predict(job, paths, NoProgress(), ProcessWorld(rank=index, size=2), {ENV_ATTEMPT: "1"})

    with ThreadPoolExecutor(2) as pool:
        follows = pool.submit(work, 1)
        wait_until(lambda: bool(began), "the first worker")
        leads = pool.submit(work, 0)
        assert leads.result(patient(120))["rows"] == len(TEXTS)
        error = follows.exception(patient(120))
    assert isinstance(error, StageError) == fails
    assert len(began) == (2 if fails else 1)
    assert [row["row"] for row in answers(paths)] == list(range(len(TEXTS)))


def test_exact_backend_with_wrong_answers_is_refused_by_name(
    model: Path, data: Path, paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Upside(name="compile", lossy=False)
    monkeypatch.setattr(choosing, "backends_of", lambda _name, **_: [backend])
    for module in (choosing, backend_in_use):
        monkeypatch.setattr(module, "backend_by_name", lambda _name, *_: backend)
    with pytest.raises(StageError, match="computes wrongly on this machine") as caught:
        predict(a_job(model, data, optimization="compile"), paths, NoProgress())
    assert caught.value.reason == "BackendNotRightEnough"
    assert not paths.predictions_jsonl.exists()

    monkeypatch.setattr(backend_in_use.BackendInUse, "choose", lambda _self: "compile")  # as another worker has chosen
    with pytest.raises(StageError, match="computes wrongly on this machine"):
        predict(a_job(model, data, optimization="compile"), paths, NoProgress())


def test_a_choice_that_an_earlier_version_stored_is_read() -> None:
    stored = '{"chosen": "bf16", "rows": 9, "reason": "fastest", "rungs": [{"name": "bf16", "why": "fastest"}]}'
    assert [row.name for row in BackendTable.model_validate_json(stored).backends] == ["bf16"]
