"""Refusal of a training that fits nowhere: what it takes, what it lacks, and the changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from finetune_contract.arguments import COMPILATION
from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import AdapterMethod
from finetune_operator.plan.hardware.assumed_hardware import UNKNOWN_GPU, assumed_memory
from finetune_operator.plan.memory.adapter_sizes import choose_adapter
from finetune_operator.plan.strategy.batch import divisors, micro_batches
from finetune_operator.plan.strategy.choice import best_fit, choose_fit, fewest_slices, fitting
from finetune_operator.plan.strategy.combination_checks import with_parallelism, with_spec
from finetune_operator.plan.strategy.degrees import obstacles, slices, spreads
from finetune_operator.plan.strategy.ladder import Fit, fit_at, rungs
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.quantities import human_count
from finetune_operator.spec.rules.process_counts import requested_strategy
from finetune_operator.spec.types import OffloadSpec, ParallelismSpec

MOST_NODES = 4096
"""Most nodes that a refusal tries in its search for a sufficient number."""


def ran_out_at_one(labels: Sequence[str]) -> str:
    return f"{' and '.join(labels)} ran out of memory with one row at a time"


def memory_unit(draft: Draft) -> str:
    """Return the unit that one process computes on, as text."""
    return "GPU" if decided(draft.world).device == "cuda" else "process"


def refuse_at_one_row(draft: Draft) -> Draft:
    """Refuse a job whose strategies have all been tried, or all that can resume from its checkpoints."""
    asked, tried = draft.spec.parallelism, draft.adaptation
    rule = f"{ran_out_at_one(tried.skipped_strategies)}, and none is left"
    ways = ["use devices or nodes with more memory, or a smaller preparation.maxLength or model"]
    if free := _set_free(asked):
        ways.insert(0, free)
    if tried.checkpoint_form is not None:
        rule += f" that goes on from the checkpoints of {tried.checkpoint_form}"
        fresh = best_fit(draft.with_inputs(adaptation=replace(tried, checkpoint_form=None)))
        if fresh is not None:
            label = fresh[1].strategy.label
            ways.insert(0, f"create a new job with checkpoints.resume never, and parallelism for {label}")
    shown = requested_strategy(asked) or "auto"
    return draft.refusing(("parallelism", "strategy"), shown, rule, "; or ".join(ways))


def refuse_strategy(draft: Draft) -> Draft:
    """Refuse a job that fits on no rung, with the arithmetic of its most frugal form, the reason why its model is not
    split, and hints.
    """
    best = most_frugal(draft)
    asked, world = draft.spec.parallelism, decided(draft.world)
    rule = f"does not fit: needs {', and '.join(_short_of(draft, best))} ({strategy_form(best)}{_terms(best)})"
    rule += _taken(draft)
    path = ("parallelism", "strategy") if requested_strategy(asked) else ("resources",)
    if requested_strategy(asked) is None and asked.model_ranks == 1:
        rule += "".join(f"; {why}" for why in _why_whole(draft))
    value: str | None = requested_strategy(asked)
    if value is None and best.memory.total_bytes > best.memory.capacity_bytes:
        value = f"{world.size} x {human_bytes(best.memory.capacity_bytes)}"
    ways = tuple(_changes_that_fit(draft)) or (*_larger_changes(draft), _more(draft, best))
    return draft.refusing(path, value, rule, "; or ".join((*_assumed_less(draft, best), *ways)))


def _assumed_less(draft: Draft, fit: Fit) -> Iterator[str]:
    """Yield hints to describe the nodes, if assumed memory is too small for `fit`."""
    needed = fit.memory
    on_host = needed.host_bytes > draft.hardware.memory_bytes
    if on_host and _host_is_assumed(draft) and decided(draft.world).device == "cuda":
        least = human_bytes(needed.host_bytes)
        if draft.inputs.facts.hardware is not None:
            yield f"add hostMemory=SIZE to --hardware where a node has {least} or more"
        else:
            yield f"set resources.memory where a node has {least} or more"
    if needed.total_bytes > needed.capacity_bytes and _gpu_is_assumed(draft):
        yield "set resources.accelerator.product, as which GPU it is is not known"


def _host_is_assumed(draft: Draft) -> bool:
    node = draft.hardware
    taken = node.assumed and node.memory_bytes == assumed_memory(node.gpus_per_node)
    return taken and draft.spec.resources.memory is None


def _gpu_is_assumed(draft: Draft) -> bool:
    memory = draft.spec.resources.accelerator.memory
    on_gpu = decided(draft.world).device == "cuda"
    return on_gpu and memory is None and decided(draft.hardware.gpu).product == UNKNOWN_GPU


def shortfall_of(draft: Draft, fit: Fit) -> str:
    """Describe the needed and the available memory of a form that does not fit."""
    return f"{strategy_form(fit)} needs {_short_of(draft, fit)[0]}"


def strategy_form(fit: Fit) -> str:
    """Describe the form, with its micro-batch if the device is short of memory."""
    short = fit.memory.total_bytes > fit.memory.capacity_bytes
    return f"{fit.strategy.label}{f' with micro-batch {fit.micro_batch}' if short else ''}"


def _short_of(draft: Draft, fit: Fit) -> tuple[str, ...]:
    """Describe the shortage of the device, the host or both, e.g. `61.2 GiB a GPU, and there are 24.0 GiB`."""
    needed, there, short = fit.memory, draft.hardware.memory_bytes, []
    if needed.total_bytes > needed.capacity_bytes:
        has = _are(needed.capacity_bytes, _gpu_is_assumed(draft))
        short.append(f"{human_bytes(needed.total_bytes)} a {memory_unit(draft)}, and {has}")
    if needed.host_bytes > there and not (short and decided(draft.world).device == "cpu"):
        has = _are(there, _host_is_assumed(draft))
        short.append(f"{human_bytes(needed.host_bytes)} of host memory a node, and {has}")
    return tuple(short)


def _terms(fit: Fit) -> str:
    """List the largest terms of the device's memory, if it is short."""
    if fit.memory.total_bytes <= fit.memory.capacity_bytes:
        return ""
    big = sorted(fit.memory.terms, key=lambda term: term.bytes, reverse=True)[:4]
    return f", {' + '.join(f'{term.name} {human_bytes(term.bytes)}' for term in big)} + the rest"


