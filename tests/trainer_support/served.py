"""A model server in the process of a test, and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.serving.batcher import Batcher
from finetune_trainer.serving.http_server import IDLE_SECONDS, UNREAD_SECONDS, http_server
from finetune_trainer.serving.server_state import ServerState
from finetune_trainer.serving.serving_engine import ServingEngine
from finetune_trainer.serving.serving_metrics import ServingMetrics
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until


@dataclass(frozen=True)
class Reply:
    """An answer of the server."""

    code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True)
class Served:
    """A listening server."""

    port: int
    state: ServerState
    listener: Any = None
    """Listening socket."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a GET without a body, else a POST; a body other than bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(60))
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, dict(headers or {}))
        answer = connection.getresponse()
        reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return reply

    def infer(self, **inputs: list[Any]) -> Reply:
        """Request predictions by the Open Inference Protocol."""
        tensors = [
            {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data} for name, data in inputs.items()
        ]
        return self.request(f"/v2/models/{self.state.engine.name}/infer", {"inputs": tensors})

    @contextmanager
    def held(self, *bodies: object) -> Iterator[tuple[threading.Event, list[int]]]:
        """Send requests with these bodies, and keep the first from its answer while the block runs. Yield an event that
        is set once the server computes, and the codes of the answers, complete after the block.
        """
        hold, entered = threading.Event(), threading.Event()
        engine, answer = self.state.engine, self.state.engine.answer

        def held(*given: Any) -> Any:
            entered.set()
            hold.wait(patient(30))
            return answer(*given)

        engine.answer = held  # type: ignore[method-assign]  # to keep the queue full until the block has looked
        codes: list[int] = []

        def send(body: object) -> None:
            codes.append(self.request("/", body).code)

        senders = [threading.Thread(target=send, args=(body,)) for body in bodies]
        try:
            for each in senders:
                each.start()
            yield entered, codes
        finally:
            hold.set()
            for each in senders:
                each.join(patient(30))
            engine.answer = answer  # type: ignore[method-assign]


@contextmanager
def loading(
    job: TrainerJob,
    paths: JobPaths,
    token: str | None = None,
    idle_seconds: float = IDLE_SECONDS,
    unread_seconds: float = UNREAD_SECONDS,
    local: bool = False,
) -> Iterator[Served]:
    """Run a server of `job` on a free port, which may not have its model yet. `local`: for this machine alone."""
    engine = ServingEngine.of(job, paths)
    metrics = ServingMetrics(engine.name, job.task, "r1")
    state = ServerState(engine, Batcher(engine, metrics), metrics, token, "r1", "3", local)
    server = http_server(state, "127.0.0.1", 0, idle_seconds=idle_seconds, unread_seconds=unread_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server listens")
        yield Served(server.servers[0].sockets[0].getsockname()[1], state, server.servers[0].sockets[0])
    finally:
        server.should_exit = True
        thread.join(patient(30))


@contextmanager
def served(
    job: TrainerJob, paths: JobPaths, token: str | None = None, local: bool = False, **seconds: float
) -> Iterator[Served]:
    """Run a warmed-up server of `job` on a free port; raise the error of a model that cannot be loaded."""
    with loading(job, paths, token, **seconds, local=local) as server:
        batcher = server.state.batcher
        wait_until(lambda: batcher.ready or batcher.failed is not None, "the server is warm")
        if batcher.failed is not None:
            raise batcher.failed
        yield server


class biased:  # noqa: N801 (reads as a function)
    """Raises the logit of a token in a server's model by `by`."""

    def __init__(self, server: Served, token: int, by: float) -> None:
        self._head = server.state.engine.answerer.model.get_output_embeddings()
        self._token, self._by = token, by

    def __enter__(self) -> None:
        def changed(module: Any, given: Any, logits: Any) -> Any:
            logits[..., self._token] += self._by
            return logits

        self._hook = self._head.register_forward_hook(changed)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def never_ending(server: Served) -> biased:
    """Keep the model from ending its texts by itself."""
    return biased(server, 3, -100.0)
