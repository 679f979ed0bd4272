"""Sends requests to the API server: raw JSON in and out, errors by their meaning, long answers within bounds.

Retries are here and nowhere else: 429 (after `Retry-After`), 5xx and broken connections, with a growing, jittered
delay. Repeating is harmless for every request: objects have names, so a second create finds the first one; a delete
names the uid, and a status names the version that it was computed from. An answer that refuses is never retried.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Literal, TypeAlias

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.rest import RESTClientObject
from pydantic import JsonValue

from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.kubernetes_api import errors
from finetune_operator.kubernetes_api.answers import Lines, Page, WatchEvent, delay, event_of, page_of
from finetune_operator.kubernetes_api.configuration import configure
from finetune_operator.kubernetes_api.errors import ApiError, UnavailableError, error_of
from finetune_operator.kubernetes_api.resources import POD, Resource, resource_of
from finetune_operator.spec.json_text import loads

Verb: TypeAlias = Literal["get", "list", "watch", "create", "update", "patch", "delete"]
Query: TypeAlias = Mapping[str, str]

TRIES = 5
REQUEST_SECONDS = 30.0
LIST_SECONDS = 60.0
WATCH_SECONDS = 300
"""Life of a watch; up to a minute more at random, so that not all of them start again at once."""
SILENCE_SECONDS = 150.0
"""Longest silence of a watch. The server sends a bookmark about once a minute; two missing mean a dead connection."""
DEAD_SECONDS = 10
"""Time after which the kernel gives a connection up whose server's kernel does not answer."""
PAGE = 500
ANSWER_BYTES = 16 * 1024 * 1024
"""Longest answer; a longer page of a list is requested again with fewer objects. One object has about 3 MiB at most,
and anybody who may create jobs may store many of that size.
"""
SMALLER = 8
AT_ONCE_BYTES = 128 * 1024
"""Longest text that is parsed on the event loop; longer ones are parsed in a thread."""
POD_LOG = f"{POD.plural}/log"
"""Resource under which requests for logs are counted."""
LOG_LINE_BYTES = 1024 * 1024
"""A longer line of a log is passed on in parts: the program in a pod decides when a line ends."""
MERGE_PATCH = "application/merge-patch+json"
_METHODS: Mapping[Verb, str] = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}
"""All others are GET."""


async def connect(
    manager: str, kubeconfig: Path | None, context: str | None, pool: int | None = None, *, proxies: bool = False
) -> tuple[client.ApiClient, str]:
    """Return a client for the configured cluster, and the namespace of its context. NoClusterError.

    `manager` is the user agent. At most `pool` connections are open at once (None: the library's default). `proxies`:
    take them from the environment; aiohttp then reads ~/.netrc before each request.
    """
    configuration = client.Configuration(connection_pool_maxsize=pool, client_session_kwargs={"trust_env": proxies})
    namespace = await configure(configuration, kubeconfig, context)
    api = client.ApiClient(configuration=configuration)
    api.rest_client = _Connections(configuration)
    api.user_agent = f"{manager}/{distribution_version('finetune-operator')}"
    return api, namespace


