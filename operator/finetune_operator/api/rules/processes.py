"""How many processes a spec asks for, as far as no node has a say in it; in Python and in CEL."""

from __future__ import annotations

from math import gcd

from finetune_contract.choices import StrategyName
from finetune_operator.api.types import FineTuneJobSpec, ParallelismSpec


def asked_strategy(parallelism: ParallelismSpec) -> StrategyName | None:
    """The strategy that the spec fixes, by name or by a ZeRO stage, as only DeepSpeed has them; None: it is free."""
    if parallelism.strategy != "auto":
        return parallelism.strategy
    return None if parallelism.zero_stage == "auto" else "deepspeed"


def certain_processes(spec: FineTuneJobSpec) -> int | None:
    """Processes on each node, where the node has no say in it: as asked, one a GPU, and on a CPU one where nothing is
    spread; None: the plan decides.
    """
    asked, gpus = spec.resources.processes_per_node, spec.resources.gpus_per_node
    if asked != "auto":
        return asked
    if gpus == "auto":
        return None
    alone = spec.parallelism.replica_ranks == 1 and asked_strategy(spec.parallelism) in (None, "single")
    return gpus or (1 if alone else None)


def least_processes(spec: FineTuneJobSpec) -> int:
    """Fewest processes a node that, over all nodes, are whole groups that read the same rows."""
    return spec.parallelism.replica_ranks // gcd(spec.parallelism.replica_ranks, spec.resources.nodes)


def certain_ranks(spec: FineTuneJobSpec) -> int | None:
    """Data-parallel ranks = nodes x processes / (tensor x pipeline x sequence); None while the plan may choose."""
    processes = certain_processes(spec)
    if spec.resources.elastic is not None or processes is None:
        return None
    parallelism = spec.parallelism
    world = spec.resources.nodes * processes
    model = parallelism.replica_ranks
    return None if world % model else world // model


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` next to `value`, below and above; both are positive."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


def replicas_on_cpu(spec: FineTuneJobSpec) -> int | None:
    """Data-parallel ranks where replicas of several processes run on CPUs, as few of them as make whole ones."""
    resources = spec.resources
    if resources.gpus_per_node != 0 or resources.processes_per_node != "auto" or spec.parallelism.replica_ranks == 1:
        return None
    return resources.nodes * least_processes(spec) // spec.parallelism.replica_ranks


def world_size(spec: FineTuneJobSpec) -> int | None:
    """Processes over all nodes; None: the plan decides."""
    processes = certain_processes(spec)
    return None if processes is None else processes * spec.resources.nodes


SPREAD = "self.parallelism.tensor * self.parallelism.pipeline.degree"
MODEL = f"({SPREAD} * self.parallelism.sequence)"
"""CEL of the processes of one replica, without slices of rows and with them."""
PROCESSES = (
    "(type(self.resources.processesPerNode) == int ? int(self.resources.processesPerNode)"
    " : type(self.resources.gpusPerNode) != int ? 0"
    " : int(self.resources.gpusPerNode) > 0 ? int(self.resources.gpusPerNode)"
    f" : {MODEL} == 1 && self.parallelism.strategy in ['auto', 'single'] && type(self.parallelism.zeroStage) != int"
    " ? 1 : 0)"
)
"""CEL of `certain_processes`; 0: the plan decides."""
WORLD = f"self.resources.nodes * {PROCESSES}"
WORLD_FIELDS = (
    "resources.nodes",
    "resources.processesPerNode",
    "resources.gpusPerNode",
    "parallelism.strategy",
    "parallelism.zeroStage",
    "resources.elastic",
    "parallelism.tensor",
    "parallelism.pipeline.degree",
    "parallelism.sequence",
)
"""Fields that decide the number of data-parallel ranks."""
WORLD_UNKNOWN = f"has(self.resources.elastic) || {PROCESSES} == 0"
