"""What the operator serves beside its work: probes and metrics over plain HTTP, and the progress server.

/healthz fails when something that has to run for ever has ended, or when the event loop came round more than a minute
too late: the kubelet then starts the operator anew, which loses nothing. /readyz tells that all objects are known; a
replica that stands by is ready too. Neither shows anything about jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from finetune_operator.shell.metrics import Metrics

HTTP_PORT = 8080
BEAT_SECONDS = 1.0
LAG_LIMIT_SECONDS = 60.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(Protocol):
    """How the operator is, in words."""

    def faults(self) -> Sequence[str]:
        """What has ended that has to run for ever; empty: nothing."""
        ...

    def missing(self) -> Sequence[str]:
        """What is not there yet before jobs can be looked after; empty: nothing."""
        ...


class Heartbeat:
    """Measures how late the event loop wakes up what wants to run."""

    def __init__(self, tell: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._last = clock()

    def lag(self) -> float:
        """Seconds by which the next beat is late already."""
        return max(0.0, self._clock() - self._last - BEAT_SECONDS)

    async def run(self) -> None:
        """Beats until it is cancelled."""
        self._last = self._clock()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._tell(self.lag())
            self._last = self._clock()


class Endpoints:
    """Serves /healthz, /readyz and /metrics."""

    def __init__(self, health: Health, metrics: Metrics, heartbeat: Heartbeat | None = None) -> None:
        self._health = health
        self._metrics = metrics
        self._heartbeat = heartbeat or Heartbeat(metrics.event_loop_lag)
        self._runner: web.AppRunner | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self, host: str | None = None, port: int = HTTP_PORT) -> int:
        """Listen on `host` (None: all addresses); gives the port, which is chosen when `port` is 0."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
            ]
        )
        self._beating = asyncio.create_task(self._heartbeat.run(), name="heartbeat")
        self._runner = web.AppRunner(application, access_log=None, keepalive_timeout=30.0, shutdown_timeout=2.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        chosen: int = self._runner.addresses[0][1]
        return chosen

    async def stop(self) -> None:
        """Also after a start that failed."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        if self._runner is not None:
            await self._runner.cleanup()
        self._beating = self._runner = None

    async def _healthz(self, _request: web.Request) -> web.Response:
        faults = list(self._health.faults())
        lag = self._heartbeat.lag()
        if lag > LAG_LIMIT_SECONDS:
            faults.append(f"the event loop is {lag:.0f} s late")
        return _page(faults)

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _page(self._health.missing())

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": _TEXT})


def _page(wrong: Sequence[str]) -> web.Response:
    return web.Response(text="".join(f"{line}\n" for line in wrong) or "ok\n", status=503 if wrong else 200)
