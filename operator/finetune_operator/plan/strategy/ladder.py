"""Ladder of strategies: the forms of one training that its spec leaves open, from the cheapest to the most frugal, and
the memory of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune_contract.arguments import needs_whole_logits
from finetune_contract.choices import CheckpointingMode, OffloadDevice
from finetune_contract.combinations import broken
from finetune_contract.constraints import Choices
from finetune_contract.trainer_job import Strategy, World
from finetune_operator.plan.memory import process_memory as memory
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.model_parallel_plan import filled, spread
from finetune_operator.plan.strategy.combination_checks import decided_choices
from finetune_operator.plan.time.cost import machine_of
from finetune_operator.plan.time.learned import corrected_memory
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import MemoryEstimate
from finetune_operator.spec.rules.parallelism_rules import secondary_shards
from finetune_operator.spec.rules.process_counts import requested_strategy
from finetune_operator.spec.types import ParallelismSpec


@dataclass(frozen=True)
class Fit:
    """Strategy and micro-batch with their memory."""

    strategy: Strategy
    micro_batch: int
    memory: MemoryEstimate


def ladder(asked: ParallelismSpec, world: World, compared: bool = False) -> Iterator[Strategy]:
    """Yield the strategies that the spec leaves open, the cheapest first.

    Sharding comes before recomputation, and both before offload (each step waits for the host), of the optimizer's
    state first. ZeRO-0 is not tried by itself: ddp computes the same. Offload is tried on GPUs only, as on CPU it moves
    nothing, and never to files, whose speed is unknown. fsdp and selective checkpointing are tried where times are
    `compared`: neither is always cheaper than the rung after it. Beside split layers and stages the replicas, if there
    are several, divide the optimizer state (ddp with ZeRO-1), or all state (fsdp).
    """
    modes: tuple[CheckpointingMode, ...] = ("none", "selective", "full") if compared else ("none", "full")
    if asked.activation_checkpointing != "auto":
        modes = (asked.activation_checkpointing,)
    for optimizer, parameters in _offloads(asked, world):
        changes = {
            "offload_optimizer": optimizer,
            "offload_parameters": parameters,
            "offload_activations": asked.offload.activations,
        }
        for mode in modes:
            bases = list(_sharding(asked, world, compared))
            if optimizer != "none" and requested_strategy(asked) is None and world.size == 1:
                bases += [Strategy(name="deepspeed", zero_stage=2 if parameters == "none" else 3)]
            for base in bases:
                rung = spread(asked, base.model_copy(update={"activation_checkpointing": mode, **changes}))
                if not broken(Choices().with_strategy(rung)):
                    yield rung


def _offloads(asked: ParallelismSpec, world: World) -> tuple[tuple[OffloadDevice, OffloadDevice], ...]:
    """Return the possible places of optimizer state and parameters, the cheapest first."""
    name, given = requested_strategy(asked), asked.offload
    if name == "fsdp" and given.parameters == "cpu":
        return (("cpu", "cpu"),)
    if (given.optimizer, given.parameters) != ("none", "none"):
        return ((given.optimizer, given.parameters),)
    if asked.model_ranks > 1 or world.device == "cpu" or name not in (None, "deepspeed"):
        return (("none", "none"),)
    return (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))


def _sharding(asked: ParallelismSpec, world: World, compared: bool) -> Iterator[Strategy]:
    match requested_strategy(asked):
        case None if asked.model_ranks > 1:
            yield Strategy(name="ddp")
            if world.size > asked.model_ranks:
                yield Strategy(name="ddp", zero_stage=1)
                yield Strategy(name="fsdp")
        case None:
            yield Strategy(name="single" if world.size == 1 else "ddp")
            if world.size > 1 and compared:
                yield Strategy(name="fsdp")
            if world.size > 1:
                yield from (Strategy(name="deepspeed", zero_stage=stage) for stage in (1, 2, 3))
        case "deepspeed" if asked.zero_stage == "auto":
            yield from (Strategy(name="deepspeed", zero_stage=stage) for stage in (1, 2, 3))
        case "deepspeed" | "ddp" as name if asked.zero_stage != "auto":
            yield Strategy.model_validate({"name": name, "zero_stage": asked.zero_stage})
        case "fsdp":
            yield Strategy(name="fsdp", fsdp_sharding=asked.sharding)
        case name:
            yield Strategy(name=name)


def estimate(draft: Draft, strategy: Strategy, micro: int) -> MemoryEstimate:
    """Estimate the memory of one process of this draft."""
    work = workload(draft, strategy, micro)
    return corrected_memory(draft, strategy, memory.estimate(work, draft.device_bytes))


def workload(draft: Draft, strategy: Strategy, micro: int) -> Workload:
    """Return the inputs of the memory estimate of one process of this draft."""
    return Workload(
        model=draft.model,
        task=draft.spec.task,
        strategy=strategy,
        precision=decided(draft.precision),
        optimizer=draft.training.optimizer,
        world=decided(draft.world),
        micro_batch=micro,
        length=draft.lengths.longest,
        sequences=draft.lengths.sequences,
        packed=draft.packing,
        rows_apart=draft.packing and not draft.why_packs_have_masks(strategy),
        adapter=draft.adapter,
        secondary_shards=secondary_shards(draft.spec.parallelism),
        smooths=draft.training.label_smoothing > 0,
        whole_logits=needs_whole_logits(draft.training.arguments),
        accumulates=accumulates(draft, strategy, micro),
    )


def accumulates(draft: Draft, strategy: Strategy, micro: int) -> bool:
    """Return whether a step has several micro-batches of `micro` rows."""
    return strategy.pipeline is not None or draft.training.global_batch_size > draft.data_ranks * micro


def fit_at(draft: Draft, rung: Strategy, micro: int) -> Fit:
    """Return the rung at a micro-batch, whether or not it fits."""
    strategy = with_passes(draft, rung, micro)
    return Fit(strategy, micro, estimate(draft, strategy, micro))


def free_margin(draft: Draft) -> float:
    """Return the share of a GPU's memory that a choice by time leaves free if it can; 0 if times are not known."""
    return draft.settings.planning.memory_margin if machine_of(draft) is not None else 0.0


