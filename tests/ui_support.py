"""For tests of `finetune ui`: folders as `finetune run` leaves them, and a server over them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_operator.api.settings import LOCAL_SETTINGS
from finetune_operator.cli.ui.jobs import ClusterJobs
from finetune_operator.cli.ui.pages import Pages
from finetune_operator.cli.ui.runs import Workspace
from finetune_operator.cli.ui.server import Server
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Facts
from finetune_operator.rendering.contract import JOB_FILE, files
from planning_support.cases import BERT, job
from suite_plugins.patience import patient

ALL = (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT)


def history_lines(steps: int, first: int = 1) -> str:
    """What a training writes into history.jsonl."""
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
) -> JobPaths:
    """A run whose stages `done` have ended well, and whose training has logged `steps` steps."""
    gate = {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.8}}}
    planned = plan(job({"predict": {}, **gate, **(spec or {})}, name), Facts(model=BERT, local=True), LOCAL_SETTINGS)
    paths = JobPaths.of(workspace, name)
    for folder in (paths.state, paths.logs):
        folder.mkdir(parents=True)
    paths.plan.write_text(planned.to_json(), encoding="utf-8")
    paths.job.write_text(files(planned)[JOB_FILE], encoding="utf-8")
    begun = ALL[: len(done) + 1] if len(done) < len(ALL) else ALL
    for number, stage in enumerate(begun):
        told = Progress(stage=stage, step=10, total_steps=40, loss=0.5, time=1_790_000_000.0 + number)
        (paths.logs / f"{stage}.progress.jsonl").write_text(
            told.model_dump_json(by_alias=True) + "\n", encoding="utf-8"
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
    """What a server has answered."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """Asks a server as a browser does that has opened its URL."""

    server: Server
    cookie: str = field(default="")

    def send(self, path: str, method: str = "GET", **headers: str | None) -> Reply:
        """Send one request; `headers` with `_` for `-`, None takes one away."""
        port = self.server.port
        given: dict[str, str | None] = {"Host": f"127.0.0.1:{port}", "Cookie": self.cookie or self._own_cookie()}
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
        """The page at these parts of a path, which has to be there."""
        reply = self.send("/" + "/".join(quote(part, safe="") for part in parts))
        assert reply.code == 200, reply.text
        return reply.text

    def _own_cookie(self) -> str:
        return f"finetune-ui-{self.server.port}={self.server.keys.token}"


@contextmanager
def serving(workspace: Path, jobs: ClusterJobs | None = None) -> Iterator[Client]:
    """A server over the workspace, for the time of a `with` block."""
    with Server(Pages(Workspace(workspace), jobs), 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()
