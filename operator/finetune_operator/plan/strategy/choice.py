"""Choice among the forms of a training that fit: the one that takes the least time, pauses for checkpoints included.

Every strategy of the ladder, micro-batch and degree of tensor, pipeline and sequence parallelism that the spec leaves
open is a candidate. Times are arithmetic on a few numbers and are computed for all; memory is estimated from the
quickest candidate on, until no other can be as quick. Where times are not known (on CPUs, and for GPUs without figures)
the first rung of the ladder that fits is taken, and degrees only if no rung fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.strategy.batch import less_padded, micro_batches
from finetune_operator.plan.strategy.degrees import slices, spreads
from finetune_operator.plan.strategy.ladder import Fit, accumulates, estimate, fit_at, fits, rungs, with_passes
from finetune_operator.plan.time.asynchronous_saving import saves_beside
from finetune_operator.plan.time.cost import machine_of, step_work
from finetune_operator.plan.time.pauses import Saving
from finetune_operator.plan.time.step_time import time_of_step
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import MemoryEstimate
from finetune_operator.spec.rules.process_counts import requested_strategy
from finetune_operator.spec.types import ParallelismSpec

SIMPLER_MARGIN = 0.02
"""Share of the least time that a simpler form may take more: the estimates are no better than that, and a plan that
changes with the last digit of a figure is of no use.
"""
_STRATEGIES = ("single", "ddp", "fsdp", "deepspeed")
_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """Form of a training whose memory is not estimated yet."""

    draft: Draft
    """Draft with its degrees."""
    rung: Strategy
    """Strategy without the micro-batches of a pipeline's pass."""
    strategy: Strategy
    micro_batch: int
    seconds: float
    """Time of a step with its share of the checkpoints, as `beside` has them."""
    beside: bool = False
    """True if checkpoints are written beside the training, provided that the node's memory has room for a copy."""

    @property
    def effort(self) -> tuple[int, ...]:
        """Return the sort key by which a form is simpler than another: whole models, then less sharding, recomputation
        and offload, then larger micro-batches.
        """
        form = self.strategy
        return (
            (form.offload_optimizer != "none") + (form.offload_parameters != "none"),
            (form.tensor > 1) + (form.pipeline is not None) + (form.sequence > 1),
            form.replica_ranks,
            _STRATEGIES.index(form.name),
            form.zero_stage or 0,
            _MODES.index(form.activation_checkpointing),
            -self.micro_batch,
        )


def candidates(draft: Draft, asked: ParallelismSpec, micros: tuple[int, ...]) -> Iterator[Candidate]:
    """Yield the forms of one draft, with its degrees, on GPUs whose speed is known."""
    for rung in rungs(draft, asked):
        beside = saves_beside(draft, rung, 0)
        saving = Saving.of(draft, rung, beside)
        for micro in less_padded(draft, rung, micros):
            strategy = with_passes(draft, rung, micro)
            seconds = saving.seconds_of_step(decided(_seconds(draft, strategy, micro)))
            yield Candidate(draft, rung, strategy, micro, seconds, beside)


def seconds_of_form(draft: Draft, fit: Fit) -> float | None:
    """Return the time of a step of a form that fits, with its share of the checkpoints; None if it is not known."""
    step = _seconds(draft, fit.strategy, fit.micro_batch)
    beside = saves_beside(draft, fit.strategy, fit.memory.host_bytes)
    return None if step is None else Saving.of(draft, fit.strategy, beside).seconds_of_step(step)


