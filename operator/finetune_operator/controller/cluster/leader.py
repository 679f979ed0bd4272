"""Leader election: the replica that holds the Lease `finetune-operator` acts.

A Lease excludes: of two replicas that cannot reach each other, one acts. The loser stops acting and stands for election
again; it keeps its view of the cluster, and so takes over at once.

A replica that cannot renew stops before the Lease ends, by its own clock and whatever its requests are doing. A write
that is still under way then does no harm: every write names the version that it was computed from (see reconciler.py).

The Lease belongs to the operator's Deployment, and goes with it: an uninstallation takes the rights before the holder
has stopped, which then cannot release it.

The stand-by relays progress to the address that is in the holder's name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock
from pydantic import JsonValue

from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.kubernetes_api.errors import ApiError, UnavailableError
from finetune_operator.kubernetes_api.resources import DEPLOYMENT, LEASE

log = logging.getLogger(__name__)

LEASE_NAME = DEPLOYMENT_NAME = "finetune-operator"
LEASE_SECONDS = 15
RENEW_SECONDS = 12.0
"""Without a renewal for this long, the leader stops acting: before the Lease ends."""
RETRY_SECONDS = 2.0
"""Interval between two renewals (two requests each), and between two checks of the stand-by (one)."""
REQUEST_SECONDS = 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def identity() -> str:
    """Return name and IP address of this pod; outside of a cluster, host and process."""
    name = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
    return f"{name}_{os.environ.get('POD_IP', '')}"


def address_in(holder: str | None) -> str | None:
    """Return the IP address in a holder's identity, if there is one."""
    written = (holder or "").rpartition("_")[2]
    with suppress(ValueError):
        return str(ipaddress.ip_address(written))
    return None


def own_namespace() -> str | None:
    """Return the namespace of this pod; None outside of a cluster."""
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else None


class LeaseLock(BaseLock):
    """Lock on the Lease for the library's election: it returns answers, never errors. A network outage must not end the
    election. (The library's own lock for Leases fails at every create in kubernetes 37.)
    """

    def __init__(self, kube: Kube, namespace: str, holder: str, renewed: Callable[[float], None]) -> None:
        super().__init__(LEASE_NAME, namespace, holder)
        self._kube = kube
        self._renewed = renewed
        self._lease: Manifest | None = None
        self.failure: ApiError | None = None
        """Error of the last request, if it had one."""
        self._owned: dict[str, JsonValue] = {}
        """Metadata of the Lease that name its owner."""

    async def get(self, name: str, namespace: str) -> Any:
        """Return True and the record, or False and the reason."""
        try:
            self._lease = await self._within(self._kube.get(LEASE, namespace, name))
        except ApiError as error:
            self.failure = error
            refusal = ApiException(status=error.code, reason=str(error))
            refusal.body = json.dumps({"code": error.code})
            return False, refusal
        return True, _record(_spec(self._lease))

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Create the Lease; return whether it is ours now."""
        metadata: dict[str, JsonValue] = {"name": name, "namespace": namespace, **await self._owner()}
        lease: Manifest = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata}
        return await self._acquired(self._kube.create({**lease, "spec": self._lease_spec(None)}, namespace))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Renew or take the Lease; return whether it is ours now, False also if somebody was faster."""
        if self._lease is None:
            return False
        lease = {**self._lease, "spec": self._lease_spec(_spec(self._lease))}
        if _spec(self._lease).get("holderIdentity") != self.identity:
            metadata = self._lease["metadata"]
            assert isinstance(metadata, dict), "the API server returned an object without metadata"
            lease["metadata"] = {**metadata, **await self._owner()}
        return await self._acquired(self._kube.replace(lease, namespace, name))

    async def release(self) -> None:
        """Release the Lease, so that the next replica has it at once. ApiError."""
        lease = await self._within(self._kube.get(LEASE, self.namespace, LEASE_NAME))
        spec = _spec(lease)
        if spec.get("holderIdentity") == self.identity:
            free = {**lease, "spec": {**spec, "holderIdentity": ""}}
            await self._within(self._kube.replace(free, self.namespace, LEASE_NAME))

    async def _owner(self) -> dict[str, JsonValue]:
        """Return the metadata that make the Deployment the owner; empty without one, as for a process outside. Once it
        is deleted, they still name it: a Lease that is created then is deleted too.
        """
        try:
            deployment = await self._within(self._kube.get(DEPLOYMENT, self.namespace, DEPLOYMENT_NAME))
        except ApiError as error:
            log.info("the Deployment of this operator cannot be read: %s", error)
            return self._owned
        metadata = deployment.get("metadata")
        uid = metadata.get("uid") if isinstance(metadata, dict) else None
        named: dict[str, JsonValue] = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind}
        self._owned = {"ownerReferences": [{**named, "name": DEPLOYMENT_NAME, "uid": uid}]}
        return self._owned

    def _lease_spec(self, before: Mapping[str, JsonValue] | None) -> dict[str, JsonValue]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        ours = before is not None and before.get("holderIdentity") == self.identity
        changes = 0 if before is None else before.get("leaseTransitions")
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime") if before is not None and ours else now,
            "renewTime": now,
            "leaseTransitions": (changes if isinstance(changes, int) else 0) + (before is not None and not ours),
        }

    async def _acquired(self, request: Awaitable[Manifest]) -> bool:
        began = time.monotonic()
        try:
            await self._within(request)
        except ApiError as error:
            self.failure = error
            return False
        self.failure = None
        self._renewed(began)
        return True

    async def _within(self, request: Awaitable[Manifest]) -> Manifest:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await request
        except TimeoutError as error:
            no_answer = UnavailableError("the Lease", 0, "", f"no answer within {REQUEST_SECONDS:g} s")
            self._kube.outage.failed(no_answer)
            raise no_answer from error


