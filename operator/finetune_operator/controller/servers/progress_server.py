"""Server to which pods report their progress: HTTPS, in the protocol of Kubeflow Trainer.

It accepts only cheap requests: a body of 64 KiB, one update a second from a pod, a connection of half a minute without
an update of a known pod, and a limited number of connections at once (listener.py) and of unknown tokens of one pod or,
where a token names no known pod, of one address. The sender is known from the token alone, and its pod has to be one of
the attempt in the path. Losing an update disturbs nothing, so doubtful requests are refused; but the operator is
notified, and then does not take a pod's silence for a sign that it hangs. Answers and logs hold our own text only:
never a token, never a part of a body.

A stand-by relays to the leader. It shows the servers' certificate as its own, so that the leader can trust the address
that it names; a relayed report is not relayed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Protocol

import aiohttp
from aiohttp import web

from finetune_operator.controller.servers.certificates import SERVICE_NAME, TlsContexts
from finetune_operator.controller.servers.connections import Server
from finetune_operator.controller.servers.listener import Bounds, Listener
from finetune_operator.controller.servers.progress_protocol import (
    BODY_LIMIT_BYTES,
    AttemptKey,
    BadBodyError,
    attempt_of,
    findings_of,
    mark_of,
    progress_of,
    update_of,
)
from finetune_operator.controller.servers.request_bodies import Bodies, BodyError
from finetune_operator.controller.servers.tokens import (
    PodIdentity,
    RefusedToken,
    ReviewUnavailableError,
    TokenChecker,
    TokenReviewer,
    claimed,
)
from finetune_operator.controller.store.rate_limit import Rate
from finetune_operator.jobs.render.render_types import PROGRESS_PORT
from finetune_operator.jobs.state.decision_types import Findings
from finetune_operator.spec.types import ProgressStatus

log = logging.getLogger(__name__)

PORT = PROGRESS_PORT
RELAYED_FOR = "X-Finetune-Relayed-For"
"""Address of the pod whose report a replica relays."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server. The defaults serve a thousand pods on one processor."""

    connections: int = 384
    connection_seconds: float = 30.0
    """Life of a connection that carries one update; for that of a known pod from its last update on."""
    body_seconds: float = 10.0
    """Limit for reading a body."""
    handshake_seconds: float = 10.0
    pod_burst: int = 3
    pod_per_second: float = 1.0
    unknown_burst: int = 20
    """Unusable tokens of one address, counted for each pod that they name; good ones are not counted."""
    unknown_per_second: float = 1.0
    reviews_burst: int = 100
    """TokenReviews that all addresses together cause."""
    reviews_per_second: float = 50.0
    relays: int = 64
    """Requests that a stand-by relays at the same time."""
    relay_seconds: float = 10.0
    stop_seconds: float = 5.0
    """Time for requests in progress when the server stops."""


@dataclass(frozen=True)
class KnownPod:
    """A pod as the operator's store knows it."""

    uid: str
    job_uid: str
    attempt: AttemptKey
    index: int | None = None
    """See `PodView.index`."""


class World(Protocol):
    """The server's view of the operator, and the receiver of its reports."""

    def leading(self) -> bool:
        """Return whether reports are accepted here."""
        ...

    def synced(self) -> bool:
        """Return whether all pods are known."""
        ...

    def leader(self) -> tuple[str, int] | None:
        """Return host and port of the leader's progress server; None: there is no leader, or it is not known."""
        ...

    def pod(self, namespace: str, name: str) -> KnownPod | None:
        """Return the pod, if it belongs to an attempt of a job."""
        ...

    def report(self, pod: KnownPod, progress: ProgressStatus, findings: Findings, mark: str) -> None:
        """Take the pod's report; `mark` is the same for as long as there is no progress."""
        ...

    def report_lost(self) -> None:
        """Note that a report of an honest pod may just have been rejected."""
        ...


