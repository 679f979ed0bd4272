"""The progress server over real TLS: accepted requests, refusals and their form, and no echo of the request."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_operator.controller.servers.certificates import Certificates, TlsContexts, make, server_names
from finetune_operator.controller.servers.progress_protocol import BODY_LIMIT_BYTES, AttemptKey
from finetune_operator.controller.servers.progress_server import RELAYED_FOR, KnownPod, ProgressServer, ServerLimits
from finetune_operator.controller.servers.tokens import PodIdentity, ReviewUnavailableError, Verdict, verdict
from finetune_operator.jobs.state.decision_types import Findings
from finetune_operator.spec.types import ProgressStatus
from suite_plugins.fuzz import examples
from suite_plugins.patience import patient

PATH = "/v1alpha1/namespaces/team/finetunejobs/tune/stages/train/attempts/2"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = AttemptKey("team", "tune", Stage.TRAIN, 2)
POD = KnownPod("pod-uid", "job-uid", KEY)
CANARY = "canary-7f3a9c"


def token(name: str, end: float | None = None) -> str:
    """Return a token with an expiry, as an API server's; its signature holds a marker to search for."""
    payload = base64.urlsafe_b64encode(json.dumps({"exp": end or time.time() + 86_400, "n": name}).encode()).decode()
    return f"{name}.{payload.rstrip('=')}.{CANARY}"


GOOD = token("good")
BODY = json.dumps(
    {
        "trainerStatus": {
            "progressPercentage": 40,
            "estimatedRemainingSeconds": 90,
            "metrics": [{"name": "step", "value": "4"}, {"name": "total_steps", "value": "10"}],
            "lastUpdatedTime": "2020-01-01T00:00:00Z",
        }
    }
)
TAKEN = ProgressStatus(
    step=4, total_steps=10, percent=40, remaining_seconds=90.0, last_update_time="2026-01-02T03:04:05Z"
)


def status_of(pod: PodIdentity) -> dict[str, Any]:
    """Return the status of a TokenReview as an API server answers for a pod's projected token."""
    return {
        "authenticated": True,
        "audiences": ["finetune.dev/progress"],
        "user": {
            "username": f"system:serviceaccount:{pod.namespace}:default",
            "extra": {
                "authentication.kubernetes.io/pod-name": [pod.name],
                "authentication.kubernetes.io/pod-uid": [pod.uid],
            },
        },
    }


@dataclass
class Operator:
    """The server's view of an operator, and the API server's answers about tokens."""

    leads: bool = True
    filled: bool = True
    leader_at: tuple[str, int] | None = None
    known: dict[tuple[str, str], KnownPod] = field(default_factory=lambda: {("team", "pod-0"): POD})
    reviews: dict[str, Mapping[str, Any]] = field(
        default_factory=lambda: {GOOD: status_of(PodIdentity("team", "pod-0", "pod-uid"))}
    )
    away: bool = False
    reviewed: list[str] = field(default_factory=list)
    reported: list[tuple[KnownPod, ProgressStatus]] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    turned_away: int = 0

    def leading(self) -> bool:
        return self.leads

    def synced(self) -> bool:
        return self.filled

    def leader(self) -> tuple[str, int] | None:
        return self.leader_at

    def pod(self, namespace: str, name: str) -> KnownPod | None:
        return self.known.get((namespace, name))

    def report(self, pod: KnownPod, progress: ProgressStatus, findings: Findings, mark: str) -> None:
        self.reported.append((pod, progress))

    def report_lost(self) -> None:
        self.turned_away += 1

    async def review_token(self, token: str, audience: str) -> Verdict:
        self.reviewed.append(token)
        assert audience == "finetune.dev/progress"
        await asyncio.sleep(0)
        if self.away:
            raise ReviewUnavailableError
        status = self.reviews.get(token, {"authenticated": False, "error": f"invalid bearer token {token}"})
        return verdict(status, audience)


