"""What to try after an attempt has run out of memory, the smallest change first.

Half the micro-batch, as often as there is a half, with the global batch kept by accumulation; then the next strategy of
the ladder, beginning again with the micro-batch that is estimated to fit it. Each step takes something away, so that
there is an end: `plan` refuses when nothing is left. What an attempt failed of is for others to say.
"""

from __future__ import annotations

from finetune_operator.planning.types import Adaptation, JobPlan


def next_adaptation(plan: JobPlan, current: Adaptation) -> Adaptation:
    """The adaptation after `plan`, which was made with `current`, has run out of memory; of a plan that trains."""
    if plan.trainer.training is None:
        raise ValueError("nothing is trained, so there is no micro-batch to halve and no strategy to leave out")
    micro = plan.trainer.training.batch.micro_batch_size
    if micro > 1:
        return Adaptation(micro // 2, current.skipped_strategies)
    return Adaptation(None, (*current.skipped_strategies, plan.strategy))
