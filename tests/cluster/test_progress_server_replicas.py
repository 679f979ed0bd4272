"""Two replicas' servers against a real API server: real tokens, real reviews, real public keys, a real Secret."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

import aiohttp
import pytest

from cluster_support.api_access import Access, kubeconfig_text, wait_until
from finetune_contract.choices import Stage
from finetune_operator.controller.cluster.kube import KEYS_PATH, Kube
from finetune_operator.controller.reconcile.operator_state import OperatorState, ProgressBook
from finetune_operator.controller.servers.certificates import SECRET_NAME
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.progress_protocol import BODY_LIMIT_BYTES
from finetune_operator.controller.servers.serving import Servers
from finetune_operator.controller.store.queue import JobKey, WorkQueue
from finetune_operator.controller.store.store import Store
from finetune_operator.jobs.render.render_types import (
    ATTEMPT_LABEL,
    JOB_LABEL,
    PROGRESS_AUDIENCE,
    STAGE_LABEL,
    UID_LABEL,
)
from finetune_operator.kubernetes_api.client import connect
from finetune_operator.kubernetes_api.resources import POD
from finetune_operator.spec.schema.crd import crd_yaml
from finetune_operator.spec.settings.settings import Progress, ProgressTokens, Settings

OURS, THEIRS, OPERATORS = "progress-ours", "progress-theirs", "progress-operator"
CRD = "finetunejobs.finetune.dev"
PATH = f"/v1alpha1/namespaces/{OURS}/finetunejobs/tune/stages/train/attempts/1"
BODY = json.dumps(
    {"trainerStatus": {"lastUpdatedTime": "", "metrics": [{"name": "step", "value": "4"}], "progressPercentage": 40}}
)


class Cluster(Protocol):
    kubeconfig: Path

    @property
    def access(self) -> Access: ...

    def own(self, need: str) -> Path: ...

    def kubectl(self, *arguments: str, stdin: str | None = None) -> Any: ...

    def must(self, *arguments: str, stdin: str | None = None) -> str: ...

    def wait_served(self, *names: str) -> None: ...


@dataclass
class Given:
    """Surroundings of a test: two namespaces with a job of the same name and its pods; and an account with the rights
    for progress of an operator for given namespaces, and none in the cluster.
    """

    cluster: Cluster
    limited: Path
    """The account's kubeconfig."""
    objects: list[dict[str, Any]] = field(default_factory=list)

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(
            self.cluster.must("create", "-f", "-", "-o", "json", stdin=json.dumps(manifest))
        )
        return made

    def pod(self, namespace: str, name: str, job: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
        """Create a pod of an attempt at training; nothing runs it, which its token does not need."""
        labels = {
            JOB_LABEL: job["metadata"]["name"],
            UID_LABEL: job["metadata"]["uid"],
            STAGE_LABEL: "train",
            ATTEMPT_LABEL: str(attempt),
        }
        spec = {
            "automountServiceAccountToken": False,
            "serviceAccountName": "trainer",
            "containers": [{"name": "pytorch", "image": "nothing"}],
        }
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "controller": True}
        owner |= {key: job["metadata"][key] for key in ("name", "uid")}
        metadata = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]}
        return self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def token(self, pod: dict[str, Any] | None, namespace: str = OURS, audience: str = PROGRESS_AUDIENCE) -> str:
        """Return a token of the namespace's service account, bound to the pod if there is one."""
        bound = []
        if pod is not None:
            about = pod["metadata"]
            bound = ["--bound-object-kind=Pod", f"--bound-object-name={about['name']}"]
            bound += [f"--bound-object-uid={about['uid']}"]
        where = ["-n", namespace, f"--audience={audience}"]
        return self.cluster.must("create", "token", "trainer", *where, *bound).strip()


ACCOUNT = f"system:serviceaccount:{OPERATORS}:operator"


def allow_secrets(cluster: Cluster) -> None:
    """Grant the rights that the chart grants for given namespaces, and no others."""
    where = ("-n", OPERATORS)
    cluster.must("create", "serviceaccount", "operator", *where)
    cluster.must("create", "role", "operator", *where, "--resource=secrets", "--verb=get,create,update")
    account = f"--serviceaccount={OPERATORS}:operator"
    cluster.must("create", "rolebinding", "operator", *where, "--role=operator", account)


