"""Network devices of nodes, by the resources that their device plugins advertise: RDMA (InfiniBand, RoCE) and EFA.

A pod that requests none of them sends over TCP, whatever the node has. The settings' `network.devices` come before the
built-in rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from finetune_operator.plan.types.plan_types import NodeDevice, NodesNetwork
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.settings.settings_nodes import NetworkDeviceRow
from finetune_operator.spec.tables.machine_types import TYPE_LABEL

DeviceTransport: TypeAlias = Literal["rdma", "efa"]

EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
EFA_HUGE_PAGES = "5120Mi"
"""Huge pages of 2 MiB for the EFA provider's bounce buffers, as in the examples of EKS' user guide. The provider maps
them anonymously (MAP_HUGETLB), so that no volume is needed.
"""
EFA_INTERFACES: Mapping[str, int] = {
    "g4dn.8xlarge": 1, "g4dn.12xlarge": 1, "g4dn.16xlarge": 1, "g4dn.metal": 1, "p3dn.24xlarge": 1,
    "g5.8xlarge": 1, "g5.12xlarge": 1, "g5.16xlarge": 1, "g5.24xlarge": 1, "g5.48xlarge": 1,
    "g6.8xlarge": 1, "g6.12xlarge": 1, "g6.16xlarge": 1, "g6.24xlarge": 1, "g6.48xlarge": 1,
    "g6e.8xlarge": 1, "g6e.12xlarge": 1, "g6e.16xlarge": 1, "g6e.24xlarge": 2, "g6e.48xlarge": 4,
    "p4d.24xlarge": 4, "p4de.24xlarge": 4, "p5.4xlarge": 1, "p5.48xlarge": 32, "p5e.48xlarge": 32, "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
}  # fmt: skip
"""EFA interfaces by instance type: one for each network card that supports EFA. Sources: EC2's user guide ("Supported
instance types" of EFA, "Network cards"), and the device counts of torchx' `named_resources_aws.py` for p4d, p4de, p5,
p5e and p5en.
"""
_RDMA = re.compile(r"rdma/|nvidia\.com/[^/]*rdma")
"""Resources of the RDMA shared device plugin and of NVIDIA's network operator, e.g. `nvidia.com/sriov-rdma-vf`."""


@dataclass(frozen=True)
class DeviceKind:
    """Requests of a pod for one network resource."""

    transport: DeviceTransport
    per_node: int | None = None
    """Devices of a pod; None: by its GPUs."""
    per_gpu: int | None = None
    """Devices for each GPU of a pod; None: the pod's share of the node's devices."""
    huge_pages: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def requested(self, advertised: int, gpus: int, node_gpus: int) -> int:
        """Return the devices of a pod with `gpus` of the `node_gpus` GPUs of a node that advertises so many."""
        if self.per_node is not None:
            return self.per_node
        if self.per_gpu is not None:
            return self.per_gpu * gpus
        return max(1, advertised * gpus // max(gpus, node_gpus))


def device_kind(resource: str, settings: Settings) -> DeviceKind | None:
    """Return the requests for a resource; None if it is no network device."""
    row = next((row for row in settings.network.devices if row.resource == resource), None)
    if row is not None:
        return _of_row(row)
    if resource == EFA:
        env = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
        return DeviceKind("efa", per_node=settings.defaults.efa_interfaces, huge_pages=EFA_HUGE_PAGES, env=env)
    if resource == settings.defaults.rdma_resource or resource.startswith("rdma/"):
        # The shared device plugin gives a pod all of the node's adapters for one of its many units.
        return DeviceKind("rdma", per_node=1, env={"NCCL_NET": "IB"})
    return DeviceKind("rdma", env={"NCCL_NET": "IB"}) if _RDMA.match(resource) else None


def _of_row(row: NetworkDeviceRow) -> DeviceKind:
    return DeviceKind(row.transport, row.per_node, row.per_gpu, row.huge_pages, dict(row.env))


def default_resource(transport: DeviceTransport, settings: Settings) -> str:
    """Return the resource to request if the nodes' own are not known."""
    rows = (row.resource for row in settings.network.devices if row.transport == transport)
    return next(rows, EFA if transport == "efa" else settings.defaults.rdma_resource)


def nodes_network(
    nodes: Iterable[tuple[Mapping[str, str], Mapping[str, str]]], gpu_resource: str, settings: Settings
) -> NodesNetwork:
    """Return the network devices of nodes, which are given by their labels and allocatable resources."""
    everywhere = [(labels, {name: _count(text) for name, text in there.items()}) for labels, there in nodes]
    names = sorted({name for _, there in everywhere for name in there if device_kind(name, settings) is not None})
    order = [row.resource for row in settings.network.devices] + [EFA]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    devices = []
    for name in names:
        counts = [there[name] for _, there in everywhere if there.get(name, 0) > 0]
        if counts:
            devices.append(NodeDevice(resource=name, count=min(counts), nodes=len(counts)))
    silent = {labels.get(TYPE_LABEL, "") for labels, there in everywhere if not there.get(EFA)} & {*EFA_INTERFACES}
    return NodesNetwork(
        nodes=len(everywhere),
        node_gpus=max((there.get(gpu_resource, 0) for _, there in everywhere), default=0),
        devices=tuple(devices),
        huge_page_bytes=min((there.get(HUGE_PAGES, 0) for _, there in everywhere), default=0),
        without_plugin=tuple(sorted(silent)),
    )


def _count(text: str) -> int:
    try:
        return int(parse_quantity(text))
    except ValueError:
        return 0
