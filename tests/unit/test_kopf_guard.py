"""kopf.operator against an API server with given answers: our connection keeps it running where kopf's own one ends it.

The second test pins why the connection exists. If kopf mends one of these cases, it fails, and the guard can go.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from cluster_support.api_access import kubeconfig_text
from cluster_support.control_plane import free_port
from finetune_operator.controller import handlers, kopf_guard, lifecycle, process
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.handlers import NothingStored
from finetune_operator.controller.kopf_guard import KopfConnection, ServedKinds
from finetune_operator.controller.servers.probes import KopfLiveness
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.kubernetes_api import client
from finetune_operator.kubernetes_api.errors import ForbiddenError
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB, JOB
from finetune_operator.spec.settings.settings import Settings
from suite_plugins.patience import patient

JOBS = "/apis/finetune.dev/v1alpha1/finetunejobs"
BATCH_JOBS = "/apis/batch/v1/jobs"
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
"""Deeper than Python's reader of JSON goes."""


def gone() -> dict[str, Any]:
    return {"kind": "Status", "code": 410, "reason": "Expired"}


def job(name: str, version: int, spec: str = "{}") -> str:
    metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": str(version)}
    return f'{{"kind":"FineTuneJob","metadata":{json.dumps(metadata)},"spec":{spec}}}'


def event(kind: str, text: str) -> str:
    return f'{{"type":"{kind}","object":{text}}}\n'


def page(*jobs: str, next_page: str = "") -> tuple[int, str]:
    metadata = json.dumps({"resourceVersion": "5", "continue": next_page})
    return 200, f'{{"kind":"FineTuneJobList","metadata":{metadata},"items":[{",".join(jobs)}]}}'


EMPTY = page()
LAST = event("ADDED", job("last", 99))


