"""Corrections of estimates by finished jobs of the same namespace: same model, strategy and device.

Off unless the administrator allows it (`planning.learnFromJobs`). The median over at least `LEAST_JOBS` jobs counts,
within bounds: a correction by more is a fault of a job or of the estimate, which a factor does not mend. Memory is
corrected upwards only, as a plan that is too small ends in a failure.
"""

from __future__ import annotations

from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import LearnedRatios, MemoryEstimate, MemoryTerm

LEAST_JOBS = 3
LEAST_FACTOR, MOST_FACTOR = 0.5, 2.0
CORRECTION = "correction"
"""Name of the memory term that finished jobs add."""
SAME_PARAMETERS = 0.02
"""Difference of the number of parameters up to which models are the same: heads for other numbers of labels."""


def learned_ratios(draft: Draft, strategy: Strategy) -> LearnedRatios | None:
    """Return the medians of finished jobs like this draft; None if there are not enough."""
    if not draft.inputs.facts.learned:
        return None
    world = decided(draft.world)
    device = "cpu" if world.device == "cpu" else decided(draft.hardware.gpu).product
    ratios = (one for one in draft.inputs.facts.learned if (one.strategy, one.device) == (strategy.label, device))
    return next((one for one in ratios if one.jobs >= LEAST_JOBS and _same_model(one, draft.model)), None)


def _same_model(learned: LearnedRatios, model: ModelFacts) -> bool:
    near = abs(learned.parameters - model.parameters) <= SAME_PARAMETERS * model.parameters
    return learned.model_type == model.model_type and near


def time_factor(draft: Draft, strategy: Strategy) -> float | None:
    """Return the factor of the time of a step; None without enough finished jobs."""
    ratios = learned_ratios(draft, strategy)
    if ratios is None or ratios.step_time is None:
        return None
    return min(MOST_FACTOR, max(LEAST_FACTOR, ratios.step_time))


def corrected_memory(draft: Draft, strategy: Strategy, estimated: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate with what finished jobs took beyond theirs as a term; never less than it was."""
    ratios = learned_ratios(draft, strategy)
    if ratios is None or ratios.memory is None or ratios.memory <= 1:
        return estimated
    factor = min(MOST_FACTOR, ratios.memory)
    more = int((factor - 1) * estimated.total_bytes)
    formula = f"x {factor:.2f}, the median of {ratios.jobs} finished jobs"
    on_host = more * decided(draft.world).processes_per_node if decided(draft.world).device == "cpu" else 0
    return estimated.model_copy(
        update={
            "terms": (*estimated.terms, MemoryTerm(name=CORRECTION, bytes=more, formula=formula)),
            "total_bytes": estimated.total_bytes + more,
            "host_bytes": estimated.host_bytes + on_host,
        }
    )


def correction_reasons(draft: Draft) -> Draft:
    """Add sentences about corrections of a finished draft."""
    strategy = draft.strategy
    ratios = None if strategy is None else learned_ratios(draft, strategy)
    if ratios is None or strategy is None:
        return draft
    factor, jobs = time_factor(draft, strategy), f"from {ratios.jobs} finished jobs of this namespace"
    if factor is not None:
        draft = draft.because(f"time corrected by {factor:.2f} {jobs} with this model, strategy and device")
    terms = () if draft.memory is None else draft.memory.terms
    if more := next((term for term in terms if term.name == CORRECTION), None):
        draft = draft.because(f"memory corrected by {more.formula.split(',')[0]} {jobs} with this strategy and device")
    return draft
