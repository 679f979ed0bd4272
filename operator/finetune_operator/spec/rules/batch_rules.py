"""Rules on the arithmetic of a step: the global batch, its micro-batches, and runs of a pipeline's schedule."""

from __future__ import annotations

from math import gcd
from typing import Literal

from finetune_contract.choices import PipelineSchedule
from finetune_operator.spec.rules.processes import (
    MODEL,
    WORLD,
    WORLD_FIELDS,
    WORLD_UNKNOWN,
    certain_ranks,
    nearest_multiples,
    replicas_on_cpu,
)
from finetune_operator.spec.rules.rule import NO_LOOP, Rule, loops
from finetune_operator.spec.types import FineTuneJobSpec, PipelineSpec


def full_passes(schedule: PipelineSchedule, degree: int, micro_batches: int) -> bool:
    """Return True if torch's schedule accepts that many micro-batches: the interleaved one needs even rounds."""
    return schedule != "interleaved" or micro_batches % max(1, micro_batches // degree) == 0


def keeps_full(pipeline: PipelineSpec, accumulation: int) -> bool:
    """Return True if a step of that many micro-batches consists of whole runs of the schedule."""
    if pipeline.degree == 1:
        return True
    passed = accumulation if pipeline.micro_batches == "auto" else pipeline.micro_batches
    return accumulation % passed == 0 and full_passes(pipeline.schedule, pipeline.degree, passed)


def passes_are_whole(pipeline: PipelineSpec, share: int, micro: Literal["auto"] | int) -> bool:
    """Return True if `share` rows of a replica and step form whole runs; `micro`: rows of a micro-batch, auto: any."""
    sizes = [size for size in range(1, share + 1) if share % size == 0] if micro == "auto" else [micro]
    return any(share % size == 0 and keeps_full(pipeline, share // size) for size in sizes)


def _batch_unit(spec: FineTuneJobSpec) -> int:
    """Return the divisor of the global batch: certain ranks x explicit micro-batch."""
    ranks = certain_ranks(spec) or 1
    micro = spec.training.micro_batch_size if spec.training else "auto"
    return ranks * (1 if micro == "auto" else micro)


def _global_batch_fits(spec: FineTuneJobSpec) -> bool:
    if spec.training is None or spec.training.script is not None:
        return True
    return spec.training.global_batch_size % _batch_unit(spec) == 0


def _global_batch_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    unit = _batch_unit(spec)
    near = " or ".join(str(batch) for batch in nearest_multiples(spec.training.global_batch_size, unit))
    ranks, micro = certain_ranks(spec), spec.training.micro_batch_size
    parts = [] if ranks in (None, 1) else [f"{ranks} ranks"]
    parts += [] if micro == "auto" else [f"{micro} row{'s' * (micro > 1)} per micro-batch"]
    smaller = ""
    share, left = divmod(spec.training.global_batch_size, ranks or 1)
    if micro != "auto" and not left:
        smaller = f"; or set spec.training.microBatchSize to {gcd(share, micro)}"
    return f"use {near}, multiples of {unit} = {' x '.join(parts)}{smaller}"


def _replicas_divide(spec: FineTuneJobSpec) -> bool:
    ranks = replicas_on_cpu(spec)
    if ranks is None or not loops(spec) or spec.training is None:
        return True
    micro = spec.training.micro_batch_size
    return spec.training.global_batch_size % (ranks * (1 if micro == "auto" else micro)) == 0


def _replicas_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    ranks, micro = replicas_on_cpu(spec) or 1, spec.training.micro_batch_size
    unit = ranks * (1 if micro == "auto" else micro)
    near = " or ".join(str(batch) for batch in nearest_multiples(spec.training.global_batch_size, unit))
    return f"use {near}, multiples of {unit}"


def _passes_fit(spec: FineTuneJobSpec) -> bool:
    """Return True if a step consists of whole runs of the schedule, if the ranks are certain and divide it."""
    ranks = certain_ranks(spec) or replicas_on_cpu(spec)
    if not loops(spec) or spec.training is None or ranks is None or spec.parallelism.pipeline.degree == 1:
        return True
    total = spec.training.global_batch_size
    if total % ranks or not _global_batch_fits(spec) or not _replicas_divide(spec):
        return True  # another rule reports it
    return passes_are_whole(spec.parallelism.pipeline, total // ranks, spec.training.micro_batch_size)


def _passes_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    micro, ranks = spec.training.micro_batch_size, certain_ranks(spec) or replicas_on_cpu(spec) or 1
    share = spec.training.global_batch_size // ranks
    passed = share if micro == "auto" else max(1, share // micro)
    whole = ", a multiple of the degree" if spec.parallelism.pipeline.schedule == "interleaved" else ""
    return f"set it to auto or to a divisor of {passed}, the micro-batches per replica and step{whole}"


_MICRO = "self.training.microBatchSize"


RULES: tuple[Rule, ...] = (
    Rule(
        "global-batch-divides",
        "training.globalBatchSize",
        # Arithmetic of _batch_unit, in two steps because CEL has no local variables.
        f"{NO_LOOP} || self.training.globalBatchSize % "
        f"((({WORLD_UNKNOWN}) || ({WORLD}) % {MODEL} != 0 ? 1 : ({WORLD}) / {MODEL})"
        f" * (type({_MICRO}) == int ? int({_MICRO}) : 1)) == 0",
        "must be a multiple of data-parallel ranks x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        advice=_global_batch_advice,
        reads=("training", *WORLD_FIELDS),
    ),
    Rule(
        "replicas-on-cpus-divide-the-batch",
        "training.globalBatchSize",
        None,
        "must be a multiple of replicas x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        test=_replicas_divide,
        advice=_replicas_advice,
        reads=("training", *WORLD_FIELDS),
    ),
    Rule(
        "pipeline-passes-are-whole",
        "parallelism.pipeline.microBatches",
        None,
        "must divide the micro-batches of a replica's step into whole passes of the schedule",
        "set it to auto",
        test=_passes_fit,
        advice=_passes_advice,
        reads=("training", "parallelism.pipeline", *WORLD_FIELDS),
    ),
)
