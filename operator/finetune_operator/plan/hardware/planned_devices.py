"""GPU that a training is planned for while its nodes are unknown, in the form in which the trainer compares it with its
own: the plan's numbers, and which of its choices another GPU would change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from finetune_contract.byte_text import MIB, human_bytes
from finetune_contract.facts import DeviceFacts
from finetune_contract.measured_devices import Choice, PlannedDevice
from finetune_operator.plan.hardware.assumed_hardware import LEAST_GPU_MEMORY
from finetune_operator.plan.hardware.gpu_table import GPU_MODELS
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import Adaptation, PlanRefused

MOST_GPU_MEMORY = max(gpu.memory_mib for gpu in GPU_MODELS) * MIB
"""Bytes of memory of the largest GPU in the table."""
_OF_KNOWN_SPEED = "H100"
"""Product that stands for those whose speed is known."""


def weakest(devices: Sequence[DeviceFacts]) -> DeviceFacts | None:
    """Return the GPU with the least memory on which a job has run, with bf16 only if all of them have it: the job may
    run on any of these nodes again. None if there are none.
    """
    if not devices:
        return None
    least = min(devices, key=lambda one: (one.memory_bytes, one.bf16, one.product))
    return least.model_copy(update={"bf16": all(one.bf16 for one in devices)})


def with_sufficient_memory(draft: Draft, fits: Callable[[Draft], bool]) -> Draft | None:
    """Return the draft of a job that does not fit the memory assumed for an unknown GPU, with the least memory of any
    GPU in the table with which it fits: its training measures the GPU. None if it fits none, or the GPU is known.

    Attempts that ran out of memory do not count, as a job must not be adapted by assuming more memory.
    """
    gpu, asked = draft.hardware.gpu, draft.spec.resources.accelerator.memory
    if (
        draft.basis.device_source != "assumed"
        or gpu is None
        or asked is not None
        or gpu.memory_bytes != LEAST_GPU_MEMORY
    ):
        return None
    if not draft.loops:
        return None
    unadapted = draft.with_inputs(adaptation=Adaptation())
    sizes = sorted({LEAST_GPU_MEMORY, *(gpu.memory_mib * MIB for gpu in GPU_MODELS if gpu.memory_mib)})
    sizes = sizes[sizes.index(LEAST_GPU_MEMORY) :]
    if not fits(_with_memory(unadapted, sizes[-1])):
        return None
    least = bisect_left(sizes, True, key=lambda size: fits(_with_memory(unadapted, size)))
    return _with_memory(draft, sizes[least]) if least else None


def _with_memory(draft: Draft, memory: int) -> Draft:
    """Return a draft that assumes `memory` bytes for the unknown GPU."""
    gpu = decided(draft.hardware.gpu).model_copy(update={"memory_bytes": memory})
    return draft.with_basis(hardware=draft.hardware.model_copy(update={"gpu": gpu})).assuming(
        f"hardware: the job does not fit {human_bytes(LEAST_GPU_MEMORY)} a GPU; {human_bytes(memory)} are assumed "
        "instead, the least of any known GPU with which it fits, and the training measures its GPU before it starts"
    )


def with_planned_device(draft: Draft, begun: Draft, train: Callable[[Draft], Draft]) -> Draft:
    """Return a finished draft of a training with the GPU that it is planned for, unless it runs on CPUs or on known
    nodes. `train` plans the training of `begun`, the draft before its choices.
    """
    gpu = draft.hardware.gpu
    if draft.basis.device_source == "known" or gpu is None or decided(draft.world).device == "cpu":
        return draft
    planned = PlannedDevice(
        product=gpu.product,
        memory_bytes=gpu.memory_bytes,
        bf16=gpu.bf16,
        source=draft.basis.device_source,
        needed_bytes=0 if draft.memory is None else draft.memory.total_bytes,
        undecided=_undecided(draft, begun, train) if draft.basis.device_source == "assumed" else (),
    )
    return replace(draft, device=planned)


def _undecided(draft: Draft, begun: Draft, train: Callable[[Draft], Draft]) -> tuple[Choice, ...]:
    """Return the properties with which the same job would be trained in another form, by planning it with them."""
    others: dict[Choice, dict[str, object]] = {
        "memory": {"memory_bytes": MOST_GPU_MEMORY},
        "speed": {"product": _OF_KNOWN_SPEED},
    }
    undecided = [choice for choice, facts in others.items() if _differs(draft, begun, train, facts)]
    return (*undecided, "precision") if draft.training.precision == "auto" else tuple(undecided)


def _differs(draft: Draft, begun: Draft, train: Callable[[Draft], Draft], facts: dict[str, object]) -> bool:
    gpu = decided(begun.hardware.gpu).model_copy(update=facts)
    changed = begun.with_basis(hardware=begun.hardware.model_copy(update={"gpu": gpu}))
    try:
        other = train(changed)
    except PlanRefused:
        return True
    return (other.strategy, other.batch, other.precision) != (draft.strategy, draft.batch, draft.precision)
