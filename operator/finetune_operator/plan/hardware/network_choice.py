"""Network between the nodes of a training: devices that its pods request, or TCP.

`auto` requests devices if all nodes that can run the pods advertise them. A pod without such a request sends over TCP,
which the plan then shows and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Transport
from finetune_operator.plan.hardware.network_devices import (
    EFA,
    EFA_INTERFACES,
    HUGE_PAGES,
    DeviceKind,
    DeviceTransport,
    default_resource,
    device_kind,
)
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import NetworkPlan, NodeDevice, NodesNetwork
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.tables.machine_types import TYPE_LABEL

TCP_ONLY = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
NO_HUGE_PAGES = {"FI_EFA_USE_HUGE_PAGE": "0"}
NAMES: Mapping[DeviceTransport, str] = {"rdma": "RDMA", "efa": "EFA"}


def choose_network(draft: Draft) -> Draft:
    """Choose the network between nodes; with one node, or without GPUs, pods request no devices."""
    world, asked = draft.world, draft.spec.resources.network
    if world is None or draft.local:
        return draft
    if world.nodes == 1 or world.device == "cpu":
        if asked not in ("rdma", "efa"):
            return draft
        why = "the training has one node" if world.nodes == 1 else "processes on CPUs send over TCP"
        return draft.because(f"resources.network {asked} has no effect: {why}")
    match asked:
        case "tcp":
            return _over_tcp(draft, TCP_ONLY).because("network tcp: as asked; pods request no network devices")
        case "auto":
            return _automatic(draft)
        case "rdma" | "efa":
            return _as_asked(draft, asked)


def _automatic(draft: Draft) -> Draft:
    network = draft.nodes_network
    if network is None:
        return _over_tcp(draft).assuming(
            "network: the nodes' devices are not known, so pods request none and NCCL uses TCP; resources.network rdma "
            "or efa requests them"
        )
    everywhere = next((device for device in network.devices if device.nodes == network.nodes), None)
    if everywhere is not None:
        return _with_devices(draft, network, everywhere, _all_have_it(network.nodes))
    if network.devices:
        some = network.devices[0]
        return _over_tcp(draft).because(
            f"network tcp: only {some.nodes} of {network.nodes} nodes that fit the job have {some.resource}; "
            f"resources.network {_transport(draft, some)} has pods wait for these"
        )
    return _over_tcp(draft).because(
        f"network tcp: nodes that fit the job advertise no RDMA or EFA devices{_gap(network)}"
    )


def _as_asked(draft: Draft, asked: DeviceTransport) -> Draft:
    network = draft.nodes_network
    if network is None:
        return _unknown(draft, asked)
    matching = [device for device in network.devices if _transport(draft, device) == asked]
    if matching:
        chosen = max(matching, key=lambda device: device.nodes)
        some = (
            ""
            if chosen.nodes == network.nodes
            else f"; {chosen.nodes} of {network.nodes} nodes that fit the job have it"
        )
        return _with_devices(draft, network, chosen, f"as asked{some}")
    others = sorted({_transport(draft, device) for device in network.devices})
    instead = " or ".join([*others, "auto"])
    return draft.refusing(
        ("resources", "network"),
        asked,
        f"nodes that fit the job advertise no {NAMES[asked]} devices{_gap(network) if asked == 'efa' else ''}",
        f"set it to {instead}, install the device plugin, or add its resource to network.devices of the settings",
        "NotSupported",
    )


def _unknown(draft: Draft, asked: DeviceTransport) -> Draft:
    """Request devices of nodes that were not read, or that do not exist yet."""
    resource = default_resource(asked, draft.settings)
    kind = device_kind(resource, draft.settings)
    assert kind is not None, "the default resource of a transport is a known device"
    instance = draft.spec.template.node_selector.get(TYPE_LABEL, "")
    count, why = 1, "the nodes' devices are not known"
    if resource == EFA and kind.per_node is None and instance in EFA_INTERFACES:
        count, why = EFA_INTERFACES[instance], f"a {instance} has {EFA_INTERFACES[instance]} interfaces"
    requests = kind.requested(count, draft.gpus_per_node, draft.hardware.gpus_per_node)
    return _requesting(draft, resource, kind, requests, None).because(
        f"network {asked}: as asked; pods request {requests} {resource}: {why}"
    )


def _with_devices(draft: Draft, network: NodesNetwork, device: NodeDevice, why: str) -> Draft:
    kind = device_kind(device.resource, draft.settings)
    assert kind is not None, "only network devices are among the nodes' facts"
    requests = kind.requested(device.count, draft.gpus_per_node, network.node_gpus)
    return _requesting(draft, device.resource, kind, requests, network.huge_page_bytes).because(
        f"network {kind.transport}: pods request {requests} {device.resource}: {why}"
    )


def _requesting(draft: Draft, resource: str, kind: DeviceKind, count: int, huge_page_bytes: int | None) -> Draft:
    """Request devices; huge pages only if the nodes have them (`huge_page_bytes`; None: unknown), or the pod would wait
    for ever.
    """
    limits, env = {resource: str(count)}, dict(kind.env)
    if kind.huge_pages is not None:
        if huge_page_bytes is None or huge_page_bytes >= parse_quantity(kind.huge_pages):
            limits[HUGE_PAGES] = kind.huge_pages
        else:
            env |= NO_HUGE_PAGES if kind.transport == "efa" else {}
            draft = draft.because(
                f"no huge pages: {resource} works with {kind.huge_pages} of {HUGE_PAGES}, and nodes have "
                f"{human_bytes(huge_page_bytes)}"
            )
    return _planned(draft, kind.transport, limits, env)


def _over_tcp(draft: Draft, env: Mapping[str, str] | None = None) -> Draft:
    return _planned(draft, "tcp", {}, env or {})


def _planned(draft: Draft, transport: Transport, limits: Mapping[str, str], env: Mapping[str, str]) -> Draft:
    settings = draft.settings.network
    host = settings.host_network and transport != "tcp"
    interface = {} if host or not settings.socket_interface else {"NCCL_SOCKET_IFNAME": settings.socket_interface}
    network = NetworkPlan(transport=transport, limits=dict(limits), env={**interface, **env}, host=host)
    world = decided(draft.world)
    if transport != "tcp":
        world = world.model_copy(update={"network": transport})
    return replace(draft, network=network, world=world)


def _transport(draft: Draft, device: NodeDevice) -> DeviceTransport:
    kind = device_kind(device.resource, draft.settings)
    assert kind is not None, "only network devices are among the nodes' facts"
    return kind.transport


def _all_have_it(nodes: int) -> str:
    return "the node that fits the job has it" if nodes == 1 else f"all {nodes} nodes that fit the job have it"


def _gap(network: NodesNetwork) -> str:
    """Return the remark on instance types with EFA whose device plugin is missing."""
    if not network.without_plugin:
        return ""
    first = network.without_plugin[0]
    return f"; a {first} has {EFA_INTERFACES[first]} EFA interfaces, which the EFA device plugin advertises"
