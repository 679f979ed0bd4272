"""What to try after an attempt has run out of memory, the smallest change first.

Half the micro-batch, as often as there is a half, with the global batch kept by accumulation; then the next strategy of
the ladder, beginning again with the micro-batch that is estimated to fit it; once there are checkpoints, the next one
that goes on from them. Each step takes something away, so that there is an end: `plan` refuses when nothing is left.
What an attempt failed of is for others to say.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_operator.planning.plan_types import Adaptation, JobPlan


def next_adaptation(plan: JobPlan, current: Adaptation) -> Adaptation:
    """The adaptation after `plan`, which was made with `current`, has run out of memory; of a plan that trains."""
    if plan.trainer.training is None:
        raise ValueError("nothing is trained, so there is no micro-batch to halve and no strategy to leave out")
    micro = plan.trainer.training.batch.micro_batch_size
    if micro > 1:
        return replace(current, micro_batch_limit=micro // 2)
    return replace(current, micro_batch_limit=None, skipped_strategies=(*current.skipped_strategies, plan.strategy))