def _taken(draft: Draft) -> str:
    """List the assumptions about the model and the rows."""
    taken = [] if draft.model_known else [f"{human_count(draft.model.parameters)} parameters"]
    if draft.data is None:
        taken.append(f"rows of {draft.lengths.longest} tokens")
    return f"; {' and '.join(taken)} are assumed" if taken else ""


def _are(there: int, assumed: bool) -> str:
    """Format `there are 64.0 GiB`, or `64.0 GiB are assumed`."""
    return f"{human_bytes(there)} are assumed" if assumed else f"there are {human_bytes(there)}"


def _why_whole(draft: Draft) -> Iterator[str]:
    """Yield reasons why layers are not split, the model is not cut, and rows of text are not divided: the obstacles, or
    the memory of the most frugal degrees.
    """
    tried = tuple(spreads(draft))
    divides = draft.spec.task == "text-generation" and draft.spec.parallelism.sequence == 1
    for name, drafts in (
        ("tensor", [other for other in tried if other.spec.parallelism.pipeline.degree == 1]),
        ("pipeline", [other for other in tried if other.spec.parallelism.pipeline.degree > 1]),
        ("sequence", [*chain.from_iterable(slices(draft))] if divides else []),
    ):
        best = [most_frugal(other) for other in drafts if not other.problems and rungs(other, other.spec.parallelism)]
        if best:
            yield shortfall_of(draft, min(best, key=lambda fit: fit.memory.total_bytes))
        elif drafts:
            whys = dict.fromkeys(why for other in drafts for why in obstacles(other.problems))
            yield f"parallelism.{name} is not chosen: {', and '.join(whys)}"
        elif tried and name == "tensor":
            yield f"parallelism.{name} is not chosen: layers are split inside of a node, which has one process"


