"""How the model is spread: the first rung of a ladder, from the cheapest to the most frugal, on which a micro-batch
fits.

An explicit choice leaves one rung, or a few; it is met or refused, never replaced. What fits on no rung is refused with
the arithmetic and the smallest change that would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from finetune_contract.choices import CheckpointingMode, OffloadDevice, Stage
from finetune_contract.job import Strategy, World
from finetune_operator.api.deepspeed_overrides import override_problems
from finetune_operator.api.types import ParallelismSpec
from finetune_operator.planning import memory
from finetune_operator.planning.batch import batch_arithmetic, batch_of, divisors, explain_batch, micro_batches
from finetune_operator.planning.draft import Draft, Lengths, decided
from finetune_operator.planning.placement import asked_strategy
from finetune_operator.planning.quantities import human_bytes
from finetune_operator.planning.types import MemoryEstimate

MOST_NODES = 4096
"""Up to here the refusal looks for a number of nodes that would do."""


@dataclass(frozen=True)
class Fit:
    """A strategy and a micro-batch with their memory."""

    strategy: Strategy
    micro_batch: int
    memory: MemoryEstimate


def check_parallelism(draft: Draft) -> Draft:
    """Refuse settings that contradict each other."""
    asked, training = draft.spec.parallelism, draft.training
    if asked.strategy != "deepspeed":
        if asked.zero_stage != "auto" and asked.strategy != "auto":
            draft = draft.refusing(
                ("parallelism", "zeroStage"),
                asked.zero_stage,
                f"only deepspeed has ZeRO stages, and strategy is {asked.strategy}",
                "leave zeroStage out, or set strategy to deepspeed",
            )
        if asked.deepspeed_config:
            draft = draft.refusing(
                ("parallelism", "deepspeedConfig"),
                asked.deepspeed_config,
                f"only deepspeed reads it, and strategy is {asked.strategy}",
                "leave deepspeedConfig out, or set strategy to deepspeed",
            )
    draft = replace(draft, problems=(*draft.problems, *override_problems(asked.deepspeed_config)))
    if asked.offload.optimizer == "none":
        return draft
    path, value = ("parallelism", "offload", "optimizer"), asked.offload.optimizer
    if asked.strategy != "deepspeed":
        draft = draft.refusing(
            path,
            value,
            f"only deepspeed offloads, and strategy is {asked.strategy}",
            "set strategy to deepspeed, or leave offload out",
        )
    if asked.zero_stage == 0:
        draft = draft.refusing(path, value, "ZeRO stage 0 does not offload", "set zeroStage to 1, 2, 3 or auto")
    if training.optimizer != "adamw":
        draft = draft.refusing(
            path,
            value,
            f"DeepSpeed has an offloaded form of adamw only, and optimizer is {training.optimizer}",
            "set training.optimizer to adamw, or offload.optimizer to none",
        )
    return draft


def ladder(asked: ParallelismSpec, world: World, offload_allowed: bool = True) -> Iterator[Strategy]:
    """The strategies that the spec leaves open, the cheapest first.

    Sharding comes before recomputation (a third more arithmetic), and both before offload (each step waits for the
    host). ZeRO-0 is not tried by itself: stage 1 sends as much and needs less. Offload needs a ZeRO stage from 1 to 3
    and is tried on GPUs only, as on CPU it moves nothing.
    """
    modes: tuple[CheckpointingMode, ...] = ("none", "full")
    if asked.activation_checkpointing != "auto":
        modes = (asked.activation_checkpointing,)
    name = asked_strategy(asked)
    offloads: tuple[OffloadDevice, ...] = ("none", "cpu")
    if asked.offload.optimizer != "none":
        offloads = (asked.offload.optimizer,)
    elif world.device == "cpu" or name not in (None, "deepspeed") or not offload_allowed:
        offloads = ("none",)
    for offload in offloads:
        for mode in modes:
            for base in _sharding(asked, world):
                if offload != "none" and not base.zero_stage:
                    continue
                yield base.model_copy(update={"activation_checkpointing": mode, "offload_optimizer": offload})
            if offload != "none" and name is None and world.size == 1:
                yield Strategy(name="deepspeed", zero_stage=2, activation_checkpointing=mode, offload_optimizer=offload)


def _sharding(asked: ParallelismSpec, world: World) -> Iterator[Strategy]:
    match asked_strategy(asked):
        case None:
            yield Strategy(name="single" if world.size == 1 else "ddp")
            if world.size > 1:
                yield from (Strategy(name="deepspeed", zero_stage=stage) for stage in (1, 2, 3))
        case "deepspeed" if asked.zero_stage == "auto":
            yield from (Strategy(name="deepspeed", zero_stage=stage) for stage in (1, 2, 3))
        case "deepspeed":
            yield Strategy.model_validate({"name": "deepspeed", "zero_stage": asked.zero_stage})
        case name:
            yield Strategy(name=name)


def estimate(draft: Draft, strategy: Strategy, micro: int) -> MemoryEstimate:
    """Memory of one process of this draft."""
    work = memory.Workload(
        model=draft.model,
        task=draft.spec.task,
        strategy=strategy,
        precision=decided(draft.precision),
        optimizer=draft.training.optimizer,
        world=decided(draft.world),
        micro_batch=micro,
        length=draft.lengths.longest,
        adapter=draft.adapter,
    )
    return memory.estimate(work, draft.device_bytes)


def fits(draft: Draft, estimated: MemoryEstimate) -> bool:
    """Whether device and host hold it."""
    return estimated.total_bytes <= estimated.capacity_bytes and estimated.host_bytes <= draft.hardware.memory_bytes


def rungs(draft: Draft, asked: ParallelismSpec) -> tuple[Strategy, ...]:
    """The ladder of this draft, without what has run out of memory with one row at a time."""
    adamw = draft.training.optimizer == "adamw"
    found = ladder(asked, decided(draft.world), offload_allowed=adamw)
    return tuple(rung for rung in found if rung.label not in draft.adaptation.skipped_strategies)


def first_fit(draft: Draft, asked: ParallelismSpec, micros: tuple[int, ...]) -> Fit | None:
    """The first rung on which one of `micros` (largest first) fits."""
    for strategy in rungs(draft, asked):
        for micro in micros:
            estimated = estimate(draft, strategy, micro)
            if fits(draft, estimated):
                return Fit(strategy, micro, estimated)
    return None


def choose_strategy(draft: Draft) -> Draft:
    """Strategy, checkpointing, offload and micro-batch together: each depends on the others through the memory."""
    asked = draft.spec.parallelism
    if not rungs(draft, asked):
        return _refuse_more(draft)
    found = first_fit(draft, asked, micro_batches(draft))
    if found is None and _may_fit(draft):
        found = _most_frugal(draft)
        batch = batch_of(draft, found.micro_batch)
        draft = replace(draft, strategy=found.strategy, batch=batch, memory=found.memory)
        draft = draft.because(
            f"strategy {found.strategy.label}, provisionally: the most frugal one; {batch_arithmetic(batch)}"
        )
        return draft.assuming(
            f"memory: as assumed here nothing fits ({human_bytes(found.memory.total_bytes)} of "
            f"{human_bytes(found.memory.capacity_bytes)} with {found.strategy.label}); prepare measures first, and the "
            "plan is made anew before the training starts"
        )
    if found is None:
        return _refuse(draft)
    batch = batch_of(draft, found.micro_batch)
    draft = replace(draft, strategy=found.strategy, batch=batch, memory=found.memory)
    draft = draft.because(_explain_strategy(draft, found)).because(explain_batch(draft, batch))
    return _explain_extras(draft, found.strategy)


def _may_fit(draft: Draft) -> bool:
    """Whether what prepare will measure can make the job fit: a model that nobody has read, or rows shorter than the
    longest that are allowed.
    """
    if draft.data is not None or Stage.PREPARE not in draft.stages:
        return False
    if not draft.model_known:
        return True
    short = replace(draft, lengths=Lengths(longest=1, typical=1.0))
    return first_fit(short, draft.spec.parallelism, micro_batches(short)) is not None


def _explain_strategy(draft: Draft, found: Fit) -> str:
    asked, world = draft.spec.parallelism, decided(draft.world)
    words = found.strategy.label
    need = f"{human_bytes(found.memory.total_bytes)} of {human_bytes(found.memory.capacity_bytes)}"
    if left_out := [rung.label for rung in ladder(asked, world) if rung.label in draft.adaptation.skipped_strategies]:
        return f"strategy {words}: {_ran_out_at_one(left_out)}; one process needs {need}"
    if asked.zero_stage != "auto" or asked.strategy not in ("auto", "deepspeed"):
        alone = "; with one process nothing is divided" if world.size == 1 and asked.strategy != "single" else ""
        return f"strategy {words}: as asked; one process needs {need}{alone}"
    labels = [rung.label for rung in ladder(asked, world)]
    skipped = labels[: labels.index(words)]
    if not skipped:
        kind = "the cheapest one" if asked_strategy(asked) is None else "the lowest stage"
        return f"strategy {words}: {kind} fits; one process needs {need}"
    return f"strategy {words}: the first that fits ({need}); {', '.join(skipped)} would need more"


def _explain_extras(draft: Draft, strategy: Strategy) -> Draft:
    asked = draft.spec.parallelism
    if strategy.activation_checkpointing != "none":
        why = "nothing fits without" if asked.activation_checkpointing == "auto" else "as asked"
        draft = draft.because(
            f"activation checkpointing {strategy.activation_checkpointing}: {why}; layers are computed twice"
        )
    if strategy.offload_optimizer != "none":
        why = "nothing fits without" if asked.offload.optimizer == "none" else "as asked"
        where = "the host" if decided(draft.world).device == "cuda" else "the same memory, as the device is the host"
        draft = draft.because(f"optimizer offload: {why}; its state lies in {where}")
    return draft


# -------------------------------------------------------------------------------------------------------------- refusal


def _ran_out_at_one(labels: Sequence[str]) -> str:
    return f"{' and '.join(labels)} ran out of memory with one row at a time"


def _refuse_more(draft: Draft) -> Draft:
    """The problem of a job whose strategies have all been tried."""
    asked = draft.spec.parallelism
    tried = [rung.label for rung in ladder(asked, decided(draft.world))]
    way_out = "use devices or nodes with more memory, or a smaller preparation.maxLength or model"
    if free := _set_free(asked):
        way_out = f"{free}; or {way_out}"
    shown = asked_strategy(asked) or "auto"
    return draft.refusing(("parallelism", "strategy"), shown, f"{_ran_out_at_one(tried)}, and none is left", way_out)


def _refuse(draft: Draft) -> Draft:
    """The problem of a job that fits on no rung: the arithmetic of its most frugal form, and what would help."""
    best = _most_frugal(draft)
    world, hardware = decided(draft.world), draft.hardware
    big = sorted(best.memory.terms, key=lambda term: term.bytes, reverse=True)[:4]
    arithmetic = " + ".join(f"{term.name} {human_bytes(term.bytes)}" for term in big)
    unit = "GPU" if world.device == "cuda" else "process"
    rule = (
        f"{best.strategy.label} with micro-batch {best.micro_batch} needs "
        f"{human_bytes(best.memory.total_bytes)} a {unit} ({arithmetic} + the rest), and there are "
        f"{human_bytes(best.memory.capacity_bytes)}"
    )
    if best.memory.total_bytes <= best.memory.capacity_bytes:
        rule = (
            f"{best.strategy.label} needs {human_bytes(best.memory.host_bytes)} of host memory a node, "
            f"and there are {human_bytes(hardware.memory_bytes)}"
        )
    asked = draft.spec.parallelism
    path = ("parallelism", "strategy") if asked_strategy(asked) else ("resources",)
    value = asked_strategy(asked) or f"{world.size} x {human_bytes(best.memory.capacity_bytes)}"
    return draft.refusing(path, value, rule, _smallest_change(draft, best))


def _most_frugal(draft: Draft) -> Fit:
    """The rung that needs the least on the device, at the smallest micro-batch that the spec allows."""
    micro = micro_batches(draft)[-1]
    tried = [Fit(rung, micro, estimate(draft, rung, micro)) for rung in rungs(draft, draft.spec.parallelism)]
    on_host = [fit for fit in tried if fit.memory.host_bytes <= draft.hardware.memory_bytes]
    return min(on_host or tried, key=lambda fit: fit.memory.total_bytes)


def _smallest_change(draft: Draft, best: Fit) -> str:
    asked, training, world = draft.spec.parallelism, draft.training, decided(draft.world)
    if training.micro_batch_size != "auto":
        smaller = tuple(
            size for size in divisors(training.global_batch_size // world.size) if size < training.micro_batch_size
        )
        found = first_fit(draft, asked, smaller)
        if found is not None:
            return f"set training.microBatchSize to {found.micro_batch} or to auto; the global batch stays"
    relaxed = asked.model_copy(update={"activation_checkpointing": "auto"})
    if first_fit(draft, relaxed, micro_batches(draft)) is not None:
        return "set parallelism.activationCheckpointing to full or auto"
    free = ParallelismSpec()
    found = first_fit(draft, free, micro_batches(draft))
    if found is not None:
        return f"{_set_free(asked)}, and the plan takes {found.strategy.label}"
    bigger = f"devices of at least {human_bytes(best.memory.total_bytes)}"
    if best.memory.total_bytes <= best.memory.capacity_bytes:
        bigger = f"nodes with at least {human_bytes(best.memory.host_bytes)} of memory"
    elif world.device == "cpu":
        bigger = f"nodes with at least {human_bytes(best.memory.host_bytes)} of memory"
        bigger += " or fewer processes" if world.processes_per_node > 1 else ""
    more = _nodes_that_fit(draft)
    shorter = "or a smaller preparation.maxLength or model"
    idle = ""
    if world.device == "cpu" and draft.hardware.gpus_per_node:
        idle = "the node's GPUs (set resources.gpusPerNode to auto), "
    return f"use {idle}{more}{bigger}, {shorter}"


def _set_free(asked: ParallelismSpec) -> str:
    """What to change so that the plan may choose among all strategies; what only one of them reads goes as well."""
    fixed = (
        ("zeroStage", asked.zero_stage != "auto"),
        ("offload", asked.offload.optimizer != "none"),
        ("deepspeedConfig", bool(asked.deepspeed_config)),
        ("activationCheckpointing", asked.activation_checkpointing != "auto"),
    )
    names = " and ".join(f"parallelism.{name}" for name, given in fixed if given)
    steps = ["set parallelism.strategy to auto"] if asked.strategy != "auto" else []
    return " and ".join([*steps, f"leave {names} out"] if names else steps)


def _nodes_that_fit(draft: Draft) -> str:
    """`16 nodes (128 GPUs in all), or ` when more nodes of this kind would do; empty when they would not."""
    world = decided(draft.world)
    if draft.local:
        return ""
    nodes = world.nodes
    while (nodes := nodes * 2) <= MOST_NODES:
        wider = replace(draft, world=world.model_copy(update={"nodes": nodes}))
        if first_fit(wider, ParallelismSpec(), (1,)) is not None:
            size = decided(wider.world).size
            multiple = (
                "" if draft.training.global_batch_size % size == 0 else f" with a globalBatchSize that {size} divides"
            )
            unit = "GPUs" if world.device == "cuda" else "processes"
            return f"{nodes} nodes ({size} {unit} in all){multiple}, or "
    return ""
