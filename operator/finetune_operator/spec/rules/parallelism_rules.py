"""Rules on degrees, placement and DeepSpeed's own keys."""

from __future__ import annotations

from finetune_operator.spec.rules.process_counts import (
    MODEL,
    SPREAD,
    WORLD_FIELDS,
    certain_processes,
    with_ranks,
    world_size,
)
from finetune_operator.spec.rules.rule import NO_LOOP, Rule
from finetune_operator.spec.types import FineTuneJobSpec, ParallelismSpec


def _degrees_advice(spec: FineTuneJobSpec) -> str:
    parallelism, world = spec.parallelism, world_size(spec) or 0
    degrees = {"tensor": parallelism.tensor, "pipeline": parallelism.pipeline.degree, "sequence": parallelism.sequence}
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    smaller = max((divisor for divisor in range(1, parallelism.replica_ranks + 1) if world % divisor == 0), default=1)
    return f"{world} processes are not a multiple of {product}: use a product that divides {world}, e.g. {smaller}"


def _idle_sections(spec: FineTuneJobSpec) -> bool:
    """Return True if `deepspeedConfig` tunes an offload that is not enabled."""
    keys, offload = spec.parallelism.deepspeed_config.get("zero_optimization"), spec.parallelism.offload
    sections = (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters))
    return any(
        isinstance(keys, dict) and isinstance(inner := keys.get(name), dict) and "device" not in inner
        for name, where in sections
        if where == "none"
    )


HPZ = "zero_hpz_partition_size"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""ZeRO++ (Wang et al., 2023): secondary parameter shards inside each node, and 8-bit communication."""


def secondary_shards(parallelism: ParallelismSpec) -> int:
    """Return the number of processes that share a secondary partition of the parameters; 1: there is none."""
    keys = parallelism.deepspeed_config.get("zero_optimization")
    shards = keys.get(HPZ, 1) if isinstance(keys, dict) else 1
    return shards if isinstance(shards, int) and shards > 0 else 1


def _zero_plus_plus_works(spec: FineTuneJobSpec) -> bool:
    """Return True if DeepSpeed obeys the keys of ZeRO++."""
    keys = spec.parallelism.deepspeed_config.get("zero_optimization")
    quantized = isinstance(keys, dict) and any(keys.get(key) for key in QUANTIZED)
    shards = secondary_shards(spec.parallelism)
    if not quantized and shards == 1:
        return True
    placed = shards == 1 or certain_processes(spec) in (None, shards)
    return spec.parallelism.zero_stage == 3 and placed and not (quantized and spec.resources.gpus_per_node == 0)


RULES: tuple[Rule, ...] = (
    Rule(
        "model-parallel-divides-world",
        "parallelism",
        f"{MODEL} == 1 || {with_ranks('world % model == 0')}",
        "needs a product of tensor, pipeline.degree and sequence that divides the number of processes",
        "change the degrees, the nodes or the processes",
        advice=_degrees_advice,
        reads=WORLD_FIELDS,
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
        f"meet all of these, or leave the keys zero_quantized_weights, zero_quantized_gradients and {HPZ} out",
        test=_zero_plus_plus_works,
        reads=("parallelism.deepspeedConfig", *WORLD_FIELDS),
    ),
    Rule(
        "offload-keys-need-an-offload",
        "parallelism.deepspeedConfig",
        None,
        "configures an offload that spec.parallelism.offload does not enable",
        "set the same state in spec.parallelism.offload, or leave the section out",
        test=lambda spec: not _idle_sections(spec),
        reads=("parallelism.deepspeedConfig", "parallelism.offload"),
    ),
)
