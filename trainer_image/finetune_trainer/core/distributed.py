"""Rank and world size of this process: read from the launcher's environment, before torch is imported.

torchrun, Open MPI (4 and 5), MPICH and Intel MPI each set variables of their own; all code after this module sees the
five of torchrun. A world that differs from the plan is refused: Open MPI without its host file and a launcher with a
wrong count both start fewer processes without an error, and the run would train something else than planned.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from finetune_contract.choices import Device, StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import World
from finetune_trainer.core.allocator import keep_freed_memory
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
Launcher: TypeAlias = Literal["torchrun", "mpi", "environment", "none"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time that a collective operation of the training waits for a lost process."""
PATIENCE = timedelta(days=1)
"""Time that processes wait for each other while they write, hash and read checkpoints, 12 bytes a parameter, which may
take more than half an hour for tens of billions of them on a slow volume. A process that ends closes its connections,
which ends the wait at once, and the operator finds one that hangs (`runPolicy.progressDeadlineSeconds`).
"""

START_SECONDS = 1800
"""Time that pods of one gang wait for each other to start: images are pulled and nodes are added."""

LOOPBACK = "127.0.0.1"
_MPI_PORTS = (20000, 10000)
"""First port and number of ports from which all processes of one mpirun derive the same port without communicating."""
_FREE_PORTS = (10000, 10000)
"""First port and number of ports from which one process chooses a port for itself and its peers."""

# Rank, size, local rank, local size by process manager; the first whose rank and size are set counts.
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Same value in all processes of one mpirun, another in another mpirun: Open MPI 4 and 5 set the first, Open MPI 4 the
# second too. MPICH has none (its PMI_ID is the process's own number), so its runs share one port unless MASTER_PORT is
# set.
_MPI_RUN_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_FIVE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessWorld:
    """Rank and sizes of this process in the world."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "none"

    @property
    def is_main(self) -> bool:
        """Return True for rank 0, which writes the files that all ranks share."""
        return self.rank == 0


def discover(environment: Mapping[str, str]) -> ProcessWorld:
    """Return the world that the environment describes; a world of one process when it describes none.

    torchrun comes first: inside `mpirun torchrun ...` its variables are the nearer ones. MPI comes before bare RANK and
    WORLD_SIZE, which some operators set for the node and not for the process.
    """
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        return _from_variables(environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun")
    for names in _MPI_VARIABLES:
        if names[0] in environment and names[1] in environment:
            return _from_variables(environment, names, "mpi")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_variables(environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "environment")
    return ProcessWorld()


def _from_variables(
    environment: Mapping[str, str], names: tuple[str, str, str, str], launcher: Launcher
) -> ProcessWorld:
    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        if not text.isdecimal():
            raise StageError(
                FailureClass.CONFIG,
                "BadProcessVariable",
                f"The environment variable {name} is {text!r}; it must be a whole number.",
                "Start the trainer with torchrun or mpirun, which set it.",
            )
        return int(text)

    rank, size = number(names[0], 0), number(names[1], 1)
    return ProcessWorld(rank, size, number(names[2], rank), number(names[3], size), launcher)


def check_world(world: ProcessWorld, planned: World, data_parallel: int, replica_ranks: int = 1) -> None:
    """Raise StageError WORLD_SIZE when the running processes are not the planned ones: `data_parallel` times the
    `replica_ranks` that read the same rows.
    """
    if world.size == planned.size == data_parallel * replica_ranks:
        return
    replicas = "" if replica_ranks == 1 else f" x {replica_ranks} processes that read the same rows"
    raise StageError(
        FailureClass.WORLD_SIZE,
        "WorldSizeMismatch",
        f"{world.size} processes run (started by {world.launcher}), and the plan has {planned.size} ({planned.nodes} "
        f"nodes x {planned.processes_per_node}), {data_parallel} data-parallel{replicas}.",
        "Check the launcher's process count and its host file: mpirun without one starts on a single node.",
    )


def settle_environment(
    environment: MutableMapping[str, str], world: ProcessWorld, *, device: Device, threads: int, strategy: StrategyName
) -> None:
    """Set the variables that torch, accelerate and DeepSpeed read on import; call it before that."""
    environment["OMP_NUM_THREADS"] = str(threads)
    # Several processes already share the machine; a fork after its threads have started would only warn.
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # Our own client implements the progress protocol; transformers' callback would post everything a second time.
    environment["DISABLE_KUBEFLOW_INTEGRATION"] = "TRUE"
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        if not any(name in environment for name in _ALLOCATOR_SETTINGS):
            environment[_ALLOCATOR_SETTINGS[0]] = _GROWING_BLOCKS
        if (instance := _own_instance(environment, world)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = instance
    if strategy == "single":
        if device == "cuda":
            # Use the first of several GPUs: the Trainer would spread one process over all of them (torch's
            # DataParallel).
            environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        # With them, accelerate would start a distributed run (and DDP) for one process.
        for name in _FIVE:
            environment.pop(name, None)
        return
    settle_rank(environment, world)


_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator on GPUs: today's name and the one before."""
_GROWING_BLOCKS = "expandable_segments:True"
"""Blocks grow in place. With rows of many lengths, blocks of fixed sizes would leave gaps that nothing fits into."""
INSTANCE = "MIG-"
"""Prefix of the identifier of an instance of a partitioned GPU."""


