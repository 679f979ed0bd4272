"""Decision on strategy, degrees, checkpointing, offload and micro-batch, with its reasons (`choice` compares forms).

An explicit choice leaves one rung of the ladder, or a few; it is met or refused, never replaced. A job that fits on no
rung is refused with the arithmetic and each change that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from finetune_contract.arguments import COMPILATION
from finetune_contract.choices import AdapterMethod, Stage
from finetune_contract.trainer_job import Strategy
from finetune_operator.api.quantities import human_bytes, human_count
from finetune_operator.api.rules.processes import requested_strategy
from finetune_operator.api.types import OffloadSpec, ParallelismSpec
from finetune_operator.planning.adapter_sizes import choose_adapter
from finetune_operator.planning.assumed_facts import UNKNOWN_GPU, assumed_memory
from finetune_operator.planning.batch import batch_arithmetic, batch_of, divisors, explain_batch, micro_batches
from finetune_operator.planning.choice import SIMPLER_MARGIN, best_fit, choose_fit, fewest_slices, fitting
from finetune_operator.planning.combination_checks import with_parallelism, with_spec
from finetune_operator.planning.cost import machine_of, step_duration, step_time
from finetune_operator.planning.degrees import obstacles, slices, spreads
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.ladder import Fit, fit_at, fits, free_margin, open_rungs, rungs
from finetune_operator.planning.model_parallel_plan import explain_pipeline

MOST_LABELS = 5
"""Most forms that a reason lists by their labels."""
MOST_NODES = 4096
"""Most nodes that a refusal tries in its search for a sufficient number."""


def choose_strategy(draft: Draft) -> Draft:
    """Choose strategy, degrees, checkpointing, offload and micro-batch together, as they share the memory."""
    chosen = best_fit(draft)
    if chosen is not None:
        return _decide(draft, *chosen)
    if not rungs(draft, draft.spec.parallelism):
        return _refuse_more(draft)
    if not _may_fit(draft):
        return _refuse(draft)
    found = _most_frugal(draft)
    batch = batch_of(draft, found.micro_batch)
    draft = replace(draft, strategy=found.strategy, batch=batch, memory=found.memory)
    draft = draft.because(
        f"strategy {found.strategy.label}, provisionally: the most frugal one; {batch_arithmetic(batch)}"
    )
    return draft.assuming(
        f"memory: as assumed here nothing fits ({human_bytes(found.memory.total_bytes)} of "
        f"{human_bytes(found.memory.capacity_bytes)} with {found.strategy.label}); prepare measures first, and the "
        "job is planned again before the training"
    )


def _decide(draft: Draft, changed: Draft, found: Fit) -> Draft:
    """Return `changed`, the draft with the chosen degrees, with the decision and its reasons."""
    batch = batch_of(changed, found.micro_batch)
    sentence = _explain_strategy(draft, changed, found)
    if found.strategy.sequence > draft.spec.parallelism.sequence:
        sentence += _explain_exchange(changed, found)
    margin = draft.settings.planning.memory_margin
    if machine_of(draft) is not None and not fits(changed, found.memory, margin):
        share = found.memory.total_bytes / found.memory.capacity_bytes
        sentence += f"; it fills {share:.0%} of the GPU, as nothing fits that leaves {margin:.0%} free"
    decision = replace(changed, strategy=found.strategy, batch=batch, memory=found.memory).because(sentence)
    decision = decision.because(explain_batch(decision, batch, _is_most(changed, found)))
    return explain_pipeline(_explain_extras(decision, found.strategy, changed))


def _is_most(draft: Draft, found: Fit) -> bool:
    """Return whether no larger micro-batch of the same form fits."""
    larger = [size for size in micro_batches(draft) if size > found.micro_batch]
    return not larger or not fits(draft, fit_at(draft, found.strategy, larger[-1]).memory, free_margin(draft))


def _may_fit(draft: Draft) -> bool:
    """Return whether prepare's measurements can make the job fit: of an unread model, or of rows shorter than the
    limit.
    """
    if draft.as_known or draft.data is not None or Stage.PREPARE not in draft.stages:
        return False
    if not draft.model_known:
        return True
    return best_fit(replace(draft, lengths=replace(draft.lengths, longest=1, typical=1.0))) is not None


def _explain_strategy(draft: Draft, changed: Draft, found: Fit) -> str:
    """Return the reason for the fit; `draft` is the one before its degrees were chosen, `changed` the one after."""
    asked, world = draft.spec.parallelism, decided(draft.world)
    words = found.strategy.label
    need = f"{human_bytes(found.memory.total_bytes)} of {human_bytes(found.memory.capacity_bytes)}"
    if left_out := draft.adaptation.skipped_strategies:
        form = draft.adaptation.checkpoint_form
        kept = "" if form is None else f"; it goes on from the checkpoints of {form}"
        return f"strategy {words}: {_ran_out_at_one(left_out)}; one process needs {need}{kept}"
    if found.strategy.replica_ranks > asked.replica_ranks:
        return _explain_degrees(draft, changed, found, need)
    if asked.zero_stage != "auto" or asked.strategy not in ("auto", "deepspeed"):
        alone = "; with one process nothing is divided" if world.size == 1 and asked.strategy != "single" else ""
        return f"strategy {words}: as asked; one process needs {need}{alone}"
    before = open_rungs(draft, asked)
    labels = [rung.label for rung in before]
    skipped = before[: labels.index(words)]
    if machine_of(draft) is not None:
        return f"strategy {words}: {_quickest_reason(draft, found)} ({need}){_explain_skipped(draft, skipped)}"
    if not skipped:
        kind = "the cheapest one" if requested_strategy(asked) is None else "the lowest stage"
        return f"strategy {words}: {kind} fits; one process needs {need}"
    passed = ", ".join(rung.label for rung in skipped)
    return f"strategy {words}: the first that fits ({need}); {passed} would need more"


def _quickest_reason(draft: Draft, found: Fit) -> str:
    time = decided(step_time(draft, found.strategy, batch_of(draft, found.micro_batch)))
    return f"a step takes {step_duration(time.total)}, within {SIMPLER_MARGIN:.0%} of the least of all forms that fit"


def _explain_skipped(draft: Draft, skipped: Sequence[Strategy]) -> str:
    """Describe simpler forms than the chosen one: those that need more memory, and those that take longer."""
    smallest = micro_batches(draft)[-1]
    margin = draft.settings.planning.memory_margin
    small = [rung for rung in skipped if not fits(draft, fit_at(draft, rung, smallest).memory, margin)]
    slow = [rung for rung in skipped if rung not in small]
    return "".join(
        f"; {_few([rung.label for rung in group])} would {what}"
        for group, what in ((small, "need more"), (slow, "take longer"))
        if group
    )


def _few(labels: Sequence[str]) -> str:
    """List the first labels, and count the others."""
    more = f" and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
    return ", ".join(labels[:MOST_LABELS]) + more


def _explain_degrees(draft: Draft, changed: Draft, found: Fit, need: str) -> str:
    """Return the reason for degrees that the plan chose."""
    words, unit, slices = found.strategy.label, _unit(draft), f"rows in {found.strategy.sequence} slices"
    whole = choose_fit(draft, draft.spec.parallelism, micro_batches(draft))
    if whole is not None:
        taken = step_time(draft, whole.strategy, batch_of(draft, whole.micro_batch))
        longer = "" if taken is None else f", which takes {step_duration(taken.total)}"
        return (
            f"strategy {words}: {_quickest_reason(changed, found)} ({need}); the quickest with whole layers and rows "
            f"on each {unit} is {whole.strategy.label}{longer}"
        )
    lacking = _lacking(draft, _most_frugal(draft))
    if found.strategy.model_ranks > draft.spec.parallelism.model_ranks:
        which = "the smallest degrees that fit" if machine_of(draft) is None else _quickest_reason(changed, found)
        return f"strategy {words}: {which} ({need}); with whole layers on each {unit} nothing does: {lacking}"
    return f"strategy {words}: {slices} fit ({need}); with whole rows on each {unit} nothing does: {lacking}"


def _explain_exchange(draft: Draft, found: Fit) -> str:
    """Return the reason for the number of slices, and their cost; `draft` has them."""
    time = step_time(draft, found.strategy, batch_of(draft, found.micro_batch))
    if time is None:
        return (
            "; it is the smallest degree that does with as little in host memory, and how long it takes to exchange "
            "heads for tokens is not known"
        )
    return (
        "; to exchange heads for tokens takes "
        f"{time.exchanging_share} of the time ({human_bytes(time.exchanged_bytes)} a process and step)"
    )


def _explain_extras(draft: Draft, strategy: Strategy, before: Draft) -> Draft:
    """Add reasons for checkpointing and offload; `before` is the draft with the chosen degrees."""
    asked = draft.spec.parallelism
    if strategy.activation_checkpointing != "none":
        without = _why_with(before, strategy, lambda rung: rung.activation_checkpointing == "none")
        why = without if asked.activation_checkpointing == "auto" else "as asked"
        twice = "layers are" if strategy.activation_checkpointing == "full" else "all but matrix products is"
        draft = draft.because(
            f"activation checkpointing {strategy.activation_checkpointing}: {why}; {twice} computed twice"
        )
    where = {"cpu": "host memory", "nvme": "files on the node's disk"}
    if decided(draft.world).device == "cpu":
        where["cpu"] = "the same memory, as the device is the host"
    for name, device, given in (
        ("optimizer", strategy.offload_optimizer, asked.offload.optimizer),
        ("parameter", strategy.offload_parameters, asked.offload.parameters),
    ):
        if device == "none":
            continue
        why = "as asked" if given != "none" else "fsdp moves it with the parameters"
        if given == "none" and strategy.name != "fsdp":
            why = _why_with(before, strategy, _stays_optimizer if name == "optimizer" else _stays_parameters)
        what = "its state lies" if name == "optimizer" else "they lie"
        draft = draft.because(f"{name} offload: {why}; {what} in {where[device]}")
    if strategy.offload_activations != "none":
        draft = draft.because(f"activation offload: as asked; they lie in {where['cpu']} until the backward pass")
    return draft


def _stays_optimizer(rung: Strategy) -> bool:
    return rung.offload_optimizer == "none"


def _stays_parameters(rung: Strategy) -> bool:
    return rung.offload_parameters == "none"


def _why_with(draft: Draft, strategy: Strategy, without: Callable[[Strategy], bool]) -> str:
    """Return the reason for a part of `strategy`: nothing fits without it, or a step takes longer."""
    smallest = micro_batches(draft)[-1]
    others = [rung for rung in rungs(draft, draft.spec.parallelism) if without(rung)]
    margin = free_margin(draft)
    if any(fits(draft, fit_at(draft, rung, smallest).memory, margin) for rung in others):
        return "a step takes less time with it than in the other forms that fit"
    slices = " in as many slices" if strategy.sequence > 1 else ""
    return f"nothing fits without{slices}"


# -------------------------------------------------------------------------------------------------------------- refusal


def _ran_out_at_one(labels: Sequence[str]) -> str:
    return f"{' and '.join(labels)} ran out of memory with one row at a time"


def _unit(draft: Draft) -> str:
    """Return the unit that one process computes on, as text."""
    return "GPU" if decided(draft.world).device == "cuda" else "process"


def _refuse_more(draft: Draft) -> Draft:
    """Refuse a job whose strategies have all been tried, or all that can resume from its checkpoints."""
    asked, tried = draft.spec.parallelism, draft.adaptation
    rule = f"{_ran_out_at_one(tried.skipped_strategies)}, and none is left"
    ways = ["use devices or nodes with more memory, or a smaller preparation.maxLength or model"]
    if free := _set_free(asked):
        ways.insert(0, free)
    if tried.checkpoint_form is not None:
        rule += f" that goes on from the checkpoints of {tried.checkpoint_form}"
        fresh = best_fit(replace(draft, adaptation=replace(tried, checkpoint_form=None)))
        if fresh is not None:
            label = fresh[1].strategy.label
            ways.insert(0, f"create a new job with checkpoints.resume never, and parallelism for {label}")
    shown = requested_strategy(asked) or "auto"
    return draft.refusing(("parallelism", "strategy"), shown, rule, "; or ".join(ways))


def _refuse(draft: Draft) -> Draft:
    """Refuse a job that fits on no rung, with the arithmetic of its most frugal form, the reason why its model is not
    split, and hints.
    """
    best = _most_frugal(draft)
    asked, world = draft.spec.parallelism, decided(draft.world)
    rule = f"does not fit: needs {', and '.join(_short_of(draft, best))} ({_form(best)}{_terms(best)}){_taken(draft)}"
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
        if draft.hardware_known:
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


def _lacking(draft: Draft, fit: Fit) -> str:
    """Describe the needed and the available memory of a form that does not fit."""
    return f"{_form(fit)} needs {_short_of(draft, fit)[0]}"


def _form(fit: Fit) -> str:
    """Describe the form, with its micro-batch if the device is short of memory."""
    short = fit.memory.total_bytes > fit.memory.capacity_bytes
    return f"{fit.strategy.label}{f' with micro-batch {fit.micro_batch}' if short else ''}"


def _short_of(draft: Draft, fit: Fit) -> tuple[str, ...]:
    """Describe the shortage of the device, the host or both, e.g. `61.2 GiB a GPU, and there are 24.0 GiB`."""
    needed, there, short = fit.memory, draft.hardware.memory_bytes, []
    if needed.total_bytes > needed.capacity_bytes:
        has = _are(needed.capacity_bytes, _gpu_is_assumed(draft))
        short.append(f"{human_bytes(needed.total_bytes)} a {_unit(draft)}, and {has}")
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
        ("tensor", [each for each in tried if each.spec.parallelism.pipeline.degree == 1]),
        ("pipeline", [each for each in tried if each.spec.parallelism.pipeline.degree > 1]),
        ("sequence", [*chain.from_iterable(slices(draft))] if divides else []),
    ):
        best = [_most_frugal(each) for each in drafts if not each.problems and rungs(each, each.spec.parallelism)]
        if best:
            yield _lacking(draft, min(best, key=lambda fit: fit.memory.total_bytes))
        elif drafts:
            whys = dict.fromkeys(why for each in drafts for why in obstacles(each.problems))
            yield f"parallelism.{name} is not chosen: {', and '.join(whys)}"
        elif tried and name == "tensor":
            yield f"parallelism.{name} is not chosen: layers are split inside of a node, which has one process"


def _most_frugal(draft: Draft) -> Fit:
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
    return f"{human_bytes(needed.total_bytes)} of {human_bytes(needed.capacity_bytes)} a {_unit(draft)}"


def _changes_that_fit(draft: Draft) -> Iterator[str]:
    """Yield changes that keep the training the same, each computed to fit, the smallest first."""
    asked, training, seen = draft.spec.parallelism, draft.training, set[str]()
    if training.micro_batch_size != "auto":
        share = training.global_batch_size // draft.data_ranks
        found = choose_fit(draft, asked, tuple(size for size in divisors(share) if size < training.micro_batch_size))
        if found is not None:
            takes = f"{_takes(draft, found)}; the global batch stays"
            yield f"set training.microBatchSize to {found.micro_batch} or to auto ({takes})"
    relaxed = asked.model_copy(update={"activation_checkpointing": "auto"})
    if (found := choose_fit(draft, relaxed, micro_batches(draft))) is not None:
        seen.add(found.strategy.label)
        yield f"set parallelism.activationCheckpointing to full or auto ({_takes(draft, found)})"
    free = ParallelismSpec(
        tensor=asked.tensor, pipeline=asked.pipeline, sequence=asked.sequence, placement=asked.placement
    )
    if asked != free and (chosen := best_fit(with_parallelism(draft, free))) is not None:
        label = chosen[1].strategy.label
        if label not in seen:
            yield f"{_set_free(asked)}, and the plan takes {label} ({_takes(draft, chosen[1])})"
        seen.add(label)
    if asked.model_ranks > 1 and (chosen := best_fit(with_parallelism(draft, ParallelismSpec()))) is not None:
        label = chosen[1].strategy.label
        if label not in seen:
            yield f"leave parallelism out, and the plan takes {label} ({_takes(draft, chosen[1])})"
    for changed, found in fitting(spreads(draft)):
        degrees = changed.spec.parallelism
        if degrees.model_ranks > asked.model_ranks and found.strategy.label not in seen:
            stages = f" and parallelism.pipeline.degree to {degrees.pipeline.degree}"
            yield (
                f"set parallelism.tensor to {degrees.tensor}{stages if degrees.pipeline.degree > 1 else ''} "
                f"({_takes(draft, found)})"
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
    chosen = fewest_slices(replace(changed, precision=precision, packing=packing))
    if chosen is None or chosen[1].strategy.label in seen:
        return
    steps.append(f"set parallelism.sequence to {chosen[1].strategy.sequence}")
    packs = ", where rows are not packed" if draft.packing and not packing else ""
    yield f"{' and '.join(steps)} ({_takes(draft, chosen[1])}{packs})"


def _larger_changes(draft: Draft) -> Iterator[str]:
    """Yield changes that need more of the nodes or train less of the model, each computed to fit."""
    asked, adapter = draft.spec.parallelism, draft.spec.model.adapter
    for devices in ({"optimizer": "nvme"}, {"optimizer": "nvme", "parameters": "nvme"}):
        moved = ParallelismSpec.model_validate({"strategy": "deepspeed", "offload": devices})
        changed = with_parallelism(draft, moved)
        if decided(draft.world).device == "cuda" and (chosen := next(fitting((changed,)), None)) is not None:
            disk = human_bytes(chosen[1].memory.disk_bytes)
            what = " and ".join(f"parallelism.offload.{name} to nvme" for name in devices)
            yield (
                f"set parallelism.strategy to deepspeed and {what} ({_takes(draft, chosen[1])}, and {disk} of "
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
            found = None if changed.problems else choose_fit(changed, parallelism, micro_batches(changed))
            if found is not None:
                takes = f"{found.strategy.label}, {_takes(draft, found)}"
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