def most_frugal(draft: Draft) -> Fit:
    """Return the rung that is closest to fit, at the smallest micro-batch that the spec allows: of those that fit the
    device, the one that needs the least host memory, which is easier to add; else the one that needs the least on the
    device.
    """
    micro = micro_batches(draft)[-1]
    tried = [fit_at(draft, rung, micro) for rung in rungs(draft, draft.spec.parallelism)]
    on_device = [fit for fit in tried if fit.memory.total_bytes <= fit.memory.capacity_bytes]
    if on_device and decided(draft.world).device == "cuda":
        return min(on_device, key=lambda fit: fit.memory.host_bytes)
    on_host = [fit for fit in tried if fit.memory.host_bytes <= draft.hardware.memory_bytes]
    return min(on_host or tried, key=lambda fit: fit.memory.total_bytes)


def _takes(draft: Draft, fit: Fit) -> str:
    """Format the memory of a fit, e.g. `61.2 GiB of 79.6 GiB a GPU`."""
    needed = fit.memory
    return f"{human_bytes(needed.total_bytes)} of {human_bytes(needed.capacity_bytes)} a {memory_unit(draft)}"


def _changes_that_fit(draft: Draft) -> Iterator[str]:
    """Yield changes that keep the training the same, each computed to fit, the smallest first."""
    asked, training, seen = draft.spec.parallelism, draft.training, set[str]()
    if training.micro_batch_size != "auto":
        share = training.global_batch_size // draft.data_ranks
        fit = choose_fit(draft, asked, tuple(size for size in divisors(share) if size < training.micro_batch_size))
        if fit is not None:
            takes = f"{_takes(draft, fit)}; the global batch stays"
            yield f"set training.microBatchSize to {fit.micro_batch} or to auto ({takes})"
    relaxed = asked.model_copy(update={"activation_checkpointing": "auto"})
    if (fit := choose_fit(draft, relaxed, micro_batches(draft))) is not None:
        seen.add(fit.strategy.label)
        yield f"set parallelism.activationCheckpointing to full or auto ({_takes(draft, fit)})"
    free = ParallelismSpec(
        tensor=asked.tensor, pipeline=asked.pipeline, sequence=asked.sequence, placement=asked.placement
    )
    if asked != free and (best := best_fit(with_parallelism(draft, free))) is not None:
        label = best[1].strategy.label
        if label not in seen:
            yield f"{_set_free(asked)}, and the plan takes {label} ({_takes(draft, best[1])})"
        seen.add(label)
    if asked.model_ranks > 1 and (best := best_fit(with_parallelism(draft, ParallelismSpec()))) is not None:
        label = best[1].strategy.label
        if label not in seen:
            yield f"leave parallelism out, and the plan takes {label} ({_takes(draft, best[1])})"
    for changed, fit in fitting(spreads(draft)):
        degrees = changed.spec.parallelism
        if degrees.model_ranks > asked.model_ranks and fit.strategy.label not in seen:
            stages = f" and parallelism.pipeline.degree to {degrees.pipeline.degree}"
            yield (
                f"set parallelism.tensor to {degrees.tensor}{stages if degrees.pipeline.degree > 1 else ''} "
                f"({_takes(draft, fit)})"
            )
            break
    yield from _shorter_rows(draft, seen)


def _shorter_rows(draft: Draft, seen: set[str]) -> Iterator[str]:
    """Yield the change to rows in slices, without settings that exclude slices, and without packs, unless the job
    explicitly asks for these.
    """
    spec, training = draft.spec, draft.training
    whole = (*COMPILATION, "use_liger_kernel")
    kept = {name: value for name, value in training.arguments.items() if name not in whole}
    steps = [f"leave training.arguments.{name} out" for name in whole if training.arguments.get(name)]
    precision = draft.precision
    if precision == "fp8":
        precision = "bf16"
        steps.append("set training.precision to bf16")
    training = training.model_copy(update={"arguments": kept, "precision": precision})
    changed = with_spec(draft, spec.model_copy(update={"training": training}))
    packing = spec.preparation.packing == "always"
    best = fewest_slices(replace(changed, precision=precision, packing=packing))
    if best is None or best[1].strategy.label in seen:
        return
    steps.append(f"set parallelism.sequence to {best[1].strategy.sequence}")
    packs = ", where rows are not packed" if draft.packing and not packing else ""
    yield f"{' and '.join(steps)} ({_takes(draft, best[1])}{packs})"


