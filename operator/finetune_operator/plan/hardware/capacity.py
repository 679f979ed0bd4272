"""Capacity type of the training's nodes, and the wait for them.

Only the train stage uses spot nodes: the others are short, and a preemption would undo the saving. On this machine the
setting has no effect and is noted in a sentence, so that one file works for both.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import SpotSpec

NO_SPOT_HERE = "it trains on this machine, as there are no spot nodes without a cluster; spec.spot holds in one"


def patience(spot: SpotSpec, settings: Settings, ran: float = 0.0, waited: float = 0.0) -> float:
    """Return the seconds that pods wait for a spot node before they fall back, after `waited` s of spot.maxWaitSeconds
    and `ran` s of training.

    The wait leaves the training time to end on other nodes: the rest of maxRunSeconds, or half of maxWaitSeconds if
    maxRunSeconds is not set.
    """
    after = settings.spot.fallback_after_seconds
    if spot.max_wait_seconds is None:
        return after
    needed = spot.max_wait_seconds / 2 if spot.max_run_seconds is None else spot.max_run_seconds - ran
    return max(0.0, min(after, spot.max_wait_seconds - waited - needed))


def choose_capacity(draft: Draft) -> Draft:
    """Choose spot nodes or any."""
    spot = draft.spec.spot
    if not spot.enabled:
        return draft
    if draft.local:
        return draft.because(f"capacity: {NO_SPOT_HERE}")
    draft = replace(draft, capacity="spot").because(f"capacity spot: as asked, for the training alone; {_wait(draft)}")
    if draft.spec.checkpoints.on_preemption:
        return draft
    return draft.because(
        "checkpoints.onPreemption is false: each time a spot node is taken away, what was done since the last "
        "checkpoint is done again"
    )


def _wait(draft: Draft) -> str:
    spot = draft.spec.spot
    if spot.fallback_to_on_demand:
        waits = human_seconds(patience(spot, draft.settings))
        return f"it goes to any nodes once a pod has waited {waits} for a spot node"
    if spot.max_wait_seconds is None:
        return "it waits for them without a bound, which spot.maxWaitSeconds would set"
    return f"it takes {human_seconds(spot.max_wait_seconds)} at most, with waiting"