@pytest.fixture(scope="module")
def given(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Given]:
    cluster.must("apply", "--server-side", "-f", "-", stdin=crd_yaml())
    cluster.wait_served(CRD)
    found = Given(cluster, tmp_path_factory.mktemp("account") / "kubeconfig")
    try:
        for namespace in (OURS, THEIRS, OPERATORS):
            cluster.must("create", "namespace", namespace)
        allow_secrets(cluster)
        token = cluster.must("create", "token", "operator", "-n", OPERATORS).strip()
        found.limited.write_text(kubeconfig_text(cluster.access.host, cluster.access.ca, token))
        for namespace in (OURS, THEIRS):
            cluster.must("create", "serviceaccount", "trainer", "-n", namespace)
            spec = {
                "task": "text-classification",
                "model": {"uri": "hf://a/b"},
                "dataset": {"uri": "hf://c/d"},
                "training": {},
            }
            metadata = {"name": "tune", "namespace": namespace}
            job = found.create(
                {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata, "spec": spec}
            )
            pods = [found.pod(namespace, f"tune-train-{number}", job, number) for number in (1, 2)]
            found.objects += [job, *pods]
        yield found
    finally:
        cluster.kubectl("delete", "namespace", OURS, THEIRS, OPERATORS, "--wait=false")
        cluster.kubectl("delete", "crd", CRD, "--timeout=120s")


@dataclass
class Replica:
    """Servers of one running replica."""

    state: OperatorState
    servers: Servers
    session: aiohttp.ClientSession

    async def post(self, token: str, path: str = PATH, body: Any = BODY) -> tuple[int, str]:
        """Post a report; return the status, and the error or `taken`."""
        url = f"https://localhost:{self.servers.progress_port}{path}"
        async with self.session.post(url, data=body, headers={"Authorization": f"Bearer {token}"}) as answer:
            text = await answer.json()
            return answer.status, text.get("error", "taken")

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(f"http://127.0.0.1:{self.servers.http_port}{path}") as answer:
            return answer.status, await answer.text()


class NoFaults:
    """Faults of servers that no kopf starts."""

    async def faults(self) -> list[str]:
        return []


@asynccontextmanager
async def replica(
    given: Given,
    *,
    leads: Replica | None = None,
    namespace: str = OPERATORS,
    tokens: ProgressTokens = "review",
    limited: bool = False,
) -> AsyncIterator[Replica]:
    """Run a replica that leads, or stands by for the leader. `limited`: without any right in the cluster."""
    settings = Settings(progress=Progress(tokens=tokens))
    api, _ = await connect("finetune-operator", given.limited if limited else given.cluster.kubeconfig, None)
    metrics = Metrics()
    state = OperatorState(
        settings=settings,
        namespace=namespace,
        kube=Kube(api, counter=metrics),
        store=Store(settings),
        queue=WorkQueue(),
        progress=ProgressBook(),
        leading=asyncio.Event(),
        synced=asyncio.Event(),
        leader_address=lambda: "127.0.0.1" if leads else None,
        measurements=metrics,
    )
    for one in given.objects:
        state.store.put(one)
    state.synced.set()
    port = leads.servers.progress_port if leads else 0
    if leads is None:
        state.leading.set()
    # The stand-by looks for the leader at its own port; on one machine it needs another address.
    host = "127.0.0.1" if leads is None else "127.0.0.2"
    servers = Servers(metrics, NoFaults(), host=host, http_port=0, progress_port=port)
    try:
        await servers.start(state)
        endpoint = state.progress_endpoint
        assert endpoint is not None
        trusting = ssl.create_default_context(cadata=endpoint.ca_certificate)
        trusting.check_hostname = leads is None
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
            yield Replica(state, servers, session)
    finally:
        await servers.stop()
        await api.close()  # type: ignore[no-untyped-call]


def call(
    given: Given, action: Callable[[Replica], Awaitable[Any]], tokens: ProgressTokens = "review", **how: Any
) -> Any:
    """Run `action` with a replica; with `tokens` keys, it has no right in the cluster, unless `how` grants one."""

    async def go() -> Any:
        async with replica(given, tokens=tokens, **{"limited": tokens == "keys", **how}) as running:
            return await action(running)

    return asyncio.run(go())


