"""Serve probes and metrics over plain HTTP.

/healthz passes on what kopf's probe handlers report, from an endpoint of kopf that only this process can reach. It
fails when a task that has to run for ever has ended, or when the event loop was more than a minute late: the kubelet
then restarts the operator, which loses nothing. /readyz succeeds once all objects are known; a stand-by is
ready too. Neither shows anything about jobs. The port is open to many: connections are limited (listener.py), so that
the kubelet is served whoever else calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import aiohttp
from aiohttp import web

from finetune_operator.controller.servers.listener import Bounds
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.sites import Site

HTTP_PORT = 8080
BEAT_SECONDS = 1.0
BEATS = 60
"""Beats over which the largest lag is kept: a minute, about the interval at which metrics are read."""
LAG_LIMIT_SECONDS = 60.0
LIVENESS_SECONDS = 3.0
BOUNDS = Bounds(connections=128, seconds=20.0)
METRICS_PAUSE = 10
"""The metrics page is reused for this many times the duration of its generation."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(Protocol):
    """Health of the operator, as messages."""

    def missing(self) -> Sequence[str]:
        """Return messages on state that is still missing before jobs can be reconciled; empty: none."""
        ...


class Faults(Protocol):
    """Faults of the operator, as messages."""

    async def faults(self) -> Sequence[str]:
        """Return messages on what has to be and is not; empty: none."""
        ...


class KopfLiveness:
    """Facts of kopf's liveness endpoint, which itself has no limit on connections."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def faults(self) -> Sequence[str]:
        """See `Faults`."""
        try:
            timeout = aiohttp.ClientTimeout(LIVENESS_SECONDS)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self._url) as answer:
                answer.raise_for_status()
                facts = await answer.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            return [f"kopf does not report: {type(error).__name__}"]
        return [str(fault) for faults in facts.values() for fault in faults]


class Heartbeat:
    """Measures how late the event loop wakes up tasks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._lags: deque[float] = deque(maxlen=BEATS)

    def lag(self) -> float:
        """Return the seconds by which the next beat is late already; 0 before the first."""
        return 0.0 if self._last is None else max(0.0, self._clock() - self._last - BEAT_SECONDS)

    def largest_lag(self) -> float:
        """Return the largest lag of the last minute in seconds, that of the next beat included."""
        return max(self.lag(), *self._lags, 0.0)

    def beat(self) -> None:
        """Note the lag of a beat; the next one is due after BEAT_SECONDS."""
        self._lags.append(self.lag())
        self._last = self._clock()

    async def run(self) -> None:
        """Beat until it is cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)


class Endpoints:
    """Serves /healthz, /readyz and /metrics."""

    def __init__(self, health: Health, liveness: Faults, metrics: Metrics, heartbeat: Heartbeat | None = None) -> None:
        self._health = health
        self._liveness = liveness
        self._metrics = metrics
        self._heartbeat = heartbeat or Heartbeat()
        metrics.follow_event_loop(self._heartbeat.largest_lag)
        self._site: Site | None = None
        self._exposed = b""
        self._exposed_until = float("-inf")
        self._beating: asyncio.Task[None] | None = None

    async def start(self, host: str | None = None, port: int = HTTP_PORT) -> int:
        """Listen on `host` (None: all addresses); return the port, which is chosen if `port` is 0."""
        self._beating = asyncio.create_task(self._heartbeat.run(), name="heartbeat")
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics_page}
        routes = {(method, path): page for path, page in pages.items() for method in ("GET", "HEAD")}
        self._site = Site("probes and metrics", routes, BOUNDS)
        return await self._site.start(host, port)

    async def stop(self) -> None:
        """Stop, also after a start that failed."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        if self._site is not None:
            await self._site.stop()
        self._beating = self._site = None

    async def _healthz(self, _request: web.BaseRequest) -> web.Response:
        faults = list(await self._liveness.faults())
        lag = self._heartbeat.lag()
        if lag > LAG_LIMIT_SECONDS:
            faults.append(f"the event loop is {lag:.0f} s late")
        return _page(faults)

    async def _readyz(self, _request: web.BaseRequest) -> web.Response:
        return _page(self._health.missing())

    async def _metrics_page(self, _request: web.BaseRequest) -> web.Response:
        began = time.monotonic()
        if began > self._exposed_until:
            self._exposed = self._metrics.exposition()
            # Frequent requests use at most about a tenth of the processor.
            self._exposed_until = time.monotonic() + METRICS_PAUSE * (time.monotonic() - began)
        return web.Response(body=self._exposed, headers={"Content-Type": _TEXT})


def _page(problems: Sequence[str]) -> web.Response:
    return web.Response(text="".join(f"{line}\n" for line in problems) or "ok\n", status=503 if problems else 200)