def fits(draft: Draft, estimated: MemoryEstimate, margin: float = 0.0) -> bool:
    """Return whether it fits the device, of which a share of `margin` stays free, and the host."""
    device = (1 - margin) * estimated.capacity_bytes
    return estimated.total_bytes <= device and estimated.host_bytes <= draft.hardware.memory_bytes


def open_rungs(draft: Draft, asked: ParallelismSpec) -> tuple[Strategy, ...]:
    """Return the rungs of the ladder that are compatible with the job's other choices."""
    world, choices = decided(draft.world), decided_choices(draft)
    # Only fsdp divides models in fp8.
    compared = machine_of(draft) is not None or draft.precision == "fp8"
    return tuple(rung for rung in ladder(asked, world, compared) if not broken(choices.with_strategy(rung)))


def rungs(draft: Draft, asked: ParallelismSpec) -> tuple[Strategy, ...]:
    """Return the ladder of this draft, without strategies that have run out of memory with one row at a time, and
    without those that cannot resume from the existing checkpoints.
    """
    skipped, form = draft.adaptation.skipped_strategies, draft.adaptation.checkpoint_form
    return tuple(
        rung
        for rung in open_rungs(draft, asked)
        if rung.label not in skipped and (form is None or rung.resumes_from(form))
    )


def with_passes(draft: Draft, rung: Strategy, micro: int) -> Strategy:
    """Return the rung with the micro-batches of a pipeline pass set by their size, `micro`."""
    share = draft.training.global_batch_size // draft.data_ranks
    return filled(rung, draft.spec.parallelism.pipeline, max(1, share // micro))
