"""Records of TensorBoard, MLflow and W&B: the curves of the history, also of a run that was resumed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_trainer.checkpoint.checkpoints import identity
from finetune_trainer.core.failures import StageError
from finetune_trainer.training.tracking import Tracked, refuse_missing_trackers, tracking
from finetune_trainer.training.training_arguments import refuse_bad_arguments

FIGURES = {"loss", "learning_rate", "grad_norm", "samples_per_second", "tokens_per_second", "epoch"}
STEPS = 6


@pytest.fixture(autouse=True)
def no_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORBOARD_LOGGING_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def history(run: Any) -> Iterator[dict[str, Any]]:
    return map(json.loads, run.paths.history.read_text(encoding="utf-8").splitlines())


def curve(run: Any, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in history(run) if name in line}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return tag -> step and value, as TensorBoard shows them."""
    pytest.importorskip("tensorboard", reason="the extra tracking is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def short(run: Any, report_to: object, steps: int = STEPS, **changes: Any) -> Any:
    """Return the tiny job over a few steps."""
    return run.with_training(arguments={"report_to": report_to}, max_steps=steps, steps_per_epoch=12, **changes)


def failing_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the training fail after that step."""
    from finetune_trainer.training.run_observers import RunObserver

    original = RunObserver.on_step

    def on_step(self: RunObserver, report: Any) -> None:
        if report.step == step:
            raise RuntimeError("enough")
        original(self, report)

    monkeypatch.setattr(RunObserver, "on_step", on_step)


def test_tensorboard_shows_the_curves_of_the_history_also_of_a_resumed_run(bench, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="the extra tracking is not installed")
    run = short(bench.at(tmp_path / "w"), ["tensorboard"], checkpoints=CheckpointSchedule(every_steps=3, keep=1))
    with monkeypatch.context() as broken:
        failing_at(5, broken)
        with pytest.raises(RuntimeError, match="enough"):
            run.train_here()
    run.train_here()

    shown = scalars(run.paths.tracking / "tensorboard")
    assert {f"train/{name}" for name in FIGURES} <= shown.keys()
    assert [step for step, _ in shown["train/loss"]] == list(range(1, STEPS + 1))
    for name in ("loss", "learning_rate", "grad_norm"):
        assert dict(shown[f"train/{name}"]) == pytest.approx(curve(run, name)), name
    for name in ("loss", "accuracy"):
        assert dict(shown[f"eval/{name}"]) == pytest.approx(curve(run, f"eval_{name}")), name


def test_mlflow_has_one_run_with_the_history_after_a_resume(bench, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra tracking is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra tracking is not installed")
    run = short(bench.at(tmp_path / "w"), "mlflow", checkpoints=CheckpointSchedule(every_steps=3, keep=1))
    store = f"sqlite:///{run.paths.tracking / 'mlflow' / 'mlflow.db'}"
    with monkeypatch.context() as broken:
        failing_at(5, broken)
        with pytest.raises(RuntimeError, match="enough"):
            run.train_here()
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment.artifact_location.endswith("/tracking/mlflow/artifacts")
    (failed,) = client.search_runs([experiment.experiment_id])
    assert failed.info.status == "FAILED"

    run.train_here()
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.status, found.info.run_name) == (failed.info.run_id, "FINISHED", "tiny")
    assert found.data.params["seed"] == "11"
    assert found.data.metrics.keys() >= FIGURES | {"eval_loss", "eval_accuracy"}
    for name in ("loss", "learning_rate", "eval_loss"):
        history = client.get_metric_history(found.info.run_id, name)
        # Points cannot be deleted: a step that was done twice has both, the later one last.
        latest = {each.step: each.value for each in sorted(history, key=lambda each: each.timestamp)}
        assert latest == pytest.approx(curve(run, name)), name
    assert not mlflow.is_tracking_uri_set()
    assert not Path("mlruns").exists()


def test_mlflow_continues_the_run_that_a_variable_names(bench, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra tracking is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra tracking is not installed")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(store)
    mine = client.create_run(client.create_experiment("tiny")).info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_RUN_ID", mine)
    run = short(bench.at(tmp_path / "w"), "mlflow", steps=2)
    run.train_here()
    mlflow.set_tracking_uri(None)  # the callback has set it
    assert client.get_run(mine).info.status == "FINISHED"
    assert [each.value for each in client.get_metric_history(mine, "loss")] == pytest.approx(
        list(curve(run, "loss").values())
    )


def offline_records(folder: Path) -> Iterator[Any]:
    """Yield the records of the offline runs below for `wandb sync`, oldest first: a file is a log in LevelDB's format,
    blocks of 32 KiB with pieces of (checksum, length, kind) and data, after a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    whole, first, last = 1, 2, 4
    for file in sorted(folder.rglob("*.wandb")):
        content, at, parts = file.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)
            data = content[at + 7 : at + 7 + length]
            at += 7 + length
            parts = data if kind in (whole, first) else parts + data
            if kind in (whole, last):
                yield Record.FromString(parts)


