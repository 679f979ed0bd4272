"""The model server's connections: slow ones are closed, and many requests leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.serving import http_server
from finetune_trainer.serving.protocols import http_json
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Served, served

WORDS = ["a", "good", "bad", "film"]
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"inputs": "a"}'
MANY = 2000
IDLE = 2000
"""Idle connections at once."""
GROWTH = 40 << 20
"""Bytes that the process may grow by over so many requests: allocators keep memory that large batches needed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=WORDS, labels=("bad", "good"))


def job_of(model: Path, **changes: object) -> TrainerJob:
    serving = {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 512, **changes}
    return TrainerJob.model_validate(
        {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "serving": serving}
    )


def connected(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=patient(60))


def answer_of(client: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    found = b""
    while part := client.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("sent", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost:"])
def test_connection_without_a_request_is_closed(model: Path, tmp_path: Path, sent: bytes) -> None:
    with served(job_of(model), JobPaths(tmp_path / "job"), idle_seconds=1) as server, connected(server) as client:
        client.sendall(sent)
        assert answer_of(client) == b""


def test_connection_that_is_idle_or_slow_after_an_answer_is_closed(model: Path, tmp_path: Path) -> None:
    with served(job_of(model), JobPaths(tmp_path / "job"), idle_seconds=1) as server:
        for second in (b"", b"GET /v2 HT"):
            with connected(server) as client:
                client.sendall(HEAD + BODY)
                wait_until(lambda client=client: b"score" in client.recv(65536), "the first request is answered")
                client.sendall(second)
                assert answer_of(client) == b""


def test_slow_body_gets_408_and_delays_no_other_client(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_json, "BODY_SECONDS", 1.0)
    with served(job_of(model), JobPaths(tmp_path / "job")) as server, connected(server) as client:
        client.sendall(HEAD + BODY[:3])
        assert server.request("/", {"inputs": "a"}).code == 200
        found = answer_of(client)

    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 1 s" in found


def test_half_closed_connection_holds_no_request(model: Path, tmp_path: Path) -> None:
    with served(job_of(model), JobPaths(tmp_path / "job"), idle_seconds=1) as server:
        for sent in (HEAD + BODY, HEAD + BODY[:3], HEAD, HEAD[:20], b""):
            with connected(server) as client:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                found = answer_of(client)
            wait_until(lambda: server.state.in_flight == 0, "no request is held")
            assert found == b"" or int(found.split()[1]) < 500, sent
            assert server.request("/", {"inputs": "a"}).code == 200


def test_idle_connections_delay_no_other_client(model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * IDLE:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * IDLE), hard))
    with served(job_of(model), JobPaths(tmp_path / "job"), idle_seconds=patient(10)) as server, ExitStack() as idle:
        for _ in range(IDLE):
            idle.enter_context(connected(server))
        wait_until(lambda: _served_connections(server) == IDLE, "all connections are accepted")
        assert [server.request("/", {"inputs": "a"}).code for _ in range(20)] == [200] * 20
        assert _served_connections(server) == IDLE, "they were open all the time"


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + BODY[:3]], ids=["silent", "head", "body"])
def test_many_slow_connections_end_the_oldest_of_them_and_no_request(
    sent: bytes, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 20)
    with served(job_of(model), JobPaths(tmp_path / "job"), idle_seconds=patient(60)) as server, ExitStack() as slow:
        with server.held({"inputs": "a"}) as (entered, codes):
            assert entered.wait(patient(30))
            clients = [slow.enter_context(connected(server)) for _ in range(60)]
            for client in clients:
                with suppress(OSError):  # ended meanwhile
                    client.sendall(sent)
            wait_until(lambda: _served_connections(server) <= 20, "the oldest are ended")
            with suppress(ConnectionResetError):
                assert answer_of(clients[0]) == b""
        assert codes == [200]
        assert server.request("/", {"inputs": "a"}).code == 200


def test_connection_of_a_client_that_does_not_read_is_closed(model: Path, tmp_path: Path) -> None:
    with served(job_of(model), JobPaths(tmp_path / "job"), unread_seconds=1) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(patient(60))
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 40)
            answered = b'path="/metrics"'
            wait_until(lambda: answered in server.state.metrics.text(), "the first is answered")
            wait_until(lambda: _served_connections(server) == 0, "the connection is closed")
            found = b""
            with suppress(ConnectionError):
                while part := client.recv(65536):
                    found += part
        wait_until(lambda: server.state.in_flight == 0, "no request is held")

    assert 0 < found.count(b"HTTP/1.1 200") < 40


def _served_connections(server: Served) -> int:
    """Return the number of established connections that the server in this process has accepted."""
    return sum(
        each.laddr.port == server.port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process().net_connections("tcp")
    )


def _open_ends(server: Served) -> int:
    """Return the number of ends, the server's and the clients', that this process has of its connections. Other tests
    may have left connections of their own in it.
    """
    return sum(
        each.status != psutil.CONN_LISTEN and server.port in (each.laddr.port, each.raddr.port if each.raddr else None)
        for each in psutil.Process().net_connections("tcp")
    )