class _Connections(RESTClientObject):
    """The library's connections, which end when their server is gone: when one of several API servers loses its power,
    or a node forgets where its connections lead, nobody else ends those that are open.
    """

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=self.maxsize, ssl=self.ssl_context, socket_factory=_watched_socket)


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose kernel asks the server's after DEAD_SECONDS / 2 of silence, and gives the connection up
    after DEAD_SECONDS without an answer.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux has all of them, as each operator has; the command also runs where some are missing.
    for option, value in (
        ("TCP_KEEPIDLE", DEAD_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_USER_TIMEOUT", DEAD_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


@dataclass(frozen=True)
class Request:
    """One request."""

    verb: Verb
    path: str
    counted: str
    """Resource under which metrics count it."""
    query: Query = field(default_factory=dict)
    body: Manifest | str | None = None
    content_type: str = "application/json"
    seconds: float | None = REQUEST_SECONDS
    """Limit for the whole answer; None: no limit."""
    tries: int | None = None
    """Maximum number of tries; None: the client's."""

    def __str__(self) -> str:
        """Return the text for error messages."""
        return f"{self.verb} {self.path}"


@dataclass
class KubernetesClient:
    """Client of the API server. Methods raise ApiError."""

    api: client.ApiClient
    manager: str
    """Field manager of all that it writes."""
    tries: int = TRIES
    connect_seconds: float = REQUEST_SECONDS
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    @property
    def server(self) -> str:
        """URL of the API server."""
        host: str = self.api.configuration.host
        return host

    # ------------------------------------------------------------------------------------------------------- reading

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """Return one object. NotFoundError."""
        return await self._json(Request("get", resource.path(namespace, name), resource.plural))

    async def document(self, path: str, counted: str) -> Manifest:
        """Return the document at a path that belongs to no resource; `counted`: see `Request`."""
        return await self._json(Request("get", path, counted))

    async def list_at(self, path: str, query: Query) -> Manifest:
        """Return the answer to a list, which may be only a page of it, as it is."""
        return await self._json(Request("list", path, plural_in(path), query, seconds=LIST_SECONDS))

    def watch_at(self, path: str, query: Query) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return the answer to a watch, once it has begun; its body is read as it arrives."""
        return self._streamed(Request("watch", path, plural_in(path), query), SILENCE_SECONDS)

    async def serves(self, resource: Resource) -> bool:
        """Return whether the API server serves the resource."""
        try:
            discovery = await self.document(f"/apis/{resource.api_version}", f"{resource.plural}/discovery")
        except errors.NotFoundError:
            return False
        kinds = discovery.get("resources")
        return isinstance(kinds, list) and any(
            isinstance(kind, dict) and kind.get("name") == resource.plural for kind in kinds
        )

    async def serves_group(self, group: str) -> bool:
        """Return whether the API server lists the API group. Unlike `serves`, it does not fail while the server behind
        an aggregated API is down.
        """
        groups = (await self.document("/apis", "apis/discovery")).get("groups")
        return isinstance(groups, list) and any(
            isinstance(entry, dict) and entry.get("name") == group for entry in groups
        )

    async def list_objects(
        self, resource: Resource, namespace: str | None = None, labels: str | None = None, fields: str | None = None
    ) -> tuple[list[Manifest], int]:
        """Return all objects, of one namespace or of all, and their resource version: for lists that fit in memory."""
        items: list[Manifest] = []
        version = 0
        async for page in self.pages(resource, namespace, labels, fields):
            if page.first:
                items.clear()
            items += page.items
            version = page.version
        return items, version

    async def pages(
        self, resource: Resource, namespace: str | None = None, labels: str | None = None, fields: str | None = None
    ) -> AsyncGenerator[Page, None]:
        """Yield the same in pages, so that no more than one is in memory. The list starts again, with a page that is
        the first again, when the server no longer has the version of the first page.
        """
        left, limit, next_page = TRIES, PAGE, ""
        path = resource.path(namespace)
        while True:
            query = _non_empty(
                {"limit": str(limit), "labelSelector": labels, "fieldSelector": fields, "continue": next_page}
            )
            request = Request("list", path, resource.plural, query, seconds=LIST_SECONDS)
            try:
                answer = await self._json(request)
            except errors.GoneError:
                left, next_page = left - 1, ""
                if not left:
                    raise
                continue
            except errors.TooLongError:
                if limit == 1:
                    raise
                limit = max(1, limit // SMALLER)
                continue
            page = page_of(str(request), resource, answer, first=not next_page)
            yield page
            next_page, limit = page.next_page, min(PAGE, 2 * limit)
            if not next_page:
                return

    async def watch(
        self,
        resource: Resource,
        version: int,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the changes of objects after `version`, until the server ends the watch, which it does every few
        minutes.

        GoneError if the server no longer has that version; UnavailableError if the connection breaks or is silent for
        longer than the bookmarks that the server sends about once a minute.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(version),
            "timeoutSeconds": str(WATCH_SECONDS + random.randrange(60)),
            **_non_empty({"labelSelector": labels, "fieldSelector": fields}),
        }
        request = Request("watch", resource.path(namespace), resource.plural, query)
        async with aclosing(self._lines(request, SILENCE_SECONDS)) as lines:
            async for line in lines:
                try:
                    value = await _parsed(line)
                except ValueError:
                    value = None
                yield event_of(str(request), resource, value)

    def log_lines(
        self, namespace: str, pod: str, query: Query, silence_seconds: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a pod's log as they arrive."""
        request = Request("get", POD.path(namespace, pod, "log"), POD_LOG, query)
        return self._lines(request, silence_seconds, LOG_LINE_BYTES)

    # ------------------------------------------------------------------------------------------------------- writing

    async def create(self, manifest: Manifest, namespace: str | None = None, *, dry_run: bool = False) -> Manifest:
        """Create an object and return it as it is stored. AlreadyExistsError when its name is taken."""
        resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
        query = self._write_query(dry_run)
        return await self._json(Request("create", resource.path(namespace), resource.plural, query, manifest))

    async def replace(self, manifest: Manifest, namespace: str | None, name: str) -> Manifest:
        """Replace an object. With a resourceVersion in it, ConflictError when it has changed since."""
        resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
        path, query = resource.path(namespace, name), self._write_query()
        return await self._json(Request("update", path, resource.plural, query, manifest))

    async def merge(
        self, resource: Resource, namespace: str, name: str, body: Manifest, *, dry_run: bool = False
    ) -> Manifest:
        """Change the fields in `body` and return the object. With a uid in it, ConflictError for another object."""
        path, query = resource.path(namespace, name), self._write_query(dry_run)
        return await self._json(Request("patch", path, resource.plural, query, body, MERGE_PATCH))

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None, *, dry_run: bool = False
    ) -> Manifest | None:
        """Delete an object and, in the background, its dependents. Return it while it still ends, None once it is
        deleted. ConflictError if the name belongs to an object with another uid.
        """
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if dry_run:
            # The API server ignores the query of a deletion that has a body.
            body["dryRun"] = ["All"]
        try:
            left = await self._json(Request("delete", resource.path(namespace, name), resource.plural, body=body))
        except errors.NotFoundError:
            return None
        return left if left.get("kind") == resource.kind else None

    def _write_query(self, dry_run: bool = False) -> Query:
        return {"fieldManager": self.manager, **({"dryRun": "All"} if dry_run else {})}

    # ------------------------------------------------------------------------------------------------------ requests

    async def _json(self, request: Request) -> Manifest:
        answer = await self._body(request)
        try:
            value = await _parsed(answer)
        except ValueError as error:
            raise UnavailableError(str(request), 0, "", "the answer is not JSON") from error
        if not isinstance(value, dict):
            raise UnavailableError(str(request), 0, "", "the answer is not an object")
        return value

    async def _body(self, request: Request) -> bytes:
        tries = request.tries or self.tries
        for attempt in range(1, tries + 1):
            began = time.monotonic()
            try:
                answer = await self._once(request)
            except ApiError as error:
                self._count(request, error.code, began)
                if attempt == tries or not isinstance(error, errors.TooManyRequestsError | UnavailableError):
                    raise
                await self.sleep(delay(attempt, error.retry_after, random.random()))
            else:
                self._count(request, 200, began)
                return answer
        raise AssertionError("a loop of at least one try")

    async def _once(self, request: Request) -> bytes:
        try:
            async with self._sent(request) as response:
                answer = await _whole(request, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            no_answer = errors.NoAnswerError(str(request), 0, "", f"no answer: {error or type(error).__name__}")
            self._failed(request, no_answer)
            raise no_answer from error
        if response.status >= 300:
            raise error_of(str(request), response.status, answer, response.headers.get("Retry-After"))
        self._answered()
        return answer

    async def _lines(
        self, request: Request, silence_seconds: float | None, longest: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer line by line, also a last one without an end."""
        lines = Lines(longest)
        async with self._streamed(request, silence_seconds) as answer:
            async for chunk in answer.content.iter_any():
                for line in lines.take(chunk):
                    yield line
            if lines.rest:
                yield lines.rest

    @asynccontextmanager
    async def _streamed(
        self, request: Request, silence_seconds: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Yield an answer without an end, once it has begun. ApiError, also in place of errors while it is read."""
        began = time.monotonic()
        try:
            async with self._sent(replace(request, seconds=None), silence_seconds) as answer:
                self._count(request, answer.status, began)
                if answer.status >= 300:
                    retry_after = answer.headers.get("Retry-After")
                    raise error_of(str(request), answer.status, await _whole(request, answer), retry_after)
                self._answered()
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise errors.NoAnswerError(
                str(request), 0, "", f"connection broken: {error or type(error).__name__}"
            ) from error

    @asynccontextmanager
    async def _sent(
        self, request: Request, silence_seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to one request, whose body is still to be read."""
        timeout = aiohttp.ClientTimeout(request.seconds, sock_connect=self.connect_seconds, sock_read=silence_seconds)
        method, url, headers, sent, _ = await self.api.param_serialize(
            _METHODS.get(request.verb, "GET"),
            request.path,
            query_params=list(request.query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        sent_at = datetime.now(UTC)
        answered = await self.api.call_api(method, url, headers, body=sent, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answered.response
        self._responded(response.headers.get("Date"), sent_at)
        async with response:
            yield response

    # ----------------------------------------------------------------------------------- hooks: outcomes of requests

    def _responded(self, date: str | None, sent: datetime) -> None:
        """Note the `Date` header of an answer to a request that was sent at `sent`."""

    def _answered(self) -> None:
        """Note that a request was carried out."""

    def _failed(self, request: Request, error: ApiError) -> None:
        """Note that the request had no answer."""

    def _count(self, request: Request, code: int, began: float) -> None:
        """Note the end of a request that began then, on the monotonic clock; `code` 0: it had no answer."""


def plural_in(path: str) -> str:
    """Return the plural of the resource whose collection has this path."""
    return path.rpartition("/")[2]


def _non_empty(query: Mapping[str, str | None]) -> Query:
    return {name: value for name, value in query.items() if value}


async def _parsed(text: bytes) -> JsonValue:
    """Return the value of JSON of any length without blocking the event loop. ValueError."""
    return loads(text) if len(text) <= AT_ONCE_BYTES else await asyncio.to_thread(loads, text)


async def _whole(request: Request, response: aiohttp.ClientResponse) -> bytes:
    """Return the body. TooLongError."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            response.close()
            raise errors.TooLongError(str(request), 0, "", f"the answer has more than {ANSWER_BYTES:,} bytes")
    return bytes(body)
