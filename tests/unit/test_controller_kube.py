"""The client: meanings of answers, and retries, against a small server with given answers."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from cluster_support.api_access import Access, kubeconfig_text
from cluster_support.background import Background
from cluster_support.deaf_proxy import DeafProxy
from finetune_operator.controller.cluster.kube import Kube, as_yaml
from finetune_operator.controller.servers.serving import KubeKeys
from finetune_operator.controller.servers.token_keys import KeysUnavailableError
from finetune_operator.kubernetes_api import client
from finetune_operator.kubernetes_api.answers import FIRST_DELAY_SECONDS, Lines
from finetune_operator.kubernetes_api.client import TRIES
from finetune_operator.kubernetes_api.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NamespaceTerminatingError,
    NoAnswerError,
    NotFoundError,
    TooLongError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
    WebhookError,
    error_of,
)
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB, JOB, POD, resource_of

Answer = tuple[int, Any, dict[str, str]]


def status(code: int, reason: str, message: str = "because") -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}


@dataclass
class Server:
    """Gives its answers one after the other, the last one for ever, and records the requests."""

    answers: list[Answer]
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append((request.method, request.path_qs, json.loads(body) if body else None))
        self.headers.append(dict(request.headers))
        code, answer, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if code == 0:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=code, text=text, headers=headers)


@dataclass
class Ran:
    """Result of a call."""

    value: Any
    error: ApiError | None
    server: Server
    slept: list[float]
    ends_of_outages: int


def call(work: Callable[[Kube], Awaitable[Any]], *answers: Answer | int) -> Ran:
    """Run `work` against a server with these answers."""
    server = Server([(each, status(each, "Odd"), {}) if isinstance(each, int) else each for each in answers])
    slept: list[float] = []
    ends: list[None] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run() -> tuple[Any, ApiError | None]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        api = ApiClient(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        kube = Kube(api, sleep=sleep)
        kube.outage.on_end = lambda: ends.append(None)
        try:
            return await work(kube), None
        except ApiError as error:
            return None, error
        finally:
            await api.close()
            await runner.cleanup()

    value, error = asyncio.run(run())
    return Ran(value, error, server, slept, len(ends))


def get(kube: Kube) -> Awaitable[Any]:
    return kube.get(JOB, "team", "demo")


OK: Answer = (200, {"kind": "Job"}, {})


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", InvalidError),
        (401, "Unauthorized", UnauthorizedError),
        (403, "Forbidden", ForbiddenError),
        (404, "NotFound", NotFoundError),
        (409, "AlreadyExists", AlreadyExistsError),
        (409, "Conflict", ConflictError),
        (410, "Expired", GoneError),
        (413, "RequestEntityTooLarge", InvalidError),
        (422, "Invalid", InvalidError),
        (429, "TooManyRequests", TooManyRequestsError),
        (500, "InternalError", UnavailableError),
        (503, "ServiceUnavailable", UnavailableError),
        (418, "Teapot", ApiError),
    ],
)
def test_error_class_follows_the_answer(code: int, reason: str, expected: type[ApiError]):
    error = error_of("get /x", code, json.dumps(status(code, reason)).encode(), "7")

    assert type(error) is expected
    assert (error.code, error.reason, error.message, error.retry_after) == (code, reason, "because", 7.0)


def test_a_namespace_that_is_being_deleted_is_no_matter_of_rights():
    refused = {**status(403, "Forbidden"), "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    error = error_of("create /x", 403, json.dumps(refused).encode())
    assert (type(error), isinstance(error, ForbiddenError)) == (NamespaceTerminatingError, False)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (500, 'failed calling webhook "validator.pytorchjob": no endpoints available', WebhookError),
        (500, "etcdserver: request timed out", UnavailableError),
        (503, "the server is starting", UnavailableError),
    ],
)
def test_silent_webhook_is_distinguished_from_failing_api_server(code, message, kind):
    body = {**status(code, "InternalError"), "message": f"Internal error occurred: {message}"}
    assert type(error_of("create /x", code, json.dumps(body).encode())) is kind


def test_an_answer_of_a_proxy_is_an_error_too():
    error = error_of("get /x", 502, b"<html>Bad \xff gateway</html>", "Wed, 21 Oct 2015 07:28:00 GMT")

    assert type(error) is UnavailableError
    assert (error.message, error.retry_after) == ("<html>Bad � gateway</html>", None)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(429, id="too many requests"),
        pytest.param(500, id="a fault of the server"),
        pytest.param(503, id="a server that starts"),
    ],
)
def test_transient_errors_are_retried(first: int):
    ran = call(get, first, first, OK)

    assert ran.value == {"kind": "Job"}
    assert len(ran.server.requests) == 3
    assert len(ran.slept) == 2
    assert FIRST_DELAY_SECONDS / 2 <= ran.slept[0] <= FIRST_DELAY_SECONDS
    assert FIRST_DELAY_SECONDS <= ran.slept[1] <= FIRST_DELAY_SECONDS * 2


ISSUER: Answer = (200, {"issuer": "https://issuer", "jwks_uri": "https://elsewhere.example.com/keys"}, {})
KEYS: Answer = (200, {"keys": []}, {"Content-Type": "application/jwk-set+json"})


def test_token_issuer_and_keys_are_read_only_from_the_api_server():
    ran = call(lambda kube: KubeKeys(kube).read_issuer(), ISSUER, KEYS)

    assert ran.value == (ISSUER[1], KEYS[1])
    assert ran.server.requests == [
        ("GET", "/.well-known/openid-configuration", None),
        ("GET", "/openid/v1/jwks", None),
    ]


@pytest.mark.parametrize(
    ("code", "help"),
    [
        (403, "ClusterRoleBinding system:service-account-issuer-discovery"),
        (404, "set --service-account-issuer of the API server to an https URL"),
        (401, "401 Odd: because"),
        (500, "500 Odd: because"),
    ],
)
def test_unreadable_issuer_is_reported_with_a_hint(code: int, help: str):
    async def read(kube: Kube) -> str:
        with pytest.raises(KeysUnavailableError) as caught:
            await KubeKeys(kube).read_issuer()
        return str(caught.value)

    message = call(read, code).value
    assert f"get /.well-known/openid-configuration: {code} Odd: because" in message
    assert help in message


def test_create_with_a_broken_connection_is_retried():
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo"}}
    ran = call(lambda kube: kube.create(manifest, "team"), 0, 0, OK)

    request = ("POST", "/apis/batch/v1/namespaces/team/jobs?fieldManager=finetune-operator", manifest)
    assert ran.server.requests == [request, request, request]
    assert len(ran.slept) == 2


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 410, 422])
def test_refusals_are_not_retried(code: int):
    ran = call(get, code, OK)

    assert ran.error is not None
    assert ran.error.code == code
    assert len(ran.server.requests) == 1


def test_retry_waits_as_long_as_retry_after():
    ran = call(get, (429, status(429, "TooManyRequests"), {"Retry-After": "3"}), OK)

    assert ran.slept == [3.0]


def test_after_so_many_tries_it_is_an_error():
    ran = call(get, 503)

    assert isinstance(ran.error, UnavailableError)
    assert len(ran.server.requests) == TRIES


def test_end_of_an_outage_is_logged_once():
    async def twice(kube: Kube) -> None:
        await get(kube)
        await get(kube)

    assert call(twice, 0, 0, OK).ends_of_outages == 1
    assert call(twice, OK).ends_of_outages == 0


def test_a_list_is_read_in_pages_and_items_get_their_kind():
    pages: list[Answer] = [
        (200, {"metadata": {"resourceVersion": "7", "continue": "more/="}, "items": [{"metadata": {"name": "a"}}]}, {}),
        (200, {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]}, {}),
    ]
    ran = call(lambda kube: kube.list_objects(POD, None, "finetune.dev/job"), *pages)

    named = {"apiVersion": "v1", "kind": "Pod"}
    assert ran.value == ([{**named, "metadata": {"name": "a"}}, {**named, "metadata": {"name": "b"}}], 7)
    paths = [path for _, path, _ in ran.server.requests]
    assert paths == [
        "/api/v1/pods?limit=500&labelSelector=finetune.dev/job",
        "/api/v1/pods?limit=500&labelSelector=finetune.dev/job&continue=more/%3D",
    ]


def test_list_restarts_if_its_version_has_expired():
    first: Answer = (200, {"metadata": {"resourceVersion": "7", "continue": "x"}, "items": [{"a": 1}]}, {})
    whole: Answer = (200, {"metadata": {"resourceVersion": "9"}, "items": None}, {})
    ran = call(lambda kube: kube.list_objects(POD), first, (410, status(410, "Expired"), {}), whole)

    assert ran.value == ([], 9)


def test_an_item_of_a_list_that_is_no_object_costs_that_item_only():
    page: Answer = (200, {"metadata": {"resourceVersion": "7"}, "items": [None, 3, {"metadata": {"name": "a"}}]}, {})
    items, _ = call(lambda kube: kube.list_objects(POD), page).value
    assert [item["metadata"]["name"] for item in items] == ["a"]


def test_an_answer_that_is_no_list_is_an_error():
    assert isinstance(call(lambda kube: kube.list_objects(POD), OK).error, UnavailableError)


def test_a_log_line_without_an_end_is_passed_on_in_parts():
    lines = Lines(longest=4)
    taken = [line for chunk in (b"ab\ncd", b"efgh", b"i\nj") for line in lines.take(chunk)]
    assert (taken, lines.rest) == ([b"ab", b"cdefgh", b"i"], b"j")


def test_too_long_page_is_requested_in_smaller_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("finetune_operator.kubernetes_api.client.ANSWER_BYTES", 1_000)
    long: Answer = (200, {"metadata": {"resourceVersion": "7"}, "items": [{"text": "x" * 2_000}]}, {})
    pages: list[Answer] = [
        (200, {"metadata": {"resourceVersion": "7", "continue": mark}, "items": [{"metadata": {"name": mark}}]}, {})
        for mark in ("a", "b")
    ]
    last: Answer = (200, {"metadata": {"resourceVersion": "7"}, "items": []}, {})
    ran = call(lambda kube: kube.list_objects(POD), long, long, pages[0], long, pages[1], last)

    items, version = ran.value
    assert ([item["metadata"]["name"] for item in items], version) == (["a", "b"], 7)
    limits = [int(path.split("limit=")[1].split("&")[0]) for _, path, _ in ran.server.requests]
    assert limits == [500, 62, 7, 14, 1, 2]


def test_an_object_that_is_too_long_alone_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("finetune_operator.kubernetes_api.client.ANSWER_BYTES", 1_000)
    long: Answer = (200, {"metadata": {"resourceVersion": "7"}, "items": [{"text": "x" * 2_000}]}, {})
    ran = call(lambda kube: kube.list_objects(POD), long)

    assert isinstance(ran.error, TooLongError)
    assert len(ran.server.requests) == 4


def test_a_delete_names_the_object_that_is_meant():
    ran = call(lambda kube: kube.delete(JOB, "team", "demo", "uid-1"), (200, status(200, "", ""), {}))

    assert ran.value is None
    assert ran.server.requests == [
        (
            "DELETE",
            "/apis/batch/v1/namespaces/team/jobs/demo",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "propagationPolicy": "Background",
                "preconditions": {"uid": "uid-1"},
            },
        )
    ]


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        pytest.param((404, status(404, "NotFound"), {}), None, id="it was gone before"),
        pytest.param((200, {"kind": "Job", "metadata": {}}, {}), {"kind": "Job", "metadata": {}}, id="it still ends"),
    ],
)
def test_delete_returns_the_remaining_object(answer: Answer, left: Any):
    assert call(lambda kube: kube.delete(JOB, "team", "demo", None), answer).value == left


def test_a_status_is_applied_to_the_version_it_was_computed_from():
    ran = call(lambda kube: kube.apply_status("team", "demo", "uid-1", "42", {"phase": "Training"}), OK)

    metadata = {"name": "demo", "namespace": "team", "uid": "uid-1", "resourceVersion": "42"}
    assert ran.server.requests == [
        (
            "PATCH",
            "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs/demo/status"
            "?fieldManager=finetune-operator&force=true",
            {
                "apiVersion": FINETUNE_JOB.api_version,
                "kind": "FineTuneJob",
                "metadata": metadata,
                "status": {"phase": "Training"},
            },
        )
    ]
    assert ran.server.headers[0]["Content-Type"] == "application/apply-patch+yaml; charset=utf-8"


@pytest.mark.parametrize(
    "text",
    [
        "a beach \N{BEACH WITH UMBRELLA}\ufe0f and a \N{GRINNING FACE}",
        "backslashes \\ \\\\ud83d\\ude00 before what is no escape",
        "quotes \" and ' and new\nlines \t",
        "controls \x00 \x1b[31m \x7f \x85 \u2028 \ufeff",
        "---\n%YAML: {{ }} # &a *a !!x",
    ],
)
def test_a_status_with_any_text_is_json_and_the_same_yaml(text: str):
    ran = call(lambda kube: kube.apply_status("team", "demo", "uid-1", "42", {"failure": {"logTail": text}}), OK)
    assert ran.server.requests[0][2]["status"] == {"failure": {"logTail": text}}
    assert yaml.safe_load(as_yaml({"failure": {"logTail": text}})) == {"failure": {"logTail": text}}
    # The API server's parser, unlike this one, refuses halves of a pair.
    assert not re.search(r"(?<!\\)(\\\\)*\\ud[89a-f]", as_yaml({"logTail": text}))


def test_half_a_character_in_a_status_becomes_the_sign_for_a_broken_one():
    assert as_yaml({"\udc00": "cut \ud83c"}) == r'{"\ufffd": "cut \ufffd"}'


def test_the_same_event_has_the_same_name_and_a_later_one_another():
    involved = {"kind": "FineTuneJob", "namespace": "team", "name": "demo", "uid": "u"}

    async def record(kube: Kube) -> None:
        await kube.create_event(involved, "Normal", "Started", "a" * 2000, salt="1")
        await kube.create_event(involved, "Normal", "Started", "a" * 2000, salt="1")
        await kube.create_event(involved, "Normal", "Started", "a" * 2000, salt="2")

    ran = call(record, OK, (409, status(409, "AlreadyExists"), {}), OK)

    assert ran.error is None
    bodies = [body for _, _, body in ran.server.requests]
    first, again, later = (body["metadata"]["name"] for body in bodies)
    assert first == again != later
    assert len(bodies[0]["message"]) == 1024


def test_log_request_is_limited_to_the_last_lines():
    ran = call(lambda kube: kube.pod_log("team", "demo-0", "pytorch"), (200, "x" * 5000 + "the cause\n", {}))

    assert ran.value == "x" * 5000 + "the cause\n"
    ((_, path, _),) = ran.server.requests
    assert "tailLines=" in path


@pytest.mark.parametrize("code", [400, 404, 500])
def test_a_log_that_cannot_be_had_is_empty_and_costs_one_request(code: int):
    ran = call(lambda kube: kube.pod_log("team", "demo-0", "pytorch"), code)

    assert ran.value == ""
    assert len(ran.server.requests) == 1


def test_a_log_that_does_not_come_is_no_outage_of_the_api_server():
    async def log_then_get(kube: Kube) -> None:
        assert await kube.pod_log("team", "demo-0", "pytorch") == ""
        await get(kube)

    assert call(log_then_get, 0, 0, OK).ends_of_outages == 0


def test_launchers_are_those_that_the_server_serves():
    def served(*names: str) -> Answer:
        return 200, {"kind": "APIResourceList", "resources": [{"name": name} for name in names]}, {}

    absent = (404, status(404, "x"), {})
    result = call(lambda kube: kube.served_launchers(), served("pytorchjobs", "mpijobs"), absent, absent)
    assert result.value == ("pytorchjob", "job")
    result = call(
        lambda kube: kube.served_launchers(), served("tfjobs"), served("mpijobs"), served("sparkapplications")
    )
    assert result.value == ("mpijob", "job", "sparkapplication")
    assert result.server.requests[-1][1] == "/apis/sparkoperator.k8s.io/v1beta2"


def test_kind_without_rights_is_refused_before_the_request():
    with pytest.raises(ValueError, match="StatefulSet of apps/v1 is not a kind"):
        resource_of("apps/v1", "StatefulSet")


# ------------------------------------------------------------------------------------------------------------- watches


def event_line(kind: str, version: int, **more: Any) -> str:
    """Return one line of a watch."""
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": str(version)}, **more}}) + "\n"


async def watched(kube: Kube) -> list[tuple[str, int]]:
    events = kube.watch(POD, 5, "team", labels="finetune.dev/job")
    return [(event.type, event.version) async for event in events]


def test_watch_yields_events_with_the_version_to_resume_from():
    long = event_line("MODIFIED", 8, spec={"text": "x" * 300_000})
    ran = call(
        watched, (200, event_line("ADDED", 7) + long + event_line("DELETED", 9) + event_line("BOOKMARK", 12), {})
    )

    assert (ran.value, ran.error) == ([("ADDED", 7), ("MODIFIED", 8), ("DELETED", 9), ("BOOKMARK", 12)], None)
    ((_, query, _),) = ran.server.requests
    assert query.startswith("/api/v1/namespaces/team/pods?watch=true&allowWatchBookmarks=true&resourceVersion=5&")
    assert "labelSelector=finetune.dev" in query


WATCH_ERRORS: dict[str, tuple[Answer, type[ApiError]]] = {
    "the version is forgotten, told at once": ((410, status(410, "Expired"), {}), GoneError),
    "the version is forgotten, told in the watch": (
        (200, json.dumps({"type": "ERROR", "object": status(410, "Expired")}) + "\n", {}), GoneError
    ),
    "no rights": ((403, status(403, "Forbidden"), {}), ForbiddenError),
    "a line that is no event": ((200, "<html>\n", {}), UnavailableError),
    "an event without a version": ((200, json.dumps({"type": "ADDED", "object": {}}) + "\n", {}), UnavailableError),
    "no answer": ((0, "", {}), NoAnswerError),
}  # fmt: skip


@pytest.mark.parametrize("case", WATCH_ERRORS)
def test_broken_watch_raises_the_reason(case: str):
    answer, expected = WATCH_ERRORS[case]
    assert type(call(watched, answer).error) is expected


def test_connection_is_given_up_when_no_kernel_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As when the server has lost its power: one that is only slow still acknowledges what it receives. The request is
    then sent again on a new connection, long before its own limit.
    """
    monkeypatch.setattr(client, "DEAD_SECONDS", 2)
    file = tmp_path / "kubeconfig"
    background = Background()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Job"})

    async def run() -> list[Any]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy = DeafProxy(Access(f"http://127.0.0.1:{runner.addresses[0][1]}", None), background)
        await asyncio.to_thread(proxy.up)
        file.write_text(kubeconfig_text(proxy.url.replace("https", "http"), None, "token"))
        api, _ = await client.connect("test", file, None)
        try:
            kube = Kube(api, tries=1)
            answers = [await get(kube)]
            assert await asyncio.to_thread(proxy.go_deaf) == 1
            return [*answers, await get(kube)]
        finally:
            await api.close()  # type: ignore[no-untyped-call]
            await asyncio.to_thread(proxy.down)
            await runner.cleanup()

    try:
        assert asyncio.run(run()) == [{"kind": "Job"}] * 2
    finally:
        background.close()