CERTIFICATES = make(server_names("ops", None), datetime.now(UTC))


@dataclass
class Running:
    session: aiohttp.ClientSession
    base: str
    port: int

    async def post(
        self, path: str = PATH, body: Any = BODY, bearer: str | None = GOOD, **headers: str
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Post a report; return status, JSON body and headers."""
        given = {"Authorization": f"Bearer {bearer}"} if bearer is not None else {}
        async with self.session.post(self.base + path, data=body, headers=given | headers) as answer:
            return answer.status, await answer.json(), answer.headers


def trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=certificates.authority)


@asynccontextmanager
async def serving(
    operator: Operator, limits: ServerLimits | None = None, certificates: Certificates = CERTIFICATES
) -> AsyncIterator[Running]:
    server = ProgressServer(
        operator, operator, TlsContexts(certificates), counted=operator.answered.append, limits=limits,
        clock=lambda: NOW,
    )  # fmt: skip
    try:
        port = await server.start("127.0.0.1", 0)
        connector = aiohttp.TCPConnector(ssl=trusting(certificates), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Running(session, f"https://localhost:{port}", port)
    finally:
        await server.stop()


def run_with(operator: Operator, call: Callable[[Running], Awaitable[Any]], limits: ServerLimits | None = None) -> Any:
    async def go() -> Any:
        async with serving(operator, limits) as running:
            return await call(running)

    return asyncio.run(go())


def test_a_report_of_a_pod_of_the_attempt_is_taken() -> None:
    operator = Operator()
    status, body, _ = run_with(operator, lambda running: running.post())
    assert (status, body) == (200, {})
    assert operator.reported == [(POD, TAKEN)]
    assert operator.answered == [200]


def other(namespace: str = "team", name: str = "pod-0", uid: str = "pod-uid") -> tuple[str, dict[str, Any]]:
    one = token(f"{namespace}-{name}-{uid}")
    return one, status_of(PodIdentity(namespace, name, uid))


def without(status: dict[str, Any], *path: str) -> dict[str, Any]:
    copy = json.loads(json.dumps(status))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return dict(copy)


PODS = "authentication.kubernetes.io/pod-name"
GOOD_STATUS = status_of(PodIdentity("team", "pod-0", "pod-uid"))
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another path": ({"path": "/v1alpha1/other"}, 404, "no such path"),
    "a path that goes on": ({"path": PATH + "/more"}, 404, "no such path"),
    "a path with a query": ({"path": PATH + "?a=b"}, 404, "no such path"),
    "a stage that there is not": ({"path": PATH.replace("train", "sleep")}, 404, "no such path"),
    "attempt 0": ({"path": PATH[:-1] + "0"}, 404, "no such path"),
    "an encoded path": ({"path": PATH.replace("team", "%2e%2e%2fteam")}, 404, "no such path"),
    "no token": ({"bearer": None}, 401, "a bearer token is required"),
    "another scheme": ({"bearer": None, "Authorization": "Basic Zm9vOmJhcg=="}, 401, "a bearer token is required"),
    "an empty token": ({"bearer": ""}, 401, "a bearer token is required"),
    "a guessed token": ({"bearer": token("guess")}, 401, "the token is not valid for audience finetune.dev/progress"),
    "another attempt": ({"path": PATH[:-1] + "3"}, 403, "the token does not belong to a pod of this attempt"),
    "another stage": (
        {"path": PATH.replace("train", "predict")},
        403,
        "the token does not belong to a pod of this attempt",
    ),
    "another job": (
        {"path": PATH.replace("/tune/", "/other/")},
        403,
        "the token does not belong to a pod of this attempt",
    ),
    "another namespace": (
        {"path": PATH.replace("team", "theirs")},
        403,
        "the token does not belong to a pod of this attempt",
    ),
    "no JSON": ({"body": "{"}, 400, "the body is not a progress update: body: Invalid JSON"),
    "no body": ({"body": b""}, 400, "the body is not a progress update: body: Invalid JSON"),
    "a compressed body": ({"body": b"\x1f\x8b\x08", "Content-Encoding": "gzip"}, 400, "Invalid JSON"),
    "other JSON": ({"body": "{}"}, 400, "the body is not a progress update: trainerStatus: Field required"),
    "101 percent": (
        {"body": BODY.replace("40", "101")},
        400,
        "trainerStatus.progressPercentage: Input should be less than or equal to 100",
    ),
    "a body of known length that is too large": ({"body": b" " * (BODY_LIMIT_BYTES + 1)}, 413, "larger than 65536"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_report_is_refused_with_its_own_status_and_reason(case: str, caplog: pytest.LogCaptureFixture) -> None:
    request, status, reason = REFUSED[case]
    operator = Operator()
    with caplog.at_level(logging.DEBUG):
        got, body, headers = run_with(operator, lambda running: running.post(**request))
    assert (got, list(body)) == (status, ["error"])
    assert reason in body["error"]
    assert (headers.get("WWW-Authenticate") == "Bearer") == (status == 401)
    assert operator.reported == []
    assert operator.answered == [status]
    assert CANARY not in caplog.text + json.dumps(body) + str(headers)


TOKENS: dict[str, tuple[dict[str, Any], int]] = {
    "a good one": (GOOD_STATUS, 200),
    "not authenticated": ({**GOOD_STATUS, "authenticated": False}, 401),
    "for no audience, as servers answer that know none": (without(GOOD_STATUS, "audiences"), 401),
    "for another audience": ({**GOOD_STATUS, "audiences": ["https://kubernetes.default.svc"]}, 401),
    "of a service account without a pod": (without(GOOD_STATUS, "user", "extra", PODS), 401),
    "of no service account": ({**GOOD_STATUS, "user": {**GOOD_STATUS["user"], "username": "alice"}}, 401),
    "of a pod of another namespace": (status_of(PodIdentity("theirs", "pod-0", "pod-uid")), 403),
    "of a pod that is not known": (status_of(PodIdentity("team", "pod-1", "pod-uid")), 403),
    "of an earlier pod of the same name": (status_of(PodIdentity("team", "pod-0", "earlier")), 403),
}


@pytest.mark.parametrize("case", TOKENS)
def test_a_token_counts_for_the_pod_and_the_audience_it_was_made_for(case: str) -> None:
    status, expected = TOKENS[case]
    operator = Operator(reviews={GOOD: status})
    assert run_with(operator, lambda running: running.post())[0] == expected
    assert len(operator.reported) == (expected == 200)


def test_reports_of_the_standard_librarys_client_are_accepted() -> None:
    def send(running: Running) -> int:
        headers = {"Authorization": f"Bearer {GOOD}", "Content-Type": "application/json"}
        request = urllib.request.Request(running.base + PATH, BODY.encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=patient(60), context=trusting(CERTIFICATES)) as answer:
            return int(answer.status)

    operator = Operator()
    assert run_with(operator, lambda running: asyncio.to_thread(send, running)) == 200
    assert operator.reported == [(POD, TAKEN)]


def test_methods_other_than_post_get_405() -> None:
    async def get(running: Running) -> tuple[int, Any, str | None]:
        async with running.session.get(running.base + PATH) as answer:
            return answer.status, await answer.json(), answer.headers.get("Allow")

    assert run_with(Operator(), get) == (405, {"error": "send progress by POST"}, "POST")


def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1024
            await asyncio.sleep(0)

    operator = Operator()
    status, body, _ = run_with(operator, lambda running: running.post(body=endless()))
    assert (status, body) == (413, {"error": "the body is larger than 65536 bytes"})
    assert operator.reviewed == []


def test_rate_limit_applies_to_one_pod() -> None:
    more, answer = other(name="pod-1", uid="uid-1")
    operator = Operator()
    operator.reviews[more] = answer
    operator.known["team", "pod-1"] = KnownPod("uid-1", "job-uid", KEY)

    async def hurry(running: Running) -> list[Any]:
        return [(await running.post(bearer=one))[::2] for one in [GOOD] * 4 + [more]]

    answers = run_with(operator, hurry, ServerLimits(pod_per_second=0.001))
    assert [status for status, _ in answers] == [200, 200, 200, 429, 200]
    assert answers[3][1]["Retry-After"] == "1"


def test_a_token_is_reviewed_once_however_often_and_at_once_it_comes() -> None:
    operator = Operator()

    async def many(running: Running) -> list[int]:
        together = [status for status, _, _ in await asyncio.gather(*(running.post() for _ in range(8)))]
        return [*together, (await running.post())[0]]

    assert set(run_with(operator, many, ServerLimits(pod_burst=100))) == {200}
    assert operator.reviewed == [GOOD]


def test_guessed_tokens_exhaust_reviews_but_known_tokens_still_count() -> None:
    operator = Operator()

    async def guess(running: Running) -> list[int]:
        await running.post()
        guesses = [(await running.post(bearer=token(f"guess-{number}")))[0] for number in range(6)]
        return [*guesses, (await running.post())[0]]

    limits = ServerLimits(unknown_burst=4, unknown_per_second=0.001)
    assert run_with(operator, guess, limits) == [401, 401, 401, 401, 429, 429, 200]
    assert len(operator.reviewed) == 5


def test_good_tokens_of_one_address_do_not_count_as_guesses() -> None:
    operator = Operator()
    pods = [other(name=f"pod-{number}", uid=f"uid-{number}") for number in range(1, 9)]
    for number, (one, answer) in enumerate(pods, start=1):
        operator.reviews[one] = answer
        operator.known["team", f"pod-{number}"] = KnownPod(f"uid-{number}", "job-uid", KEY)

    async def all_of_them(running: Running) -> set[int]:
        return {(await running.post(bearer=one))[0] for one, _ in pods}

    assert run_with(operator, all_of_them, ServerLimits(unknown_burst=2, unknown_per_second=0.001)) == {200}


def claiming(uid: str) -> str:
    """Return a token that claims to be of pod-0 with this uid."""
    claim = {"namespace": "team", "pod": {"name": "pod-0", "uid": uid}}
    payload = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claim}).encode()).decode().rstrip("=")
    return f"a.{payload}.{CANARY}"


def test_guesses_from_the_address_of_an_honest_pod_are_not_held_against_it() -> None:
    new = claiming("pod-uid")
    operator = Operator(reviews={new: GOOD_STATUS})

    async def guess(running: Running) -> list[int]:
        guesses = [(await running.post(bearer=token(f"guess-{number}")))[0] for number in range(3)]
        return [*guesses, (await running.post(bearer=new))[0]]

    assert run_with(operator, guess, ServerLimits(unknown_burst=1, unknown_per_second=0.001)) == [401, 429, 429, 200]
    assert operator.turned_away == 2


@pytest.mark.parametrize(
    "claims", ["[" * 3_000 + "]" * 3_000, "{}", "[]", '{"kubernetes.io": {"pod": []}}', "\xff", ""]
)
def test_a_token_may_claim_anything(claims: str) -> None:
    payload = base64.urlsafe_b64encode(claims.encode("latin-1")).decode().rstrip("=")
    assert run_with(Operator(), lambda running: running.post(bearer=f"a.{payload}.b"))[0] == 401


def test_a_report_waits_for_better_times_while_the_api_server_is_away() -> None:
    operator = Operator(away=True)

    async def twice(running: Running) -> list[int]:
        first = (await running.post())[0]
        operator.away = False
        return [first, (await running.post())[0]]

    assert run_with(operator, twice) == [503, 200]


def test_a_replica_that_has_not_read_all_pods_yet_takes_nothing() -> None:
    operator = Operator(filled=False)
    status, body, headers = run_with(operator, lambda running: running.post())
    assert (status, body, headers["Retry-After"]) == (503, {"error": "the operator is starting"}, "5")


# ------------------------------------------------------------------------------------------------------------ stand-by


def relayed(leader: Operator, stand_by: Operator, call: Callable[[Running], Awaitable[Any]], **limits: Any) -> Any:
    """Run `call` against the stand-by of two replicas that share certificates."""

    async def go() -> Any:
        async with serving(leader, ServerLimits(**limits)) as first, serving(stand_by) as second:
            stand_by.leader_at = ("127.0.0.1", first.port)
            return await call(second)

    return asyncio.run(go())


def test_a_stand_by_relays_and_gives_the_answer_of_the_one_that_leads() -> None:
    leader, stand_by = Operator(), Operator(leads=False)

    async def two(running: Running) -> list[Any]:
        return [(await running.post())[:2], (await running.post(path=PATH[:-1] + "9"))[:2]]

    assert relayed(leader, stand_by, two) == [
        (200, {}),
        (403, {"error": "the token does not belong to a pod of this attempt"}),
    ]
    assert leader.reported == [(POD, TAKEN)]
    assert (stand_by.reported, stand_by.reviewed) == ([], [])


def test_replicas_that_take_each_other_for_the_leader_do_not_loop() -> None:
    first, second = Operator(leads=False), Operator(leads=False)

    async def go() -> tuple[int, Any]:
        async with serving(first) as one, serving(second) as two:
            first.leader_at, second.leader_at = ("127.0.0.1", two.port), ("127.0.0.1", one.port)
            return (await one.post())[:2]

    assert asyncio.run(go()) == (503, {"error": "no replica accepts reports now"})
    assert (first.answered, second.answered) == ([503], [503])


def test_stand_by_without_a_leader_answers_503() -> None:
    status, body, _ = run_with(Operator(leads=False), lambda running: running.post())
    assert (status, body) == (503, {"error": "no replica accepts reports now"})


def test_stand_by_answers_503_when_the_leader_is_unreachable() -> None:
    stand_by = Operator(leads=False, leader_at=("127.0.0.1", 1))
    status, body, _ = run_with(stand_by, lambda running: running.post())
    assert (status, body) == (503, {"error": "the leading replica cannot be reached"})


def test_a_stand_by_gives_no_token_to_a_server_of_another_authority(caplog: pytest.LogCaptureFixture) -> None:
    stranger, stand_by = Operator(), Operator(leads=False)
    foreign = make(server_names("ops", None), datetime.now(UTC))

    async def go() -> int:
        async with serving(stranger, certificates=foreign) as one, serving(stand_by) as two:
            stand_by.leader_at = ("127.0.0.1", one.port)
            return (await two.post())[0]

    assert asyncio.run(go()) == 503
    assert stranger.reviewed == []
    assert CANARY not in caplog.text


def test_guesses_through_a_stand_by_count_for_the_pod() -> None:
    """The leader trusts the address named by a replica, which shows the servers' certificate."""

    async def guess(running: Running) -> list[int]:
        codes: list[int] = []
        for pod in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
            headers = {RELAYED_FOR: pod, "Authorization": f"Bearer {token(f'guess-{len(codes)}')}"}
            async with running.session.post(
                running.base + PATH, data=BODY, headers=headers, ssl=TlsContexts(CERTIFICATES).relay
            ) as answer:
                codes.append(answer.status)
        return codes

    assert run_with(Operator(), guess, ServerLimits(unknown_burst=1, unknown_per_second=0.001)) == [401, 401, 429]


def test_unverified_relay_header_is_ignored() -> None:
    operator = Operator()

    async def lie(running: Running) -> list[int]:
        return [
            (await running.post(bearer=token(f"guess-{number}"), **{RELAYED_FOR: f"10.0.0.{number}"}))[0]
            for number in range(3)
        ]

    assert run_with(operator, lie, ServerLimits(unknown_burst=1, unknown_per_second=0.001)) == [401, 429, 429]


# -------------------------------------------------------------------------------------------------------- connections


def test_client_with_another_authority_or_name_gets_no_connection() -> None:
    async def connect(running: Running) -> list[str]:
        foreign = trusting(make(server_names("ops", None), datetime.now(UTC)))
        found = []
        for context, name in [(foreign, "localhost"), (trusting(CERTIFICATES), "elsewhere")]:
            with pytest.raises(ssl.SSLCertVerificationError) as caught:
                await asyncio.open_connection("127.0.0.1", running.port, ssl=context, server_hostname=name)
            found.append(caught.value.verify_message)
        return found

    assert run_with(Operator(), connect) == [
        "self-signed certificate in certificate chain",
        "Hostname mismatch, certificate is not valid for 'elsewhere'.",
    ]


async def spoken(running: Running, text: bytes) -> bytes:
    """Send raw bytes and return the answer, until the server closes."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", running.port, ssl=trusting(CERTIFICATES), server_hostname="localhost"
    )
    writer.write(text)
    try:
        return await asyncio.wait_for(reader.read(), patient(30))
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


def head(*lines: str) -> bytes:
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def test_a_client_that_sends_no_request_is_cut_off() -> None:
    assert run_with(
        Operator(), lambda running: spoken(running, b"PO"), ServerLimits(connection_seconds=patient(0.3))
    ) in (
        b"",
        b"reset",
    )


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    text = head(f"Authorization: Bearer {GOOD}", "Content-Length: 100") + b"{"
    limits = ServerLimits(body_seconds=patient(0.3))
    answer = run_with(Operator(), lambda running: spoken(running, text), limits)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert f"the body did not arrive within {limits.body_seconds:g} s".encode() in answer


def test_request_that_is_no_http_is_answered_without_an_echo(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = run_with(Operator(), lambda running: spoken(running, head(f"Authorization\x00: Bearer {GOOD}")))
    assert b" 400 " in answer.splitlines()[0]
    assert b'{"error": "this is not an HTTP request"}' in answer
    assert CANARY not in caplog.text + answer.decode()


def test_report_is_accepted_while_its_address_holds_all_connections() -> None:
    operator = Operator()

    async def crowd(running: Running) -> int:
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writers.append(writer)
        status = (await running.post())[0]
        for writer in writers:
            writer.transport.abort()
        return status

    writers: list[asyncio.StreamWriter] = []
    assert run_with(operator, crowd, ServerLimits(connections=2)) == 200
    assert operator.turned_away >= 6


@pytest.mark.parametrize(("uid", "status"), [("pod-uid", 200), ("another", None)])
def test_a_crowd_closes_no_connection_of_a_known_pod_under_review(uid: str, status: int | None) -> None:
    operator = Operator(reviews={claiming(uid): GOOD_STATUS})
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(token: str, audience: str) -> Verdict:
        arrived.set()
        await go_on.wait()
        return verdict(operator.reviews[token], audience)

    operator.review_token = slow  # type: ignore[method-assign]
    writers: list[asyncio.StreamWriter] = []

    async def crowd(running: Running) -> int | None:
        posting = asyncio.create_task(running.post(bearer=claiming(uid)))
        await arrived.wait()
        while operator.turned_away < 6:
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writers.append(writer)
            await asyncio.sleep(0.01)
        go_on.set()
        try:
            return (await posting)[0]
        except aiohttp.ClientError:
            return None
        finally:
            for writer in writers:
                writer.transport.abort()

    assert run_with(operator, crowd, ServerLimits(connections=2)) == status


@pytest.mark.parametrize(
    ("bearer", "connection"), [(GOOD, None), (token("unknown"), "close")], ids=["known", "unknown"]
)
def test_connection_of_a_known_pod_stays_open_for_its_next_report(bearer: str, connection: str | None) -> None:
    async def twice(running: Running) -> list[str | None]:
        return [(await running.post(bearer=bearer))[2].get("Connection") for _ in range(2)]

    # The first report shows whose token it is.
    assert run_with(Operator(), twice) == ["close", connection]


def test_a_report_in_hand_is_finished_when_the_server_stops() -> None:
    operator = Operator()
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(token: str, audience: str) -> Verdict:
        arrived.set()
        await go_on.wait()
        return verdict(operator.reviews[token], audience)

    operator.review_token = slow  # type: ignore[method-assign]

    async def go() -> int:
        server = ProgressServer(operator, operator, TlsContexts(CERTIFICATES), clock=lambda: NOW)
        port = await server.start("127.0.0.1", 0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(CERTIFICATES))) as session:
            posting = asyncio.create_task(Running(session, f"https://localhost:{port}", port).post())
            await arrived.wait()
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0)
            go_on.set()
            status = (await posting)[0]
            await stopping
            with pytest.raises(aiohttp.ClientConnectorError):
                await Running(session, f"https://localhost:{port}", port).post()
            return status

    assert asyncio.run(go()) == 200
    assert operator.reported == [(POD, TAKEN)]


def test_renewed_certificates_are_served_without_a_restart() -> None:
    renewed = make(server_names("ops", None), datetime.now(UTC))

    async def go() -> list[int]:
        tls = TlsContexts(CERTIFICATES)
        operator = Operator()
        server = ProgressServer(operator, operator, tls, clock=lambda: NOW)
        port = await server.start("127.0.0.1", 0)
        try:
            codes = []
            for certificates in (CERTIFICATES, renewed):
                tls.take(certificates)
                connector = aiohttp.TCPConnector(ssl=trusting(certificates))
                async with aiohttp.ClientSession(connector=connector) as session:
                    codes.append((await Running(session, f"https://localhost:{port}", port).post())[0])
            return codes
        finally:
            await server.stop()

    assert asyncio.run(go()) == [200, 200]


# ---------------------------------------------------------------------------------------------------------------- fuzz

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
metrics = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["step", "total_steps", "loss", "epoch", "train_loss", "current_step"]) | st.text(),
            "value": st.floats().map(str) | st.integers().map(str) | st.text(),
        }
    ),
    max_size=6,
)
updates = st.fixed_dictionaries(
    {},
    optional={
        "progressPercentage": st.integers() | json_values,
        "estimatedRemainingSeconds": st.integers() | json_values,
        "metrics": metrics | json_values,
        "lastUpdatedTime": st.text() | json_values,
    },
)
bodies = (
    st.binary(max_size=300)
    | json_values.map(lambda value: json.dumps(value).encode())
    | (updates | json_values).map(lambda value: json.dumps({"trainerStatus": value}).encode())
    | st.integers(1, 20_000).map(lambda depth: b"[" * depth)
)


@pytest.mark.hypothesis
def test_random_body_gets_200_or_400_and_accepted_ones_a_status() -> None:
    operator = Operator()
    seen: set[int] = set()

    async def go() -> None:
        async with serving(operator, ServerLimits(pod_burst=10**9)) as running:
            loop = asyncio.get_running_loop()

            def one(body: bytes) -> None:
                operator.reported.clear()
                posting = asyncio.run_coroutine_threadsafe(running.post(body=body), loop)
                status, answer, _ = posting.result(patient(60))
                seen.add(status)
                assert status in (200, 400)
                assert answer == {} if status == 200 else isinstance(answer["error"], str)
                assert len(operator.reported) == (status == 200)
                for _, progress in operator.reported:
                    json.dumps(progress.model_dump(), allow_nan=False, default=datetime.isoformat)
                    ProgressStatus.model_validate(progress.model_dump())

            checked = examples(150, suppress_health_check=list(HealthCheck))(given(bodies)(one))
            await asyncio.to_thread(checked)

    asyncio.run(go())
    assert seen == {200, 400}
