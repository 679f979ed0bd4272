"""The model server under requests that are wrong, too many or too late."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.layout import EXIT_OK, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.serving.serving_engine import ServingEngine
from process_support import http_fuzz
from suite_plugins.fuzz import examples
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.served import Served, loading, served

WORDS = ["a", "good", "bad", "film"]


def job_of(model: Path, **serving: Any) -> TrainerJob:
    settings = {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 256, **serving}
    return TrainerJob.model_validate(
        {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "serving": settings}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=WORDS, labels=("bad", "good"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(job_of(model, max_queue=8), JobPaths(tmp_path_factory.mktemp("w") / "job")) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "code", "rule"),
    [
        (b'{"inputs": NaN}', 400, "NaN"),
        (b'{"inputs": "\xff"}', 400, "UTF-8"),
        (b"[" * 100_000, 400, "nested"),
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"inputs": 3}', 422, "inputs must be a text"),
        (b'{"inputs": []}', 422, "no rows"),
        (b'{"inputs": ["a", {"text": "a", "text_pair": "b"}]}', 422, "same inputs"),
        (b'{"inputs": "\\ud800"}', 422, "surrogate"),
        (b'{"inputs": "a", "parameters": 3}', 422, "parameters"),
        (b'{"inputs": "a", "parameters": {"top_k": "x"}}', 422, "top_k"),
        (json.dumps({"inputs": ["a"] * 300}).encode(), 413, "300 rows"),
        (json.dumps({"inputs": "a" * 300_000}).encode(), 413, "characters"),
        (b" " * (10 << 20), 413, "bytes"),
    ],
)
def test_bad_request_is_refused_with_the_rule(server: Served, body: bytes, code: int, rule: str) -> None:
    reply = server.request("/", body)

    assert reply.code == code
    assert rule in reply.json["error"]


@pytest.mark.parametrize(
    "change",
    [
        {"datatype": "FP32"},
        {"shape": [2]},
        {"data": [1]},
        {"name": "other"},
        {"parameters": {"binary_data_size": 4}},
        {"data": None},
        {"shape": [1, True]},
    ],
)
def test_bad_tensor_is_refused(server: Served, change: dict[str, Any]) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"], **change}

    reply = server.request("/v2/models/tiny/infer", {"inputs": [tensor]})

    assert 400 <= reply.code < 500
    assert reply.json["error"]


def test_unknown_path_and_method_are_refused_as_json(server: Served) -> None:
    found = server.request("/v3")
    wrong = server.request("/metrics", b"{}")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(30))
    connection.request("PUT", "/")
    allowed = connection.getresponse().headers["allow"]
    connection.close()

    assert (found.code, wrong.code) == (404, 405)
    assert allowed == "GET, HEAD, POST"
    assert found.json["error"]
    assert wrong.json["error"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@examples(60)
@given(
    inputs=JSON,
    parameters=JSON,
    path=st.sampled_from(["/", "/models/tiny", "/v2/models/tiny/infer"]),
    more=st.dictionaries(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), JSON),
)
def test_no_body_is_answered_with_a_server_error(
    server: Served, inputs: Any, parameters: Any, path: str, more: dict[str, Any]
) -> None:
    for body in ({"inputs": inputs, "parameters": parameters}, {"inputs": [more], "id": inputs}):
        assert server.request(path, body).code < 500


@examples(40)
@given(
    sent=http_fuzz.sendings(
        ["/", "/models/tiny", "/v2/models/tiny/infer", "/v2/health/ready", "/metrics"],
        {"inputs": ["a"], "parameters": {"top_k": 1}, "id": "i"},
    )
)
def test_no_bytes_are_answered_with_a_server_error(server: Served, sent: bytes) -> None:
    statuses = http_fuzz.statuses(http_fuzz.answer(server.port, sent))
    assert statuses <= http_fuzz.ALLOWED, sent[:500]
    assert server.request("/", {"inputs": "a"}).code == 200


def test_full_queue_answers_429_and_keeps_the_accepted_requests(server: Served) -> None:
    late, body = "X-Request-Timeout-Ms", {"inputs": ["a"] * 4}
    with server.held(body, body) as (entered, codes):
        wait_until(lambda: server.state.batcher.queued == 8 and entered.is_set(), "the queue is full")
        refused = server.request("/", {"inputs": "a"})
        assert refused.code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-endpoint-revision"] == "3"
    assert codes == [200, 200]
    assert server.request("/", {"inputs": "a"}, {late: "60000"}).code == 200
    assert server.request("/", {"inputs": "a"}, {late: "soon"}).code == 400


def test_requests_that_wait_are_tokenised_and_computed_together(server: Served) -> None:
    hold, entered = threading.Event(), threading.Event()
    engine, batches = server.state.engine, []
    answer, encode = engine.answer, engine.encode

    def held(form: Any, rows: Any, *given: Any) -> Any:
        entered.set()
        hold.wait(patient(30))
        batches.append(("answer", len(rows)))
        return answer(form, rows, *given)

    def seen(form: Any, rows: Any) -> Any:
        batches.append(("encode", len(rows)))
        server.state.batcher._token_seconds = 0.0  # the time that the first was held limits no batch
        return encode(form, rows)

    engine.answer, engine.encode = held, seen  # type: ignore[method-assign]  # to see the work done at once
    replies: dict[str, Any] = {}
    texts = ["a film", "good", "bad film", "a good film"]
    senders = [
        threading.Thread(target=lambda text=text: replies.update({text: server.request("/", {"inputs": text}).json}))
        for text in texts
    ]
    try:
        senders[0].start()
        wait_until(entered.is_set, "the first is computed")
        for each in senders[1:]:
            each.start()
        wait_until(lambda: server.state.batcher.queued == 4, "three wait")
    finally:
        hold.set()
        for each in senders:
            each.join(patient(30))
        engine.answer, engine.encode = answer, encode  # type: ignore[method-assign]

    assert batches == [("encode", 1), ("answer", 1), ("encode", 3), ("answer", 3)]
    for text in texts:
        alone = {each["label"]: each["score"] for each in server.request("/", {"inputs": text}).json[0]}
        assert {each["label"]: each["score"] for each in replies[text][0]} == pytest.approx(alone, abs=1e-5)


def test_server_is_alive_and_not_ready_while_it_loads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, load = threading.Event(), ServingEngine.open

    def slow(engine: ServingEngine) -> None:
        go.wait(patient(60))
        load(engine)

    monkeypatch.setattr(ServingEngine, "open", slow)
    with loading(job_of(model), JobPaths(tmp_path / "job")) as server:
        before = [server.request(f"/v2/health/{name}").code for name in ("live", "ready")]
        refused = [server.request("/", {"inputs": "a"}), server.request("/"), server.request("/v2/models/tiny")]
        go.set()
        wait_until(lambda: server.request("/v2/health/ready").code == 200, "the server is ready")
        assert server.request("/", {"inputs": "a"}).code == 200

    assert before == [200, 503]
    assert [each.code for each in refused] == [503, 503, 503]
    assert refused[0].headers["retry-after"] == "1"


def test_request_that_times_out_gets_504_and_leaves_the_queue(server: Served) -> None:
    hold = threading.Event()
    engine, answer = server.state.engine, server.state.engine.answer
    engine.answer = lambda *given: (hold.wait(patient(30)), answer(*given))[1]  # type: ignore[method-assign]
    try:
        reply = server.request("/", {"inputs": "a"}, {"X-Request-Timeout-Ms": "20"})
        assert reply.code == 504
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b'POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"inputs": "b"}')
            wait_until(lambda: server.state.batcher.queued == 2, "the request is queued")
        queued = server.state.batcher._inbox
        wait_until(lambda: all(one.disconnected for one in queued), "the server notices the closed connection")
    finally:
        hold.set()
        engine.answer = answer  # type: ignore[method-assign]
    wait_until(lambda: server.state.batcher.queued == 0, "the queue is empty")
    # It is counted after its row has left the queue.
    counted = b'code="499",model="tiny",path="/"} 1.0'
    wait_until(lambda: counted in server.request("/metrics").content, "the closed connection is counted")


def test_health_check_of_the_page_is_no_request_to_the_model(server: Served) -> None:
    assert server.request("/").code == 200
    text = server.request("/metrics").content.decode()
    assert 'finetune_serving_requests_total{code="200",model="",path="/page/{name}"}' in text
    assert 'finetune_serving_requests_total{code="200",model="",path="/"}' not in text


def test_token_is_required_except_for_probes(model: Path, tmp_path: Path) -> None:
    with served(job_of(model), JobPaths(tmp_path / "job"), token="secret") as server:
        assert server.request("/", {"inputs": "a"}).code == 401
        assert server.request("/", {"inputs": "a"}, {"Authorization": "Bearer wrong"}).code == 401
        assert server.request("/", {"inputs": "a"}, {"Authorization": "Bearer secret"}).code == 200
        assert server.request("/openapi.json").code == 401
        assert [server.request(path).code for path in ("/v2/health/live", "/v2/health/ready", "/metrics")] == [200] * 3


def test_sigterm_drops_no_request_sent_before_or_soon_after_it(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(job_of(model, drain_seconds=30).to_json(), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "finetune_trainer", "serve", "--job", str(file), "--workspace", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=environment, stdout=output, stderr=output
        )
    client = Served(port, None)  # type: ignore[arg-type]  # it is in another process
    codes: list[int | str] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            try:
                codes.append(client.request("/", {"inputs": "a good film"}).code)
            except ConnectionRefusedError:
                return  # the port is closed: nothing was accepted
            except Exception as error:
                codes.append(repr(error))

    def ready() -> int | None:
        try:
            return client.request("/v2/health/ready").code
        except OSError:
            assert process.poll() is None, log.read_text()
            return None

    try:
        wait_until(lambda: ready() == 200, "the server is ready", 120)
        senders = [threading.Thread(target=send) for _ in range(4)]
        for each in senders:
            each.start()
        wait_until(lambda: len(codes) > 20, "requests are answered")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready() == 503, "the server is not ready any more")
        answered = len(codes)
        wait_until(lambda: len(codes) > answered + 8, "requests are answered after the signal")
        stop.set()  # as a Service sends nothing to a pod that is not ready
        assert process.wait(patient(60)) == EXIT_OK
    finally:
        stop.set()
        process.kill()
        process.wait()
    for each in senders:
        each.join(patient(30))
    assert set(codes) == {200}
