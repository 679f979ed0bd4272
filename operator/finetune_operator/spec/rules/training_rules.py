"""Rules on training: the rows of a step, runs of a pipeline's schedule, checkpoints, scripts."""

from __future__ import annotations

from math import gcd
from typing import Literal

from finetune_operator.spec.rules.process_counts import (
    WORLD_FIELDS,
    certain_ranks,
    nearest_multiples,
    replicas_on_cpu,
    with_ranks,
)
from finetune_operator.spec.rules.rule import NO_LOOP, Rule, chosen_cel, loops, value_of
from finetune_operator.spec.types import CheckpointEverySpec, FineTuneJobSpec, PipelineSpec


def keeps_full(pipeline: PipelineSpec, accumulation: int) -> bool:
    """Return True if a step of that many micro-batches consists of whole runs of torch's schedule, of which the
    interleaved one needs even rounds.
    """
    if pipeline.degree == 1:
        return True
    passed = accumulation if pipeline.micro_batches == "auto" else pipeline.micro_batches
    even = pipeline.schedule != "interleaved" or passed % max(1, passed // pipeline.degree) == 0
    return accumulation % passed == 0 and even


def passes_are_whole(pipeline: PipelineSpec, share: int, micro: Literal["auto"] | int) -> bool:
    """Return True if `share` rows of a replica and step form whole runs; `micro`: rows of a micro-batch, auto: any."""
    sizes = [size for size in range(1, share + 1) if share % size == 0] if micro == "auto" else [micro]
    return any(share % size == 0 and keeps_full(pipeline, share // size) for size in sizes)


def _ranks(spec: FineTuneJobSpec) -> int:
    """Return the data-parallel ranks, or the fewest that a CPU takes; 1 if the plan decides."""
    return certain_ranks(spec) or replicas_on_cpu(spec) or 1


def _batch_unit(spec: FineTuneJobSpec) -> int:
    """Return the divisor of the global batch: ranks x explicit micro-batch."""
    micro = value_of(spec, "training.microBatchSize")
    return _ranks(spec) * (micro if isinstance(micro, int) else 1)


def _batch_fits(spec: FineTuneJobSpec) -> bool:
    return not loops(spec) or value_of(spec, "training.globalBatchSize") % _batch_unit(spec) == 0


def _batch_advice(spec: FineTuneJobSpec) -> str:
    batch, micro = value_of(spec, "training.globalBatchSize"), value_of(spec, "training.microBatchSize")
    ranks, unit = _ranks(spec), _batch_unit(spec)
    near = " or ".join(str(multiple) for multiple in nearest_multiples(batch, unit))
    parts = [f"{ranks} ranks"] if ranks > 1 else []
    parts += [] if micro == "auto" else [f"{micro} row{'s' * (micro > 1)} per micro-batch"]
    smaller = ""
    if micro != "auto" and batch % ranks == 0:
        smaller = f"; or set spec.training.microBatchSize to {gcd(batch // ranks, micro)}"
    return f"use {near}, multiples of {unit} = {' x '.join(parts)}{smaller}"


def _passes_fit(spec: FineTuneJobSpec) -> bool:
    """Return True if a step consists of whole runs of the schedule, if the ranks are certain and divide it."""
    pipeline, ranks = spec.parallelism.pipeline, certain_ranks(spec) or replicas_on_cpu(spec)
    if spec.training is None or not loops(spec) or ranks is None or pipeline.degree == 1 or not _batch_fits(spec):
        return True
    return passes_are_whole(pipeline, spec.training.global_batch_size // ranks, spec.training.micro_batch_size)


def _passes_advice(spec: FineTuneJobSpec) -> str:
    passed = value_of(spec, "training.globalBatchSize") // _batch_unit(spec)
    return f"set it to auto or to a divisor of {passed}, the micro-batches per replica and step"


def _has_one_interval(spec: FineTuneJobSpec) -> bool:
    every = spec.checkpoints.every
    return not isinstance(every, CheckpointEverySpec) or (every.steps is None) != (every.minutes is None)


def _stays_inside(path: str) -> Rule:
    """Return the rule that a path stays below the repository."""
    return Rule(
        f"{path}-stays-inside",
        path,
        f"!({chosen_cel(path)}) || !self.{path}.matches('(^|/)[.][.](/|$)')",
        "must stay inside the repository",
        "write it without ..",
    )


_MICRO = "self.training.microBatchSize"


RULES: tuple[Rule, ...] = (
    Rule(
        "global-batch-divides",
        "training.globalBatchSize",
        # Arithmetic of _batch_unit.
        f"{NO_LOOP} || "
        + with_ranks(
            "self.training.globalBatchSize % ((world == 0 || world % model != 0 ? 1 : world / model)"
            f" * (type({_MICRO}) == int ? int({_MICRO}) : 1)) == 0"
        ),
        "must be a multiple of data-parallel ranks x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        advice=_batch_advice,
        reads=("training", *WORLD_FIELDS),
    ),
    Rule(
        "replicas-on-cpus-divide-the-batch",
        "training.globalBatchSize",
        None,
        "must be a multiple of replicas x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        test=lambda spec: replicas_on_cpu(spec) is None or _batch_fits(spec),
        advice=_batch_advice,
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
    _stays_inside("training.script.git.path"),
    _stays_inside("training.script.entryPoint"),
    Rule(
        "checkpoint-interval-is-one",
        "checkpoints.every",
        None,
        "takes exactly one of steps and minutes",
        "remove one of the two, or write auto",
        test=_has_one_interval,
        reads=("checkpoints.every",),
        schema={"maxProperties": 1},
    ),
    Rule(
        "warmup-counts-whole-steps",
        "training.warmupSteps",
        "!has(self.training) || self.training.warmupSteps < 1.0"
        " || self.training.warmupSteps == double(int(self.training.warmupSteps))",
        "must be a fraction below 1, or a whole number of steps",
        "write a whole number, or a fraction of all steps below 1",
        advice=lambda spec: f"write {spec.training.warmup_steps:.0f}" if spec.training else "",
    ),
)
