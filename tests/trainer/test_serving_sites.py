"""The model server and web sites that somebody visits: their requests are refused, those of other clients answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune_contract.browser_requests import is_loopback
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from trainer_support.served import Served, served

BODY = {"inputs": "a good film"}
JSON = {"Content-Type": "application/json"}
REBOUND = {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}", "Sec-Fetch-Site": "same-origin"}
"""Headers of a site whose name was pointed at this machine."""
SITES: dict[str, dict[str, str]] = {
    "a script of another site": {"Origin": "https://evil.example", "Content-Type": "text/plain"},
    "a script of another site that sends JSON": {"Origin": "https://evil.example", **JSON},
    "a page in a sandbox": {"Origin": "null", **JSON},
    "another program of this machine, in the browser": {"Origin": "http://localhost:3000", **JSON},
    "another site, by what the browser says": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a site on another port": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", **JSON},
    "a form that another site sends off": {
        "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document",
        "Content-Type": "application/x-www-form-urlencoded",
    },
}  # fmt: skip
CLIENTS: dict[str, dict[str, str]] = {
    "a client that is no browser": JSON,
    "a charset beside the type": {"Content-Type": "application/json; charset=utf-8"},
    "a client that names no type": {},
    "the page of this server": {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin", **JSON},
    "the page, in an older browser": {"Origin": "http://127.0.0.1:{port}", **JSON},
    "the other local name": {"Host": "localhost:{port}", **JSON},
    "a tunnel with another port": {"Host": "localhost:9000", "Origin": "http://localhost:9000", **JSON},
    "IPv6": {"Host": "[::1]:{port}", **JSON},
}


def job_of(model: Path) -> TrainerJob:
    settings = {"model_name": "tiny", "device": "cpu", "max_batch_tokens": 256}
    return TrainerJob.model_validate(
        {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "serving": settings}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    return tiny_bert(folder, words=["a", "good", "bad", "film"], labels=("bad", "good"))


@pytest.fixture(scope="module")
def local(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(job_of(model), JobPaths(tmp_path_factory.mktemp("local") / "job"), local=True) as running:
        yield running


@pytest.fixture(scope="module")
def in_pod(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(job_of(model), JobPaths(tmp_path_factory.mktemp("pod") / "job")) as running:
        yield running


def computed(server: Served) -> bytes:
    """Return the counter of computed tokens."""
    metrics = server.request("/metrics").content.splitlines()
    return b"".join(line for line in metrics if line.startswith(b"finetune_serving_tokens_total"))


def of(server: Served, headers: dict[str, str]) -> dict[str, str]:
    return {name: value.format(port=server.port) for name, value in headers.items()}


@pytest.mark.parametrize("case", SITES)
def test_request_of_another_site_computes_nothing(case: str, local: Served, in_pod: Served) -> None:
    for server in (local, in_pod):
        before = computed(server)
        reply = server.request("/", BODY, of(server, SITES[case]))
        assert (reply.code, computed(server)) == (403, before)
        assert "other sites" in reply.json["error"]
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("path", ["/", "/v2/models/tiny", "/metrics", "/openapi.json", "/v2/health/ready"])
def test_local_server_shows_nothing_to_a_rebound_name(path: str, local: Served) -> None:
    reply = local.request(path, headers=of(local, REBOUND))
    assert (reply.code, "127.0.0.1 or localhost" in reply.json["error"]) == (421, True)


def test_local_server_computes_nothing_for_a_rebound_name(local: Served) -> None:
    assert local.request("/", BODY).code == 200
    before = computed(local)
    for host in ("evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0:{port}", "localhost.evil.example", "["):
        headers = of(local, {**REBOUND, **JSON, "Host": host})
        assert local.request("/", BODY, headers).code == 421, host
    assert computed(local) == before != b""


@pytest.mark.parametrize("case", CLIENTS)
def test_request_of_a_client_is_answered(case: str, local: Served, in_pod: Served) -> None:
    for server in (local, in_pod):
        assert server.request("/", BODY, of(server, CLIENTS[case])).code == 200


@pytest.mark.parametrize("host", ["job-endpoint.team.svc", "10.0.0.7:8000", "models.example.com"])
def test_server_in_a_pod_is_called_by_any_name(host: str, in_pod: Served) -> None:
    assert in_pod.request("/", BODY, {"Host": host, **JSON}).code == 200
    assert in_pod.request("/", BODY, {"Host": host, "Origin": f"https://{host}", **JSON}).code == 200
    assert in_pod.request("/v2/health/ready", headers={"Host": host}).code == 200


def test_link_of_another_site_opens_the_page(local: Served) -> None:
    opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert local.request("/", headers=opened).code == 200
    assert local.request("/", headers={**opened, "Sec-Fetch-Dest": "iframe"}).code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_types_of_html_forms_are_refused(kind: str, local: Served) -> None:
    for path in ("/", "/v2/models/tiny/infer"):
        reply = local.request(path, BODY, {"Content-Type": kind})
        assert (reply.code, "application/json" in reply.json["error"]) == (415, True)


def test_token_lets_a_gateway_admit_pages_of_other_sites(model: Path, tmp_path: Path) -> None:
    asked = {"Host": "models.example.com", "Origin": "https://app.example.com", **JSON}
    with served(job_of(model), JobPaths(tmp_path / "job"), token="secret", local=True) as server:
        assert server.request("/", BODY, asked).code == 401
        for kind in ({}, {"Content-Type": "text/plain"}):
            assert server.request("/", BODY, {**asked, "Authorization": "Bearer secret", **kind}).code == 200
        assert server.request("/metrics", headers=asked).code == 421


def test_addresses_of_this_machine_alone_are_known() -> None:
    local = ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST")
    assert [is_loopback(address) for address in (*local, "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example")] == [
        *(True for _ in local), False, False, False, False,
    ]  # fmt: skip
