"""Progress: a file, the Kubeflow protocol over real HTTPS, and no effect on the run."""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN, ENV_KUBEFLOW_URL, ENV_PROGRESS
from finetune_contract.report import KubeflowUpdate, Progress
from finetune_trainer.core import progress
from finetune_trainer.core.progress import KubeflowProgress, NoProgress, ProgressReporter, Throttle, progress_for
from finetune_trainer.report.history import History
from finetune_trainer.training.loop_parts import StepReport
from finetune_trainer.training.run_observers import RunObserver
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until

PATH = "/v1alpha1/namespaces/team/finetunejobs/on/stages/train/attempts/2"
"""Path as the operator writes it into the pods' environment."""


@dataclass
class Server:
    """Accepts posts over HTTPS."""

    url: str
    ca_file: Path
    posts: list[tuple[str | None, dict[str, object]]] = field(default_factory=list)
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    """Posts are accepted and answered once it is set."""
    paths: list[str] = field(default_factory=list)
    protocol: str = "HTTP/1.0"
    """With HTTP/1.1, connections stay open after an answer."""
    connections: int = 0
    closes: bool = False
    """Close each connection after its answer, unannounced."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    state = Server("", certificate)
    state.answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            state.connections += 1
            self.protocol_version = state.protocol

        def do_POST(self) -> None:
            state.answers.wait(patient(60))
            status = state.status
            state.paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.posts.append((self.headers["Authorization"], body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            self.close_connection = state.closes or self.close_connection

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    state.url = f"https://localhost:{listening.server_port}{PATH}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield state
    state.answers.set()
    listening.shutdown()
    listening.server_close()


def environment(server: Server, token: Path) -> dict[str, str]:
    return {ENV_KUBEFLOW_URL: server.url, ENV_KUBEFLOW_CA: str(server.ca_file), ENV_KUBEFLOW_TOKEN: str(token)}


def test_first_and_last_update_are_posted_with_the_current_token(server: Server, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("first\n")
    sink = progress_for(Stage.TRAIN, 0, environment(server, token))
    sink.update(0, 10)
    wait_until(lambda: server.posts, "the first post")
    token.write_text("second\n")
    for step in range(1, 11):
        sink.update(
            step, 10, loss=1.0 / step, epoch=0.5, samples_per_second=8.0, tokens_per_second=64.0, eval_accuracy=0.75
        )
    sink.close()

    assert [authorization for authorization, _ in server.posts] == ["Bearer first", "Bearer second"]
    assert server.paths == [PATH, PATH]
    status = server.posts[-1][1]["trainerStatus"]
    assert isinstance(status, dict)
    assert status["progressPercentage"] == 100
    assert status["estimatedRemainingSeconds"] == 0
    assert {metric["name"]: metric["value"] for metric in status["metrics"]} == {
        "epoch": "0.5",
        "loss": "0.1",
        "samples_per_second": "8.0",
        "tokens_per_second": "64.0",
        "step": "10",
        "total_steps": "10",
        "eval_accuracy": "0.75",
    }
    assert status["lastUpdatedTime"].endswith("Z")


class Counting(KubeflowProgress):
    """Records the thread and the step of each post that is tried."""

    def __init__(self, *args: Any) -> None:
        self.tried: list[tuple[int, str]] = []
        super().__init__(*args)

    def post(self, update: KubeflowUpdate) -> None:
        steps = [metric.value for metric in update.trainer_status.metrics if metric.name == "step"]
        self.tried.append((threading.get_ident(), steps[0]))
        super().post(update)

    def steps(self) -> list[str]:
        return [step for _, step in self.tried]


def at_step(step: int) -> Progress:
    return Progress(stage=Stage.TRAIN, step=step, total_steps=3, time=time.time())


@pytest.mark.parametrize("trouble", ["refuses", "is slow", "is away", "has another certificate"])
def test_a_server_in_trouble_never_disturbs_the_run_and_is_logged_once(
    trouble: str, server: Server, tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch
):
    token = tmp_path / "token"
    token.write_text("x")
    url, ca_file = server.url, server.ca_file
    if trouble == "refuses":
        server.status = 503
    if trouble == "is slow":
        server.answers.clear()
        monkeypatch.setattr(progress, "_POST_TIMEOUT_SECONDS", 0.5)
        monkeypatch.setattr(progress, "_CLOSE_SECONDS", 1.0)
    if trouble == "is away":
        url = "https://localhost:1/status"
    if trouble == "has another certificate":
        ca_file = None  # then the public authorities count, and ours is none
    outlet = Counting(url, ca_file, token)
    for step in range(3):
        outlet.publish(at_step(step))
        wait_until(lambda tried=str(step): tried in outlet.steps(), f"post {step} is tried")
    outlet.close()
    assert threading.get_ident() not in {thread for thread, _ in outlet.tried}, "the thread that trains posts nothing"
    assert trouble != "is slow" or not server.posts, "the end of the run waits for no answer"
    wait_until(lambda: "Progress cannot be sent" in caplog.text, "the log")
    assert len([record for record in caplog.records if "Progress cannot be sent" in record.getMessage()]) == 1


def test_failed_update_is_posted_again_until_it_is_accepted_or_replaced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token = tmp_path / "token"
    token.write_text("x")
    monkeypatch.setattr(progress, "_AGAIN_SECONDS", patient(60))
    outlet = Counting(server.url, server.ca_file, token)
    server.status = 503
    outlet.publish(at_step(0))
    wait_until(lambda: server.posts, "step 0 is refused")
    outlet.publish(at_step(1))
    wait_until(lambda: len(server.posts) == 2, "step 1 is refused at once")
    server.status = 200
    outlet.close()
    assert outlet.steps() == ["0", "1", "1"], "an update is not posted again after a newer one or its acceptance"


@pytest.mark.parametrize(
    ("protocol", "idle", "connections"), [("HTTP/1.1", 60, 1), ("HTTP/1.1", 0, 3), ("HTTP/1.0", 60, 3)]
)
def test_kept_connection_carries_the_next_updates_until_it_is_idle(
    protocol: str, idle: float, connections: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token = tmp_path / "token"
    token.write_text("x")
    monkeypatch.setattr(progress, "_IDLE_SECONDS", patient(idle))
    server.protocol = protocol
    outlet = KubeflowProgress(server.url, server.ca_file, token)
    for step in range(3):
        outlet.publish(at_step(step))
        wait_until(lambda number=step + 1: len(server.posts) == number, f"post {step} has arrived")
    outlet.close()
    assert server.connections == connections


def test_connection_closed_by_the_server_loses_no_update(server: Server, tmp_path: Path, caplog):
    token = tmp_path / "token"
    token.write_text("x")
    server.protocol = "HTTP/1.1"
    server.closes = True
    outlet = KubeflowProgress(server.url, server.ca_file, token)
    for step in range(2):
        outlet.publish(at_step(step))
        wait_until(lambda number=step + 1: len(server.posts) == number, f"post {step} has arrived")
    outlet.close()
    assert server.connections == 2
    assert not caplog.records


def test_an_update_is_posted_three_times_at_most(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = tmp_path / "token"
    token.write_text("x")
    monkeypatch.setattr(progress, "_AGAIN_SECONDS", 0.0)
    server.status = 503
    outlet = Counting(server.url, server.ca_file, token)
    outlet.publish(at_step(1))
    wait_until(lambda: len(server.posts) == 3, "step 1 is posted three times")
    server.status = 200
    outlet.close()
    assert outlet.steps() == ["1", "1", "1"]


def test_an_address_without_tls_or_without_a_token_is_not_used(tmp_path: Path, caplog):
    plain = {ENV_KUBEFLOW_URL: "http://localhost/status", ENV_KUBEFLOW_TOKEN: str(tmp_path / "token")}
    assert isinstance(progress_for(Stage.TRAIN, 0, plain), NoProgress)
    assert isinstance(progress_for(Stage.TRAIN, 0, {ENV_KUBEFLOW_URL: "https://localhost/status"}), NoProgress)
    assert len(caplog.records) == 2


class Recorder:
    """An outlet that records updates."""

    interval_seconds = 5.0

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.sent: list[Progress] = []

    def publish(self, progress: Progress) -> None:
        self.steps.append(progress.step)
        self.sent.append(progress)

    def close(self) -> None:
        self.steps.append(-1)


def test_the_throttle_passes_the_first_the_last_and_one_per_interval():
    now = [0.0]
    recorder = Recorder()
    throttle = Throttle(recorder, clock=lambda: now[0])
    for step in range(20):
        throttle.publish(Progress(stage=Stage.TRAIN, step=step, total_steps=100, time=0.0))
        now[0] += 1.0
    throttle.close()
    assert recorder.steps == [0, 5, 10, 15, 19, -1]


class Shown(NoProgress):
    """Sink that keeps the figures of the last update."""

    def update(self, step: int, total: int, **values: float) -> None:
        self.values = values


def test_loss_and_rates_of_the_progress_are_means_over_recent_steps(tmp_path: Path):
    shown, history = Shown(), History(tmp_path / "history.jsonl")
    observer = RunObserver(history, shown, total_steps=40)
    # The loss alternates, and each fourth step takes three times as long as the others.
    for step in range(1, 41):
        seconds = 3.0 if step % 4 == 0 else 1.0
        observer.on_step(StepReport(step, 0.5, 1.0 + step % 2, 1e-5, None, seconds, 8, 96, 128, {}))
    figures = {name: shown.values[name] for name in ("loss", "samples_per_second", "tokens_per_second")}
    # 20 steps: 15 of 1 s and 5 of 3 s.
    assert figures == {"loss": 1.5, "samples_per_second": 20 * 8 / 30, "tokens_per_second": 20 * 96 / 30}
    last = history.read()[-1]
    assert (last["loss"], last["samples_per_second"]) == (1.0, 2.667)


def test_the_remaining_time_counts_from_where_a_resumed_run_started():
    now = [100.0]
    recorder = Recorder()
    reporter = ProgressReporter(Stage.TRAIN, [recorder], clock=lambda: now[0])
    reporter.update(50, 100)
    now[0] += 10.0
    reporter.update(60, 100, loss=0.5)
    assert recorder.sent[0].remaining_seconds is None
    assert recorder.sent[1].remaining_seconds == pytest.approx(40.0)
    assert recorder.sent[1].loss == 0.5


def test_the_file_gets_json_lines_from_rank_0_alone(tmp_path: Path):
    path = tmp_path / "progress.jsonl"
    assert isinstance(progress_for(Stage.PREPARE, 1, {ENV_PROGRESS: str(path)}), NoProgress)
    sink = progress_for(Stage.PREPARE, 0, {ENV_PROGRESS: str(path)})
    for row in range(0, 1001, 100):
        sink.update(row, 1000)
    sink.close()
    lines = [Progress.model_validate_json(line) for line in path.read_text().splitlines()]
    # The updates in between depend on the total time.
    points = [(line.stage, line.step, line.percent) for line in (lines[0], lines[-1])]
    assert points == [("prepare", 0, 0), ("prepare", 1000, 100)]
    assert lines[-1].samples_per_second


def test_unwritable_progress_file_is_logged_once(tmp_path: Path, caplog):
    sink = progress_for(Stage.TRAIN, 0, {ENV_PROGRESS: str(tmp_path / "missing" / "progress.jsonl")})
    sink.update(0, 2)
    sink.update(2, 2)
    sink.close()
    assert len(caplog.records) == 1
