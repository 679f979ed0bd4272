"""An API server that misbehaves on demand: a proxy that cuts watches, refuses writes and delays requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from cluster_support.api_access import Access
from cluster_support.background import Background
from cluster_support.control_plane import free_port
from cluster_support.self_signed import for_loopback
from suite_plugins.patience import patient

_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}


@dataclass(frozen=True)
class Faults:
    """Faults, each as a share of the requests that it can affect."""

    conflicts: float = 0.0
    """Share of writes that get a 409 and are not passed on."""
    too_many: float = 0.0
    """Share of requests that get a 429 and Retry-After: 1."""
    lost_answers: float = 0.0
    """Share of executed writes whose answer is lost with the connection."""
    refuse_all: int | None = None
    """HTTP status for every request; None: no such fault."""
    refuse_watches: bool = False
    """Answer 503 to watches."""
    delay_seconds: float = 0.0
    """Longest delay of a request."""


NONE = Faults()


class FaultProxy:
    """HTTPS proxy on loopback; passes bearer tokens on, so the real server authenticates the client."""

    def __init__(self, access: Access, background: Background, folder: Path, seed: int) -> None:
        self.faults = NONE
        self.injected: dict[str, int] = {}
        self.refused = 0
        """Number of requests refused by `refuse_all`."""
        self._access = access
        self._background = background
        self._random = random.Random(seed)
        self._certificate = for_loopback(folder, "fault-proxy")
        self._watches: set[asyncio.Task[object]] = set()
        self._muted: set[asyncio.Task[object]] = set()
        self._runner: web.AppRunner | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca(self) -> Path:
        return self._certificate.certificate

    def up(self) -> None:
        self._background.run(self._up())

    def down(self) -> None:
        self._background.run(self._down())

    def cut_watches(self) -> int:
        """Break every open watch; return their number."""

        async def cut() -> int:
            open_now = list(self._watches)
            for task in open_now:
                task.cancel()
            return len(open_now)

        return self._background.run(cut())

    def mute_watches(self) -> int:
        """Silence every open watch but keep its connection, as when its server lost its power; return their number."""

        async def mute() -> int:
            self._muted |= self._watches
            return len(self._watches)

        return self._background.run(mute())

    def live_watches(self) -> int:
        """Return the number of open watches that are not muted."""

        async def count() -> int:
            return len(self._watches - self._muted)

        return self._background.run(count())

    async def _up(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._access.ssl_context(), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=patient(5))
        # Bodies are passed on as they are, compressed ones too.
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        application = web.Application(client_max_size=64 * 1024**2)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._certificate.server_context()).start()

    async def _down(self) -> None:
        for task in list(self._watches):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._session.close()

    def _happens(self, name: str, share: float) -> bool:
        if self._random.random() >= share:
            return False
        self.injected[name] = self.injected.get(name, 0) + 1
        return True

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        faults, write = self.faults, request.method in _WRITES
        if faults.delay_seconds:
            await asyncio.sleep(self._random.uniform(0, faults.delay_seconds))
        if faults.refuse_all is not None:
            self.refused += 1
            return _refusal(faults.refuse_all, "Refused", {})
        if self._happens("429", faults.too_many):
            return _refusal(429, "TooManyRequests", {"Retry-After": "1"})
        if write and self._happens("409", faults.conflicts):
            return _refusal(409, "Conflict", {})
        watching = request.query.get("watch") in ("true", "1")
        if watching and faults.refuse_watches:
            return _refusal(503, "ServiceUnavailable", {})
        task = asyncio.current_task()
        assert task is not None
        if watching:
            self._watches.add(task)
        try:
            return await self._forward(request, lose=write and self._happens("lost answer", faults.lost_answers))
        except asyncio.CancelledError:
            _break(request)
            raise
        except aiohttp.ClientError:
            # The real server is unavailable, or the answer shall be lost.
            _break(request)
            return web.Response(status=502)
        finally:
            self._watches.discard(task)
            self._muted.discard(task)

    async def _forward(self, request: web.Request, lose: bool) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            f"{self._access.host}{request.rel_url}",
            # None rather than an empty body, which would get a Content-Type that the client did not send.
            data=await request.read() or None,
            headers=headers,
        ) as answer:
            if lose:
                raise aiohttp.ClientConnectionError("the answer is lost on purpose")
            passed = {name: value for name, value in answer.headers.items() if name.lower() != "transfer-encoding"}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                if asyncio.current_task() not in self._muted:
                    await response.write(chunk)
            await response.write_eof()
            return response


def _break(request: web.Request) -> None:
    """Cut the connection without an answer, like a dead server."""
    if request.transport is not None:
        request.transport.abort()


def _refusal(code: int, reason: str, headers: dict[str, str]) -> web.Response:
    """Return an error in the API server's own form."""
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": f"{reason}, made by the test",
    }
    return web.json_response(status, status=code, headers=headers)
