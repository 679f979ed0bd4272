"""Puts the operator together, runs it, and ends it in order.

    lists -> store <- kopf's watches
               |
    queue -> workers: store -> decide -> API server -> store

kopf watches in a thread with an event loop of its own: at its end, kopf cancels every task of its loop, whoever made
it, and it takes the process' signals for itself. What it hears comes over by one call, into our loop.

The end, on SIGTERM or SIGINT: no more passes are begun, those in hand are finished, the Lease is given back.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
from kubernetes.aio.client import ApiClient

from finetune_operator.api.settings import Settings
from finetune_operator.shell.discovery import Discovery
from finetune_operator.shell.handlers import kopf_settings, registry
from finetune_operator.shell.kube import Kube, connect
from finetune_operator.shell.leader import Leader
from finetune_operator.shell.queue import WorkQueue
from finetune_operator.shell.reconciler import Decide, Reconciler
from finetune_operator.shell.state import Measurements, NoMeasurements, OperatorState, ProgressBook, Service
from finetune_operator.shell.store import Store
from finetune_operator.shell.sync import Syncer

log = logging.getLogger(__name__)

FINISH_SECONDS = 15.0
"""For the passes in hand at the end; Kubernetes gives 30 s in all."""
KOPF_AGAIN_SECONDS = 2.0
SPARE_CONNECTIONS = 8
"""Beside one for each worker: for lists, the Lease, tokens."""


@dataclass(frozen=True)
class Options:
    """How one process of the operator runs."""

    settings: Settings
    namespace: str
    """The operator's own."""
    kubeconfig: Path | None = None
    context: str | None = None
    leader_election: bool = True
    workers: int = 8


class Operator:
    """One running operator."""

    def __init__(self, options: Options, api: ApiClient, decide: Decide, measurements: Measurements) -> None:
        self._options = options
        self._api = api
        kube = Kube(api, counter=measurements)
        self.state = OperatorState(
            settings=options.settings,
            namespace=options.namespace,
            kube=kube,
            store=Store(options.settings),
            queue=WorkQueue(),
            progress=ProgressBook(),
            leading=asyncio.Event(),
            synced=asyncio.Event(),
            leader_address=lambda: None,
            measurements=measurements,
        )
        discovery = Discovery(kube, once=bool(options.settings.namespaces))
        self._syncer = Syncer(self.state, discovery)
        self._reconciler = Reconciler(self.state, discovery, decide)
        self._leader: Leader | None = None
        self._stop_kopf = threading.Event()
        self._background: dict[str, asyncio.Task[None]] = {}
        if options.leader_election:
            self._leader = Leader(
                api, options.namespace, self.state.leading, kube.outage, self._prepare_to_lead, self._look_at_all
            )
            self.state.leader_address = self._leader.leader_address
        kube.outage.on_end = lambda: self._syncer.request_all("outage")

    # --------------------------------------------------------------------------------------------------------- health

    def faults(self) -> Sequence[str]:
        """What has ended that has to run for ever."""
        return [f"{name} has ended" for name, task in self._background.items() if task.done()]

    def missing(self) -> Sequence[str]:
        """What is not there yet before jobs can be looked after."""
        return [] if self.state.synced.is_set() else ["the state of the cluster has not been read yet"]

    # ---------------------------------------------------------------------------------------------------------- running

    async def run(self, stopping: asyncio.Event, services: Sequence[Service]) -> None:
        """Run until `stopping`."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end)
            for service in services:
                stack.push_async_callback(service.stop)
                await service.start(self.state)
            self._start("watching", self._watch())
            self._start("resync", self._syncer.run())
            workers = [self._start(f"worker {n}", self._reconciler.work()) for n in range(self._options.workers)]
            self._start("start", self._begin(stopping))
            await stopping.wait()
            log.info("ending")
            for name in ("start", *(f"worker {n}" for n in range(len(workers)))):
                self._background.pop(name, None)
            self.state.queue.close()
            await asyncio.wait(workers, timeout=FINISH_SECONDS)

    async def _begin(self, stopping: asyncio.Event) -> None:
        await self._syncer.fill("start")
        if self._leader is not None:
            await self._leader.run()
        self.state.leading.set()
        self._look_at_all()
        await stopping.wait()

    async def _end(self) -> None:
        self._stop_kopf.set()
        if self._leader is not None:
            await self._leader.stop()
        self.state.leading.clear()
        watching = self._background.pop("watching", None)
        for task in self._background.values():
            task.cancel()
        await asyncio.gather(*self._background.values(), return_exceptions=True)
        if watching is not None:
            await asyncio.wait([watching], timeout=FINISH_SECONDS)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background[name] = task
        return task

    async def _prepare_to_lead(self) -> None:
        await self._syncer.fill("leadership")

    def _look_at_all(self) -> None:
        for key in self.state.store.jobs():
            self.state.queue.add(key)

    # ------------------------------------------------------------------------------------------------------------- kopf

    async def _watch(self) -> None:
        """Watch by kopf; begun anew, with lists, should kopf end."""
        while not self._stop_kopf.is_set():
            try:
                await asyncio.to_thread(self._kopf, asyncio.get_running_loop())
            except Exception as error:
                log.warning("watching is begun anew: %s: %s", type(error).__name__, error)
            if not self._stop_kopf.is_set():
                await asyncio.sleep(KOPF_AGAIN_SECONDS)
                self._syncer.request_all("relist")

    def _kopf(self, loop: asyncio.AbstractEventLoop) -> None:
        namespaces = self._options.settings.namespaces
        kopf.run(
            registry=registry(self.state, self._syncer, self._api.configuration, loop),
            settings=kopf_settings(self.state.settings),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=self._stop_kopf,
        )


async def run(options: Options, decide: Decide) -> None:
    """Run until a signal ends it."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        api = await connect(options.kubeconfig, options.context, pool=options.workers + SPARE_CONNECTIONS)
        stack.push_async_callback(api.close)
        await Operator(options, api, decide, NoMeasurements()).run(stopping, ())
