"""Guards around kopf 1.45: for objects that anybody may have written, and for kinds that are served later.

A login handler of kopf may return a session of aiohttp (`kopf.AiohttpSession`). `KopfConnection` has what kopf calls of
one, sends the requests by our client, and does what kopf leaves to the server (kopf/_cogs/clients: api.py, watching.py,
fetching.py in https://github.com/nolar/kopf):

- JSON is cut to a depth that Python can parse: `json.loads` of an object that nests 1,000 levels is a RecursionError,
  which ends kopf.operator.
- A page of a list that is longer than our limit is requested again with fewer objects, and the page after it is
  requested once its objects were handled: kopf would hold the objects of all pages in the queues of its workers.
- An error within a watch (kopf: WatchingError), a page whose token has expired (410), a kind that is no longer served
  (404), or a line that breaks off end that request only, which kopf sends again. Each of them would end kopf.operator.
- A watch that was open during an outage ends with the outage: its connection may hang on a server that is gone.
- Each list is told, as it does not name the objects that were deleted before it and are known here.

Requests are counted, and outages noticed, where all requests of the operator are.

`ServedKinds` does what kopf does when a CustomResourceDefinition has changed, which kopf sees only with the right to
list and watch all of them (kopf/_core/reactor/observation.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, NoReturn, cast
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from kopf import OperatorRegistry, OperatorSettings, WebhookFn
from kopf._cogs.structs.references import Insights
from kopf._core.engines.admission import WebhookError
from kopf._core.reactor.observation import process_discovered_resource_event

from finetune_operator.controller.cluster.kube import Kube, Outage
from finetune_operator.jobs.admission import NoReviewError
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.kubernetes_api.answers import Lines
from finetune_operator.kubernetes_api.client import SMALLER, plural_in
from finetune_operator.kubernetes_api.errors import (
    ApiError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    TooLongError,
    UnauthorizedError,
)
from finetune_operator.kubernetes_api.resources import Resource
from finetune_operator.spec.json_text import bounded

log = logging.getLogger(__name__)

SHORTEST_WATCH_SECONDS = 1.0
"""A watch that ends earlier is followed by a pause of about this length: kopf would begin the next one at once."""
LOOK_AGAIN_SECONDS = 5.0
PAGE_SECONDS = 30.0
"""Longest wait for the objects of a page."""
GONE = b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'
"""Event after which kopf lists again."""
_ERROR_EVENT = b'{"type":"ERROR"'


class KopfConnection:
    """An `aiohttp.ClientSession`, as far as kopf uses one."""

    def __init__(self, kube: Kube, listed: Callable[[str], None]) -> None:
        """`listed` is called with the path of a collection once the first page of a list is there."""
        self.kube = kube
        self._listed = listed
        self._forbidden: set[str] = set()
        self._waiting: Counter[str] = Counter()
        """Listed objects that were not handled yet, by plural."""
        self._handled = asyncio.Event()
        self._limits: dict[str, int] = {}
        """Objects in a page, by path, where the limit that kopf asks for was too high."""
        self.headers = {"User-Agent": kube.manager}
        self.closed = False

    async def close(self) -> None:
        """Do nothing: the connections are our client's."""

    async def request(self, method: str, url: str, **_: object) -> Answer | Watch:
        """Return the answer to a request of kopf's, which only reads. aiohttp.ClientError: kopf tries again."""
        assert method == "get", f"kopf has to write nothing, and sent {method} {url}"
        target = urlsplit(url.removeprefix(self.kube.server))
        query = dict(parse_qsl(target.query))
        try:
            if "watch" in query:
                return await self._watch(target.path, query)
            if "limit" in query:
                return Answer(await self._page(target.path, query))
            return Answer(await self.kube.document(target.path, "discovery"))
        except (UnauthorizedError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and query:
                _again(error)
            return Answer({}, error.code)
        except ApiError as error:
            if isinstance(error, ForbiddenError) and str(error) not in self._forbidden:
                self._forbidden.add(str(error))
                log.warning("no right to read what jobs need, trying again: %s", error)
            _again(error)

    def handled(self, plural: str) -> None:
        """Note that the handler of a listed object has ended."""
        self._waiting[plural] = max(0, self._waiting[plural] - 1)
        self._handled.set()

    async def _all_handled(self, plural: str) -> None:
        # kopf hands on no object whose events it has postponed after an error of its own.
        with suppress(TimeoutError):
            async with asyncio.timeout(PAGE_SECONDS):
                while self._waiting[plural] > 0:
                    self._handled.clear()
                    await self._handled.wait()
        self._waiting[plural] = 0

    async def _page(self, path: str, query: dict[str, str]) -> Manifest:
        plural = plural_in(path)
        await self._all_handled(plural)
        wanted = int(query["limit"])
        while True:
            limit = self._limits.get(path, wanted)
            try:
                page = await self.kube.list_at(path, {**query, "limit": str(limit)})
            except TooLongError:
                if limit == 1:
                    raise
                self._limits[path] = max(1, limit // SMALLER)
                continue
            except GoneError as error:
                # The list has to begin again, which kopf does for this error and not for a 410.
                raise aiohttp.ClientPayloadError(str(error)) from error
            self._limits[path] = min(wanted, 2 * limit)
            items = page.get("items")
            self._waiting[plural] += len(items) if isinstance(items, list) else 0
            if "continue" not in query:
                self._listed(path)
            return page

    async def _watch(self, path: str, query: dict[str, str]) -> Watch:
        began = time.monotonic()
        try:
            async with AsyncExitStack() as opened:
                answer = await opened.enter_async_context(self.kube.watch_at(path, query))
                return Watch(answer, self.kube.outage, opened.pop_all(), began)
        except GoneError:
            return Watch(None, self.kube.outage, AsyncExitStack(), began)


def _again(error: ApiError) -> NoReturn:
    log.debug("kopf tries again: %s", error)
    raise aiohttp.ClientConnectionError(str(error)) from error


class Answer:
    """An `aiohttp.ClientResponse` with one document, as far as kopf uses one."""

    def __init__(self, document: Manifest, status: int = 200) -> None:
        self._document = document
        self.status = status
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def json(self) -> Manifest:
        """Return the document."""
        return self._document

    def raise_for_status(self) -> None:
        """Raise _RefusedError for the status of a refusal."""
        if self.status >= 400:
            raise _RefusedError(self.status)


class _RefusedError(aiohttp.ClientResponseError):
    def __init__(self, status: int) -> None:
        super().__init__(cast(Any, None), (), status=status)

    def __str__(self) -> str:
        return f"the API server answered {self.status}"


class Watch:
    """An `aiohttp.ClientResponse` whose content are the events of a watch, as far as kopf uses one."""

    status = 200

    def __init__(
        self, answer: aiohttp.ClientResponse | None, outage: Outage, opened: AsyncExitStack, began: float
    ) -> None:
        """`answer` None: the server no longer has the version from which kopf wants to watch."""
        self._answer = answer
        self._outage = outage
        self._opened = opened
        self._began = began

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    def close(self) -> None:
        """End the watch."""
        if self._answer is not None:
            self._answer.close()

    @property
    def content(self) -> Watch:
        """The body."""
        return self

    async def iter_chunked(self, _size: int) -> AsyncGenerator[bytes, None]:
        """Yield lines of the body, always whole ones."""
        if self._answer is None:
            yield GONE
            await self._pause()
            return
        lines = Lines()
        try:
            while chunk := await self._chunk(self._answer.content):
                for line in lines.take(chunk):
                    if line.startswith(_ERROR_EVENT) and not _is_gone(line):
                        log.debug("the API server ends a watch: %s", line[:500])
                        await self._pause()
                        return
                    yield bounded(line) + b"\n"
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("a watch has ended: %s", error or type(error).__name__)
        await self._pause()

    async def _pause(self) -> None:
        if time.monotonic() < self._began + SHORTEST_WATCH_SECONDS:
            await asyncio.sleep(SHORTEST_WATCH_SECONDS * (0.5 + random.random()))

    async def _chunk(self, content: aiohttp.StreamReader) -> bytes:
        """Return the next part of the body, empty at its end. TimeoutError after an outage of the API server."""
        async with self._outage.until_end():
            return await content.readany()


def _is_gone(line: bytes) -> bool:
    try:
        event: Any = json.loads(line)
        return bool(event["object"]["code"] == 410)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class ServedKinds:
    """Has kopf watch the kinds that the API server serves now."""

    def __init__(
        self, settings: OperatorSettings, registry: OperatorRegistry, needed: Resource, groups: set[str]
    ) -> None:
        """`needed`: the kind without which there is nothing to do. `groups`: API groups that may be served later."""
        self._settings = settings
        self._registry = registry
        self._needed = needed
        self._groups = groups
        self.insights = Insights()
        """Kinds and namespaces that kopf has found, for kopf.operator."""

    async def follow(self, changed: asyncio.Event) -> None:
        """Look for the needed kind until it is served, then for the others whenever the served kinds have changed. A
        watch of the needed kind stays, as it goes on by itself when somebody replaces the CustomResourceDefinition.
        """
        await self.insights.ready_resources.wait()
        while not any(one.plural == self._needed.plural for one in self.insights.watched_resources):
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            await self._look(self._needed.group_kind.group)
        while True:
            await changed.wait()
            changed.clear()
            # Twice, as one of several API servers may learn of a kind later than the one that was asked before.
            for _ in range(2):
                for group in sorted(self._groups):
                    await self._look(group)
                await asyncio.sleep(LOOK_AGAIN_SECONDS)

    async def _look(self, group: str) -> None:
        await process_discovered_resource_event(
            raw_event={"type": "MODIFIED", "object": {"spec": {"group": group}}},
            settings=self._settings,
            registry=self._registry,
            insights=self.insights,
        )


def reviewing(answer: WebhookFn) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Return kopf's function for admission, which raises NoReviewError for a review that kopf has no handler for."""

    async def answered(review: dict[str, Any]) -> Any:
        try:
            return await answer(cast(Any, review))
        except WebhookError as error:
            raise NoReviewError(str(error)) from error

    return answered