def _own_instance(environment: Mapping[str, str], world: ProcessWorld) -> str | None:
    """Return the instance of this process where several of partitioned GPUs are listed: CUDA shows a process only the
    first of them. NVIDIA's device plugin lists those of a pod in NVIDIA_VISIBLE_DEVICES. None: no such list.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("NVIDIA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in listed.split(",")]
    if not all(name.startswith(INSTANCE) for name in names) or world.local_rank >= len(names):
        return None
    return names[world.local_rank]


def device_index(environment: Mapping[str, str], local_rank: int) -> int:
    """Return the number of a process's GPU among those that it sees: 0 where it sees an instance of its own."""
    return 0 if environment.get("CUDA_VISIBLE_DEVICES", "").startswith(INSTANCE) else local_rank


def settle_rank(environment: MutableMapping[str, str], world: ProcessWorld) -> None:
    """Set torchrun's variables, whatever launcher started this process."""
    address, port = _rendezvous(environment, world)
    settled = (world.rank, world.size, world.local_rank, world.local_size, address, port)
    environment.update({name: str(value) for name, value in zip(_FIVE, settled, strict=True)})


def _rendezvous(environment: Mapping[str, str], world: ProcessWorld) -> tuple[str, int]:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and world.local_size != world.size:
        raise StageError(
            FailureClass.CONFIG,
            "MasterAddressMissing",
            f"{world.size} processes run on several nodes ({world.local_size} on this one) and MASTER_ADDR is not set.",
            "Pass the host name of rank 0, e.g. mpirun -x MASTER_ADDR=host ...",
        )
    if port is not None:
        return address or LOOPBACK, int(port)
    if world.size == 1:
        return address or LOOPBACK, free_port()
    first, count = _MPI_PORTS
    run = next((environment[name] for name in _MPI_RUN_VARIABLES if name in environment), "")
    return address or LOOPBACK, first + zlib.crc32(run.encode()) % count


def free_port() -> int:
    """Return an unused port of this machine. Its user binds it seconds later, so it is below the kernel's ephemeral
    range, from which it could be taken by then. Raise OSError when 100 ports are in use.
    """
    first, count = _FREE_PORTS
    for _ in range(100):
        port = first + secrets.randbelow(count)  # `random` may have been seeded alike in two jobs
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port among 100 from {first} to {first + count - 1}")


@dataclass(frozen=True)
class Backends:
    """Backends of all process groups: groups created later inherit the training's."""

    training: str
    """Backend in torch.distributed's notation: one name, or one for each kind of device."""
    waiting: str
    """Backend of the group in which processes wait for each other, with `PATIENCE`."""
    store: Store | None = None
    """Store for the rendezvous; None: at MASTER_ADDR."""


BACKENDS: Mapping[Device, Backends] = {
    "cpu": Backends("gloo", "gloo"),
    # gloo beside nccl: for tensors in host memory, so that no host waits for its GPU.
    "cuda": Backends("cpu:gloo,cuda:nccl", "gloo"),
}


def connect(
    world: ProcessWorld, device: Device, threads: int, strategy: StrategyName, backends: Backends | None = None
) -> None:
    """Join the process groups. `backends`: in place of the device's; a dry run has one that sends nothing."""
    import torch

    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    if device == "cuda":
        index = device_index(os.environ, world.local_rank)
        refuse_missing_gpu(world.rank, index)
        torch.cuda.set_device(index)
    if strategy != "single":
        used = backends or BACKENDS[device]
        place: dict[str, Any] = (
            {} if used.store is None else {"store": used.store, "rank": world.rank, "world_size": world.size}
        )
        torch.distributed.init_process_group(used.training, timeout=COLLECTIVE_TIMEOUT, **place)
        _Barrier.backend = used.waiting
        _Barrier.group = new_waiting_group()


