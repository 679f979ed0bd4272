"""Number of processes that a spec requests, as far as it does not depend on the node; in Python and in CEL."""

from __future__ import annotations

from math import gcd

from finetune_contract.choices import StrategyName
from finetune_operator.spec.types import FineTuneJobSpec, ParallelismSpec


def requested_strategy(parallelism: ParallelismSpec) -> StrategyName | None:
    """Return the strategy that the spec fixes, by name or by a ZeRO stage, which is DeepSpeed's around whole layers;
    None: it is free.
    """
    if parallelism.strategy != "auto":
        return parallelism.strategy
    if parallelism.zero_stage == "auto":
        return None
    return "ddp" if parallelism.model_ranks > 1 else "deepspeed"


def certain_processes(spec: FineTuneJobSpec) -> int | None:
    """Return the processes on each node, if independent of the node: as requested, one per GPU, and one on a CPU
    without parallelism; None: the plan decides.
    """
    requested, gpus = spec.resources.processes_per_node, spec.resources.gpus_per_node
    if requested != "auto":
        return requested
    if gpus == "auto":
        return None
    alone = spec.parallelism.replica_ranks == 1 and requested_strategy(spec.parallelism) in (None, "single")
    return gpus or (1 if alone else None)


def least_processes(spec: FineTuneJobSpec) -> int:
    """Return the minimum processes per node that, over all nodes, form whole groups reading the same rows."""
    return spec.parallelism.replica_ranks // gcd(spec.parallelism.replica_ranks, spec.resources.nodes)


def certain_ranks(spec: FineTuneJobSpec) -> int | None:
    """Return data-parallel ranks = nodes x processes / (tensor x pipeline x sequence); None if the plan may choose."""
    processes = certain_processes(spec)
    if spec.resources.elastic is not None or processes is None:
        return None
    parallelism = spec.parallelism
    world = spec.resources.nodes * processes
    model = parallelism.replica_ranks
    return None if world % model else world // model


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """Return the multiples of `unit` next to `value`, below and above; both are positive."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


def replicas_on_cpu(spec: FineTuneJobSpec) -> int | None:
    """Return the data-parallel ranks if replicas of several processes run on CPUs: the fewest for whole replicas."""
    resources = spec.resources
    if resources.gpus_per_node != 0 or resources.processes_per_node != "auto" or spec.parallelism.replica_ranks == 1:
        return None
    return resources.nodes * least_processes(spec) // spec.parallelism.replica_ranks


def world_size(spec: FineTuneJobSpec) -> int | None:
    """Return the number of processes over all nodes; None: the plan decides."""
    processes = certain_processes(spec)
    return None if processes is None else processes * spec.resources.nodes


SPREAD = "self.parallelism.tensor * self.parallelism.pipeline.degree"
MODEL = f"({SPREAD} * self.parallelism.sequence)"
"""CEL of the processes of one replica, without and with slices of rows."""
PROCESSES = (
    "(type(self.resources.processesPerNode) == int ? int(self.resources.processesPerNode)"
    " : type(self.resources.gpusPerNode) != int ? 0"
    " : int(self.resources.gpusPerNode) > 0 ? int(self.resources.gpusPerNode)"
    f" : {MODEL} == 1 && self.parallelism.strategy in ['auto', 'single'] && type(self.parallelism.zeroStage) != int"
    " ? 1 : 0)"
)
"""CEL of `certain_processes`; 0: the plan decides."""
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
"""Fields that determine the number of data-parallel ranks."""


def with_ranks(holds: str) -> str:
    """Return CEL that is `holds` on `world` and `model`: the processes over all nodes, 0 if the plan decides, and those
    of one replica. A list of one item names a value in CEL, so that it is computed once.
    """
    world = f"has(self.resources.elastic) ? 0 : self.resources.nodes * {PROCESSES}"
    return f"[{world}].all(world, [{MODEL}].all(model, {holds}))"
