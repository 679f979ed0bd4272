"""Read the bodies of requests within limits: on each body, on its time, and on all together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from aiohttp import web

SMALL_BYTES = 64 * 1024


class BodyError(Exception):
    """The body is refused; the text has the reason, in our own words."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Bodies:
    """The bodies that one server reads."""

    limit_bytes: int
    """Limit of one body."""
    seconds: float
    """Time limit from the request to the end of its body."""
    large: int = 8
    """Bodies beyond SMALL_BYTES that are read at a time. One more replaces the oldest: an honest body arrives in a
    moment, and a slow sender must not keep it out.
    """
    _reading: dict[asyncio.Task[object], None] = field(default_factory=dict)

    async def read(self, request: web.BaseRequest) -> bytes:
        """Return the whole body, also of unknown length. BodyError."""
        if request.content_length is not None and request.content_length > self.limit_bytes:
            raise self._too_long()
        body = bytearray()
        task = asyncio.current_task()
        assert task is not None, "requests are handled by tasks"
        try:
            async with asyncio.timeout(self.seconds):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > self.limit_bytes:
                        raise self._too_long()
                    if len(body) > SMALL_BYTES and task not in self._reading:
                        self._begin(task)
        except TimeoutError:
            why = f"the body did not arrive within {self.seconds:g} s"
            raise BodyError(HTTPStatus.REQUEST_TIMEOUT, why) from None
        except (aiohttp.ClientPayloadError, aiohttp.http_exceptions.HttpProcessingError, web.RequestPayloadError):
            raise BodyError(HTTPStatus.BAD_REQUEST, "the body does not match its headers") from None
        finally:
            self._reading.pop(task, None)
        return bytes(body)

    def _begin(self, task: asyncio.Task[object]) -> None:
        if len(self._reading) >= self.large:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.cancel()
        self._reading[task] = None

    def _too_long(self) -> BodyError:
        return BodyError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {self.limit_bytes} bytes")
