"""JSON in requests and answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from finetune_trainer.serving.request_rows import RequestError

JSON = "application/json"
MAX_BODY = 4 << 20
MOST_DISCARDED = 64 << 20
"""Bytes of a too large body after which the connection is closed."""
BODY_SECONDS = 10.0
"""Time for a client to send a body."""


def json_response(body: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with compact JSON."""
    return Response(json_bytes(body), code, dict(headers or {}), JSON)


def json_bytes(body: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # halves of surrogate pairs that a client sent, as in its request's id
        return json.dumps(body, separators=(",", ":")).encode()


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. RequestError of `read_body` and `parsed_json`."""
    return parsed_json(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Return the body. RequestError 408, 413, 415 if it is compressed, or 499 if the client disconnected."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(415, f"The body has the Content-Encoding {coding[:40]!r}: send it without compression.")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MOST_DISCARDED:
                    raise _too_large()
                if size > MAX_BODY:
                    parts.clear()  # keep reading: a client that still sends would not see the answer
                else:
                    parts.append(part)
    except TimeoutError as error:
        raise RequestError(
            408, f"The body did not arrive within {BODY_SECONDS:g} s.", {"Connection": "close"}
        ) from error
    except ClientDisconnect as error:
        raise RequestError(499, "The client has disconnected.") from error
    if size > MAX_BODY:
        raise _too_large()
    return b"".join(parts)


def parsed_json(content: bytes) -> dict[str, Any]:
    """Return `content` as a JSON object. RequestError 400."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise RequestError(400, "The body is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(400, f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError(400, f"The body must be a JSON object; found {type(body).__name__}.")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _too_large() -> RequestError:
    return RequestError(413, f"The body has more than {MAX_BODY:,} bytes: split the request.", {"Connection": "close"})


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `parameters` of a request."""
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError(422, f"parameters must be an object; found {type(parameters).__name__}.")
    return parameters
