"""Build the operator, run it, and end it in order.

    lists -> store <- watches
               |
    queue -> workers: store -> decide -> API server -> store

On SIGTERM or SIGINT no more reconciles start, those in progress finish, and the Lease is released.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient

from finetune_operator.api.settings import Settings
from finetune_operator.kubernetes_api.client import connect
from finetune_operator.kubernetes_api.errors import TooManyRequestsError, UnavailableError
from finetune_operator.rendering.render_types import FIELD_OWNER
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.endpoints import HTTP_PORT
from finetune_operator.shell.kube import Kube
from finetune_operator.shell.leader import Leader
from finetune_operator.shell.node_reading import NodeReading
from finetune_operator.shell.operator_metrics import Metrics
from finetune_operator.shell.progress_server import PORT
from finetune_operator.shell.queue import WorkQueue
from finetune_operator.shell.reconciler import Decide, Reconciler
from finetune_operator.shell.served_kind import wait_for_status_fields
from finetune_operator.shell.serving import Servers
from finetune_operator.shell.state import Measurements, OperatorState, ProgressBook, Service
from finetune_operator.shell.store import Store
from finetune_operator.shell.sync import Syncer
from finetune_operator.shell.watches import Watchers
from finetune_operator.shell.webhook import WebhookOptions

log = logging.getLogger(__name__)

FINISH_SECONDS = 10.0
"""Time for reconciles in progress at the end; Kubernetes allows 30 s in all."""
EVENTS_SECONDS = 3.0
"""Time after that for events that are not created yet."""
AGAIN_SECONDS = 2.0
STATUS_WRITERS = 4
"""Fewer than workers: under load, the objects that jobs need to run come before their statuses."""
SPARE_CONNECTIONS = 8
"""Connections beside those of the workers: for lists, the Lease, tokens, events."""
FOLLOWED_KINDS = 8
"""Maximum number of kinds; each has a connection for each namespace that is followed."""


@dataclass(frozen=True)
class Options:
    """Options of one process of the operator."""

    settings: Settings
    namespace: str
    """Namespace of the operator; empty: it has none, as one process outside of a cluster."""
    kubeconfig: Path | None = None
    context: str | None = None
    leader_election: bool = True
    workers: int = 16
    listen: str | None = None
    """Address to serve on; None: all."""
    http_port: int = HTTP_PORT
    progress_port: int = PORT
    webhook: WebhookOptions | None = None
    """Options of the webhook; None: it is not served."""


class Operator:
    """One running operator."""

    def __init__(self, options: Options, api: ApiClient, decide: Decide, measurements: Measurements) -> None:
        self._options = options
        self._api = api
        kube = Kube(api, counter=measurements)
        self._discovery = discovery = Discovery(kube)
        self.state = OperatorState(
            settings=options.settings,
            namespace=options.namespace,
            kube=kube,
            store=Store(options.settings),
            queue=WorkQueue(),
            progress=ProgressBook(),
            leading=asyncio.Event(),
            synced=asyncio.Event(),
            served=discovery.served_now,
            leader_address=lambda: None,
            measurements=measurements,
        )
        self._syncer = Syncer(self.state, discovery)
        self._reconciler = Reconciler(self.state, discovery, NodeReading(kube, options.settings.nodes.read), decide)
        self._leader: Leader | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._background: list[asyncio.Task[None]] = []
        if options.leader_election:
            self._leader = Leader(kube, options.namespace, self.state.leading, self._prepare_to_lead, self._requeue_all)
            self.state.leader_address = self._leader.leader_address
        kube.outage.on_end = lambda: self._syncer.request_all("outage")

    # ---------------------------------------------------------------------------------------------------------- running

    async def run(self, stopping: asyncio.Event, services: Sequence[Service]) -> None:
        """Run until `stopping`."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end)
            if not await _until_stopped(stopping, self._wait_for_api_server()):
                return
            for service in services:
                stack.push_async_callback(service.stop)
                if not await _until_stopped(stopping, service.start(self.state)):
                    return
            self._workers = [
                asyncio.create_task(self._reconciler.work(), name=f"worker {number}")
                for number in range(1, self._options.workers + 1)
            ]
            self._background = [
                asyncio.create_task(self._syncer.run(), name="resync"),
                asyncio.create_task(self._syncer.launchers(), name="launchers"),
                asyncio.create_task(Watchers(self.state, self._discovery).run(), name="following"),
                asyncio.create_task(self._reconciler.events.write(), name="events"),
                asyncio.create_task(self.state.check_reports(), name="listening"),
                *(
                    asyncio.create_task(self._reconciler.write_statuses(), name=f"statuses {number}")
                    for number in range(1, STATUS_WRITERS + 1)
                ),
                asyncio.create_task(self._lead(), name="leading"),
            ]
            self.state.tasks += [*self._workers, *self._background]
            for task in self.state.tasks:
                task.add_done_callback(_log_fault)
            await stopping.wait()

    async def _wait_for_api_server(self) -> None:
        """Wait for the API server; an outage at the start does not end the operator again and again."""
        while True:
            try:
                await self._discovery.refresh()
            except (UnavailableError, TooManyRequestsError) as error:
                log.warning("waiting for the API server: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def _lead(self) -> None:
        await wait_for_status_fields(self.state.kube)
        await self._syncer.fill("start")
        if self._leader is not None:
            await self._leader.run()
        self.state.leading.set()
        self._requeue_all()
        await asyncio.Event().wait()

    async def _end(self) -> None:
        """Stop in order: workers finish while everything that they need still runs, the Lease included."""
        log.info("shutting down")
        self.state.queue.close()
        if self._workers:
            await asyncio.wait(self._workers, timeout=FINISH_SECONDS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reconciler.statuses_written(), FINISH_SECONDS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reconciler.events.written(), EVENTS_SECONDS)
        for task in (*self._workers, *self._background):
            task.cancel()
        await asyncio.gather(*self._workers, *self._background, return_exceptions=True)
        await self._reconciler.close()
        self.state.leading.clear()
        if self._leader is not None:
            await self._leader.stop()

    async def _prepare_to_lead(self) -> None:
        await self._syncer.fill("leadership")

    def _requeue_all(self) -> None:
        for key in self.state.store.jobs():
            self.state.queue.add(key)


async def run(options: Options, decide: Decide) -> None:
    """Run until a signal ends it. NoClusterError when no cluster is configured; OSError when a port is in use; ApiError
    when the API server refuses a request that is needed to begin.
    """
    # Only jobs with faults or a template need them: the first one's validation has a time limit.
    import finetune_operator.api.field_faults
    import finetune_operator.api.template  # noqa: F401

    # Imported code stays: full collections, during which no probe is answered, need not inspect its 100,000 objects.
    gc.collect()
    gc.freeze()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    watches = FOLLOWED_KINDS * max(1, len(options.settings.namespaces))
    pool = 2 * options.workers + SPARE_CONNECTIONS + watches
    api, _ = await connect(FIELD_OWNER, options.kubeconfig, options.context, pool)
    try:
        metrics = Metrics(options.settings.currency)
        servers = Servers(
            metrics,
            host=options.listen,
            http_port=options.http_port,
            progress_port=options.progress_port,
            webhook=options.webhook,
        )
        await Operator(options, api, decide, metrics).run(stopping, (servers,))
    finally:
        await api.close()  # type: ignore[no-untyped-call]


def _log_fault(task: asyncio.Task[None]) -> None:
    """Log a task that ended by itself: a bug, which /healthz reports too, so that the kubelet restarts the operator."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s has ended: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)


async def _until_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Return whether `work` ended before `stopping`; if not, it is cancelled."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.wait([task])
    return False