class _Barrier:
    """Process group that `connect` created for `barrier`, whose callers cannot pass it on."""

    group: ClassVar[ProcessGroup | None] = None
    backend: ClassVar[str] = "gloo"
    of_thread: ClassVar[ContextVar[ProcessGroup | None]] = ContextVar("waiting_group", default=None)
    """Group of a thread that has one of its own: a new thread begins without."""


def new_waiting_group() -> ProcessGroup | None:
    """Return a further group of all processes with `PATIENCE`; None without a process group. Every rank must call it.
    A thread beside the training needs one: collectives of a group have the same order on all processes.
    """
    import torch

    if not torch.distributed.is_initialized():
        return None
    group = torch.distributed.new_group(backend=_Barrier.backend, timeout=PATIENCE)
    assert not isinstance(group, int), "this process belongs to the group of all processes"
    return group


@contextmanager
def waiting_in(group: ProcessGroup | None) -> Iterator[None]:
    """Have this thread's `barrier`, `patiently_gathered`, `patiently_shared` and `waiting_group` use `group`."""
    before = _Barrier.of_thread.set(group)
    try:
        yield
    finally:
        _Barrier.of_thread.reset(before)


def refuse_missing_gpu(rank: int = 0, index: int = 0) -> None:
    """Raise StageError STRATEGY_NOT_IN_EFFECT `DeviceMissing` where the process of that rank does not see its GPU, the
    one with that number.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() > index:
        return
    raise StageError(
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        "DeviceMissing",
        f"The plan runs this stage on GPUs; process {rank} needs GPU {index}, and sees {torch.cuda.device_count()} "
        f"of them (torch {torch.__version__}, built "
        f"{'without CUDA' if torch.version.cuda is None else f'for CUDA {torch.version.cuda}'}).",
        "Request as many GPUs as processes per node, use an image that is built with CUDA, and check the driver.",
    )


def barrier() -> None:
    """Wait for all processes, with `PATIENCE`; return at once without a process group."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier(group=waiting_group())


def waiting_group() -> ProcessGroup | None:
    """Return the group of all processes, in host memory and with `PATIENCE`; None without a process group."""
    return _Barrier.of_thread.get() or _Barrier.group


def patiently_gathered(mine: T) -> list[T]:
    """Return `mine` of each process, by rank, also where some come much later. Every rank must call it."""
    import torch

    if not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine, group=waiting_group())
    return everyone


def patiently_shared(value: T | None) -> T:
    """Return the `value` of rank 0, which may be long in coming; the others pass None. Every rank must call it."""
    import torch

    shared: list[Any] = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(shared, src=0, group=waiting_group())
    return shared[0]  # type: ignore[no-any-return]


def gathered(mine: T) -> list[T]:
    """Return `mine` of each process, by rank. Every rank must call it."""
    import torch

    if not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def gathered_on_first(mine: T) -> list[T] | None:
    """Return `mine` of each process, by rank, on rank 0; None on the others. Every rank must call it."""
    import torch

    if not torch.distributed.is_initialized():
        return [mine]
    first = torch.distributed.get_rank() == 0
    everyone: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(mine, everyone)
    return everyone


def summed(mine: Sequence[float]) -> list[float]:
    """Return each number summed over all processes. Every rank must call it.

    In host memory, also on GPUs: to read them from its device, a process would wait for all work that is queued there.
    """
    import torch

    buffer = torch.tensor(mine, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(buffer)
    total: list[float] = buffer.tolist()
    return total


def lowest(mine: Sequence[float], group: ProcessGroup | None = None) -> list[float]:
    """Return the lowest of each number over all processes, or those of `group`, in host memory. Each must call it."""
    import torch

    buffer = torch.tensor(mine, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(buffer, torch.distributed.ReduceOp.MIN, group=group)
    least: list[float] = buffer.tolist()
    return least


def disconnect() -> None:
    """Wait for all processes, then leave the group, so that no process ends while another still needs it."""
    import torch

    if torch.distributed.is_initialized():
        barrier()
        _Barrier.group = None
        torch.distributed.destroy_process_group()


def current() -> ProcessWorld:
    """Call `discover` on this process's own environment."""
    return discover(os.environ)
