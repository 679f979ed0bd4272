"""Support for tests of `finetune ui`: output folders of `finetune run`, an API server of a few jobs, and a server over
both."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import yaml

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_operator.extras.ui.pages import Pages
from finetune_operator.extras.ui.ui_jobs import ClusterJobs
from finetune_operator.extras.ui.ui_runs import Workspace
from finetune_operator.extras.ui.ui_server import LIFE_SECONDS, Server
from finetune_operator.jobs.render.contract import JOB_FILE, files
from finetune_operator.jobs.render.render_types import JOB_LABEL, UID_LABEL
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from planning_support.cases import BERT, job
from suite_plugins.patience import patient

ALL = (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT)


def history_lines(steps: int, first: int = 1) -> str:
    """Return lines as in a training's history.jsonl."""
    lines = [
        {"step": step, "loss": 1 / step, "learning_rate": 1e-4, "tokens_per_second": 900.0}
        for step in range(first, first + steps)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(
    workspace: Path,
    name: str,
    *,
    done: tuple[Stage, ...] = ALL,
    steps: int = 20,
    log: str = "step 1  loss 0.7\n",
    spec: Mapping[str, Any] | None = None,
    started: float = 1_790_000_000.0,
) -> JobPaths:
    """Write a run with the successful stages `done`, and `steps` logged steps of training; `started`: Unix time."""
    gate = {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.8}}}
    planned = plan(job({"predict": {}, **gate, **(spec or {})}, name), Facts(model=BERT, local=True), LOCAL_SETTINGS)
    paths = JobPaths.of(workspace, name)
    for folder in (paths.state, paths.logs):
        folder.mkdir(parents=True)
    paths.plan.write_text(planned.to_json(), encoding="utf-8")
    paths.job.write_text(files(planned)[JOB_FILE], encoding="utf-8")
    begun = ALL[: len(done) + 1] if len(done) < len(ALL) else ALL
    for number, stage in enumerate(begun):
        progress = Progress(stage=stage, step=10, total_steps=40, loss=0.5, time=started + number)
        (paths.logs / f"{stage}.progress.jsonl").write_text(
            progress.model_dump_json(by_alias=True) + "\n", encoding="utf-8"
        )
        (paths.logs / f"{stage}.log").write_text(log, encoding="utf-8")
    for stage in done:
        report = TrainerReport(job=name, stage=stage, outcome="succeeded", seconds=30.0)
        (paths.state / f"{stage}.json").write_text(report.model_dump_json(by_alias=True), encoding="utf-8")
    if Stage.TRAIN in begun:
        paths.history.write_text(history_lines(steps), encoding="utf-8")
    if Stage.EVALUATE in done:
        metrics = {"evaluate": {"accuracy": 0.9125, "loss": 0.3, "rows": 160}, "majority": {"accuracy": 0.5}}
        paths.metrics.write_text(json.dumps(metrics), encoding="utf-8")
        paths.report.write_text("<!DOCTYPE html><script>alert(1)</script><p>report</p>", encoding="utf-8")
    return paths


@dataclass(frozen=True)
class Reply:
    """Answer of a server."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """Sends requests to a server like a browser that has opened its URL."""

    server: Server
    cookie: str = field(default="")

    def send(self, path: str, method: str = "GET", **headers: str | None) -> Reply:
        """Send one request; `headers` with `_` for `-`, None removes one."""
        port = self.server.port
        given: dict[str, str | None] = {"Host": f"127.0.0.1:{port}", "Cookie": self.cookie or self.own_cookie()}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(60))
        try:
            connection.putrequest(method, path, skip_host=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return Reply(answer.status, {name.title(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def page(self, *parts: str) -> str:
        """Return the page at these parts of a path, which must exist."""
        reply = self.send("/" + "/".join(quote(part, safe="") for part in parts))
        assert reply.code == 200, reply.text
        return reply.text

    def own_cookie(self) -> str:
        """Return the cookie of a browser that has opened the server's URL."""
        return f"finetune-ui-{self.server.port}={self.server.keys.token}"


@contextmanager
def serving(workspace: Path, jobs: ClusterJobs | None = None, life_seconds: float = LIFE_SECONDS) -> Iterator[Client]:
    """Run a server over the workspace during the `with` block."""
    with Server(Pages(Workspace(workspace), jobs), 0, life_seconds) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


def standalone(client: Client, file: Path, *parts: str) -> Path:
    """Write the page into a file with its styles, as shown by a browser without scripts."""
    page = re.sub(r"<script src=[^>]*></script>|<link rel=.icon.[^>]*>", "", client.page(*parts))
    linked = re.compile(r'<link rel="stylesheet" href="/([^"]+)">')
    styled = linked.sub(lambda found: f"<style>{client.send(f'/{found[1]}').text}</style>", page)
    file.write_text(styled, encoding="utf-8")
    return file


# ------------------------------------------------------------------------------------------------------------ cluster


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
    """API server of a few objects, which records its requests."""

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
        listed = {"metadata": {"resourceVersion": "1"}}
        answers: dict[str, Any] = {
            JOBS: {**listed, "items": self.jobs},
            **by_name,
            "/api/v1/namespaces/team/events": {**listed, "items": [
                {"metadata": {"creationTimestamp": TIME}, "type": "Normal", "reason": "AttemptStarted",
                 "message": "attempt 2"}
            ]},
            "/api/v1/namespaces/team/pods": {**listed, "items": [POD] if uid == "1" else []},
        }  # fmt: skip
        if path.endswith("/log"):
            return 200, self.log.encode()
        return (200, json.dumps(answers[path]).encode()) if path in answers else (404, b'{"message": "none"}')

    def write_kubeconfig(self, file: Path) -> Path:
        """Write a kubeconfig for this server."""
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {}}],
        }
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        return file


@contextmanager
def api_server() -> Iterator[Api]:
    """Run an API server during the `with` block."""
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
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