def pod_of(given: Given, namespace: str, attempt: int) -> dict[str, Any]:
    return next(
        one
        for one in given.objects
        if one["kind"] == "Pod"
        and one["metadata"]["namespace"] == namespace
        and one["metadata"]["labels"][ATTEMPT_LABEL] == str(attempt)
    )


WAYS: tuple[ProgressTokens, ...] = get_args(ProgressTokens)


@pytest.mark.parametrize("tokens", WAYS)
def test_report_with_the_token_of_a_pod_updates_its_job(given: Given, tokens: ProgressTokens) -> None:
    token = given.token(pod_of(given, OURS, 1))

    async def post(running: Replica) -> Any:
        answer = await running.post(token)
        key = await running.state.queue.take()
        job = running.state.store.job(JobKey(OURS, "tune"))
        assert job is not None
        progress = running.state.progress.of(job.uid, Stage.TRAIN, 1)
        assert progress is not None
        return answer, key, (progress.step, progress.percent)

    assert call(given, post, tokens) == ((200, "taken"), JobKey(OURS, "tune"), (4, 40))


CASES: dict[str, tuple[Callable[[Given], str], str, int, str]] = {
    "a token for the API server": (
        lambda given: given.token(pod_of(given, OURS, 1), audience="https://kubernetes.default.svc.cluster.local"),
        PATH,
        401,
        "the token is not valid for audience finetune.dev/progress",
    ),
    "a token of no pod": (
        lambda given: given.token(None),
        PATH,
        401,
        "the token is not bound to a pod; use the token mounted into the pod",
    ),
    "garbage": (lambda given: "garbage", PATH, 401, "the token is not valid for audience finetune.dev/progress"),
    "a token with another signature": (
        lambda given: given.token(pod_of(given, OURS, 1))[:-8] + "AAAAAAAA",
        PATH,
        401,
        "the token is not valid for audience finetune.dev/progress",
    ),
    "another attempt": (
        lambda given: given.token(pod_of(given, OURS, 2)),
        PATH,
        403,
        "the token does not belong to a pod of this attempt",
    ),
    "another job": (
        lambda given: given.token(pod_of(given, OURS, 1)),
        PATH.replace("/tune/", "/other/"),
        403,
        "the token does not belong to a pod of this attempt",
    ),
    "a pod of the same name in another namespace": (
        lambda given: given.token(pod_of(given, THEIRS, 1), THEIRS),
        PATH,
        403,
        "the token does not belong to a pod of this attempt",
    ),
}