@dataclass
class ApiServer:
    """Gives its answers to lists and watches of jobs in turn; the last watch has the job `last`, and stays open."""

    lists: list[tuple[int, str]] = field(default_factory=list)
    watches: list[tuple[int, str]] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    groups: list[str] = field(default_factory=lambda: ["finetune.dev/v1alpha1", "apiextensions.k8s.io/v1"])
    url: str = ""
    refusals: int = 0
    """Requests that are answered with 403 before any other answer."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.refusals > 0:
            self.refusals -= 1
            raise web.HTTPForbidden
        if request.path in ("/api/v1/pods", "/apis/apps/v1/deployments"):
            return web.Response(text=EMPTY[1], content_type="application/json")
        if request.path not in (JOBS, BATCH_JOBS):
            return web.json_response(self._discovery(request.path))
        self.requests.append({"path": request.path, **request.query})
        if "watch" not in request.query:
            own = request.path == JOBS and self.lists
            code, text = self.lists.pop(0) if own else EMPTY
            return web.Response(status=code, text=text, content_type="application/json")
        code, text = self.watches.pop(0) if self.watches else (200, LAST)
        answer = web.StreamResponse(status=code)
        await answer.prepare(request)
        await answer.write(text.encode())
        if text == LAST:
            await asyncio.Event().wait()
        return answer

    def _discovery(self, path: str) -> dict[str, Any]:
        kinds = {
            "v1": ("namespaces", "Namespace"),
            "finetune.dev/v1alpha1": ("finetunejobs", "FineTuneJob"),
            "apiextensions.k8s.io/v1": ("customresourcedefinitions", "CustomResourceDefinition"),
            "batch/v1": ("jobs", "Job"),
        }
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            split = [group.split("/") for group in self.groups]
            groups = [{"name": g, "versions": [{"version": v}], "preferredVersion": {"version": v}} for g, v in split]
            return {"groups": groups}
        if path.removeprefix("/apis/").removeprefix("/api/") not in kinds:
            raise web.HTTPNotFound
        plural, kind = kinds[path.removeprefix("/apis/").removeprefix("/api/")]
        one = {"name": plural, "kind": kind, "singularName": kind.lower(), "verbs": ["list", "watch"]}
        return {"resources": [{**one, "namespaced": plural not in ("namespaces", "customresourcedefinitions")}]}


@dataclass
class Ran:
    """Events that an operator with one handler saw until it got the job `last`, or ended."""

    seen: list[tuple[str | None, str, Any]]
    listed: list[str]
    logins: int
    ended: BaseException | None


Login = Callable[[ApiServer, Kube, list[str]], Any]


def guarded(_: ApiServer, kube: Kube, listed: list[str]) -> Any:
    return session(KopfConnection(kube, listed.append))


def session(connection: KopfConnection) -> kopf.AiohttpSession:
    server = connection.kube.server
    return kopf.AiohttpSession(server=server, aiohttp_session=cast(aiohttp.ClientSession, connection))


def plain(server: ApiServer, _: Kube, __: list[str]) -> Any:
    return kopf.ConnectionInfo(server=server.url)


def operated(server: ApiServer, login_of: Login) -> Ran:
    """Run kopf.operator until its handler gets the job `last`, or kopf.operator ends."""
    ran, registry = Ran([], [], 0, None), kopf.OperatorRegistry()

    async def run() -> None:
        last = asyncio.Event()

        @kopf.on.startup(registry=registry)
        async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
            settings.scanning.disabled = True
            settings.persistence.diffbase_storage = NothingStored()
            settings.watching.chunk_size = 500
            settings.networking.error_backoffs = [0.01] * 1000
            settings.queueing.exit_timeout = settings.queueing.idle_timeout = 0.05

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> Any:
            ran.logins += 1
            return login_of(server, kube, ran.listed)

        @kopf.on.event(FINETUNE_JOB.api_version, FINETUNE_JOB.plural, registry=registry)
        async def seen(event: kopf.RawEvent, name: str, **_: Any) -> None:
            ran.seen.append((event["type"], name, event["object"].get("spec")))
            if name == "last":
                last.set()

        async with server.running():
            kube = Kube(ApiClient(Configuration(host=server.url)), tries=1)
            operator = asyncio.create_task(kopf.operator(registry=registry, standalone=True, clusterwide=True))
            waiting = asyncio.create_task(last.wait())
            await asyncio.wait([operator, waiting], timeout=patient(30), return_when=asyncio.FIRST_COMPLETED)
            ran.ended = operator.exception() if operator.done() else None
            assert operator.done() or last.is_set(), "neither the last event nor an end"
            operator.cancel()
            waiting.cancel()
            await asyncio.wait([operator, waiting])
            await kube.api.close()  # type: ignore[no-untyped-call]

    asyncio.run(run())
    return ran


CASES: dict[str, Callable[[], ApiServer]] = {
    "a job in a list nests too deep": lambda: ApiServer([page(job("deep", 4, DEEP))]),
    "a job in a watch nests too deep": lambda: ApiServer(watches=[(200, event("ADDED", job("deep", 6, DEEP)))]),
    "a watch has an error": lambda: ApiServer(watches=[(200, event("ERROR", '{"kind":"Status","code":500}'))]),
    "a line of a watch breaks off": lambda: ApiServer(watches=[(200, event("ADDED", job("half", 6))[:-20])]),
    "the token of a page has expired": lambda: ApiServer(
        [page(job("one", 4), next_page="t"), (410, json.dumps(gone()))]
    ),
    "the kind is not served for a moment": lambda: ApiServer([(404, "{}"), EMPTY]),
    "a watch begins at a version that is gone": lambda: ApiServer(watches=[(410, json.dumps(gone()))]),
    "the API server starts, and knows no token yet": lambda: ApiServer([(401, "{}"), EMPTY]),
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_guard, "SHORTEST_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(kopf_guard, "LOOK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(kopf_guard, "PAGE_SECONDS", 0.05)


@pytest.mark.parametrize("case", CASES)
def test_operator_goes_on(case: str) -> None:
    ran = operated(CASES[case](), guarded)
    assert (ran.ended, ran.seen[-1]) == (None, ("ADDED", "last", {}))


@pytest.mark.parametrize("case", CASES)
def test_operator_with_the_connection_of_kopf_ends(case: str) -> None:
    ran = operated(CASES[case](), plain)
    assert ran.ended is not None
    assert "last" not in [name for _, name, _ in ran.seen]


def test_events_pass_unchanged_and_in_order() -> None:
    server = ApiServer(
        [page(job("a", 3), next_page="t"), page(job("b", 4))],
        [(200, event("MODIFIED", job("a", 6, '{"x": [1, "é"]}')) + event("DELETED", job("b", 7)))],
    )
    ran = operated(server, guarded)
    assert sorted(ran.seen[:2]) == [(None, "a", {}), (None, "b", {})]
    assert sorted(ran.seen[2:4]) == [("DELETED", "b", {}), ("MODIFIED", "a", {"x": [1, "é"]})]
    assert (ran.listed, ran.logins) == ([JOBS], 1)
    lists = [one for one in server.requests if "watch" not in one]
    assert [one.get("continue") for one in lists] == [None, "t"]
    assert [one["resourceVersion"] for one in server.requests if "watch" in one] == ["5", "7"]


def test_each_list_is_told() -> None:
    """Its objects are those of its version: others that are known here may have been deleted before."""
    ran = operated(ApiServer(watches=[(200, event("ERROR", json.dumps(gone())))]), guarded)
    assert ran.listed == [JOBS, JOBS]


def test_page_that_is_too_long_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES", 2000)
    long = page(job("a", 3, json.dumps({"text": "x" * 3000})))
    server = ApiServer([long, page(job("a", 3), next_page="t"), page(job("b", 4))])
    ran = operated(server, guarded)
    limits = [int(one["limit"]) for one in server.requests if "watch" not in one]
    assert limits == [500, 62, 124]
    assert {name for _, name, _ in ran.seen} == {"a", "b", "last"}


def test_next_page_is_requested_once_the_objects_of_the_last_were_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf itself would have all of a list's objects in memory at a time."""
    monkeypatch.setattr(kopf_guard, "PAGE_SECONDS", patient(30))
    server = ApiServer([page(job("a", 3), job("b", 3), next_page="t"), page(job("c", 4))])

    async def run() -> None:
        async with server.running():
            kube = Kube(ApiClient(Configuration(host=server.url)))
            connection = KopfConnection(kube, lambda path: None)
            await connection.request("get", f"{server.url}{JOBS}?limit=500")
            second = asyncio.create_task(connection.request("get", f"{server.url}{JOBS}?limit=500&continue=t"))
            for _ in range(2):
                await asyncio.sleep(0.05)
                assert len(server.requests) == 1
                connection.handled("finetunejobs")
            await second
            assert len(server.requests) == 2
            await kube.api.close()  # type: ignore[no-untyped-call]

    asyncio.run(run())


