"""Peak memory of a training's processes, and the parts of it that can be measured apart.

On GPUs torch's allocator counts: the memory of tensors, and what it reserved for them. CUDA's context and NCCL's
buffers are the rest of what the device has in use, of other processes on the same GPU too, which a training has not.
On CPUs it is the resident set, which holds all of a process.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_contract.choices import Device
from finetune_contract.plan_check import ALLOCATOR, PROCESS, TENSORS, TRAINING
from finetune_trainer.devices.pass_memory import CudaMemory
from finetune_trainer.strategies.strategy_protocol import Placed

PARAMETERS, OPTIMIZER_STATE = "parameters", "optimizer state"
"""Names of terms in the plan (`finetune_operator.plan.memory.process_memory`)."""


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one process."""

    allocated: int
    """Bytes of tensors on its GPU; its resident set on CPU."""
    device: int
    """Bytes of its device in use."""
    terms: dict[str, int] = field(default_factory=dict)


def resident_peak() -> int:
    """Return the peak resident set of this process in bytes."""
    # ru_maxrss counts kibibytes on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory(device: Device, placed: Placed, before: int) -> PeakMemory:
    """Return the peak of this process after its training; `before`: its resident set before it read the model."""
    held = {
        PARAMETERS: sum(_bytes_on(device, weight) for weight in _weights(placed.model)),
        OPTIMIZER_STATE: sum(_bytes_on(device, state) for state in _optimizer_tensors(placed)),
    }
    if device == "cpu":
        peak = resident_peak()
        return PeakMemory(peak, peak, {**held, PROCESS: before, TRAINING: max(0, peak - before)})
    allocated, reserved = CudaMemory.peaks()
    free, total = torch.cuda.mem_get_info()
    context = max(0, total - free - torch.cuda.memory_reserved())
    terms = {**held, TENSORS: allocated, ALLOCATOR: max(0, reserved - allocated), PROCESS: context}
    return PeakMemory(allocated, reserved + context, terms)


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield this process's part of each weight; ZeRO-3 keeps it beside an empty one."""
    for weight in model.parameters():
        yield getattr(weight, "ds_tensor", weight)


def _optimizer_tensors(placed: Placed) -> Iterator[torch.Tensor]:
    """Yield the state of the optimizer, and master copies, which are no weights of the model."""
    optimizer: Any = placed.optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's are around the one that steps
        optimizer = optimizer.optimizer
    weight_ids = {id(weight) for weight in placed.model.parameters()}
    for weight, states in optimizer.state.items():
        if id(weight) not in weight_ids:
            yield weight
        yield from (state for state in states.values() if isinstance(state, torch.Tensor))


def _bytes_on(device: Device, tensor: torch.Tensor) -> int:
    """Return the bytes of this process's part of a tensor; 0 if it is elsewhere."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size() if local.device.type == device else 0
