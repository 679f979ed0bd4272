"""Decision on strategy, degrees, checkpointing, offload and micro-batch, with its reasons (`choice` compares forms).

An explicit choice leaves one rung of the ladder, or a few; it is met or refused, never replaced. A job that fits on no
rung is refused with the arithmetic and each change that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.memory.model_parallel_plan import explain_pipeline
from finetune_operator.plan.strategy.batch import batch_arithmetic, batch_of, explain_batch, micro_batches
from finetune_operator.plan.strategy.choice import SIMPLER_MARGIN, best_fit, choose_fit
from finetune_operator.plan.strategy.ladder import Fit, fit_at, fits, free_margin, open_rungs, rungs
from finetune_operator.plan.strategy.strategy_refusal import (
    memory_unit,
    most_frugal,
    ran_out_at_one,
    refuse_at_one_row,
    refuse_strategy,
    shortfall_of,
)
from finetune_operator.plan.time.cost import machine_of, step_duration, step_time
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.rules.process_counts import requested_strategy

MOST_LABELS = 5
"""Most forms that a reason lists by their labels."""


def choose_strategy(draft: Draft) -> Draft:
    """Choose strategy, degrees, checkpointing, offload and micro-batch together, as they share the memory."""
    best = best_fit(draft)
    if best is not None:
        return _decide(draft, *best)
    if not rungs(draft, draft.spec.parallelism):
        return refuse_at_one_row(draft)
    if not _may_fit(draft):
        return refuse_strategy(draft)
    fit = most_frugal(draft)
    batch = batch_of(draft, fit.micro_batch)
    draft = replace(draft, strategy=fit.strategy, batch=batch, memory=fit.memory)
    draft = draft.because(
        f"strategy {fit.strategy.label}, provisionally: the most frugal one; {batch_arithmetic(batch)}"
    )
    return draft.assuming(
        f"memory: as assumed here nothing fits ({human_bytes(fit.memory.total_bytes)} of "
        f"{human_bytes(fit.memory.capacity_bytes)} with {fit.strategy.label}); prepare measures first, and the "
        "job is planned again before the training"
    )


def _decide(draft: Draft, changed: Draft, fit: Fit) -> Draft:
    """Return `changed`, the draft with the chosen degrees, with the decision and its reasons."""
    batch = batch_of(changed, fit.micro_batch)
    sentence = _explain_strategy(draft, changed, fit)
    if fit.strategy.sequence > draft.spec.parallelism.sequence:
        sentence += _explain_exchange(changed, fit)
    margin = draft.settings.planning.memory_margin
    if machine_of(draft) is not None and not fits(changed, fit.memory, margin):
        share = fit.memory.total_bytes / fit.memory.capacity_bytes
        sentence += f"; it fills {share:.0%} of the GPU, as nothing fits that leaves {margin:.0%} free"
    decision = replace(changed, strategy=fit.strategy, batch=batch, memory=fit.memory).because(sentence)
    decision = decision.because(explain_batch(decision, batch, _is_most(changed, fit)))
    return explain_pipeline(_explain_extras(decision, fit.strategy, changed))


def _is_most(draft: Draft, fit: Fit) -> bool:
    """Return whether no larger micro-batch of the same form fits."""
    larger = [size for size in micro_batches(draft) if size > fit.micro_batch]
    return not larger or not fits(draft, fit_at(draft, fit.strategy, larger[-1]).memory, free_margin(draft))


def _may_fit(draft: Draft) -> bool:
    """Return whether prepare's measurements can make the job fit: of an unread model, or of rows shorter than the
    limit.
    """
    if draft.inputs.as_known or draft.data is not None or Stage.PREPARE not in draft.stages:
        return False
    if not draft.model_known:
        return True
    return best_fit(draft.with_basis(lengths=replace(draft.lengths, longest=1, typical=1.0))) is not None


def _explain_strategy(draft: Draft, changed: Draft, fit: Fit) -> str:
    """Return the reason for the fit; `draft` is the one before its degrees were chosen, `changed` the one after."""
    asked, world = draft.spec.parallelism, decided(draft.world)
    words = fit.strategy.label
    need = f"{human_bytes(fit.memory.total_bytes)} of {human_bytes(fit.memory.capacity_bytes)}"
    if left_out := draft.adaptation.skipped_strategies:
        form = draft.adaptation.checkpoint_form
        kept = "" if form is None else f"; it goes on from the checkpoints of {form}"
        return f"strategy {words}: {ran_out_at_one(left_out)}; one process needs {need}{kept}"
    if fit.strategy.replica_ranks > asked.replica_ranks:
        return _explain_degrees(draft, changed, fit, need)
    if asked.zero_stage != "auto" or asked.strategy not in ("auto", "deepspeed"):
        alone = "; with one process nothing is divided" if world.size == 1 and asked.strategy != "single" else ""
        return f"strategy {words}: as asked; one process needs {need}{alone}"
    before = open_rungs(draft, asked)
    labels = [rung.label for rung in before]
    skipped = before[: labels.index(words)]
    if machine_of(draft) is not None:
        return f"strategy {words}: {_quickest_reason(draft, fit)} ({need}){_explain_skipped(draft, skipped)}"
    if not skipped:
        kind = "the cheapest one" if requested_strategy(asked) is None else "the lowest stage"
        return f"strategy {words}: {kind} fits; one process needs {need}"
    passed = ", ".join(rung.label for rung in skipped)
    return f"strategy {words}: the first that fits ({need}); {passed} would need more"


def _quickest_reason(draft: Draft, fit: Fit) -> str:
    time = decided(step_time(draft, fit.strategy, batch_of(draft, fit.micro_batch)))
    return (
        f"a step takes {step_duration(time.total)}, and the training with its checkpoints at most {SIMPLER_MARGIN:.0%} "
        "longer than by any other form that fits"
    )


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


def _explain_degrees(draft: Draft, changed: Draft, fit: Fit, need: str) -> str:
    """Return the reason for degrees that the plan chose."""
    words, unit, slices = fit.strategy.label, memory_unit(draft), f"rows in {fit.strategy.sequence} slices"
    whole = choose_fit(draft, draft.spec.parallelism, micro_batches(draft))
    if whole is not None:
        taken = step_time(draft, whole.strategy, batch_of(draft, whole.micro_batch))
        longer = "" if taken is None else f", which takes {step_duration(taken.total)}"
        return (
            f"strategy {words}: {_quickest_reason(changed, fit)} ({need}); the quickest with whole layers and rows "
            f"on each {unit} is {whole.strategy.label}{longer}"
        )
    lacking = shortfall_of(draft, most_frugal(draft))
    if fit.strategy.model_ranks > draft.spec.parallelism.model_ranks:
        which = "the smallest degrees that fit" if machine_of(draft) is None else _quickest_reason(changed, fit)
        return f"strategy {words}: {which} ({need}); with whole layers on each {unit} nothing does: {lacking}"
    return f"strategy {words}: {slices} fit ({need}); with whole rows on each {unit} nothing does: {lacking}"


def _explain_exchange(draft: Draft, fit: Fit) -> str:
    """Return the reason for the number of slices, and their cost; `draft` has them."""
    time = step_time(draft, fit.strategy, batch_of(draft, fit.micro_batch))
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
