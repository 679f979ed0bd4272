"""Any request to the operator's servers gets a well-formed answer, and they go on: requests by hypothesis.

The servers are the real ones. Each example is one connection: a request, or a part of one, without TLS; or a
conversation of several requests with bodies in odd chunks, in odd pieces, over TLS or a damaged form of it, that ends
early. `make fuzz` tries many more of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_operator.controller.servers.certificates import TlsContexts, make, server_names
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.probes import Endpoints
from finetune_operator.controller.servers.progress_protocol import AttemptKey
from finetune_operator.controller.servers.progress_server import KnownPod, ProgressServer, ServerLimits
from finetune_operator.controller.servers.tokens import PodIdentity, RefusedToken, Verdict
from finetune_operator.controller.servers.webhook import WebhookServer
from finetune_operator.jobs.admission import JOBS
from finetune_operator.jobs.missing_objects import LookUp
from finetune_operator.jobs.state.decision_types import Findings
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import ProgressStatus
from kopf_support import answering
from process_support.http_fuzz import ALLOWED, CANARY, GOOD, Port, answer, bodies, request, sendings, statuses
from suite_plugins.fuzz import examples
from suite_plugins.patience import patient

PROGRESS_PATH = "/v1alpha1/namespaces/team/finetunejobs/tune/stages/train/attempts/1"


class World:
    """One honest pod and its job, as all three servers need them."""

    def leading(self) -> bool:
        return True

    def synced(self) -> bool:
        return True

    def leader(self) -> None:
        return None

    def pod(self, namespace: str, name: str) -> KnownPod | None:
        known = KnownPod("pod-uid", "job-uid", AttemptKey("team", "tune", Stage.TRAIN, 1))
        return known if (namespace, name) == ("team", "pod-0") else None

    def report(self, pod: KnownPod, progress: ProgressStatus, findings: Findings, mark: str) -> None:
        assert progress.model_dump_json()

    def report_lost(self) -> None: ...

    def jobs(self) -> list[Any]:
        return []

    async def served(self) -> list[Any]:
        return ["job"]

    async def look_up(self, namespace: str, job: Any) -> LookUp:
        return LookUp()

    async def faults(self) -> list[str]:
        return []

    def missing(self) -> list[str]:
        return []

    async def review_token(self, token: str, audience: str) -> Verdict:
        return PodIdentity("team", "pod-0", "pod-uid") if token == GOOD else RefusedToken("the token is not valid")


@asynccontextmanager
async def progress_server(contexts: TlsContexts | None = None) -> AsyncIterator[Port]:
    # All examples come from one address and one pod.
    limits = ServerLimits(pod_burst=10**9, unknown_burst=10**9, reviews_burst=10**9)
    plain: Any = SimpleNamespace(server=None, relay=False)
    server = ProgressServer(World(), World(), contexts or plain, limits=limits)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


@asynccontextmanager
async def webhook_server(contexts: TlsContexts | None = None) -> AsyncIterator[Port]:
    plain: Any = None
    server = WebhookServer(World(), plain if contexts is None else contexts.webhook)
    server.answer.set_result(answering(CLUSTER_SETTINGS))
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


@asynccontextmanager
async def endpoints_server(contexts: TlsContexts | None = None) -> AsyncIterator[Port]:
    """Start the server that has no TLS."""
    server = Endpoints(World(), World(), Metrics())
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


@contextmanager
def running(server: Callable[[], Any]) -> Iterator[Port]:
    """Run the server on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    manager = server()
    try:
        yield call(manager.__aenter__())
    finally:
        call(manager.__aexit__(None, None, None))
        call(_ended())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _ended() -> None:
    """Wait for connections whose clients have closed already."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others or not (await asyncio.wait(others, timeout=patient(60)))[1]


REPORT = {
    "trainerStatus": {
        "progressPercentage": 40, "estimatedRemainingSeconds": 12, "lastUpdatedTime": "2026-01-01T00:00:00Z",
        "metrics": [{"name": "step", "value": "4"}],
    }
}  # fmt: skip
REVIEW = {
    "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
    "request": {
        "uid": "u", "operation": "CREATE", "namespace": "team", "name": "a", "userInfo": {"username": "me"},
        "resource": JOBS,
        "object": {
            "apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob",
            "metadata": {"name": "a", "namespace": "team", "labels": {}, "annotations": {}},
            "spec": {
                "task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"},
                "training": {"epochs": 1}, "template": {"env": [{"name": "A", "value": "b"}], "volumes": []},
                "resources": {"nodes": 1}, "parallelism": {"strategy": "ddp"},
            },
        },
        "oldObject": None,
    },
}  # fmt: skip
SERVERS: dict[str, tuple[Callable[[], Any], list[str], Any]] = {
    "progress": (progress_server, [PROGRESS_PATH], REPORT),
    "webhook": (webhook_server, ["/validate"], REVIEW),
    "endpoints": (endpoints_server, ["/healthz", "/readyz", "/metrics"], {}),
}


@pytest.mark.parametrize("name", SERVERS)
def test_random_input_is_answered_and_the_next_request_is_served(name: str, caplog: pytest.LogCaptureFixture) -> None:
    server, paths, model = SERVERS[name]
    good = request("GET" if name == "endpoints" else "POST", paths[0], [("Authorization", f"Bearer {GOOD}")],
                   json.dumps(model).encode())  # fmt: skip
    with caplog.at_level(logging.DEBUG), running(server) as port:

        @examples(100, everything=300)
        @given(sent=sendings(paths, model))
        def one(sent: bytes) -> None:
            response = answer(port, sent)
            # aiohttp takes a request line without a version for HTTP/0.9, and its answer repeats that.
            assert response == b"" or response.startswith((b"HTTP/1.", b"HTTP/0.9 ")), response[:200]
            assert statuses(response) <= ALLOWED, (sent[:500], response[:500])
            if name != "webhook":  # which reports faults of the user's own job
                assert CANARY.encode() not in response, (sent[:500], response[:500])

        one()
        assert answer(port, good, whole=True).startswith(b"HTTP/1.1 200"), (
            "an honest request is answered after all that"
        )
    response = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in response if record.levelno >= logging.ERROR] == []
    assert [record.getMessage() for record in caplog.records if CANARY in record.getMessage()] == []


# ------------------------------------------------------------------------------------------------------- conversations

CERTIFICATES = make(server_names("ops", None), datetime.now(UTC))
Framing: TypeAlias = Literal["length", "chunked", "both", "too long", "no end", "bad chunk"]
End: TypeAlias = Literal["wait", "half", "close", "reset"]


@dataclass(frozen=True)
class Conversation:
    """One connection of a client that sends several requests."""

    through: Literal["tls", "plain", "hello"]
    """`plain`: without TLS, whatever the server expects; `hello`: behind a damaged ClientHello."""
    sent: bytes
    cuts: tuple[int, ...]
    """Offsets at which a piece ends."""
    end: End

    def pieces(self) -> list[bytes]:
        places = sorted({cut % (len(self.sent) + 1) for cut in self.cuts} | {0, len(self.sent)})
        return [self.sent[start:end] for start, end in itertools.pairwise(places)]


def spoken(
    method: str, path: str, version: str, headers: list[tuple[str, str]], framing: Framing, body: bytes
) -> bytes:
    """Return one request of several on a connection, which stays open after it."""
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *[f"{name}: {value}" for name, value in headers]]
    if framing in ("length", "both", "too long"):
        lines.append(f"Content-Length: {len(body) + 1000 * (framing == 'too long')}")
    if framing in ("chunked", "both", "no end", "bad chunk"):
        lines.append("Transfer-Encoding: chunked")
        half = len(body) // 2
        chunks = [body[:half], body[half:]] if half else [body]
        body = b"".join(b"%x;x=y\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
        body += {"no end": b"", "bad chunk": b"-5\r\nx\r\n"}.get(framing, b"0\r\nTrailer: x\r\n\r\n")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + body


def conversations(paths: list[str], model: Any) -> st.SearchStrategy[Conversation]:
    header = st.sampled_from(
        [("Authorization", f"Bearer {GOOD}"), ("Authorization", f"Bearer {CANARY}"), ("Connection", "close"),
         ("Connection", "keep-alive"), ("Expect", "100-continue"), ("Upgrade", "websocket"), ("Content-Length", "3")]
    )  # fmt: skip
    one = st.builds(
        spoken,
        st.sampled_from(["POST", "POST", "GET", "HEAD", "OPTIONS"]),
        st.sampled_from([*paths, *paths, "/", "*", "//x", f"/{CANARY}"]),
        st.sampled_from(["1.1", "1.1", "1.0", "2.0"]),
        st.lists(header, max_size=3),
        st.sampled_from(["length", "length", "chunked", "both", "too long", "no end", "bad chunk"]),
        bodies(model),
    )
    return st.builds(
        Conversation,
        st.sampled_from(["tls", "tls", "tls", "plain", "hello"]),
        st.lists(one | st.binary(max_size=60), min_size=1, max_size=6).map(b"".join),
        st.lists(st.integers(0, 10_000), max_size=5).map(tuple),
        st.sampled_from(["half", "half", "close", "reset"]),
    )


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def greeting(damage: bytes) -> bytes:
    """Return a ClientHello with damaged bytes."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = trusting().wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    content = bytearray(outgoing.read())
    for at, value in enumerate(damage):
        content[(at * 37 + value) % len(content)] ^= value
    return bytes(content)


