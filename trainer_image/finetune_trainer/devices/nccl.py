"""NCCL in the training: its defaults, the transports that it chose, and what it leaves behind when it hangs.

NCCL's own log goes into a file of each rank, so that the pod's log has none of its hundreds of lines. A variable that
the user has set is never changed.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_contract.choices import Device, Transport
from finetune_contract.layout import ENV_NCCL, FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.nccl_log import chosen, merged, warnings

if TYPE_CHECKING:
    from finetune_contract.report import Communication
    from finetune_contract.trainer_job import World

log = logging.getLogger(__name__)

DUMP_PREFIX = "flight-recorder-"
LOG_SUFFIX = ".nccl.log"
DEFAULTS = {
    # A collective that fails or times out ends its process, instead of leaving the others to wait (torch's default).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # On a time-out each process writes its last collectives into a file, which the launcher summarizes in the log.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_ON_TIMEOUT": "1",
}
RENAMED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Earlier name of a variable, which torch reads too."""
_MISSING = re.compile(
    r"network \S+ not found|NET/IB : No device found|Failed to initialize any NET|No eligible provider"
)
_LOCKED = re.compile(r"ibv_(reg_mr|create_cq|create_qp)\w* failed with error Cannot allocate memory")
NETWORK_HINT = (
    "Check the device plugin, the image's libraries (libibverbs; for EFA its plugin) and docs/network.md, or set "
    "resources.network to tcp."
)
MEMORY_HINT = "Raise the limit of locked memory in the nodes' container runtime (docs/network.md)."


def settle_nccl(environment: MutableMapping[str, str], rank: int) -> None:
    """Set NCCL's defaults for this process, before its first communicator."""
    folder = settle_nccl_log(environment, rank)
    for name, value in {**DEFAULTS, "TORCH_FR_DUMP_TEMP_FILE": str(Path(folder, DUMP_PREFIX))}.items():
        if RENAMED.get(name, name) not in environment:
            environment.setdefault(name, value)


def settle_nccl_log(environment: MutableMapping[str, str], rank: int) -> str:
    """Have NCCL of a process write its log into a file of the folder for its files, and return that folder."""
    folder = environment.get(ENV_NCCL)
    if folder is None:
        folder = environment[ENV_NCCL] = tempfile.mkdtemp(prefix="finetune-nccl-")
    if "NCCL_DEBUG" not in environment:
        environment["NCCL_DEBUG"] = "INFO"
        # GRAPH has the topology, by which NVLink differs from PCIe.
        environment.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH")
        environment.setdefault("NCCL_DEBUG_FILE", str(Path(folder, f"rank-{rank}{LOG_SUFFIX}")))
    return folder


def nccl_log(environment: Mapping[str, str]) -> str:
    """Return NCCL's log of this process; empty if it writes to another place, also to /dev/stdout, a pipe that nobody
    would ever finish to read.
    """
    path = environment.get("NCCL_DEBUG_FILE")
    if path is None:
        return ""
    path = path.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    except OSError:
        return ""


def measured_transports(world: World, rank: int, device: Device = "cuda") -> Communication | None:
    """Connect all GPUs once by a sum of one number, and return the transports that NCCL chose; None if its log is not
    ours. Every rank must call it.

    StageError STRATEGY_NOT_IN_EFFECT if the devices of the planned network are missing or cannot be used.
    """
    import torch

    from finetune_trainer.core.distributed import gathered

    if world.network is not None and rank == 0:
        warn_of_locked_memory(world.network)
    try:
        number = torch.ones(1, device=device)
        torch.distributed.all_reduce(number)
        number.item()
    except RuntimeError as error:
        reason = unusable_network(world.network, nccl_log(os.environ))
        raise reason or error from error
    own = chosen(nccl_log(os.environ), world.processes_per_node, world.nodes)
    communication = merged(gathered(own))
    if rank == 0 and communication is not None:
        log.info("NCCL %s: %s.", communication.library or "", communication.words)
    return communication


def unusable_network(planned: Transport | None, text: str) -> StageError | None:
    """Return the error of a communicator that could not use the planned network, by its log; None for other causes."""
    if planned is None:
        return None
    if _LOCKED.search(text):
        message = f"The plan has {planned} between nodes, and NCCL cannot lock memory for it ({locked_memory()})."
        return StageError(FailureClass.STRATEGY_NOT_IN_EFFECT, "LockedMemory", message, MEMORY_HINT)
    if _MISSING.search(text):
        message = f"The plan has {planned} between nodes, and NCCL finds no device for it."
        return StageError(FailureClass.STRATEGY_NOT_IN_EFFECT, "NetworkNotInEffect", message, NETWORK_HINT)
    return None


def refuse_sockets(communication: Communication | None, planned: Transport | None) -> None:
    """Raise StageError STRATEGY_NOT_IN_EFFECT if the plan has a network with devices and NCCL uses sockets."""
    if planned is None or communication is None or communication.between != "socket":
        return
    interfaces = f" over {', '.join(communication.adapters)}" if communication.adapters else ""
    message = f"The plan has {planned} between nodes, and NCCL uses TCP sockets{interfaces}."
    raise StageError(FailureClass.STRATEGY_NOT_IN_EFFECT, "NetworkNotInEffect", message, NETWORK_HINT)


def locked_memory() -> str:
    """Return this process's limit of locked memory in words."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit of locked memory" if limit == resource.RLIM_INFINITY else f"limit {limit >> 10} KiB"


def warn_of_locked_memory(planned: Transport) -> None:
    """Warn if this process may lock little memory, which transfers by RDMA need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        log.warning("Network %s locks memory: %s. %s", planned, locked_memory(), MEMORY_HINT)


def nccl_warnings(folder: Path) -> list[str]:
    """Return the warnings in NCCL's logs of all ranks in a folder, each once."""
    texts: list[str] = []
    for file in sorted(folder.glob(f"*{LOG_SUFFIX}")):
        texts += warnings(file.read_text(encoding="utf-8", errors="replace"))
    return list(dict.fromkeys(texts))
