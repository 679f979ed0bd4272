"""Requests for fuzzing a server: whole ones and damaged ones, with values that break parsers; by hypothesis."""

from __future__ import annotations

import errno
import json
import re
import select
import socket
from typing import Any, TypeAlias

from hypothesis import strategies as st

from suite_plugins.patience import patient

Port: TypeAlias = int
CANARY = "canary7731"
"""Marker for a secret in a request: no answer and no log may contain it."""
GOOD = "good-token"
ALLOWED = frozenset(
    {200, 204, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 429, 431, 501, 503, 505}
)
"""Every status but those that report a fault of ours."""


def answer(port: Port, sent: bytes, whole: bool = False) -> bytes:
    """Send it and return the answer, until the server closes. Unless the request is `whole`, the sending side is closed
    once the server answers, or seems to wait for more.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=patient(60)) as connection:
        received = b""
        try:
            connection.sendall(sent)
            if not whole:
                select.select([connection], [], [], 0.05)
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except OSError as error:
            # The server did not read all of it, and may have closed already.
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
    return received


def statuses(response: bytes) -> set[int]:
    """Return the statuses of all answers in `response`."""
    return {int(status) for status in re.findall(rb"HTTP/\d\.\d (\d{3}) ", response)}


def request(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + body


# ------------------------------------------------------------------------------------------------------------ examples

TEXTS = st.text(max_size=20) | st.sampled_from([CANARY, "", "\0", "😀", "../..", "%00", "é" * 300])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
DEEP = st.integers(1, 5000).map(lambda levels: b'{"a":' * levels + b"1" + b"}" * levels)


def shaped(model: Any) -> st.SearchStrategy[Any]:
    """Return values in the form of `model`, some of them replaced by others."""
    if isinstance(model, dict):
        whole = st.fixed_dictionaries({}, optional={name: shaped(value) for name, value in model.items()})
        return whole | st.builds(lambda known, more: {**known, **more}, whole, st.dictionaries(TEXTS, VALUES)) | VALUES
    if isinstance(model, list):
        return st.lists(shaped(model[0]) if model else VALUES, max_size=5) | VALUES
    return st.just(model) | VALUES


def bodies(model: Any) -> st.SearchStrategy[bytes]:
    written = shaped(model).map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    return st.just(json.dumps(model).encode()) | written | DEEP | st.binary(max_size=200)


def damaged(whole: bytes, at: int, kind: str, piece: bytes) -> bytes:
    """Return the bytes with one change."""
    place = at % (len(whole) + 1)
    match kind:
        case "cut":
            return whole[:place]
        case "insert":
            return whole[:place] + piece + whole[place:]
        case "replace":
            return whole[:place] + piece + whole[place + len(piece) :]
        case "twice":
            return whole + whole
        case _:
            return whole


def sendings(paths: list[str], model: Any) -> st.SearchStrategy[bytes]:
    path = st.sampled_from(paths) | TEXTS.map(lambda text: f"/{text}")
    tokens = st.sampled_from([GOOD, CANARY, "a.b.c", "x" * 5000])
    header = (
        st.tuples(st.just("Authorization"), tokens.map(lambda token: f"Bearer {token}"))
        | st.tuples(st.sampled_from(["Content-Type", "Content-Encoding", "Transfer-Encoding", "Expect", "Cookie"]),
                    st.sampled_from(["application/json", "gzip", "chunked", "100-continue", CANARY, "a" * 9000]))
        | st.tuples(st.just("Content-Length"), st.sampled_from(["-1", "0", "99999999999", "1e3", CANARY]))
        | st.tuples(TEXTS, TEXTS)
    )  # fmt: skip
    method = st.sampled_from(["POST", "GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "TRACE", CANARY, ""])
    whole = st.builds(request, method, path, st.lists(header, max_size=4), bodies(model))
    good = st.builds(request, st.just("POST"), st.sampled_from(paths), st.just([("Authorization", f"Bearer {GOOD}")]),
                     bodies(model))  # fmt: skip
    how = st.sampled_from(["", "", "cut", "insert", "replace", "twice"])
    return st.builds(damaged, whole | good, st.integers(0, 10_000), how, st.binary(min_size=1, max_size=8))
