"""Decision whether a training goes on while its checkpoints are written.

Each process then copies its part of the state into host memory, which is the whole pause, and a thread writes the copy.
The strategies whose processes write shards of the state can (`finetune_trainer.strategies.shard_files`); DeepSpeed
gathers and writes its state in one call.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.trainer_job import WHOLE_CHECKPOINTS, Strategy
from finetune_operator.plan.memory.memory_workload import largest_layer
from finetune_operator.plan.time.pauses import checkpoint_bytes, copy_seconds, save_seconds, short_seconds
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import Adaptation, MemoryEstimate, MemoryTerm
from finetune_operator.spec.quantities import human_seconds

LEAST_PAUSE_SECONDS = 5.0
"""Pause of a checkpoint from which on a copy of the state is worth its memory."""
FREE_SHARE = 0.1
"""Share of a node's memory that stays free beside the copy: estimates of host memory are less exact than those of GPUs.
"""


def choose_saving(draft: Draft) -> Draft:
    """Choose whether checkpoints are written beside the training, and count the copy that they need."""
    strategy, memory = draft.strategy, draft.memory
    if strategy is None or memory is None:
        return draft  # nothing fits, which is refused
    pause = save_seconds(draft, strategy)
    if pause < LEAST_PAUSE_SECONDS:
        return draft
    if (why := _obstacle(draft, strategy, memory.host_bytes)) is not None:
        return draft.because(f"the training waits {human_seconds(pause)} for a checkpoint: {why}")
    copy, schedule = copied_bytes(draft, strategy), decided(draft.checkpoints)
    schedule = schedule.model_copy(update={"asynchronous": True})
    stops = short_seconds(copy_seconds(draft, strategy))
    counted = replace(draft, checkpoints=schedule, memory=_with_copy(draft, memory, copy))
    return counted.because(
        f"checkpoints are written beside the training, which waits {stops} for a copy "
        f"of {human_bytes(copy)} in a node's memory; for the last one, and on SIGTERM, it waits {human_seconds(pause)}"
    )


def saves_beside(draft: Draft, strategy: Strategy, host_bytes: int) -> bool:
    """Return whether `choose_saving` has checkpoints of a form written beside the training; `host_bytes`: memory that
    the form needs on a node's host.
    """
    return save_seconds(draft, strategy) >= LEAST_PAUSE_SECONDS and _obstacle(draft, strategy, host_bytes) is None


def _obstacle(draft: Draft, strategy: Strategy, host_bytes: int) -> str | None:
    """Return why checkpoints are not written beside the training; None if nothing prevents it."""
    if strategy.name not in WHOLE_CHECKPOINTS:
        return "DeepSpeed gathers and writes its state in one call"
    if draft.adaptation != Adaptation(checkpoint_form=draft.adaptation.checkpoint_form):
        return "an earlier attempt ran out of memory, so no copy is made"
    copy, node = copied_bytes(draft, strategy), draft.hardware.memory_bytes
    if host_bytes + copy > (1 - FREE_SHARE) * node:
        return (
            f"a copy of {human_bytes(copy)} beside {human_bytes(host_bytes)} would leave less than "
            f"{FREE_SHARE:.0%} of the node's {human_bytes(node)} free"
        )
    return None


def copied_bytes(draft: Draft, strategy: Strategy) -> int:
    """Return the bytes of a checkpoint that the processes of a node copy: those of all nodes write about as much. Whole
    tensors, of which processes write some each, differ by one at most.
    """
    nodes = decided(draft.world).nodes
    size = checkpoint_bytes(draft, strategy)
    if nodes == 1 or strategy.name == "fsdp":
        return -(-size // nodes)
    largest = size * largest_layer(draft.model) // draft.model.parameters
    return min(size, -(-size // nodes) + largest)


def _with_copy(draft: Draft, memory: MemoryEstimate, copy: int) -> MemoryEstimate:
    """Return the estimate with a copy of so many bytes on each node; on CPUs it is in the memory of the processes."""
    world = decided(draft.world)
    if world.device == "cuda":
        return memory.model_copy(update={"host_bytes": memory.host_bytes + copy})
    share = -(-copy // world.processes_per_node)
    words = f"{copy:,} of a node / {world.processes_per_node} processes"
    term = MemoryTerm(name="checkpoint copy", bytes=share, formula=words)
    return memory.model_copy(
        update={
            "terms": (*memory.terms, term),
            "total_bytes": memory.total_bytes + share,
            "host_bytes": memory.host_bytes + share * world.processes_per_node,
        }
    )
