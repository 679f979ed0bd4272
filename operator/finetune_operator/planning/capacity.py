"""Which nodes the training asks for, and how long it waits for them.

Spot nodes concern the train stage alone: the others are short, and one that is taken away in the middle of them saves
nothing. On this machine the wish has no meaning, and is passed over with a sentence, so that one file serves both.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_operator.api.quantities import human_seconds
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import SpotSpec
from finetune_operator.planning.draft import Draft

NO_SPOT_HERE = "it trains on this machine, as there are no spot nodes without a cluster; spec.spot holds in one"


def patience(spot: SpotSpec, settings: Settings, ran: float = 0.0, waited: float = 0.0) -> float:
    """Seconds that pods wait for a spot node before they fall back, when `waited` s of spot.maxWaitSeconds are over and
    `ran` s of training are done.

    Never so long that the training could not end in time on other nodes: it needs what is left of maxRunSeconds, and
    where that has no bound half of maxWaitSeconds is kept for it.
    """
    after = settings.spot.fallback_after_seconds
    if spot.max_wait_seconds is None:
        return after
    needed = spot.max_wait_seconds / 2 if spot.max_run_seconds is None else spot.max_run_seconds - ran
    return max(0.0, min(after, spot.max_wait_seconds - waited - needed))


def choose_capacity(draft: Draft) -> Draft:
    """Spot nodes or any."""
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
