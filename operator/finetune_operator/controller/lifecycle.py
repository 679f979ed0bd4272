"""The operator that kopf's handlers start, feed and stop.

    kopf's watches, lists of the resync -> store
                                             |
                   queue -> workers: store -> decide -> API server -> store

On SIGTERM or SIGINT kopf calls the cleanup handler: no more reconciles start, those in progress finish, and the Lease
is released. Before the start has ended, `start` itself does that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient

from finetune_operator.controller.cluster.discovery import Discovery
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.cluster.leader import Leader
from finetune_operator.controller.cluster.node_reading import NodeReading
from finetune_operator.controller.cluster.served_kind import wait_for_status_fields
from finetune_operator.controller.kopf_guard import KopfConnection, ServedKinds, reviewing
from finetune_operator.controller.reconcile.operator_state import OperatorState, ProgressBook, is_new
from finetune_operator.controller.reconcile.planner import PROCESSES
from finetune_operator.controller.reconcile.reconciler import Decide, Reconciler
from finetune_operator.controller.resync import Resync, store_object
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.probes import HTTP_PORT, Heartbeat, KopfLiveness
from finetune_operator.controller.servers.progress_server import PORT
from finetune_operator.controller.servers.serving import Servers
from finetune_operator.controller.servers.webhook import REVIEWING, WebhookOptions
from finetune_operator.controller.store.queue import WorkQueue
from finetune_operator.controller.store.store import Store
from finetune_operator.jobs.admission import Request, judge, refusal
from finetune_operator.kubernetes_api.errors import (
    ForbiddenError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
)
from finetune_operator.kubernetes_api.resources import Resource
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import Settings

log = logging.getLogger(__name__)

FINISH_SECONDS = 10.0
"""Time for reconciles in progress at the end; Kubernetes allows 30 s in all."""
EVENTS_SECONDS = 3.0
"""Time after that for events that are not created yet."""
AGAIN_SECONDS = 2.0
REFUSALS = 10
STATUS_WRITERS = 4
"""Fewer than workers: under load, the objects that jobs need to run come before their statuses."""


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

    def __init__(
        self,
        options: Options,
        api: ApiClient,
        lease_api: ApiClient,
        decide: Decide,
        kinds: ServedKinds,
        liveness: str,
    ) -> None:
        """`lease_api`: client for the Lease alone. `liveness`: URL of kopf's own liveness endpoint."""
        self._options = options
        self._kinds = kinds
        metrics = Metrics(options.settings.currency)
        heartbeat = Heartbeat()
        kube = Kube(api, counter=metrics)
        kube.outage.loop_lag = heartbeat.largest_lag
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
            measurements=metrics,
        )
        self._servers = Servers(
            metrics,
            KopfLiveness(liveness),
            heartbeat=heartbeat,
            host=options.listen,
            http_port=options.http_port,
            progress_port=options.progress_port,
            webhook=options.webhook,
        )
        self._resync = Resync(self.state, discovery)
        self._reconciler = Reconciler(self.state, discovery, NodeReading(kube, options.settings.nodes.read), decide)
        self._leader: Leader | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._background: list[asyncio.Task[None]] = []
        self._connection: KopfConnection | None = None
        self._lost: set[str] = set()
        self.failure: Exception | None = None
        """Error that kept it from starting."""
        if options.leader_election:
            self._leader = Leader(
                replace(kube, api=lease_api),
                options.namespace,
                self.state.leading,
                self._prepare_to_lead,
                self._requeue_all,
            )
            self.state.leader_address = self._leader.leader_address
        kube.outage.on_end = lambda: self._resync.request_all("outage")

    # ------------------------------------------------------------------------------------- called by kopf's handlers

    async def start(self) -> None:
        """Wait for the API server, serve, and start the tasks that run as long as the operator does. What was started
        is stopped again if that fails.
        """
        try:
            await self._wait_for_api_server()
            await self._servers.start(self.state)
        except BaseException as error:
            self.failure = error if isinstance(error, Exception) else None
            await self.stop()
            raise
        self._workers = [
            asyncio.create_task(self._reconciler.work(), name=f"worker {number}")
            for number in range(1, self._options.workers + 1)
        ]
        self._background = [
            asyncio.create_task(self._resync.run(), name="resync"),
            asyncio.create_task(self._resync.launchers(), name="launchers"),
            asyncio.create_task(self._resync.leftover_claims(), name="claims of deleted jobs"),
            asyncio.create_task(self._kinds.follow(self._discovery.changed), name="served kinds"),
            asyncio.create_task(self._reconciler.events.write(), name="events"),
            asyncio.create_task(self.state.check_reports(), name="listening"),
            *(
                asyncio.create_task(self._reconciler.write_statuses(), name=f"statuses {number}")
                for number in range(1, STATUS_WRITERS + 1)
            ),
            *(
                asyncio.create_task(self._reconciler.planner.run(), name=f"planning {number}")
                for number in range(1, PROCESSES + 1)
            ),
            asyncio.create_task(self._lead(), name="leading"),
        ]
        self.state.tasks += [*self._workers, *self._background]
        for task in self.state.tasks:
            task.add_done_callback(_log_fault)

    async def connection(self) -> kopf.AiohttpSession:
        """Return a connection for kopf; all but the first after a while, as the one before was refused."""
        if self._connection is not None:
            await asyncio.sleep(AGAIN_SECONDS)
        self._connection = KopfConnection(self.state.kube, self._resync.request_at)
        session = cast(aiohttp.ClientSession, self._connection)
        return kopf.AiohttpSession(server=self.state.kube.server, aiohttp_session=session)

    async def take(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """Store what an event of kopf's says of an object, and queue its job if it is news."""
        try:
            await store_object(self.state, resource, event["object"], deleted=event["type"] == "DELETED")
        except Exception:
            self._lost.add(f"an event of a {resource.kind} was lost")
            raise
        finally:
            if event["type"] is None and self._connection is not None:
                self._connection.handled(resource.plural)

    async def reviews(self, answer: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve admission for kopf, whose own server sets no limit on connections and bodies. The configuration is in
        the manifests; only our authority is written into it (controller/servers/serving.py).
        """
        self._servers.answer_reviews(reviewing(answer))
        yield {}
        await asyncio.Event().wait()

    def judge(self, request: Request) -> tuple[Sequence[Problem], Sequence[str]]:
        """Return problems and warnings for the review in progress."""
        return judged(request, self.state.settings)

    def faults(self) -> list[str]:
        """Return messages on tasks that have ended and have to run for ever, and on events that were lost."""
        return [*(f"{task.get_name()} has ended" for task in self.state.tasks if task.done()), *sorted(self._lost)]

    async def stop(self) -> None:
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
        self.state.leading.clear()
        if self._leader is not None:
            await self._leader.stop()
        await self._servers.stop()

    # ------------------------------------------------------------------------------------------------------- its tasks

    async def _wait_for_api_server(self) -> None:
        """Wait for the API server; an outage at the start does not end the operator again and again. One that starts
        itself knows no tokens and no rights for a moment. ApiError if it still knows none after REFUSALS tries.
        """
        refusals = 0
        while True:
            try:
                await self._discovery.refresh()
            except (UnavailableError, TooManyRequestsError, UnauthorizedError, ForbiddenError) as error:
                refusals += isinstance(error, UnauthorizedError | ForbiddenError)
                if refusals > REFUSALS:
                    raise
                log.warning("waiting for the API server: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def _lead(self) -> None:
        await wait_for_status_fields(self.state.kube)
        await self._resync.fill("start")
        if self._leader is not None:
            await self._leader.run()
        self.state.leading.set()
        self._requeue_all()
        await asyncio.Event().wait()

    async def _prepare_to_lead(self) -> None:
        await self._resync.fill("leadership")

    def _requeue_all(self) -> None:
        for key in self.state.store.jobs():
            self.state.queue.add(key, new=is_new(self.state.store.job(key)))


def judged(request: Request, settings: Settings) -> tuple[Sequence[Problem], Sequence[str]]:
    """Return problems and warnings for the review in progress, and keep the whole refusal for its answer."""
    reviewing = REVIEWING.get()
    judgement = judge(request, settings, reviewing.jobs, reviewing.served)
    if judgement.problems:
        reviewing.status = refusal(request.name, judgement.problems)
    reviewing.job = judgement.job
    return judgement.problems, judgement.warnings


def _log_fault(task: asyncio.Task[None]) -> None:
    """Log a task that ended by itself: a bug, which /healthz reports too, so that the kubelet restarts the operator."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s has ended: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)
