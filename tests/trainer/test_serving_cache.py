"""Servers of a model of the Hub with one cache: the model is fetched once, also if they start at the same time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetune_contract.data_settings import ModelSource
from finetune_contract.inference_settings import Serving
from finetune_contract.trainer_job import TrainerJob
from hub_stand_in.hub_server import Handler, Hub, Repository
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Reply, Served
from trainer_support.served_models import write_served_model

NAME = "acme/reviews"
WEIGHTS = "model.safetensors"
SERVERS = 2
pytestmark = pytest.mark.slow


class MeetingHub(Hub):
    """A Hub that sends no weights before `SERVERS` clients have looked for them, and counts what it sends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), {NAME: Repository(NAME, folder, private=False)}, None)
        self.RequestHandlerClass = MeetingHandler
        self.looked, self.sent, self.counting = 0, 0, threading.Condition()


class MeetingHandler(Handler):
    """Handler of a MeetingHub."""

    server: MeetingHub

    def _answer(self, body: bool) -> None:
        hub = self.server
        if WEIGHTS in self.path:
            with hub.counting:
                hub.looked += not body
                hub.sent += body
                hub.counting.notify_all()
                if body:
                    hub.counting.wait_for(lambda: hub.looked >= SERVERS, patient(60))
        super()._answer(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model") / "m", "text-classification", tiny_bert)


@pytest.fixture
def hub(model: Path) -> Iterator[MeetingHub]:
    with MeetingHub(model) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@contextmanager
def server(folder: Path, endpoint: str, cache: Path, **variables: str) -> Iterator[Callable[[], Reply | None]]:
    """Run a server in a process of its own; yield a function that returns its answer to a text, None before it is
    ready.
    """
    folder.mkdir()
    serving = Serving(model_name="reviews", device="cpu", max_batch_tokens=512)
    source = ModelSource(uri=f"hf://{NAME}")
    job = TrainerJob(name="job", task="text-classification", model=source, serving=serving)
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        # A client that waits for the other one must not give up, and ask a second time.
        "HF_HUB_DOWNLOAD_TIMEOUT": str(round(2 * patient(60))),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    } | variables
    command = [sys.executable, "-m", "finetune_trainer", "serve", "--job", str(folder / "job.json")]
    options = ["--workspace", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], env=environment, stdout=output, stderr=output)

    def answer() -> Reply | None:
        assert process.poll() is None, log.read_text()
        client = Served(port, None)  # type: ignore[arg-type]  # it is in another process
        try:
            ready = client.request("/v2/health/ready").code == 200
        except OSError:
            return None
        return client.request("/", {"inputs": "the cat"}) if ready else None

    try:
        yield answer
    finally:
        process.kill()
        process.wait()


def test_servers_that_share_a_cache_fetch_the_weights_once(tmp_path: Path, hub: MeetingHub) -> None:
    endpoint, cache = f"http://127.0.0.1:{hub.server_port}", tmp_path / "cache"
    with (
        server(tmp_path / "first", endpoint, cache) as first,
        server(tmp_path / "second", endpoint, cache) as second,
    ):
        wait_until(lambda: first() and second(), "both servers answer", 180)
        found = first()
    assert hub.looked >= SERVERS, "both servers looked for the weights before any were sent"
    assert hub.sent == 1

    hub.shutdown()
    hub.server_close()
    with server(tmp_path / "later", endpoint, cache) as later:
        wait_until(later, "a server without the Hub answers", 180)
        again = later()
    assert found is not None
    assert again is not None
    assert (again.code, again.json) == (found.code, found.json)


def test_servers_with_caches_of_their_own_fetch_the_weights_each(tmp_path: Path, hub: MeetingHub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    with (
        server(tmp_path / "first", endpoint, tmp_path / "one") as first,
        server(tmp_path / "second", endpoint, tmp_path / "other") as second,
    ):
        wait_until(lambda: first() and second(), "both servers answer", 180)
    assert hub.sent == SERVERS
