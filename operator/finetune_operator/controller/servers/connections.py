"""Connections whose answers and logs hold our own text only: aiohttp's own repeat parts of the request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""Time for reading and dropping the rest of a body after its answer: a client that still writes would not see it."""


class Connection(web.RequestHandler):
    """One connection."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to input that is not HTTP, or that a bug kept from being handled. Raise ConnectionError if
        an answer was begun before.
        """
        if isinstance(exc, ConnectionError):
            log.debug("a client disconnected before its answer")
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("a request was not handled", exc_info=exc)
        else:
            log.debug("a request could not be read (status %d)", status)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was already started")
        why = "this is not an HTTP request" if status == HTTPStatus.BAD_REQUEST else "not handled"
        answer = web.json_response({"error": why}, status=status)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log that a connection broke; the text of the error might hold parts of the request."""
        log.warning("a connection broke: %s", type(kw.get("exc_info")).__name__)


class Server(web.Server):
    """aiohttp's server with such connections."""

    def __init__(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, keepalive_seconds: float
    ) -> None:
        """`keepalive_seconds`: how long an idle connection stays open."""
        super().__init__(
            handle,
            access_log=None,
            # A compressed body could be of any size; it is not JSON then, and refused as that.
            auto_decompress=False,
            keepalive_timeout=keepalive_seconds,
            lingering_time=LINGER_SECONDS,
        )

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)
