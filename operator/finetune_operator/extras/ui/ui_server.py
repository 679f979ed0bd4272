"""Local HTTP server of the pages. It listens on 127.0.0.1 only, answers GET and HEAD, and writes nothing.

`access` decides which requests are answered. Pages load their own style and script from here and nothing from
elsewhere, and no script is inline, so text that got into a page as HTML could not run.
"""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from os import fsdecode
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes, urlencode, urlsplit

from finetune_contract.browser_requests import foreign
from finetune_contract.charts import STYLE
from finetune_operator.cli.terminal.console import print_error
from finetune_operator.extras.ui.pages import Page, Pages
from finetune_operator.extras.ui.request_checks import Keys, cookie_name, refusal

ADDRESS = "127.0.0.1"
LIFE_SECONDS = 60.0
"""Life of a connection, which is for one request. A client that sends a byte a second is never silent; a cluster may
take half of it to answer.
"""
MOST_CONNECTIONS = 100
"""Connections at a time, each of which takes a thread and a file; one more replaces the oldest."""
MOST_QUERY_FIELDS = 100
HTML = "text/html; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"
STATIC = {"ui.css": "text/css; charset=utf-8", "ui.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
FILE_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""Policy of files that a run has left: their own styles, no scripts, an origin of their own."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request."""

    body: bytes
    content: str = HTML
    code: int = 200
    policy: str = PAGE_POLICY
    headers: dict[str, str] = field(default_factory=dict)


class Server(ThreadingHTTPServer):
    """Server that listens at once; `serve_forever` answers. Raises OSError if the port is taken."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, pages: Pages, port: int, life_seconds: float = LIFE_SECONDS) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.pages = pages
        self.keys = Keys()
        self._life_seconds = life_seconds
        self._began: dict[socket, float] = {}
        """Open connection -> time of its accept, oldest first."""

    @property
    def port(self) -> int:
        """Port, also if any free one was requested."""
        return int(self.server_address[1])

    def url(self, token: str | None = None) -> str:
        """Return the address of the first page, with a token."""
        return f"http://{ADDRESS}:{self.port}/?{urlencode({'token': token or self.keys.token})}"

    def server_bind(self) -> None:
        """Bind without the base class's search for the host's name, which can ask a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection; end the oldest one if there are too many."""
        open_ones = [*self._began]
        if len(open_ones) >= MOST_CONNECTIONS:
            self._end(open_ones[0])
        self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections whose time is up, twice a second."""
        latest = time.monotonic() - self._life_seconds
        for connection, began in [*self._began.items()]:
            if began < latest:
                self._end(connection)

    def _end(self, connection: socket) -> None:
        """Have the connection's thread, which waits for its client, end and close it."""
        self._began.pop(connection, None)
        with suppress(OSError):  # it may have ended meanwhile
            connection.shutdown(SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that is answered."""
        self._began.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report bugs; a browser that disconnects in the middle is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: Server

    def do_GET(self) -> None:
        """Answer the request."""
        try:
            answer = self._answer()
        except Exception as error:
            print_error(
                f"{self.path}: {type(error).__name__}: {error}. This is a bug in finetune ui: please report it."
            )
            text = "This page cannot be rendered; the terminal of finetune ui shows the error.\n"
            answer = Answer(text.encode(), PLAIN, 500)
        self._send(answer)

    def do_HEAD(self) -> None:
        """Answer the request without the body."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request, or one with another method."""
        method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if method else HTTPStatus(code)
        text = "This page is read only: GET and HEAD." if method else status.phrase
        self.close_connection = True
        self._send(Answer(f"{text}\n".encode(), PLAIN, status, headers={"Allow": "GET, HEAD"} if method else {}))

    def version_string(self) -> str:
        """Return the server's name without versions."""
        return "finetune"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows the address."""

    def _answer(self) -> Answer:
        server = self.server
        try:
            target = urlsplit(self.path)
            query = parse_qs(target.query, max_num_fields=MOST_QUERY_FIELDS, errors="surrogateescape")
        except ValueError:
            return Answer(b"This is not the address of a page.\n", PLAIN, 400)
        headers = {name.title(): value for name, value in self.headers.items()}
        for token in query.pop("token", [])[:1]:
            refused = foreign(headers, server.port)
            if refused is None and server.keys.fits(token):
                return self._redirect_with_cookie(target.path, urlencode(query, doseq=True, errors="surrogateescape"))
        refused = refusal(headers, server.port, server.keys)
        if refused is not None:
            return Answer(f"{refused.text}\n".encode(), PLAIN, refused.code)
        path = [fsdecode(unquote_to_bytes(part)) for part in target.path.split("/")[1:]]
        answer = route(server.pages, path, query)
        if answer is None:
            not_found = server.pages.message(
                404, "Not found", "There is no such page: the run or job may have been deleted."
            )
            return _of(not_found)
        return answer

    def _redirect_with_cookie(self, path: str, query: str) -> Answer:
        """Store the token in a cookie and remove it from the address, which browsers remember and people copy."""
        location = "/" + path.lstrip("/\\") + (f"?{query}" if query else "")
        name, token = cookie_name(self.server.port), self.server.keys.token
        cookie = f"{name}={token}; HttpOnly; SameSite=Lax; Path=/"
        return Answer(b"", code=303, headers={"Location": location, "Set-Cookie": cookie})

    def _send(self, answer: Answer) -> None:
        etag = f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'
        headers = getattr(self, "headers", None)
        unchanged = answer.code == 200 and headers is not None and headers.get("If-None-Match") == etag
        self.send_response(304 if unchanged else answer.code)
        sent = {
            "Content-Type": answer.content,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            **({"ETag": etag} if answer.code == 200 else {}),
            **answer.headers,
        }
        for name, value in sent.items():
            if not (unchanged and name.startswith("Content-")):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and not unchanged:
            self.wfile.write(answer.body)


def route(pages: Pages, path: list[str], query: dict[str, list[str]]) -> Answer | None:
    """Return the answer for a path; None if it names nothing. Names go to `pages`, which look them up."""
    match path:
        case [""]:
            return _of(pages.index())
        case ["static", name]:
            return _static(name)
        case ["run", name]:
            return _page_answer(pages.run(name))
        case ["run", name, "report"]:
            report = pages.report(name)
            return None if report is None else Answer(report, policy=FILE_POLICY)
        case ["run", name, "log", stage]:
            text = pages.log(name, stage)
            return None if text is None else Answer(text.encode(errors="replace"), PLAIN, policy=FILE_POLICY)
        case ["compare"]:
            return _of(pages.compare(query.get("run", [])))
        case ["job", namespace, name]:
            return _page_answer(pages.job(namespace, name))
        case _:
            return None


def _of(page: Page) -> Answer:
    return Answer(page.html.encode(errors="replace"), code=page.code)


def _page_answer(page: Page | None) -> Answer | None:
    return None if page is None else _of(page)


@cache
def _static(name: str) -> Answer | None:
    if name == "charts.css":
        return Answer(STYLE.encode(), STATIC["ui.css"])
    if name not in STATIC:
        return None
    return Answer(files("finetune_operator.extras.ui").joinpath("static", name).read_bytes(), STATIC[name])
