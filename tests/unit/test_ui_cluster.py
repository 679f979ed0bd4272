"""The cluster's jobs in `finetune ui`: what pages show of them, and that the API server is only read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from finetune_operator.cli.cluster import Connection
from finetune_operator.cli.ui import jobs as asked
from finetune_operator.cli.ui.jobs import ClusterJobs
from finetune_operator.rendering.types import JOB_LABEL, UID_LABEL
from suite_plugins.waiting import wait_until
from ui_support import Client, serving

JOBS = "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs"
TOKEN = "hf_" + "a1B2c3D4" * 4
TIME = "2026-01-01T12:00:00Z"


def a_job(name: str, uid: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name, "namespace": "team", "uid": uid, "resourceVersion": "1", "generation": 1,
                     "creationTimestamp": TIME},
        "spec": {"task": "text-classification", "model": {"uri": "hf://org/model"}},
        "status": {"observedGeneration": 1, **status},
    }  # fmt: skip


TRAINING = a_job(
    "reviews",
    "1",
    phase="Training",
    stage="train",
    startTime=TIME,
    stages=[
        {"name": "prepare", "state": "Succeeded", "attempt": 1, "startTime": TIME,
         "completionTime": "2026-01-01T12:01:05Z"},
        {"name": "train", "state": "Running", "attempt": 2, "startTime": TIME},
    ],
    progress={"step": 5, "totalSteps": 10, "percent": 50, "loss": 0.5},
    plan={"strategy": "ddp", "launcher": "job", "worldSize": 2, "microBatchSize": 8, "gradientAccumulation": 1},
)  # fmt: skip
FAILED = a_job(
    "broken",
    "2",
    phase="Failed",
    conditions=[{"type": "Failed", "status": "True", "reason": "DataError", "message": "m",
                 "lastTransitionTime": TIME}],
    stages=[{"name": "prepare", "state": "Failed", "attempt": 1}],
    failure={"class": "DataError", "reason": "MissingColumn", "message": "no <b>text</b>", "hint": "Name it.",
             "stage": "prepare", "attempt": 1, "logTail": "the last words"},
)  # fmt: skip
POD = {
    "metadata": {"name": "reviews-train-2-0", "namespace": "team", "uid": "p", "creationTimestamp": TIME,
                 "labels": {JOB_LABEL: "reviews", UID_LABEL: "1", "finetune.dev/stage": "train",
                            "finetune.dev/attempt": "2", "batch.kubernetes.io/job-completion-index": "0"}},
    "spec": {}, "status": {"phase": "Running"},
}  # fmt: skip


@dataclass
class Api:
    """An API server of a few objects, which notes what it is asked."""

    jobs: list[dict[str, Any]] = field(default_factory=lambda: [TRAINING, FAILED])
    calls: list[tuple[str, str]] = field(default_factory=list)
    refuses: int | None = None
    log: str = f"{TIME} step 5 <script>alert(1)</script> {TOKEN}\n"
    port: int = 0

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        if self.refuses is not None:
            return self.refuses, json.dumps({"message": "no"}).encode()
        by_name = {f"{JOBS}/{job['metadata']['name']}": job for job in self.jobs}
        uid = query.get("labelSelector", [""])[0].rpartition("=")[2]
        answers: dict[str, Any] = {
            JOBS: {"items": self.jobs},
            **by_name,
            "/api/v1/namespaces/team/events": {"items": [
                {"metadata": {"creationTimestamp": TIME}, "type": "Normal", "reason": "AttemptStarted",
                 "message": "attempt 2"}
            ]},
            "/api/v1/namespaces/team/pods": {"items": [POD] if uid == "1" else []},
        }  # fmt: skip
        if path.endswith("/log"):
            return 200, self.log.encode()
        return (200, json.dumps(answers[path]).encode()) if path in answers else (404, b'{"message": "none"}')


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self.reply
            raise AttributeError(name)

        def reply(self) -> None:
            target = urlsplit(self.path)
            api.calls.append((self.command, target.path))
            code, body = api.answer(target.path, parse_qs(target.query))
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.port = server.server_port
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield api
        server.shutdown()
        thread.join()


@pytest.fixture
def client(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(asked, "ASK_SECONDS", 0.0)  # every page asks anew
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    with serving(tmp_path / "runs", ClusterJobs(Connection(kubeconfig))) as client:
        yield client


def shown(client: Client, *parts: str, word: str) -> str:
    """The page, once it holds the word."""
    return wait_until(lambda: page if word in (page := client.page(*parts)) else None, f"{word} is not shown")


def test_the_list_has_the_columns_of_finetune_status(client: Client) -> None:
    page = shown(client, word="reviews")
    assert page.index("reviews") < page.index("broken")
    for part in ('href="/job/team/reviews"', "Training", "50 %", "0.500", "Failed"):
        assert part in page


def test_the_page_of_a_job_shows_progress_stages_events_and_the_log_of_its_pods(client: Client) -> None:
    page = shown(client, "job", "team", "reviews", word="AttemptStarted")
    for part in (
        "step 5/10",
        "ddp by job, 2 processes",
        "1:05",
        "attempt 2",
        "[train-2/0] step 5",
        "finetune watch reviews",
    ):
        assert part in page
    assert "<script>alert" not in page
    assert TOKEN not in page


def test_the_page_of_a_failed_job_shows_cause_way_out_and_the_log_that_is_kept(client: Client) -> None:
    page = shown(client, "job", "team", "broken", word="MissingColumn")
    for part in ("no &lt;b&gt;text&lt;/b&gt;", "Name it.", "the last words", "the pods of prepare-1 are gone"):
        assert part in page


def test_progress_that_was_seen_becomes_a_curve(client: Client, api: Api) -> None:
    shown(client, "job", "team", "reviews", word="step 5/10")
    progress = {"step": 6, "totalSteps": 10, "percent": 60, "loss": 0.4}
    api.jobs[0] = {**TRAINING, "status": {**TRAINING["status"], "progress": progress}}
    page = shown(client, "job", "team", "reviews", word="<polyline")
    assert "Since this page has been watching" in page


def test_a_job_that_is_not_listed_is_not_asked_for(client: Client, api: Api) -> None:
    shown(client, word="reviews")
    for path in ("/job/team/other", "/job/kube-system/reviews", "/job/team/..%2f..%2fsecrets"):
        assert client.send(path).code == 404
    assert {path for _, path in api.calls} == {JOBS}


def test_what_the_api_server_refuses_is_told_beside_what_it_said_last(client: Client, api: Api) -> None:
    shown(client, word="reviews")
    api.refuses = 403
    page = shown(client, word="not allowed: no.")
    assert "reviews" in page
    api.refuses = None
    wait_until(lambda: "not allowed" not in client.page(), "the refusal stays")


def test_the_api_server_is_only_read(client: Client, api: Api) -> None:
    shown(client, "job", "team", "reviews", word="AttemptStarted")
    shown(client, "job", "team", "broken", word="MissingColumn")
    assert {method for method, _ in api.calls} == {"GET"}
    assert any(path.endswith("/log") for _, path in api.calls)


def test_an_api_server_that_is_away_is_told_on_the_page(client: Client, api: Api, tmp_path: Path) -> None:
    config = tmp_path / "away"
    config.write_text((tmp_path / "config").read_text().replace(str(api.port), "1"))
    with serving(tmp_path / "runs", ClusterJobs(Connection(config))) as other:
        page = shown(other, word="cannot be reached")
    assert "Runs" in page


def test_a_kubeconfig_that_was_named_and_is_not_there_is_told(tmp_path: Path) -> None:
    with serving(tmp_path, ClusterJobs(Connection(tmp_path / "none"))) as client:
        assert "there is no such file" in shown(client, word="--kubeconfig")