def test_connection_of_kopf_writes_nothing() -> None:
    async def run() -> None:
        kube = Kube(ApiClient(Configuration(host="http://127.0.0.1:1")))
        with pytest.raises(AssertionError, match="kopf has to write nothing"):
            await KopfConnection(kube, lambda path: None).request("patch", "http://127.0.0.1:1/api")
        await kube.api.close()  # type: ignore[no-untyped-call]

    asyncio.run(run())


def test_kinds_that_are_served_later_are_watched_then() -> None:
    """First the needed kind is missing, then another one."""
    server, registry = ApiServer(groups=["apiextensions.k8s.io/v1"]), kopf.OperatorRegistry()

    async def watched(path: str) -> None:
        while not any(one["path"] == path and "watch" in one for one in server.requests):
            await asyncio.sleep(0.02)

    async def run() -> None:
        settings = kopf.OperatorSettings()
        kinds = ServedKinds(settings, registry, FINETUNE_JOB, {"batch"})
        changed, tasks = asyncio.Event(), list[asyncio.Task[None]]()

        @kopf.on.startup(registry=registry)
        async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
            settings.scanning.disabled = True
            settings.watching.chunk_size = 500
            tasks.append(asyncio.create_task(kinds.follow(changed)))

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> Any:
            return guarded(server, kube, [])

        @kopf.on.event(FINETUNE_JOB.api_version, FINETUNE_JOB.plural, registry=registry)
        @kopf.on.event(JOB.api_version, JOB.plural, registry=registry)
        async def seen(**_: Any) -> None:
            pass

        async with server.running():
            kube = Kube(ApiClient(Configuration(host=server.url)), tries=1)
            operator = asyncio.create_task(
                kopf.operator(
                    registry=registry, settings=settings, insights=kinds.insights, standalone=True, clusterwide=True
                )
            )
            await asyncio.wait_for(kinds.insights.ready_resources.wait(), patient(10))
            assert not server.requests
            server.groups.append("finetune.dev/v1alpha1")
            await asyncio.wait_for(watched(JOBS), patient(10))
            server.groups.append("batch/v1")
            changed.set()
            await asyncio.wait_for(watched(BATCH_JOBS), patient(10))
            operator.cancel()
            await asyncio.wait([operator])
            await kube.api.close()  # type: ignore[no-untyped-call]

    asyncio.run(run())