def _larger_changes(draft: Draft) -> Iterator[str]:
    """Yield changes that need more of the nodes or train less of the model, each computed to fit."""
    asked, adapter = draft.spec.parallelism, draft.spec.model.adapter
    for devices in ({"optimizer": "nvme"}, {"optimizer": "nvme", "parameters": "nvme"}):
        moved = ParallelismSpec.model_validate({"strategy": "deepspeed", "offload": devices})
        changed = with_parallelism(draft, moved)
        if decided(draft.world).device == "cuda" and (form := next(fitting((changed,)), None)) is not None:
            disk = human_bytes(form[1].memory.disk_bytes)
            what = " and ".join(f"parallelism.offload.{name} to nvme" for name in devices)
            yield (
                f"set parallelism.strategy to deepspeed and {what} ({_takes(draft, form[1])}, and {disk} of "
                "disk a node)"
            )
            break
    if adapter.method == "qlora" or not draft.model_known or not draft.model.linear_layers:
        return
    methods: dict[AdapterMethod, str] = {
        "lora": "trains a small part of the weights",
        "qlora": "trains a small part of the weights and holds others in 4 bits",
    }
    free = ParallelismSpec(placement=asked.placement)
    freed = "leave parallelism out" if asked.replica_ranks > 1 else _set_free(asked).removeprefix("set ")
    for parallelism, step in ((asked, ""), *(((free, f" and {freed}"),) if freed else ())):
        for method, what in methods.items():
            if adapter.method != "none" and method == "lora":
                continue
            model = draft.spec.model.model_copy(update={"adapter": adapter.model_copy(update={"method": method})})
            spec = draft.spec.model_copy(update={"model": model, "parallelism": parallelism})
            changed = choose_adapter(with_spec(draft, spec))
            fit = None if changed.problems else choose_fit(changed, parallelism, micro_batches(changed))
            if fit is not None:
                takes = f"{fit.strategy.label}, {_takes(draft, fit)}"
                yield f"set model.adapter.method to {method}{step}, which {what} ({takes})"
                return


def _more(draft: Draft, best: Fit) -> str:
    """Suggest more or larger nodes, or less to train."""
    world = decided(draft.world)
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
    """Suggest the change that opens all strategies to the plan; it removes fields that only one strategy reads."""
    fixed = (
        ("zeroStage", asked.zero_stage != "auto"),
        ("sharding", asked.sharding != "full"),
        ("offload", asked.offload != OffloadSpec()),
        ("deepspeedConfig", bool(asked.deepspeed_config)),
        ("activationCheckpointing", asked.activation_checkpointing != "auto"),
    )
    names = " and ".join(f"parallelism.{name}" for name, given in fixed if given)
    steps = ["set parallelism.strategy to auto"] if asked.strategy != "auto" else []
    return " and ".join([*steps, f"leave {names} out"] if names else steps)


def _nodes_that_fit(draft: Draft) -> str:
    """Format `16 nodes (128 GPUs in all), or ` if more nodes of this kind suffice; empty if not."""
    world, asked = decided(draft.world), draft.spec.parallelism
    if draft.local:
        return ""
    free = ParallelismSpec(tensor=asked.tensor, pipeline=asked.pipeline)
    nodes = world.nodes
    while (nodes := nodes * 2) <= MOST_NODES:
        wider = replace(draft, world=world.model_copy(update={"nodes": nodes}))
        if choose_fit(wider, free, (1,)) is not None:
            size = decided(wider.world).size
            multiple = (
                "" if draft.training.global_batch_size % size == 0 else f" with a globalBatchSize that {size} divides"
            )
            unit = "GPUs" if world.device == "cuda" else "processes"
            return f"{nodes} nodes ({size} {unit} in all){multiple}, or "
    return ""