def _spec(lease: Manifest) -> Mapping[str, JsonValue]:
    spec = lease.get("spec")
    return spec if isinstance(spec, dict) else {}


def _record(spec: Mapping[str, JsonValue]) -> LeaderElectionRecord:
    """Return the record of a Lease. Empty fields are None: a Lease without a holder is free."""
    names = ("holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime")
    return LeaderElectionRecord(*(str(spec[name]) if spec.get(name) else None for name in names))


class Leader:
    """Stands for election until it is cancelled; `leading` is set while it is won."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        leading: asyncio.Event,
        prepare: Callable[[], Awaitable[None]],
        begin: Callable[[], None],
    ) -> None:
        """`prepare` is awaited before this replica acts, and `begin` called once it may."""
        self._kube = kube
        self._leading = leading
        self._prepare = prepare
        self._begin = begin
        self._lock = LeaseLock(kube, namespace, identity(), self._renewed)
        self._fence: asyncio.TimerHandle | None = None
        self._taking_over: asyncio.Task[None] | None = None
        self._term: asyncio.Task[None] | None = None
        """Task of the library for as long as the Lease is ours. It ends it when the Lease is lost, not at the end."""
        self._holding = False
        """True while the election reports that the Lease is ours."""
        self._election: LeaderElection | None = None
        # The library logs every failed try with a trace; the consequences are logged here.
        logging.getLogger("kubernetes.aio.leaderelection").setLevel(logging.CRITICAL)

    def leader_address(self) -> str | None:
        """Return the IP address of the leader, as far as it is known."""
        record = None if self._election is None else self._election.observed_record
        return None if record is None else address_in(record.holder_identity)

    async def run(self) -> None:
        """Elect, lead, lose, elect again."""
        while True:
            self._election = LeaderElection(
                Config(self._lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, self._won, self._lost)
            )
            await self._election.run()

    async def stop(self) -> None:
        """Stop acting and release the Lease."""
        self._stop_acting()
        if self._term is not None:
            self._term.cancel()
        try:
            await self._lock.release()
        except ApiError as error:
            log.info("the Lease was not released and will expire: %s", error)

    async def _won(self) -> None:
        """Act while the Lease is ours: called when it is won, cancelled when it is lost."""
        self._term = asyncio.current_task()
        self._holding = True
        self._begin_to_act()
        try:
            await asyncio.Event().wait()
        finally:
            self._holding = False
            if self._taking_over is not None:
                self._taking_over.cancel()

    async def _lost(self) -> None:
        self._stop_acting()

    def _begin_to_act(self) -> None:
        if self._taking_over is None or self._taking_over.done():
            self._taking_over = asyncio.create_task(self._take_over(), name="taking over")

    async def _take_over(self) -> None:
        try:
            await self._prepare()
        except Exception:
            log.exception("this replica holds the Lease and cannot lead yet; retrying")
            return
        # The Lease may have run out meanwhile.
        if self._holding and self._fence is not None and not self._leading.is_set():
            log.info("this replica leads now")
            self._leading.set()
            self._begin()

    def _renewed(self, requested_at: float) -> None:
        """Note that the Lease is ours for a while, counted from before the request was sent."""
        if self._fence is not None:
            self._fence.cancel()
        loop = asyncio.get_running_loop()
        self._fence = loop.call_later(requested_at + RENEW_SECONDS - time.monotonic(), self._fence_falls)
        if self._holding and not self._leading.is_set():
            # The renewal came after the fence had fallen and before the election was given up, or taking over failed.
            self._begin_to_act()

    def _fence_falls(self) -> None:
        if self._leading.is_set():
            log.warning(
                "the Lease was not renewed for %g s: %s (largest lag of the operator's event loop in the last minute: "
                "%.1f s)",
                RENEW_SECONDS,
                self._lock.failure or "the last request is not answered yet",
                self._kube.outage.loop_lag(),
            )
        self._stop_acting()

    def _stop_acting(self) -> None:
        if self._fence is not None:
            self._fence.cancel()
            self._fence = None
        if self._leading.is_set():
            self._leading.clear()
            log.warning("this replica no longer leads")