def _seconds(draft: Draft, strategy: Strategy, micro: int) -> float | None:
    """Return the time of a step with `micro` rows at once; None if it is not known."""
    machine = machine_of(draft)
    if machine is None:
        return None
    accumulation = max(1, draft.training.global_batch_size // draft.data_ranks // micro)
    return time_of_step(step_work(draft, strategy, micro, accumulation), machine).total


class _Memory:
    """Memory of the forms of one choice, estimated once each.

    A form that does not fit with n rows at once does not with more, unless these are all rows of a step, so that no
    gradients wait. So each form is tried with the fewest rows first, which discards most sizes by one estimate.
    """

    def __init__(self, forms: Iterable[Candidate]) -> None:
        self._fewest: dict[tuple[int, bool], Candidate] = {}
        for form in forms:
            fewest = self._fewest.setdefault(_kind(form), form)
            if form.micro_batch < fewest.micro_batch:
                self._fewest[_kind(form)] = form
        self._known: dict[tuple[int, int], MemoryEstimate] = {}

    def _estimate(self, candidate: Candidate) -> MemoryEstimate:
        key = id(candidate.rung), candidate.micro_batch
        if key not in self._known:
            self._known[key] = estimate(candidate.draft, candidate.strategy, candidate.micro_batch)
        return self._known[key]

    def fit(self, candidate: Candidate, margin: float) -> Fit | None:
        """Return the candidate's fit; None if it does not fit."""
        for form in (self._fewest[_kind(candidate)], candidate):
            if not fits(form.draft, self._estimate(form), margin):
                return None
        return Fit(candidate.strategy, candidate.micro_batch, self._estimate(candidate))


def _kind(candidate: Candidate) -> tuple[int, bool]:
    """Return the key of the candidates of one form whose memory grows with their rows."""
    return id(candidate.rung), accumulates(candidate.draft, candidate.strategy, candidate.micro_batch)


def quickest(forms: Iterable[Candidate], margins: Iterable[float]) -> tuple[Draft, Fit] | None:
    """Return the simplest candidate that fits and takes at most `SIMPLER_MARGIN` longer than the quickest that fits.

    `margins`: shares of the GPU's memory that stay free; each one counts only if nothing fits with those before it.
    """
    ordered = sorted(forms, key=lambda candidate: (candidate.seconds, candidate.effort))
    memory = _Memory(ordered)
    return next((best for margin in margins if (best := _quickest(ordered, memory, margin)) is not None), None)


def _quickest(ordered: Iterable[Candidate], memory: _Memory, margin: float) -> tuple[Draft, Fit] | None:
    least = math.inf
    near: list[tuple[float, Candidate, Fit]] = []
    for candidate in ordered:
        if candidate.seconds > least * (1 + SIMPLER_MARGIN):
            break
        if (fit := memory.fit(candidate, margin)) is None:
            continue
        # A node without room for a copy waits for each checkpoint.
        waits = candidate.beside and not saves_beside(candidate.draft, fit.strategy, fit.memory.host_bytes)
        seconds = decided(seconds_of_form(candidate.draft, fit)) if waits else candidate.seconds
        least = min(least, seconds)
        near.append((seconds, candidate, fit))
    simple = [(candidate, fit) for seconds, candidate, fit in near if seconds <= least * (1 + SIMPLER_MARGIN)]
    if not simple:
        return None
    candidate, fit = min(simple, key=lambda pair: pair[0].effort)
    return candidate.draft, fit


def choose_fit(draft: Draft, asked: ParallelismSpec, micros: tuple[int, ...]) -> Fit | None:
    """Return the best form with the draft's degrees; None if none fits. It leaves the settings' margin of the GPU's
    memory free where it can.
    """
    if machine_of(draft) is None:
        return _first_fit(draft, asked, micros)
    best = quickest(candidates(draft, asked, micros), (draft.settings.planning.memory_margin, 0.0))
    return None if best is None else best[1]


def best_fit(draft: Draft) -> tuple[Draft, Fit] | None:
    """Return the best form, and the draft of its job: this one, or one with degrees of tensor, pipeline or sequence
    parallelism if all is left open.
    """
    if machine_of(draft) is None:
        return _first_of_all(draft)
    forms = tuple(form for open_draft in open_drafts(draft) for form in all_forms(open_draft))
    if draft.adaptation.micro_batch_limit is not None:
        # What ran out of memory is the form that is best without the limit; it goes on with fewer rows at once.
        free = best_fit(draft.with_inputs(adaptation=replace(draft.adaptation, micro_batch_limit=None)))
        label = None if free is None else free[1].strategy.label
        forms = tuple(form for form in forms if form.strategy.label == label) or forms
    return quickest(forms, (draft.settings.planning.memory_margin, 0.0))


def is_quicker(draft: Draft, other: Draft) -> bool:
    """Return whether the best form of `draft` takes less time than that of `other` by more than `SIMPLER_MARGIN`; False
    if one of them does not fit, or if times are not known.
    """
    if machine_of(draft) is None or machine_of(other) is None:
        return False
    best, against = best_fit(draft), best_fit(other)
    if best is None or against is None:
        return False
    seconds, least = (decided(seconds_of_form(*form)) for form in (best, against))
    return seconds * (1 + SIMPLER_MARGIN) < least


def all_forms(draft: Draft) -> Iterator[Candidate]:
    """Yield the forms of one draft with its own micro-batches."""
    return candidates(draft, draft.spec.parallelism, micro_batches(draft))


def open_drafts(draft: Draft) -> Iterator[Draft]:
    """Yield the draft, and those with other degrees if its job leaves them open."""
    yield draft
    asked = draft.spec.parallelism
    if requested_strategy(asked) is None and asked.replica_ranks == 1:
        others = (*spreads(draft), *(sliced for group in slices(draft) for sliced in group))
        yield from (other for other in others if not other.problems)


# ------------------------------------------------------------------------------------------------- without known times


def _first_fit(draft: Draft, asked: ParallelismSpec, micros: tuple[int, ...]) -> Fit | None:
    """Return the first rung on which one of `micros` (largest first) fits, without those that would waste time on
    padding there.
    """
    for rung in rungs(draft, asked):
        for micro in less_padded(draft, rung, micros):
            fit = fit_at(draft, rung, micro)
            if fits(draft, fit.memory):
                return fit
    return None


def _first_of_all(draft: Draft) -> tuple[Draft, Fit] | None:
    """Return the first rung that fits, with the first degrees with which one does if none fits without: those of tensor
    and pipeline parallelism, then of slices.
    """
    asked = draft.spec.parallelism
    fit = choose_fit(draft, asked, micro_batches(draft))
    if fit is not None:
        return draft, fit
    if requested_strategy(asked) is not None or asked.replica_ranks > 1:
        return None
    return next(fitting(spreads(draft)), None) or fewest_slices(draft)


def fitting(drafts: Iterable[Draft]) -> Iterator[tuple[Draft, Fit]]:
    """Yield the drafts without problems that fit, each with its best form."""
    for draft in drafts:
        fit = None if draft.problems else choose_fit(draft, draft.spec.parallelism, micro_batches(draft))
        if fit is not None:
            yield draft, fit


def fewest_slices(draft: Draft) -> tuple[Draft, Fit] | None:
    """Return the best degree of sequence parallelism above the job's own with which a form fits, inside a node if there
    is one: that with the least offload and, if times are known, the quickest.
    """
    degree = draft.spec.parallelism.sequence
    for drafts in slices(draft):
        forms = tuple(fitting(sliced for sliced in drafts if sliced.spec.parallelism.sequence > degree))
        if forms:
            return min(forms, key=_slowness)
    return None


def _slowness(form: tuple[Draft, Fit]) -> tuple[int, float]:
    draft, fit = form
    strategy = fit.strategy
    offloads = (strategy.offload_optimizer, strategy.offload_parameters)
    return sum(where != "none" for where in offloads), _seconds(draft, strategy, fit.micro_batch) or 0.0