@pytest.mark.parametrize("tokens", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_unauthorized_report_is_refused_and_its_token_appears_nowhere(
    given: Given, case: str, tokens: ProgressTokens, caplog: pytest.LogCaptureFixture
) -> None:
    make, path, status, reason = CASES[case]
    token = make(given)

    async def post(running: Replica) -> Any:
        answer = await running.post(token, path)
        return answer, len(running.state.queue), await running.get("/metrics")

    with caplog.at_level(logging.DEBUG):
        answer, waiting, (_, metrics) = call(given, post, tokens)
    assert (answer, waiting) == ((status, reason), 0)
    assert f'finetune_progress_posts_total{{code="{status}"}} 1.0' in metrics
    for part in token.split("."):
        assert part not in caplog.text + answer[1] + metrics


INVALID, UNKNOWN = "the token is not valid for audience finetune.dev/progress", CASES["another attempt"][3]
DELETED: dict[ProgressTokens, list[tuple[int, str]]] = {
    # Posts before the deletion; after it, with another token, before its event arrives; and after that.
    "review": [(200, "taken"), (401, INVALID), (403, UNKNOWN)],
    "keys": [(200, "taken"), (200, "taken"), (403, UNKNOWN)],
}


@pytest.mark.parametrize("tokens", WAYS)
def test_report_of_a_deleted_pod_is_refused(given: Given, tokens: ProgressTokens) -> None:
    job = next(one for one in given.objects if one["kind"] == "FineTuneJob")
    pod = given.pod(OURS, "tune-train-3", job, 3)
    before, after = given.token(pod), given.token(pod)
    path = PATH[:-1] + "3"

    async def post(running: Replica) -> Any:
        running.state.store.put(pod)
        found = [await running.post(before, path)]
        await asyncio.to_thread(
            given.cluster.must, "delete", "pod", "-n", OURS, "tune-train-3", "--grace-period=0", "--force"
        )
        # The API server knows; the replica has no event yet, still knows the first token, and can verify the second.
        found.append(await running.post(after, path))
        running.state.store.mark_deleted(POD.group_kind, OURS, "tune-train-3")
        found.append(await running.post(before, path))
        return found

    assert call(given, post, tokens) == DELETED[tokens]


def test_the_token_of_an_earlier_pod_of_the_same_name_opens_nothing(given: Given) -> None:
    job = next(one for one in given.objects if one["kind"] == "FineTuneJob")
    earlier = given.pod(OURS, "tune-train-4", job, 4)
    token = given.token(earlier)
    given.cluster.must("delete", "pod", "-n", OURS, "tune-train-4", "--grace-period=0", "--force")
    later = given.pod(OURS, "tune-train-4", job, 4)
    assert later["metadata"]["uid"] != earlier["metadata"]["uid"]

    async def post(running: Replica) -> Any:
        running.state.store.put(later)
        return [await running.post(one, PATH[:-1] + "4") for one in (token, given.token(later))]

    assert call(given, post, "keys") == [(403, UNKNOWN), (200, "taken")]


def test_public_keys_need_no_right_and_no_other_request(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    may = ("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", "--as", ACCOUNT)
    groups = ("--as-group=system:serviceaccounts", "--as-group=system:authenticated")
    assert given.cluster.kubectl(*may, *groups).stdout.strip() == "no"
    tokens = [given.token(pod_of(given, OURS, 1)) for _ in range(3)]

    async def post(running: Replica) -> Any:
        codes = [(await running.post(token))[0] for token in tokens]
        return codes, await running.get("/metrics")

    with caplog.at_level(logging.INFO):
        codes, (_, metrics) = call(given, post, "keys")
    assert codes == [200] * 3
    assert 'finetune_api_requests_total{code="200",resource="openid",verb="get"} 2.0' in metrics
    assert 'resource="tokenreviews"' not in metrics
    assert "verified by public keys (progress.tokens: keys)" in caplog.text
    assert "Tokens of progress reports are verified for issuer https://" in caplog.text


def test_one_way_never_takes_the_place_of_the_other(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    token = given.token(pod_of(given, OURS, 1))

    async def post(running: Replica) -> Any:
        return await running.post(token), await running.get("/metrics")

    with caplog.at_level(logging.INFO):
        answer, (_, metrics) = call(given, post, "review", limited=True)
    assert answer == (503, "the token could not be checked now")
    assert 'resource="openid"' not in metrics
    assert "reviewed by the API server (progress.tokens: review)" in caplog.text
    assert "403 Forbidden. Grant `create` on tokenreviews, or set progress.tokens to keys" in caplog.text


DISCOVERY = ("clusterrolebinding", "system:service-account-issuer-discovery")


@contextmanager
def without_discovery(given: Given) -> Iterator[None]:
    """Remove the right to read the issuer's keys, as an administrator may."""
    given.cluster.own("taking a right from all service accounts")
    bound = json.loads(given.cluster.must("get", *DISCOVERY, "-o", "json"))
    kept = {"name": bound["metadata"]["name"], "labels": bound["metadata"].get("labels", {})}

    def may() -> str:
        return str(given.cluster.kubectl("--kubeconfig", str(given.limited), "get", "--raw", KEYS_PATH).returncode)

    given.cluster.must("delete", *DISCOVERY)
    try:
        wait_until(lambda: may() != "0", "the right is gone")
        yield
    finally:
        given.cluster.must("create", "-f", "-", stdin=json.dumps({**bound, "metadata": kept}))
        wait_until(lambda: may() == "0", "the right is back")


def test_unreadable_keys_postpone_posts_and_the_log_names_the_remedy(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    token = given.token(pod_of(given, OURS, 1))

    async def post(running: Replica) -> Any:
        return await running.post(token), await running.get("/healthz"), await running.get("/metrics")

    with without_discovery(given):
        answer, (health, _), (_, metrics) = call(given, post, "keys")
    assert (answer, health) == ((503, "the token could not be checked now"), 200)
    assert 'finetune_api_requests_total{code="403",resource="openid",verb="get"} 1.0' in metrics
    assert 'finetune_progress_posts_total{code="503"} 1.0' in metrics
    assert "ClusterRoleBinding system:service-account-issuer-discovery" in caplog.text
    assert "or grant `create` on tokenreviews and set progress.tokens to review" in caplog.text
    assert call(given, post, "keys")[0] == (200, "taken")


def test_large_and_frequent_posts_are_refused_with_one_token_review(given: Given) -> None:
    token = given.token(pod_of(given, OURS, 1))

    async def post(running: Replica) -> Any:
        large, _ = await running.post(token, body=b" " * (BODY_LIMIT_BYTES + 1))
        codes: list[int] = []
        # A slow machine may not exceed the rate with the first of them.
        while 429 not in codes and len(codes) < 3000:
            codes += [code for code, _ in await asyncio.gather(*(running.post(token) for _ in range(30)))]
        return large, codes, await running.get("/metrics")

    large, codes, (_, metrics) = call(given, post)
    assert (large, set(codes)) == (413, {200, 429})
    assert codes.count(200) >= 3  # as many as may come at once
    assert 'finetune_api_requests_total{code="200",resource="tokenreviews",verb="create"} 1.0' in metrics


def test_replicas_that_start_together_share_a_secret_and_relay(given: Given) -> None:
    token = given.token(pod_of(given, OURS, 1))

    async def go() -> Any:
        async with replica(given) as leader, replica(given, leads=leader) as stand_by:
            assert leader.state.progress_endpoint == stand_by.state.progress_endpoint
            url = f"https://127.0.0.2:{stand_by.servers.progress_port}{PATH}"
            headers = {"Authorization": f"Bearer {token}"}
            async with stand_by.session.post(url, data=BODY, headers=headers) as answer:
                status = answer.status
            return status, len(leader.state.queue), len(stand_by.state.queue), leader.state.progress_endpoint

    status, leader_waits, stand_by_waits, endpoint = asyncio.run(go())
    assert (status, leader_waits, stand_by_waits) == (200, 1, 0)
    secret = json.loads(given.cluster.must("get", "secret", "-n", OPERATORS, SECRET_NAME, "-o", "json"))
    assert base64.b64decode(secret["data"]["ca.crt"]).decode() == endpoint.ca_certificate
    assert endpoint.base_url == f"https://finetune-operator-progress.{OPERATORS}.svc:8443"


def test_replicas_race_for_the_secret_of_a_new_namespace_and_agree(given: Given) -> None:
    given.cluster.must("create", "namespace", "progress-race")

    async def one(authorities: list[str]) -> None:
        async with replica(given, namespace="progress-race") as running:
            endpoint = running.state.progress_endpoint
            assert endpoint is not None
            authorities.append(endpoint.ca_certificate)

    async def go() -> list[str]:
        authorities: list[str] = []
        await asyncio.gather(*(one(authorities) for _ in range(4)))
        return authorities

    try:
        authorities = asyncio.run(go())
    finally:
        given.cluster.kubectl("delete", "namespace", "progress-race", "--wait=false")
    assert (len(authorities), len(set(authorities))) == (4, 1)


def test_a_damaged_secret_is_replaced_on_the_api_server(given: Given) -> None:
    call(given, lambda running: running.get("/readyz"))
    patch = json.dumps({"data": {"ca.key": "", "note": "eA=="}})
    given.cluster.must("patch", "secret", "-n", OPERATORS, SECRET_NAME, "--type=merge", "-p", patch)

    async def authority(running: Replica) -> Any:
        endpoint = running.state.progress_endpoint
        assert endpoint is not None
        return endpoint.ca_certificate, await running.get("/healthz")

    (first, health), (second, _) = call(given, authority), call(given, authority)
    secret = json.loads(given.cluster.must("get", "secret", "-n", OPERATORS, SECRET_NAME, "-o", "json"))
    assert base64.b64decode(secret["data"]["ca.crt"]).decode() == first == second
    assert set(secret["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert health == (200, "ok\n")
