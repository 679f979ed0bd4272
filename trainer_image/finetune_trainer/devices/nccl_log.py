"""Transports that NCCL chose, from the lines that it writes with NCCL_DEBUG=INFO.

Formats are those of NCCL 2.5 to 2.30 (`src/transport`, `src/graph/topo.cc`) and of aws-ofi-nccl. Lines in other forms
are skipped: nothing is claimed of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias, get_args

from finetune_contract.report import Communication

Inside: TypeAlias = Literal["nvlink", "p2p", "shm", "network"]

_VERSION = re.compile(r"NCCL version (\S+)")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])?(?: \[(?:send|receive)\])? via (.+)"
)
"""Connection of two ranks of the communicator."""
_NET = re.compile(r"NET/(.+?)/\d+(?:\(\d+\))?(/GDRDMA)?(?:[/ (].*)?$")
_ADAPTERS = re.compile(r"NET/(IB|Socket) : Using (.*)")
_ADAPTER = re.compile(r"\[\d+\]([^\s<]+)")
_NETWORK = re.compile(r"Using network (.+)")
_PROVIDER = re.compile(r"NET/OFI Selected provider is (\w+)", re.IGNORECASE)
_SWITCH = re.compile(r"\b(\d+) nvls channels|nvls channels: ?(\d+)")
_NVLINK = re.compile(r"\+ NVL\[")
_INFO = "NCCL INFO "
_WARNING = "NCCL WARN "
MOST_ADAPTERS = 16
SLOWEST_LAST: Final = get_args(Inside)


def chosen(log: str, ranks_per_node: int, nodes: int) -> Communication | None:
    """Return the transports of one rank's connections, by its log; None if the log has none.

    `ranks_per_node`: ranks of the communicator on each node, which are numbered node by node.
    """
    lines = [line.partition(_INFO)[2] for line in log.splitlines() if _INFO in line]
    if not lines:
        return None
    inside: set[str] = set()
    between: set[str] = set()
    for line in lines:
        if (match := _CHANNEL.search(line)) is not None:
            first, second = (int(match[group]) // ranks_per_node for group in (1, 2))
            (inside if first == second else between).add(match[3].strip())
    adapters = _adapters(lines)
    names = [_network(text, lines, adapters) for text in between] or [_used_network(lines, adapters)] * (nodes > 1)
    nets = [match for text in between if (match := _NET.match(text)) is not None]
    known = [name for name in names if name is not None]
    slowest = "socket" if "socket" in known else next(iter(sorted(known)), None)
    devices = adapters.get("Socket" if slowest == "socket" else "IB", ()) if slowest else ()
    switches = (int(match[1] or match[2]) for line in lines if (match := _SWITCH.search(line)) is not None)
    result = Communication(
        inside=_slowest(_inside(text, lines) for text in inside),
        between=slowest,
        gpudirect=all(match[2] for match in nets) if nets and slowest != "socket" else None,
        nvls=any(switches),
        adapters=tuple(devices[:MOST_ADAPTERS]),
        library=_version(log),
    )
    return result if result.inside or result.between else None


def network_of(log: str) -> Communication | None:
    """Return what NCCL sends with between nodes, by the log of a rank whose communicators are not known: by connections
    over a network, or else by the network that it has selected. None if the log has neither.
    """
    lines = [line.partition(_INFO)[2] for line in log.splitlines() if _INFO in line]
    adapters = _adapters(lines)
    connected = (match[3].strip() for line in lines if (match := _CHANNEL.search(line)) is not None)
    nets = [match for text in connected if (match := _NET.match(text)) is not None]
    selected = _used_network(lines, adapters)
    known = [_plugin(match[1], lines, adapters) for match in nets] or ([] if selected is None else [selected])
    slowest = "socket" if "socket" in known else next(iter(sorted(known)), None)
    if slowest is None:
        return None
    return Communication(
        between=slowest,
        gpudirect=all(match[2] for match in nets) if nets and slowest != "socket" else None,
        adapters=adapters.get("Socket" if slowest == "socket" else "IB", ())[:MOST_ADAPTERS],
        library=_version(log),
    )


def _version(log: str) -> str | None:
    return next((match[1] for line in log.splitlines() if (match := _VERSION.search(line)) is not None), None)


def merged(communications: Sequence[Communication | None]) -> Communication | None:
    """Return the transports of all ranks together, the slowest of each kind; None if no rank has any."""
    known = [communication for communication in communications if communication is not None]
    if not known:
        return None
    between = [communication.between for communication in known if communication.between is not None]
    direct = [communication.gpudirect for communication in known if communication.gpudirect is not None]
    slowest = "socket" if "socket" in between else next(iter(sorted(between)), None)
    adapters = [name for communication in known if communication.between == slowest for name in communication.adapters]
    return Communication(
        inside=_slowest(communication.inside for communication in known if communication.inside is not None),
        between=slowest,
        gpudirect=all(direct) if direct and slowest != "socket" else None,
        nvls=any(communication.nvls for communication in known),
        adapters=tuple(dict.fromkeys(adapters))[:MOST_ADAPTERS],
        library=next((communication.library for communication in known if communication.library is not None), None),
    )


def warnings(log: str) -> list[str]:
    """Return NCCL's warnings, which its log has instead of the process's own, each once."""
    texts = (line.partition(_WARNING)[2].strip() for line in log.splitlines() if _WARNING in line)
    return list(dict.fromkeys(filter(None, texts)))


def _slowest(transports: Iterable[Inside]) -> Inside | None:
    return max(transports, key=SLOWEST_LAST.index, default=None)


def _inside(text: str, lines: Sequence[str]) -> Inside:
    """Return the transport in a node. NCCL connects GPUs by P2P over NVLink and over PCIe; its topology tells which."""
    if text.startswith("P2P"):
        return "nvlink" if any(map(_NVLINK.search, lines)) else "p2p"
    return "shm" if text.startswith("SHM") else "network"


def _network(text: str, lines: Sequence[str], adapters: dict[str, tuple[str, ...]]) -> str | None:
    """Return the transport between nodes of one connection: nodes of one NVLink domain are connected by P2P."""
    if text.startswith("P2P"):
        return "nvlink"
    match = _NET.match(text)
    return None if match is None else _plugin(match[1], lines, adapters)


def _used_network(lines: Sequence[str], adapters: dict[str, tuple[str, ...]]) -> str | None:
    """Return the network of a rank without connections to other nodes."""
    names = [match[1].strip() for line in lines if (match := _NETWORK.search(line)) is not None]
    return _plugin(names[-1], lines, adapters) if names else None


def _plugin(name: str, lines: Sequence[str], adapters: dict[str, tuple[str, ...]]) -> str:
    if name.startswith("IB"):
        return "roce" if any(adapter.endswith("/RoCE") for adapter in adapters.get("IB", ())) else "ib"
    if name == "Socket":
        return "socket"
    if "Libfabric" in name:
        providers = [match[1].lower() for line in lines if (match := _PROVIDER.search(line)) is not None]
        provider = providers[-1] if providers else "efa"
        return "socket" if provider in ("tcp", "sockets", "udp") else provider
    return name


def _adapters(lines: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the adapters by network, e.g. `mlx5_0:1/IB` of IB and `eth0` of Socket."""
    adapters: dict[str, tuple[str, ...]] = {}
    for line in lines:
        if (match := _ADAPTERS.search(line)) is not None:
            names = _ADAPTER.findall(match[2].partition(";")[0])
            devices = names if match[1] == "IB" else [name.partition(":")[0] for name in names]
            adapters[match[1]] = tuple(dict.fromkeys(devices))
    return adapters
