"""Sequence parallelism, in which neighbouring processes read the same rows, each a slice of the tokens: its checks."""

from __future__ import annotations

from finetune_operator.plan.memory.model_parallel_plan import divisor_hint, heads
from finetune_operator.plan.types.draft import Draft, decided


def check_sequence(draft: Draft) -> Draft:
    """Refuse slices that do not divide the model's heads."""
    path, degree = ("parallelism", "sequence"), draft.spec.parallelism.sequence
    if degree == 1 or draft.world is None:
        return draft
    model = draft.model
    uneven = [(count, what) for count, what in heads(model) if count % degree]
    if draft.model_known and uneven:
        count, what = uneven[0]
        rule = f"it has to divide the model's {count} {what}, which processes exchange for tokens"
        draft = draft.refusing(path, degree, rule, divisor_hint(degree, count, heads(model)))
    world = decided(draft.world)
    if draft.problems or world.size % degree:
        return draft
    groups = draft.data_ranks
    heads_of_each = f"{model.attention_heads // degree} of {model.attention_heads} heads"
    shared = f" and, in attention, {heads_of_each}" if draft.model_known else ""
    inside = world.nodes == 1 or world.processes_per_node % degree == 0
    return draft.because(
        f"rows are divided among {degree} neighbouring processes {'on one node' if inside else 'of several nodes'}, "
        f"{groups} group{'s' * (groups > 1)} of them: of {draft.lengths.longest} tokens each has "
        f"{slice_tokens(draft.lengths.longest, degree)}{shared}"
    )


def slice_tokens(length: int, degree: int) -> int:
    """Return the tokens that each of `degree` processes has of a row of `length`."""
    return -(-length // degree)
