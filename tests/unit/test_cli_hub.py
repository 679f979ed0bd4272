"""A Hub that is out of reach of this machine: one look, one line, and no trainer that waits for it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune_command import finetune as run_finetune
from finetune_operator.cli.local import hub_reach

JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: first}
spec:
  task: text-classification
  model: {uri: hf://some-org/some-model}
  dataset: {uri: hf://some-org/rows@v1}
  training: {}
"""
URIS: dict[str, hub_reach.Kind] = {"hf://some-org/some-model": "model", "hf://some-org/rows@v1": "dataset"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("NO_PROXY", "*")
    remembering = (hub_reach.unreachable_reason, hub_reach._note_offline)
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


@contextmanager
def listening(accepts: bool = True) -> Iterator[str]:
    """Yield the URL of a port that never answers; without `accepts` it refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if accepts:
            taken.listen()
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_hub_that_refuses_the_connection_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(accepts=False) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert hub_reach.unreachable_reason() == f"{endpoint} cannot be reached (connection refused)"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (socket.gaierror(-2, "Name or service not known"), "its name does not resolve"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
        (OSError("Tunnel connection failed: 403 Forbidden"), "Tunnel connection failed: 403 Forbidden"),
        (ssl.SSLCertVerificationError("self-signed certificate"), None),
    ],
)
def test_reason_is_short(error: OSError, message: str | None) -> None:
    assert hub_reach.reason_text(error) == message


def test_hub_that_does_not_answer_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_reach, "ANSWER_SECONDS", 0.05)
    with listening() as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert hub_reach.unreachable_reason() == f"{endpoint} cannot be reached (no answer within 5 s)"


@pytest.mark.parametrize("status", [200, 401, 404, 501])
def test_hub_that_answers_anything_is_left_to_the_trainer(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with answering(status) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert (hub_reach.unreachable_reason(), hub_reach.missing(URIS), hub_reach.variables(URIS)) == (None, (), {})


def test_gateway_that_does_not_reach_the_hub_is_not_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(504) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert hub_reach.unreachable_reason() == f"{endpoint} cannot be reached (504 Gateway Timeout)"


def test_copies_in_the_cache_are_used_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(accepts=False) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert hub_reach.missing(URIS) == tuple(URIS)
    (tmp_path / "hub-home" / "hub" / "models--some-org--some-model" / "snapshots").mkdir(parents=True)
    assert hub_reach.missing(URIS) == ("hf://some-org/rows@v1",)
    (tmp_path / "hub-home" / "datasets" / "some-org___rows").mkdir(parents=True)
    assert hub_reach.missing(URIS) == ()
    assert [hub_reach.variables(URIS) for _ in range(2)] == [{"HF_HUB_OFFLINE": "1"}] * 2
    reason = hub_reach.unreachable_reason()
    expected = f"Note: {reason}: models and data of the Hub are read from the cache on this machine.\n"
    assert capsys.readouterr().err == expected


def test_hub_is_not_requested_in_offline_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub_reach, "_request", lambda _: pytest.fail("the Hub was asked"))
    assert (hub_reach.missing(URIS), hub_reach.unreachable_reason(), hub_reach.variables(URIS)) == (
        tuple(URIS),
        "HF_HUB_OFFLINE is set",
        {},
    )
    assert capsys.readouterr().err == ""


def test_job_without_the_hub_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_reach, "unreachable_reason", lambda: pytest.fail("the Hub was asked"))
    uris: dict[str, hub_reach.Kind] = {"pkg://package/model": "model", "file:///rows": "dataset"}
    assert (hub_reach.missing(uris), hub_reach.variables(uris)) == ((), {})


@pytest.mark.parametrize(
    ("command", "message", "code"),
    [
        (
            "validate --data",
            'job.yaml:7: spec.dataset.uri: value "hf://some-org/rows@v1": is not in the cache of this machine, and '
            "{reason}. {hint}.",
            1,
        ),
        (
            "plan",
            "Note: the size of hf://some-org/some-model is assumed: {reason}, and there is no copy here. {hint}.",
            0,
        ),
        (
            "run",
            "Error: hf://some-org/some-model and hf://some-org/rows@v1: {reason}, and there is no copy here. {hint}.",
            1,
        ),
    ],
)
def test_command_reports_an_unreachable_hub_in_one_line(command: str, message: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with listening(accepts=False) as endpoint:
        ran = run_finetune(
            *command.split(), "job.yaml", folder=tmp_path, HF_ENDPOINT=endpoint, XDG_CACHE_HOME=str(tmp_path)
        )
    reason = f"{endpoint} cannot be reached (connection refused)"
    lines = [line for line in ran.stderr.splitlines() if "of memory is free" not in line]
    assert (ran.returncode, lines) == (code, [message.format(reason=reason, hint=hub_reach.HINT)])
    assert not (tmp_path / "runs" / "first" / "logs").exists()