def held(port: Port, talk: Conversation, tls: bool) -> bytes:
    """Hold the conversation and return the server's answer."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patient(60)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: socket.socket = raw
        try:
            if tls and talk.through == "hello":
                raw.sendall(greeting(talk.sent[:40]))
            elif tls and talk.through == "tls":
                connection = trusting().wrap_socket(raw, server_hostname="localhost")
            for piece in talk.pieces():
                connection.sendall(piece)
            if talk.end == "half":
                select.select([connection], [], [], 0.02)
                # Half-close TCP: TLS would close both directions.
                socket.socket.shutdown(connection, socket.SHUT_WR)
            if talk.end in ("half", "wait"):
                while part := connection.recv(65536):
                    received += part
            elif talk.end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # the server did not read all of it
        finally:
            connection.close()
    return received


@pytest.mark.parametrize("name", SERVERS)
def test_a_conversation_that_goes_wrong_at_any_place_harms_no_other(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, paths, model = SERVERS[name]
    tls = name != "endpoints"
    good = request("GET" if name == "endpoints" else "POST", paths[0], [("Authorization", f"Bearer {GOOD}")],
                   json.dumps(model).encode())  # fmt: skip
    honest = Conversation("tls", good, (), "wait")
    with caplog.at_level(logging.DEBUG), running(partial(server, TlsContexts(CERTIFICATES))) as port:

        @examples(30, everything=100)
        @given(talk=conversations(paths, model))
        def one(talk: Conversation) -> None:
            response = held(port, talk, tls)
            # A connection without TLS gets an alert of TLS at most.
            if not tls or talk.through == "tls":
                # aiohttp repeats the version of the request.
                assert response == b"" or re.match(rb"HTTP/\d\.\d \d{3} ", response), response[:200]
            assert statuses(response) <= ALLOWED | {100}, (talk, response[:500])
            if name != "webhook":
                assert CANARY.encode() not in response, (talk, response[:500])

        one()
        assert held(port, honest, tls).startswith(b"HTTP/1.1 200"), "an honest request is answered after all that"
    response = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in response] == []
    assert [record.getMessage() for record in caplog.records if CANARY in record.getMessage()] == []