def test_healthz_has_the_faults_that_the_probe_handler_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """First kopf does not run; then all is well; then a task has ended and an event was lost, each of them a bug."""
    server, found = ApiServer(), list[list[str]]()

    async def bug(*_: Any, **__: Any) -> None:
        raise RecursionError("deep")

    async def run() -> None:
        async with server.running():
            api = ApiClient(Configuration(host=server.url))
            url = f"http://127.0.0.1:{free_port()}/"
            kinds = ServedKinds(kopf.OperatorSettings(), kopf.OperatorRegistry(), FINETUNE_JOB, set())
            ours = lifecycle.Operator(lifecycle.Options(Settings(), ""), api, api, decide, kinds, url)
            registry = kopf.OperatorRegistry()
            kopf.on.probe(id="faults", registry=registry)(handlers.faults)

            @kopf.on.login(registry=registry)
            async def login(**_: Any) -> Any:
                return await ours.connection()

            async def reported(expected: int) -> None:
                while len(faults := list(await KopfLiveness(url).faults())) != expected:
                    await asyncio.sleep(0.02)
                found.append(faults)

            async def operated(expected: int) -> None:
                # kopf keeps what its probe handlers have returned for ten seconds.
                memo, settings = kopf.Memo(operator=ours), kopf.OperatorSettings()
                settings.scanning.disabled = True
                operator = asyncio.create_task(
                    kopf.operator(
                        registry=registry,
                        settings=settings,
                        memo=memo,
                        standalone=True,
                        clusterwide=True,
                        liveness_endpoint=url,
                    )
                )
                async with asyncio.timeout(patient(10)):
                    await reported(expected)
                operator.cancel()
                await asyncio.wait([operator])

            await reported(1)
            await operated(0)
            ended = asyncio.create_task(asyncio.sleep(0), name="worker 1")
            await ended
            ours.state.tasks.append(ended)
            monkeypatch.setattr(lifecycle, "store_object", bug)
            with pytest.raises(RecursionError):
                await ours.take(JOB, {"type": "ADDED", "object": {}})
            await operated(2)
            await api.close()  # type: ignore[no-untyped-call]

    asyncio.run(run())
    assert found == [
        ["kopf does not report: ClientConnectorError"],
        [],
        ["worker 1 has ended", "an event of a Job was lost"],
    ]


def alone(server: ApiServer, folder: Path, workers: int = 16) -> lifecycle.Options:
    """Return options of a process without others beside it."""
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(kubeconfig_text(server.url, None, "token", "team"))
    return lifecycle.Options(
        Settings(), "", kubeconfig, leader_election=False, listen="127.0.0.1", http_port=0, workers=workers
    )


def test_process_runs_as_a_user_without_a_name_until_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user of a container has a number only. The API server has just started, and knows no rights yet."""
    server = ApiServer(refusals=3)

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    async def run() -> None:
        async with server.running():
            operator = asyncio.create_task(process.run(alone(server, tmp_path), decide))
            async with asyncio.timeout(patient(20)):
                while not operator.done() and not any("watch" in one for one in server.requests):
                    await asyncio.sleep(0.05)
            if not operator.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await operator

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(lifecycle, "AGAIN_SECONDS", 0.01)
    asyncio.run(run())
    assert [one["path"] for one in server.requests if "watch" in one] == [JOBS]


def test_jobs_without_a_plan_come_first_once_the_process_leads(tmp_path: Path) -> None:
    planned = '{"plan":{"strategy":"ddp","launcher":"job","worldSize":1}}'
    old = [job(f"old-{number}", number + 1).replace('"spec"', f'"status":{planned},"spec"') for number in range(3)]
    server, decided = ApiServer(lists=[page(*old, job("new", 4))] * 4), list[str]()

    def record(view: JobView, *_: Any) -> Any:
        decided.append(view.name)
        if len(decided) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("nothing is decided here")

    async def run() -> None:
        async with server.running():
            async with asyncio.timeout(patient(20)):
                await process.run(alone(server, tmp_path, workers=1), record)

    asyncio.run(run())
    assert decided == ["new", "old-0", "old-1", "old-2"]


def test_process_that_is_refused_ends_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ApiServer(refusals=10**6)

    async def run() -> None:
        async with server.running():
            with pytest.raises(ForbiddenError):
                await process.run(alone(server, tmp_path), decide)

    monkeypatch.setattr(lifecycle, "AGAIN_SECONDS", 0.01)
    asyncio.run(run())
    assert [record.message for record in caplog.records if record.exc_info] == []
