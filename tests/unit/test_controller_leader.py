"""The Lease that decides which replica acts."""

from __future__ import annotations

import asyncio
from typing import Any

from finetune_operator.controller.cluster.leader import LeaseLock
from finetune_operator.kubernetes_api.resources import DEPLOYMENT, Resource

OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "finetune-operator", "uid": "of-the-deployment"}


class Leases:
    """Kube with one Lease and one Deployment."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {}

    async def get(self, resource: Resource, *_: Any) -> dict[str, Any]:
        return {"metadata": {"uid": OWNER["uid"]}} if resource == DEPLOYMENT else self.lease

    async def create(self, lease: dict[str, Any], _: str) -> dict[str, Any]:
        self.lease = lease
        return lease

    async def replace(self, lease: dict[str, Any], *_: Any) -> dict[str, Any]:
        self.lease = lease
        return lease


async def renewed(lock: Any) -> None:
    await lock.get("finetune-operator", "ns")
    assert await lock.update("finetune-operator", "ns", None)


def test_a_renewal_keeps_the_number_of_holders_and_a_takeover_adds_one() -> None:
    kube: Any = Leases()
    first, second = (LeaseLock(kube, "ns", name, lambda _: None) for name in ("a", "b"))

    async def go() -> list[tuple[str, int]]:
        seen = []
        await first.create("finetune-operator", "ns", None)  # type: ignore[arg-type]
        for lock in (first, second, second, first):
            await renewed(lock)
            spec = kube.lease["spec"]
            seen.append((spec["holderIdentity"], spec["leaseTransitions"]))
        return seen

    assert asyncio.run(go()) == [("a", 0), ("b", 1), ("b", 1), ("a", 2)]


def test_lease_belongs_to_the_deployment_of_its_holder() -> None:
    """Also a Lease that an earlier operator has created without an owner, from the first takeover on."""
    kube: Any = Leases()
    first, second = (LeaseLock(kube, "ns", name, lambda _: None) for name in ("a", "b"))

    async def go() -> list[object]:
        await first.create("finetune-operator", "ns", None)  # type: ignore[arg-type]
        owners = [kube.lease["metadata"].pop("ownerReferences")]
        for lock in (first, second):
            await renewed(lock)
            owners.append(kube.lease["metadata"].get("ownerReferences"))
        return owners

    assert asyncio.run(go()) == [[OWNER], None, [OWNER]]
