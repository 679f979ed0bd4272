"""Rules on degrees, placement and DeepSpeed's own keys."""

from __future__ import annotations

from finetune_operator.spec.rules.processes import (
    MODEL,
    SPREAD,
    WORLD,
    WORLD_FIELDS,
    WORLD_UNKNOWN,
    certain_processes,
    world_size,
)
from finetune_operator.spec.rules.rule import NO_LOOP, Rule
from finetune_operator.spec.types import FineTuneJobSpec, ParallelismSpec


def _degrees(parallelism: ParallelismSpec) -> dict[str, int]:
    """Return the degrees above 1 of a replica's processes, by field below `parallelism`."""
    degrees = {
        "tensor": parallelism.tensor,
        "pipeline.degree": parallelism.pipeline.degree,
        "sequence": parallelism.sequence,
    }
    return {name: degree for name, degree in degrees.items() if degree > 1}


def _dividing_degree(spec: FineTuneJobSpec) -> tuple[str, str] | None:
    """Return the degree to report, and its rule; None if the spec sets the processes, too."""
    degrees = _degrees(spec.parallelism)
    if spec.resources.processes_per_node != "auto" or not degrees:
        return None
    first, *others = degrees
    times = f"times {' and '.join(others)} " if others else ""
    return f"parallelism.{first}", f"{times}must divide the number of processes, one per GPU"


def _degrees_advice(spec: FineTuneJobSpec) -> str:
    degrees, world = _degrees(spec.parallelism), world_size(spec) or 0
    size = spec.parallelism.replica_ranks
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    product += f" = {size}" if len(degrees) > 1 else ""
    smaller = max((each for each in range(1, size + 1) if world % each == 0), default=1)
    return f"{world} processes are not a multiple of {product}: use a product that divides {world}, e.g. {smaller}"


def _idle_sections(spec: FineTuneJobSpec) -> tuple[tuple[str, str], ...]:
    """Return sections of `deepspeedConfig` that tune a disabled offload, with the field that enables it."""
    zero, offload = spec.parallelism.deepspeed_config.get("zero_optimization"), spec.parallelism.offload
    keys = zero if isinstance(zero, dict) else {}
    return tuple(
        (section, name)
        for section, name, where in (
            ("offload_optimizer", "optimizer", offload.optimizer),
            ("offload_param", "parameters", offload.parameters),
        )
        if isinstance(inner := keys.get(section), dict) and "device" not in inner and where == "none"
    )


def _idle_advice(spec: FineTuneJobSpec) -> str:
    (section, name), *_ = _idle_sections(spec)
    whole = f"spec.parallelism.deepspeedConfig.zero_optimization.{section}"
    return f"set spec.parallelism.offload.{name} to cpu, or leave {whole} out"


HPZ = "zero_hpz_partition_size"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""ZeRO++ (Wang et al., 2023): secondary parameter shards inside each node, and 8-bit communication."""


def zero_plus_plus(parallelism: ParallelismSpec) -> tuple[str, ...]:
    """Return the keys of ZeRO++ that `deepspeedConfig` sets."""
    keys = parallelism.deepspeed_config.get("zero_optimization")
    if not isinstance(keys, dict):
        return ()
    return tuple(key for key in QUANTIZED if keys.get(key)) + ((HPZ,) if secondary_shards(parallelism) > 1 else ())


def secondary_shards(parallelism: ParallelismSpec) -> int:
    """Return the number of processes that share a secondary partition of the parameters; 1: there is none."""
    keys = parallelism.deepspeed_config.get("zero_optimization")
    found = keys.get(HPZ, 1) if isinstance(keys, dict) else 1
    return found if isinstance(found, int) and found > 0 else 1


def _zero_plus_plus_fault(spec: FineTuneJobSpec) -> str | None:
    """Return the hint for keys of ZeRO++ that DeepSpeed would not obey."""
    above = "spec.parallelism.deepspeedConfig.zero_optimization"
    processes = certain_processes(spec)
    for key in zero_plus_plus(spec.parallelism):
        if spec.parallelism.zero_stage != 3:
            return f"set spec.parallelism.zeroStage to 3, or leave {above}.{key} out"
        if key in QUANTIZED and spec.resources.gpus_per_node == 0:
            return f"leave {above}.{key} out, or set spec.resources.gpusPerNode"
        if key == HPZ and processes is not None and secondary_shards(spec.parallelism) != processes:
            return f"set {above}.{key} to {processes}, or leave {above}.{key} out"
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "model-parallel-divides-world",
        "resources.processesPerNode",
        f"{WORLD_UNKNOWN} || ({WORLD}) % {MODEL} == 0",
        "times spec.resources.nodes must be a multiple of tensor x pipeline x sequence in spec.parallelism",
        "change the degrees, the nodes or the processes",
        advice=_degrees_advice,
        cause=_dividing_degree,
        reads=WORLD_FIELDS,
    ),
    Rule(
        "pipeline-settings-need-a-degree",
        "parallelism.pipeline",
        f"{NO_LOOP} || self.parallelism.pipeline.degree > 1 || (self.parallelism.pipeline.schedule == '1f1b'"
        " && type(self.parallelism.pipeline.microBatches) != int)",
        "has a schedule or microBatches, which have no effect with a degree of 1",
        "set degree to 2 or more, or leave schedule and microBatches out",
        reads=(
            "parallelism.pipeline.degree",
            "parallelism.pipeline.schedule",
            "parallelism.pipeline.microBatches",
            "training.script",
        ),
    ),
    Rule(
        "placement-places-something",
        "parallelism.placement",
        f"{NO_LOOP} || self.parallelism.placement == 'cluster' || ({SPREAD}) > 1",
        "has no effect without ranks of spec.parallelism.tensor or pipeline",
        "leave it out, or set tensor or pipeline.degree above 1",
        reads=("parallelism.placement", "parallelism.tensor", "parallelism.pipeline.degree", "training.script"),
    ),
    Rule(
        "placement-names-once",
        "parallelism.placement",
        "!self.parallelism.placement.matches('D.*D|P.*P|T.*T')",
        "names a dimension twice",
        "name each of D, P and T once",
    ),
    Rule(
        "placement-names-all",
        "parallelism.placement",
        "self.parallelism.placement in ['cluster', 'spread']"
        " || ((self.parallelism.tensor == 1 || self.parallelism.placement.contains('T'))"
        " && (self.parallelism.pipeline.degree == 1 || self.parallelism.placement.contains('P')))",
        "must name T with spec.parallelism.tensor above 1, and P with spec.parallelism.pipeline.degree above 1",
        "name them, e.g. DPT",
        reads=("parallelism.placement", "parallelism.tensor", "parallelism.pipeline.degree"),
    ),
    Rule(
        "zero-plus-plus-is-obeyed",
        "parallelism.deepspeedConfig",
        None,
        "has keys of ZeRO++, which need zeroStage 3, GPUs to quantize, and shards on the processes of one node",
        "set spec.parallelism.zeroStage to 3, or leave them out",
        test=lambda spec: _zero_plus_plus_fault(spec) is None,
        advice=lambda spec: _zero_plus_plus_fault(spec) or "",
        reads=("parallelism.deepspeedConfig", *WORLD_FIELDS),
    ),
    Rule(
        "offload-keys-need-an-offload",
        "parallelism.deepspeedConfig",
        None,
        "configures an offload that spec.parallelism.offload does not enable",
        "set spec.parallelism.offload, or leave the section out",
        test=lambda spec: not _idle_sections(spec),
        advice=_idle_advice,
        reads=("parallelism.deepspeedConfig", "parallelism.offload"),
    ),
)