def test_wandb_keeps_one_run_offline_with_the_figures_of_the_history(bench, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    run = short(bench.at(tmp_path / "w"), "wandb", checkpoints=CheckpointSchedule(every_steps=3, keep=1))
    with monkeypatch.context() as broken:
        failing_at(5, broken)
        with pytest.raises(RuntimeError, match="enough"):
            run.train_here()
    run.train_here()

    records = list(offline_records(run.paths.tracking / "wandb"))
    runs = [record.run for record in records if record.HasField("run")]
    assert {(each.project, each.display_name) for each in runs} == {("finetune", "tiny")}
    assert len({each.run_id for each in runs}) == 1
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]
    points = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    for name in ("train/loss", "train/learning_rate", "eval/loss"):
        shown = {int(point["train/global_step"]): point[name] for point in points if name in point}
        assert shown == pytest.approx(curve(run, name.removeprefix("train/").replace("/", "_"))), name


def test_new_run_in_the_same_folder_starts_a_new_tracking_run(tmp_path):
    folder = tmp_path / "tracking"
    (folder / "runs.json").parent.mkdir()
    (folder / "runs.json").write_text('{"mlflow": "of-another-run"}')
    from finetune_trainer.training.tracking import _run_id

    assert _run_id(Tracked("job", folder, 0, {}), "mlflow") is None
    assert _run_id(Tracked("job", folder, 3, {}), "mlflow") == "of-another-run"
    assert _run_id(Tracked("job", folder, 3, {}), "wandb") is None


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        pytest.param("tensorbord", "Did you mean tensorboard?", id="a misspelt name"),
        pytest.param(["mlflow", "comet_ml"], "Set a list of these names.", id="one that is not told"),
        pytest.param("all", "Set a list of these names.", id="whatever is installed"),
        pytest.param([3], "Set a list of these names.", id="no name"),
    ],
)
def test_a_tracker_that_is_not_known_is_refused_with_those_that_are(value, hint, bench):
    with pytest.raises(StageError) as caught:
        refuse_bad_arguments(short(bench, value).job.training)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "UnknownTracker")
    assert "the trainer supports tensorboard, mlflow, wandb." in caught.value.message
    assert caught.value.hint == hint


@pytest.mark.parametrize("value", [None, "none", [], "mlflow", ["tensorboard", "mlflow", "wandb"]], ids=str)
def test_known_trackers_and_none_are_taken(value, bench):
    refuse_bad_arguments(short(bench, value).job.training)


