"""uvicorn as the server runs it: idle connections are closed, and SIGTERM lets a moment pass."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from finetune_trainer.serving.serving_app import ServerState, make_app

log = logging.getLogger("finetune_trainer")

IDLE_SECONDS = 10.0
"""Time that a connection may be without a request, or need for the head of one."""
LINGER_SECONDS = 3.0
"""Time after SIGTERM in which requests are still taken: those who send them learn of it a little later."""


class GuardedProtocol(H11Protocol):
    """Closes connections that send no whole request head for too long; uvicorn only looks after an answer."""

    _closing: asyncio.TimerHandle | None = None
    idle_seconds = IDLE_SECONDS

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.idle_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class DrainingServer(uvicorn.Server):
    """Goes on answering for a moment after SIGTERM; ends without a signal of its own."""

    def __init__(self, config: uvicorn.Config, state: ServerState, linger: float) -> None:
        super().__init__(config)
        self._state = state
        self._linger = linger

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; the second signal, and Ctrl-C, close the port at once."""
        if self._state.draining or sig == signal.SIGINT:
            self._end()
        else:
            threading.Timer(self._linger, self._end).start()
        self._state.draining = True

    def _end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and tell where."""
        await super().startup(sockets)
        for server in self.servers:
            for socket in server.sockets:
                log.info("Serving %s at http://%s:%d", self._state.engine.name, *socket.getsockname()[:2])


def http_server(state: ServerState, host: str, port: int, *, idle_seconds: float = IDLE_SECONDS) -> DrainingServer:
    """The server of `state`, which does not listen yet."""
    drain = state.engine.serving.drain_seconds
    linger = min(LINGER_SECONDS, drain / 3)
    config = uvicorn.Config(
        make_app(state),
        host=host,
        port=port,
        http=type("Guarded", (GuardedProtocol,), {"idle_seconds": idle_seconds}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(idle_seconds)),
        timeout_graceful_shutdown=max(1, round(drain - linger)),
        h11_max_incomplete_event_size=32 << 10,
        backlog=2048,
    )
    return DrainingServer(config, state, linger)
