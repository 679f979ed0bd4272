"""uvicorn with guards: closes idle connections, those whose clients do not read, and the oldest of too many that wait
for their client; drains for a moment on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import threading
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from finetune_trainer.serving.server_state import ServerState
from finetune_trainer.serving.serving_app import make_app

log = logging.getLogger("finetune_trainer")

IDLE_SECONDS = 10.0
"""Time that a connection may stay without a request, or take to send the head of one."""
UNREAD_SECONDS = 30.0
"""Time in which a client must read some of its answer: its memory and its request are held that long."""
MOST_CONNECTIONS = 4_000
"""Limit of connections at a time, or half of the files that the process may open; one more replaces the oldest one
that has no whole request.
"""
BACKLOG = 256
"""Connections that asyncio accepts at once, before any can be closed."""
LINGER_SECONDS = 3.0
"""Time after SIGTERM in which requests are still accepted: senders learn of the end a little later."""


class GuardedProtocol(H11Protocol):
    """Closes connections that send no whole request head for too long, which uvicorn checks only after an answer; and
    those whose clients leave the answer unread. A request in progress then ends as if its client disconnected. One
    connection too many closes the oldest one whose client owes a request or the rest of one.
    """

    _closing: asyncio.TimerHandle | None = None
    _aborting: asyncio.TimerHandle | None = None
    idle_seconds = IDLE_SECONDS
    unread_seconds = UNREAD_SECONDS
    most_connections = MOST_CONNECTIONS
    by_age: ClassVar[dict[GuardedProtocol, None]]
    """Open connections of the server, oldest first."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.by_age) >= self.most_connections:
            oldest = next((one for one in self.by_age if one.waits_for_client), None)
            if oldest is not None:
                del self.by_age[oldest]
                oldest.transport.abort()
        self.by_age[self] = None
        self._look()

    @property
    def waits_for_client(self) -> bool:
        """True without a request, and until all of its body has arrived."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.by_age.pop(self, None)
        self._forget()
        self._read_on()

    def pause_writing(self) -> None:
        """Start the client's time to read."""
        super().pause_writing()
        self._aborting = self._aborting or self.loop.call_later(self.unread_seconds, self._abort)

    def resume_writing(self) -> None:
        """Cancel the client's time: enough was read."""
        super().resume_writing()
        self._read_on()

    def _read_on(self) -> None:
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None

    def _abort(self) -> None:
        log.info("Closing a connection: its client has read too little for %g s.", self.unread_seconds)
        self.transport.abort()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.idle_seconds, self._close)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection whose client sends no further request."""
        super().timeout_keep_alive_handler()
        self._close()

    def _close(self) -> None:
        """Close after the rest of the answer; abort if the client does not read it."""
        self.transport.close()
        self._aborting = self._aborting or self.loop.call_later(self.unread_seconds, self._abort)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class DrainingServer(uvicorn.Server):
    """Keeps answering for a moment after SIGTERM; does not re-raise the signal at its end."""

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
        """Listen, and log the address."""
        await super().startup(sockets)
        for server in self.servers:
            for socket in server.sockets:
                log.info("Serving %s at http://%s:%d", self._state.engine.name, *socket.getsockname()[:2])


def http_server(
    state: ServerState,
    host: str,
    port: int,
    *,
    idle_seconds: float = IDLE_SECONDS,
    unread_seconds: float = UNREAD_SECONDS,
) -> DrainingServer:
    """Return the server of `state`, which does not listen yet."""
    drain = state.engine.serving.drain_seconds
    linger = min(LINGER_SECONDS, drain / 3)
    settings = {
        "idle_seconds": idle_seconds,
        "unread_seconds": unread_seconds,
        "most_connections": min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        "by_age": {},
    }
    config = uvicorn.Config(
        make_app(state),
        host=host,
        port=port,
        http=type("Guarded", (GuardedProtocol,), settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(idle_seconds)),
        timeout_graceful_shutdown=max(1, round(drain - linger)),
        h11_max_incomplete_event_size=32 << 10,
        backlog=BACKLOG,
    )
    return DrainingServer(config, state, linger)
