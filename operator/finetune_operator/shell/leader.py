"""Which replica acts: the one that holds the Lease `finetune-operator`.

A Lease excludes, which kopf's peering does not: there, two operators that do not hear of each other both act. The loser
stops acting and stands for election again; it keeps its view of the cluster, and so takes over at once.

Whoever cannot renew stops before the Lease ends, by its own clock and whatever its requests are doing. Should a write
still be under way then, no harm comes of it: every write names what it was computed from (see reconciler.py).

The stand-by relays progress to the address that is in the holder's name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from finetune_operator.shell.kube import Outage

log = logging.getLogger(__name__)

LEASE = "finetune-operator"
LEASE_SECONDS = 20.0
RENEW_SECONDS = 15.0
"""Without a renewal for this long, the leader stops acting: before the Lease ends."""
RETRY_SECONDS = 4.0
"""Between two renewals, and between two looks of the stand-by: 15 requests a minute for both."""
REQUEST_SECONDS = 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Answer = TypeVar("Answer")


def identity() -> str:
    """Name and IP address of this pod; outside of a cluster, host and process."""
    name = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
    return f"{name}_{os.environ.get('POD_IP', '')}"


def address_in(holder: str | None) -> str | None:
    """The IP address in a holder's identity, if there is one."""
    written = (holder or "").rpartition("_")[2]
    with suppress(ValueError):
        return str(ipaddress.ip_address(written))
    return None


def own_namespace() -> str | None:
    """The namespace of the pod that this is; None outside of a cluster."""
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else None


class _Lock(LeaseLock):
    """The Lease, with answers where the library would raise: a network that is away must not end the election."""

    def __init__(self, namespace: str, holder: str, api: ApiClient, outage: Outage, renewed: Callable[[float], None]):
        super().__init__(LEASE, namespace, holder, api)
        self._outage = outage
        self._renewed = renewed

    async def get(self, name: str, namespace: str) -> Any:
        """The record, or why there is none."""
        try:
            return await self._asked(super().get(name, namespace))
        except _NoAnswerError as error:
            return False, ApiException(status=0, reason=str(error))

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Whether the Lease is ours now."""
        return await self._taken(super().create(name, namespace, election_record))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Whether the Lease is ours still, or now."""
        return await self._taken(super().update(name, namespace, updated_record))

    async def give_back(self) -> None:
        """Let the next one have it at once."""
        held, record = await self.get(LEASE, self.namespace)
        lease = self.lease_reference
        if held and record is not None and record.holder_identity == self.identity and lease and lease.spec:
            lease.spec.holder_identity = ""
            await self._asked(self.api_instance.replace_namespaced_lease(LEASE, self.namespace, lease))

    async def _taken(self, request: Awaitable[bool]) -> bool:
        began = time.monotonic()
        try:
            taken = await self._asked(request)
        except _NoAnswerError:
            return False
        if taken:
            self._renewed(began)
        return taken

    async def _asked(self, request: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await request
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._outage.failed()
            raise _NoAnswerError(f"no answer: {error or type(error).__name__}") from error
        self._outage.answered()
        return answer


class _NoAnswerError(Exception):
    """The API server did not answer."""


class Leader:
    """Stands for election until it is cancelled; `leading` is set while it is won."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        leading: asyncio.Event,
        outage: Outage,
        prepare: Callable[[], Awaitable[None]],
        begin: Callable[[], None],
        holder: str | None = None,
    ) -> None:
        """`prepare` is awaited before this replica acts, and `begin` called once it may."""
        self._leading = leading
        self._prepare = prepare
        self._begin = begin
        self._lock = _Lock(namespace, holder or identity(), api, outage, self._renewed)
        self._fence: asyncio.TimerHandle | None = None
        self._taking_over: asyncio.Task[None] | None = None
        self._holding = False
        """Whether the election says that the Lease is ours."""
        self._election: LeaderElection | None = None
        # It tells every failed try with a trace; what it means is told here.
        logging.getLogger("kubernetes.aio.leaderelection").setLevel(logging.CRITICAL)

    def leader_address(self) -> str | None:
        """IP address of the one that leads, as far as it is known."""
        record = None if self._election is None else self._election.observed_record
        return None if record is None else address_in(record.holder_identity)

    async def run(self) -> None:
        """Elect, lead, lose, elect again."""
        while True:
            self._election = LeaderElection(
                Config(self._lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, self._won, self._lost)
            )
            try:
                await self._election.run()
            except ApiException as error:
                log.warning("the election is begun anew: %s %s", error.status, error.reason)
                await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """Act no more and give the Lease back."""
        self._stop_acting()
        try:
            await self._lock.give_back()
        except (_NoAnswerError, ApiException) as error:
            log.info("the lease was not given back, and ends by itself: %s", error)

    async def _won(self) -> None:
        """Called when the Lease became ours; cancelled when it is lost."""
        self._holding = True
        try:
            await self._take_over()
            await asyncio.Event().wait()
        finally:
            self._holding = False

    async def _lost(self) -> None:
        self._stop_acting()

    async def _take_over(self) -> None:
        await self._prepare()
        # The Lease may have run out meanwhile.
        if self._holding and self._fence is not None and not self._leading.is_set():
            log.info("this replica leads now")
            self._leading.set()
            self._begin()

    def _renewed(self, asked_at: float) -> None:
        """The Lease is ours for a while, counted from before the request was sent."""
        if self._fence is not None:
            self._fence.cancel()
        loop = asyncio.get_running_loop()
        self._fence = loop.call_later(asked_at + RENEW_SECONDS - time.monotonic(), self._stop_acting)
        idle = self._taking_over is None or self._taking_over.done()
        if self._holding and not self._leading.is_set() and idle:
            # The renewal came after the fence had fallen, and before the election was given up.
            self._taking_over = asyncio.create_task(self._take_over(), name="take-over")

    def _stop_acting(self) -> None:
        if self._fence is not None:
            self._fence.cancel()
            self._fence = None
        if self._leading.is_set():
            self._leading.clear()
            log.warning("this replica leads no longer")