def mixed(draw: random.Random) -> tuple[str, bytes, int]:
    """Return a path, a body, and the expected status code."""
    match draw.randrange(8):
        case 0:
            return "/", b'{"inputs": ', 400
        case 1:
            return "/v2/models/other/infer", BODY, 404
        case 2:
            return "/", json.dumps({"inputs": 3}).encode(), 422
        case _:
            texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(draw.randint(1, 8))]
            return "/", json.dumps({"inputs": texts}).encode(), 200


def test_many_mixed_requests_leave_no_memory_descriptor_or_thread(model: Path, tmp_path: Path) -> None:
    process = psutil.Process()
    with served(job_of(model, max_queue=10_000), JobPaths(tmp_path / "job")) as server:
        wrong: list[object] = []

        def send(seed: int, count: int) -> None:
            draw = random.Random(seed)
            connection = HTTPConnection("127.0.0.1", server.port, timeout=patient(120))
            for _ in range(count):
                path, body, code = mixed(draw)
                connection.request("POST", path, body)
                answer = connection.getresponse()
                content = answer.read()
                if answer.status != code:
                    wrong.append((code, answer.status, content[:200]))
            connection.close()

        def round_of(count: int) -> tuple[int, int, int]:
            """Return descriptors, threads and memory after so many requests of 4 clients."""
            senders = [threading.Thread(target=send, args=(seed, count // 4)) for seed in range(4)]
            for each in senders:
                each.start()
            for each in senders:
                each.join(patient(240))
            wait_until(lambda: _open_ends(server) == 0, "all connections are closed")
            gc.collect()
            return len(list(Path("/proc/self/fd").iterdir())), process.num_threads(), process.memory_info().rss

        before = round_of(400)
        after = round_of(MANY)
        waiting = server.state.batcher.queued, server.state.in_flight, server.state.batcher._waiting

    assert wrong == []
    assert after[:2] == before[:2]
    assert after[2] - before[2] < GROWTH
    assert waiting == (0, 0, [])


@pytest.mark.parametrize("backend", ["bf16", "onnx"])
def test_backend_by_name_answers_within_its_tolerance(model: Path, tmp_path: Path, backend: str) -> None:
    from finetune_trainer.core.failures import StageError

    request = {"inputs": ["a good film", "bad", "a film a film"]}
    with served(job_of(model), JobPaths(tmp_path / "plain")) as server:
        plain = server.request("/", request).json
    try:
        with served(job_of(model, optimization=backend, tolerance=1.0), JobPaths(tmp_path / "backend")) as server:
            assert server.state.engine.answerer.forward is not None
            found = server.request("/", request).json
    except StageError as error:
        if error.reason != "BackendNotAvailable":
            raise
        pytest.skip(error.message)
    for ours, others in zip(found, plain, strict=True):
        scores = {each["label"]: each["score"] for each in others}
        assert all(abs(each["score"] - scores[each["label"]]) < 0.02 for each in ours)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make `folder` refuse new files, as the workspace of an endpoint's pods."""
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        return
    # Root ignores modes.
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"root may not mount here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def made_or_skipped(job: TrainerJob, root: Path) -> AbstractContextManager[Served]:
    pytest.importorskip("onnxruntime")
    return served(job, JobPaths(root))


def test_model_is_converted_elsewhere_where_the_workspace_is_read_only(model: Path, tmp_path: Path) -> None:
    with (
        read_only(tmp_path / "job"),
        made_or_skipped(job_of(model, optimization="onnx"), tmp_path / "job") as server,
    ):
        assert server.state.engine.answerer.forward is not None
        assert server.request("/", {"inputs": "a good film"}).code == 200
        assert list((tmp_path / "job").iterdir()) == []


def test_converted_model_of_older_weights_is_not_served(tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    request = {"inputs": "a good film"}
    model = tiny_bert(tmp_path / "m", words=WORDS, labels=("bad", "good"))
    with made_or_skipped(job_of(model, optimization="onnx"), tmp_path / "job") as server:
        before = server.request("/", request).json[0]
    weights = load_file(model / "model.safetensors")
    # With both signs changed, the change would cancel out.
    changed = {name: -tensor if "classifier" in name else tensor for name, tensor in weights.items()}
    save_file(changed, model / "model.safetensors", {"format": "pt"})
    with served(job_of(model), JobPaths(tmp_path / "plain")) as server:
        plain = server.request("/", request).json[0]
    with made_or_skipped(job_of(model, optimization="onnx"), tmp_path / "job") as server:
        after = server.request("/", request).json[0]

    def scores(answer: list[dict[str, object]]) -> dict[object, object]:
        return {each["label"]: each["score"] for each in answer}

    assert scores(after) == pytest.approx(scores(plain), abs=1e-4)
    assert scores(after) != pytest.approx(scores(before), abs=1e-4)
