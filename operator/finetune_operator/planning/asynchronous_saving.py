"""Decision whether a training goes on while its checkpoints are written.

Each process then copies its part of the state into host memory, which is the whole pause, and a thread writes the copy.
The strategies whose processes write shards of the state can (`finetune_trainer.strategies.shard_files`); DeepSpeed
gathers and writes its state in one call.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.trainer_job import WHOLE_CHECKPOINTS
from finetune_operator.api.quantities import human_seconds
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.memory_workload import largest_layer
from finetune_operator.planning.pauses import checkpoint_bytes, copy_seconds, save_seconds, short_seconds
from finetune_operator.planning.plan_types import Adaptation, MemoryEstimate, MemoryTerm

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
    waits = f"the training waits {human_seconds(pause)} for a checkpoint"
    if strategy.name not in WHOLE_CHECKPOINTS:
        return draft.because(f"{waits}: DeepSpeed gathers and writes its state in one call")
    if draft.adaptation != Adaptation(checkpoint_form=draft.adaptation.checkpoint_form):
        return draft.because(f"{waits}: an earlier attempt ran out of memory, so no copy is made")
    copy, node = copied_bytes(draft), draft.hardware.memory_bytes
    if memory.host_bytes + copy > (1 - FREE_SHARE) * node:
        return draft.because(
            f"{waits}: a copy of {human_bytes(copy)} beside {human_bytes(memory.host_bytes)} would leave less than "
            f"{FREE_SHARE:.0%} of the node's {human_bytes(node)} free"
        )
    schedule = decided(draft.checkpoints).model_copy(update={"asynchronous": True})
    stops = short_seconds(copy_seconds(draft, strategy))
    counted = replace(draft, checkpoints=schedule, memory=_with_copy(draft, memory, copy))
    return counted.because(
        f"checkpoints are written beside the training, which waits {stops} for a copy "
        f"of {human_bytes(copy)} in a node's memory; for the last one, and on SIGTERM, it waits {human_seconds(pause)}"
    )


def copied_bytes(draft: Draft) -> int:
    """Return the bytes of a checkpoint that the processes of a node copy: those of all nodes write about as much. Whole
    tensors, of which processes write some each, differ by one at most.
    """
    strategy, nodes = decided(draft.strategy), decided(draft.world).nodes
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
