"""Adaptations after an attempt has run out of memory, the smallest change first.

First the micro-batch is halved down to 1, with the global batch kept by accumulation; then the next strategy of the
ladder (once there are checkpoints, the next that can resume from them) starts again at the micro-batch estimated to
fit it. Each step removes an option, so that it terminates: `plan` refuses when none is left. Other modules determine
the cause of a failure.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_operator.planning.plan_types import Adaptation, JobPlan


def next_adaptation(plan: JobPlan, current: Adaptation) -> Adaptation:
    """Return the adaptation that follows `current` after `plan` ran out of memory; ValueError if it trains nothing."""
    if plan.trainer.training is None:
        raise ValueError("nothing is trained, so there is no micro-batch to halve and no strategy to leave out")
    micro = plan.trainer.training.batch.micro_batch_size
    if micro > 1:
        return replace(current, micro_batch_limit=micro // 2)
    return replace(current, micro_batch_limit=None, skipped_strategies=(*current.skipped_strategies, plan.strategy))
