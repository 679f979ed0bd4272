"""A few paths that are served on one port behind a `Listener`. Answers hold our own text only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeAlias

from aiohttp import web

from finetune_operator.controller.servers.connections import Server
from finetune_operator.controller.servers.listener import Bounds, Listener

STOP_SECONDS = 2.0
"""Time for requests in progress when the site stops."""

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.Response]]


class Site:
    """One server, one port."""

    def __init__(
        self,
        name: str,
        routes: Mapping[tuple[str, str], Handler],
        bounds: Bounds,
        *,
        tls: ssl.SSLContext | None = None,
        keepalive_seconds: float = 0.0,
        refused: Callable[[str], None] = lambda why: None,
        trusted: Callable[[asyncio.BaseTransport], bool] | None = None,
    ) -> None:
        """`routes`: by method and path. `keepalive_seconds`: how long an idle connection stays open; 0: each carries
        one request. `refused`, `trusted`: see `Listener`.
        """
        self._name = name
        self._routes = routes
        self._bounds = bounds
        self._tls = tls
        self._keepalive = keepalive_seconds
        self._refused, self._trusted = refused, trusted
        self._server: Server | None = None
        self._listener: Listener | None = None

    async def start(self, host: str | None, port: int) -> int:
        """Listen on `host` (None: all addresses) and return the port, which is chosen if `port` is 0. OSError if it is
        in use.
        """
        self._server = Server(self._handle, keepalive_seconds=self._keepalive)
        self._listener = Listener(
            self._name, self._server, self._bounds, tls=self._tls, refused=self._refused, trusted=self._trusted
        )
        return await self._listener.start(host, port)

    def renew(self, transport: asyncio.BaseTransport | None) -> None:
        """See `Listener.renew`."""
        if self._listener is not None:
            self._listener.renew(transport)

    async def stop(self) -> None:
        """Stop, also after a start that failed."""
        if self._listener is not None:
            await self._listener.stop()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(STOP_SECONDS)
        if self._listener is not None:
            self._listener.close()
        self._server = self._listener = None

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        handler = self._routes.get((request.method, request.path))
        if handler is not None:
            answer = await handler(request)
        else:
            methods = sorted(method for method, path in self._routes if path == request.path)
            status = HTTPStatus.METHOD_NOT_ALLOWED if methods else HTTPStatus.NOT_FOUND
            answer = web.json_response({"message": status.phrase}, status=status)
            if methods:
                answer.headers["Allow"] = ", ".join(methods)
        if not self._keepalive:
            answer.force_close()
        return answer
