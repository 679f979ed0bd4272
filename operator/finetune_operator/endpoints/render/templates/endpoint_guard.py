"""ASGI middleware of vLLM's servers in an endpoint: it answers the endpoint's paths only.

vLLM checks its key for paths below /v1 and a few others. It also serves /invocations, which computes texts as well,
without the key. So every path that is neither below /v1 nor a probe is answered 404. This file is mounted into vLLM's
own image, and imports the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/metrics")
"""Paths of the kubelet and of Prometheus, which have no token."""
GUARDED = "/v1/"
"""Paths of requests, for which vLLM checks its key."""
REVISION = "FINETUNE_ENDPOINT_REVISION"


class EndpointGuard:
    """Pass requests for the endpoint's paths on, and add the number of its revision to their answers."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._revision = os.environ.get(REVISION, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def with_revision(message: Message) -> None:
            if message["type"] == "http.response.start" and self._revision:
                message = {**message, "headers": [*message["headers"], (b"x-endpoint-revision", self._revision)]}
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and (scope["path"] in OPEN or scope["path"].startswith(GUARDED)):
            await self._app(scope, receive, with_revision)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Not Found"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