class RefusedError(Exception):
    """A request that is refused: its status and, in our own words, the reason."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class ProgressServer:
    """See the module."""

    def __init__(
        self,
        world: World,
        reviewer: TokenReviewer,
        tls: TlsContexts,
        *,
        counted: Callable[[int], None] = lambda status: None,
        limits: ServerLimits | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`counted` is called with the status of each answer."""
        self._world = world
        self._tokens = TokenChecker(reviewer)
        self._tls = tls
        self._counted = counted
        self._clock = clock
        self._limits = limits = limits or ServerLimits()
        self._pods = Rate(burst=limits.pod_burst, per_second=limits.pod_per_second)
        self._unknown = Rate(burst=limits.unknown_burst, per_second=limits.unknown_per_second)
        self._reviews = Rate(burst=limits.reviews_burst, per_second=limits.reviews_per_second, keys=1)
        self._bodies = Bodies(BODY_LIMIT_BYTES, limits.body_seconds)
        self._relays = asyncio.Semaphore(limits.relays)
        self._relay: aiohttp.ClientSession | None = None
        self._listener: Listener | None = None
        self._server: Server | None = None

    async def start(self, host: str | None = None, port: int = PORT) -> int:
        """Listen on `host` (None: all addresses); return the port, which is chosen if `port` is 0."""
        self._server = Server(self._handle, keepalive_seconds=self._limits.connection_seconds)
        self._relay = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls.relay, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._limits.relay_seconds),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        limits = self._limits
        bounds = Bounds(limits.connections, limits.connection_seconds, limits.handshake_seconds)
        self._listener = Listener(
            "progress", self._server, bounds, tls=self._tls.server, dropped=self._world.report_lost
        )
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Accept no more, finish requests in progress, close the rest; also after a start that failed."""
        if self._listener is not None:
            await self._listener.stop()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(self._limits.stop_seconds)
        if self._listener is not None:
            self._listener.close()
        if self._relay is not None:
            await self._relay.close()
        self._server = self._listener = self._relay = None

    # -------------------------------------------------------------------------------------------------- one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            answer = await self._answer(request)
        except RefusedError as refused:
            answer = _error(refused.status, str(refused), refused.headers)
        except BodyError as refused:
            answer = _error(refused.status, str(refused))
        except ConnectionError:
            raise  # the sender disconnected
        except Exception as error:
            # Its text might hold parts of the request.
            log.error("A progress report could not be handled: %s.", type(error).__name__)
            answer = _error(HTTPStatus.INTERNAL_SERVER_ERROR, "the operator could not handle this report")
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._world.report_lost()
        if self._listener is not None and answer.status == HTTPStatus.OK and self._listener.keeps(request.transport):
            # The pod's next report then needs no handshake, which takes seconds while others fill the port.
            self._listener.renew(request.transport)
        else:
            answer.force_close()
        self._counted(answer.status)
        return answer

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Check the request, cheap checks first, and take its report."""
        key = _attempt(request)
        token = _bearer(request)
        if self._listener is not None and self._names_known_pod(token):
            # Reading the body and reviewing the token may take longer than a crowd lets a connection live.
            self._listener.keep(request.transport)
        body = await self._bodies.read(request)
        if not self._world.leading():
            return await self._relayed(request, token, body)
        if not self._world.synced():
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the operator is starting", Retry_After="5")
        pod = self._pod_of(key, await self._sender(request, token))
        try:
            update = update_of(body)
        except BadBodyError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._world.report(pod, progress_of(update, self._clock()), findings_of(update), mark_of(update))
        return web.json_response({})

    async def _sender(self, request: web.BaseRequest, token: str) -> PodIdentity:
        """Return the pod that sends, which is known by its token alone."""
        verdict = self._tokens.remembered(token)
        if verdict is None:
            sender = self._rated(_address(request), token)
            if not (self._unknown.take(sender) and self._reviews.take("all")):
                self._world.report_lost()
                raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "too many unknown tokens", Retry_After="5")
            try:
                verdict = await self._tokens.check(token)
            except ReviewUnavailableError:
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE, "the token could not be checked now", Retry_After="5"
                ) from None
            if isinstance(verdict, PodIdentity):
                self._unknown.give_back(sender)
        if isinstance(verdict, RefusedToken):
            raise _unauthorized(verdict.reason)
        if not self._pods.take(verdict.uid):
            rate = f"{self._limits.pod_per_second:g} update(s) a second, {self._limits.pod_burst} at once"
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS, f"too many updates: a pod may send {rate}", Retry_After="1"
            )
        return verdict

    def _rated(self, address: str, token: str) -> str:
        """Return the key under which an unknown token is rate-limited: the address and, if the token claims to be of a
        known pod, that pod. A pod may share its address with a client that guesses tokens.
        """
        claim = claimed(token)
        return f"{address} {claim.uid}" if claim is not None and self._is_known(claim) else address

    def _names_known_pod(self, token: str) -> bool:
        """Return whether the token is of a known pod, or claims to be: nobody guesses a pod's uid."""
        verdict = self._tokens.remembered(token) or claimed(token)
        return isinstance(verdict, PodIdentity) and self._is_known(verdict)

    def _is_known(self, pod: PodIdentity) -> bool:
        known = self._world.pod(pod.namespace, pod.name)
        return known is not None and known.uid == pod.uid

    def _pod_of(self, key: AttemptKey, sender: PodIdentity) -> KnownPod:
        """Return the stored pod of the sender, which has to be a pod of the attempt."""
        known = self._world.pod(sender.namespace, sender.name)
        if known is None or known.uid != sender.uid or known.attempt != key:
            raise RefusedError(HTTPStatus.FORBIDDEN, "the token does not belong to a pod of this attempt")
        return known

    async def _relayed(self, request: web.BaseRequest, token: str, body: bytes) -> web.Response:
        """Return the answer of the leader."""
        leader = self._world.leader()
        if leader is None or self._relay is None or RELAYED_FOR in request.headers or self._relays.locked():
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "no replica accepts reports now", Retry_After="5")
        host, port = leader
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            RELAYED_FOR: request.remote or "",
        }
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}{request.path}"
        try:
            async with (
                self._relays,
                self._relay.post(
                    url, data=body, headers=headers, server_hostname=SERVICE_NAME, allow_redirects=False
                ) as response,
            ):
                text = await response.content.read(4096)
                retry = response.headers.get("Retry-After")
                return web.Response(
                    status=response.status,
                    body=text,
                    content_type="application/json",
                    headers={"Retry-After": retry} if retry else None,
                )
        except (aiohttp.ClientError, OSError) as error:
            log.warning("A progress report could not be relayed to %s port %d: %s.", host, port, type(error).__name__)
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the leading replica cannot be reached", Retry_After="5"
            ) from None


def _attempt(request: web.BaseRequest) -> AttemptKey:
    key = attempt_of(request.rel_url.raw_path)
    if key is None or request.query_string:
        raise RefusedError(HTTPStatus.NOT_FOUND, "no such path; send progress to the URL in the pod's environment")
    if request.method != "POST":
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "send progress by POST", Allow="POST")
    return key


def _bearer(request: web.BaseRequest) -> str:
    """Return the token, of which nothing is verified yet."""
    values = request.headers.getall("Authorization", [])
    scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token.isascii() or not token.isprintable() or not token or " " in token:
        raise _unauthorized("a bearer token is required")
    return token


def _address(request: web.BaseRequest) -> str:
    """Return the address of the sender; a replica is trusted when it names the pod's address."""
    transport = request.transport
    by_replica = transport is not None and bool(transport.get_extra_info("peercert"))
    return (request.headers.get(RELAYED_FOR) if by_replica else None) or request.remote or ""


def _unauthorized(why: str) -> RefusedError:
    return RefusedError(HTTPStatus.UNAUTHORIZED, why, WWW_Authenticate="Bearer")


def _error(status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": why}, status=status, headers=headers)
