"""An aiohttp application that is served on one port behind a `Listener`."""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

from finetune_operator.shell.listening import Bounds, Listener

STOP_SECONDS = 2.0
"""For requests in progress when the site stops."""


class Site:
    """One application, one port."""

    def __init__(
        self,
        name: str,
        application: web.Application,
        bounds: Bounds,
        *,
        tls: ssl.SSLContext | None = None,
        keepalive_seconds: float = 0.0,
    ) -> None:
        """`keepalive_seconds`: how long an idle connection stays open."""
        self._name = name
        self._bounds = bounds
        self._tls = tls
        self._runner = web.AppRunner(
            application, access_log=None, keepalive_timeout=keepalive_seconds, shutdown_timeout=STOP_SECONDS
        )
        self._listener: Listener | None = None

    async def start(self, host: str | None, port: int) -> int:
        """Listen on `host` (None: all addresses) and return the port, which is chosen if `port` is 0. OSError if it is
        in use.
        """
        await self._runner.setup()
        assert self._runner.server is not None, "it is set up"
        self._listener = Listener(self._name, self._runner.server, self._bounds, tls=self._tls)
        return await self._listener.start(host, port)

    def renew(self, transport: asyncio.BaseTransport | None) -> None:
        """See `Listener.renew`."""
        if self._listener is not None:
            self._listener.renew(transport)

    async def stop(self) -> None:
        """Stop, also after a start that failed."""
        if self._listener is not None:
            await self._listener.stop()
        await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()
        self._listener = None
