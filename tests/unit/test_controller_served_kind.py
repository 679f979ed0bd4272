"""The operator's wait for a CRD that has all fields of statuses, against a small server with given answers."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from finetune_operator.controller.cluster import served_kind
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.types import GROUP, KIND, VERSION

DOWN = 503
BUSY = 429


def document(*, without: str = "") -> dict[str, Any]:
    """Return the API server's document of the kind; `without`: a field that its status lacks."""
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["status"]["properties"].pop(without, None)
    kind = {"group": GROUP, "version": VERSION, "kind": KIND}
    return {"components": {"schemas": {"dev.finetune": {**schema, "x-kubernetes-group-version-kind": [kind]}}}}


def requests_until_start(*answers: int | dict[str, Any]) -> int:
    """Return the number of requests that the wait takes, one try a request; the last answer is given for ever."""
    left, requests = list(answers), 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text=json.dumps({"kind": "Status", "code": answer, "message": "later"}))
        return web.json_response(answer)

    async def run() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        api = ApiClient(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        try:
            await served_kind.wait_for_status_fields(Kube(api, tries=1))
        finally:
            await api.close()
            await runner.cleanup()

    asyncio.run(run())
    return requests


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_kind, "AGAIN_SECONDS", 0.0)


def test_the_operator_starts_once_the_status_has_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    old = document(without="conditions")
    assert requests_until_start(old, old, document()) == 3
    assert [one.levelno for one in caplog.records if "status.conditions" in one.message] == [logging.WARNING]


@pytest.mark.parametrize("code", [DOWN, BUSY])
def test_an_api_server_that_is_down_or_busy_does_not_end_the_wait(code: int) -> None:
    assert requests_until_start(code, code, document(without="conditions"), document()) == 4


def test_a_document_that_is_never_served_ends_the_wait() -> None:
    assert requests_until_start(DOWN) == served_kind.OUTAGE_TRIES


def test_a_document_that_may_not_be_read_ends_the_wait() -> None:
    assert requests_until_start(403) == 1