@pytest.mark.parametrize(
    ("tracker", "environment", "lacking"),
    [
        ("tensorboard", {}, {"tensorboard": "tensorboard, .*finetune-trainer.tracking"}),
        ("mlflow", {}, {"mlflow": "mlflow, ", "sqlalchemy": "sqlalchemy, ", "alembic": "alembic, "}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "https://mlflow.example.com"}, {"mlflow": "mlflow, "}),
        ("wandb", {}, {"wandb": "wandb, "}),
    ],
)
def test_a_tracker_without_its_library_is_refused(tracker, environment, lacking, monkeypatch):
    from finetune_trainer.training import tracking as module

    monkeypatch.setattr(module, "find_spec", lambda name: None if name in lacking else name)
    with pytest.raises(StageError) as caught:
        refuse_missing_trackers({"report_to": [tracker]}, environment)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "TrackerMissing")
    assert caught.value.message.endswith(f"this image lacks {', '.join(lacking)}.")
    assert f"finetune-trainer[{'wandb' if tracker == 'wandb' else 'tracking'}]" in caught.value.hint


def test_only_the_named_trackers_are_opened(tmp_path):
    with tracking({"report_to": "none"}, Tracked("job", tmp_path / "tracking", 0, {}), print) as opened:
        assert opened == ()
    assert not (tmp_path / "tracking").exists()


def test_a_tracker_that_cannot_be_opened_ends_the_stage(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tracking is not installed")
    (tmp_path / "file").write_text("")
    environment = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "file" / "below")}
    tracked = Tracked("job", tmp_path, 0, environment)
    with pytest.raises(StageError) as caught, tracking({"report_to": "tensorboard"}, tracked, print):
        pass
    assert caught.value.reason == "TrackerUnavailable"


@pytest.mark.parametrize(
    ("tracker", "value", "limited"),
    [
        ("mlflow", None, False),
        ("mlflow", "sqlite:////data/mlflow.db", False),
        ("mlflow", "/data/mlruns", False),
        ("mlflow", "http://mlflow:5000", True),
        ("mlflow", "databricks", True),
        ("tensorboard", "/data/logs", False),
        ("wandb", "offline", False),
        ("wandb", "online", True),
    ],
)
def test_only_trackers_with_a_server_have_a_limit(tracker, value, limited):
    from finetune_trainer.training.tracking import _DESTINATIONS, _has_server

    assert _has_server(tracker, {} if value is None else {_DESTINATIONS[tracker]: value}) == limited


class MLflowServer(ThreadingHTTPServer):
    """MLflow's REST API up to a path, from which on nothing is answered until the server is closed."""

    daemon_threads = True

    def __init__(self, silent_from: str) -> None:
        self.silent_from = silent_from
        self.closed = Event()
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), MLflowAnswer)


class MLflowAnswer(BaseHTTPRequestHandler):
    server: MLflowServer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rpartition("/mlflow/")[2]
        self.server.paths.append(path)
        if self.server.silent_from in self.server.paths:
            self.server.closed.wait()
            return
        info = {
            "run_id": "r" * 32,
            "run_uuid": "r" * 32,
            "experiment_id": "1",
            "status": "RUNNING",
            "artifact_uri": "a:/",
        }
        experiment = {"experiment_id": "1", "name": "tiny", "lifecycle_stage": "active"}
        body = json.dumps({"experiment": experiment, "run": {"info": info, "data": {}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("silent_from", ["experiments/get-by-name", "runs/log-batch"], ids=["at once", "later"])
def test_training_goes_on_without_a_tracker_that_falls_silent(silent_from, bench, tmp_path):
    pytest.importorskip("mlflow", reason="the extra tracking is not installed")
    run = short(bench.at(tmp_path / "w"), "mlflow", steps=3)
    with MLflowServer(silent_from) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        ended = run.run(environment={"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.server_port}"})
        server.closed.set()
        server.shutdown()
    assert silent_from in server.paths
    assert ended.exit_code == 0, ended.output
    assert sorted(curve(run, "loss")) == [1, 2, 3]
    assert ended.reports[0].note == (
        "mlflow did not answer within 10 s; check its address and the job's NetworkPolicy. "
        "The training goes on without it."
    )


def test_tracking_does_not_change_the_identity_of_the_training(bench):
    assert identity(short(bench, "tensorboard").job, "f", {}) == identity(short(bench, "mlflow").job, "f", {})
