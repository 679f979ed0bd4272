"""Measures the GPUs of a training before weights are loaded, and ends the attempt where they call for another plan.

Only device properties are read: nothing is allocated. On a CPU nothing is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune_contract.facts import DeviceFacts
from finetune_contract.layout import FailureClass
from finetune_contract.measured_devices import MeasuredDevices, PlannedDevice, plan_change
from finetune_contract.trainer_job import Training
from finetune_trainer.core.distributed import gathered
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.device_units import capability_of, has_bf16, has_fp8

log = logging.getLogger(__name__)

PRODUCT_CHARS = 64
"""Characters of a product's name in a report, which has to fit into a termination message."""
MOST_OTHERS = 4
"""Other products that a report names."""


@dataclass(frozen=True)
class RankDevice:
    """GPU of one process, and its links to the others of its node."""

    facts: DeviceFacts
    fp8: bool
    mig: bool
    seen: int
    """GPUs that the process sees."""
    peer_access: bool | None
    nvlink: bool | None


def measured_devices(training: Training) -> MeasuredDevices | None:
    """Return the GPUs of all processes; None on a CPU. Every rank must call it, after `connect`."""
    if training.world.device == "cpu":
        return None
    measured = merged(gathered(own_device()))
    log.info("Device: %s.", measured.text)
    return measured


def refuse_other_plan(planned: PlannedDevice | None, measured: MeasuredDevices | None, training: Training) -> None:
    """Raise StageError REPLANNED `DeviceDiffers` where the job was planned for an unknown GPU and needs another plan on
    the measured ones. All ranks have the same measurements, so that all of them raise it, or none.
    """
    if planned is None or measured is None:
        return
    why = plan_change(planned, measured, training.precision)
    if why is None:
        log.info("The plan was made for an unknown GPU, and stays the same for this one.")
        return
    raise StageError(
        FailureClass.REPLANNED,
        "DeviceDiffers",
        f"The GPU was unknown when the job was planned, and needs another plan: {why}.",
        "No action is needed. To plan for it from the start, set resources.accelerator.product, or add the GPU to "
        "hardware in the operator's settings.",
    )


def own_device() -> RankDevice:
    """Measure the GPU of this process."""
    own, seen = torch.cuda.current_device(), torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(own)
    name = properties.name.strip() or "GPU without a name"
    facts = DeviceFacts(
        product=name[:PRODUCT_CHARS],
        memory_bytes=properties.total_memory,
        bf16=has_bf16(properties),
        capability=capability_of(properties),
    )
    others = [index for index in range(seen) if index != own]
    return RankDevice(
        facts=facts,
        fp8=has_fp8(properties),
        mig=" MIG " in name,
        seen=seen,
        peer_access=all(torch.cuda.can_device_access_peer(own, other) for other in others) if others else None,
        nvlink=_by_nvlink(own, others),
    )


def _by_nvlink(own: int, others: Sequence[int]) -> bool | None:
    """Return whether NVLink connects a GPU to all others of its node, by NVML; None where NVML is not to be had."""
    if not others:
        return None
    try:
        c10d: Any = torch._C._distributed_c10d
        connectivity = c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink")
        return all(connectivity.matrix[own][other] > 0 for other in others)
    except (AttributeError, IndexError, ImportError, RuntimeError) as error:
        log.debug("NVLink cannot be read: %s", error)
        return None


def merged(ranks: Sequence[RankDevice]) -> MeasuredDevices:
    """Return the devices of all processes as one: the weakest of each property."""
    weakest = min(ranks, key=lambda rank: (rank.facts.bf16, rank.facts.memory_bytes, rank.facts.product)).facts
    memory = min(rank.facts.memory_bytes for rank in ranks)
    capabilities = [rank.facts.capability for rank in ranks if rank.facts.capability is not None]
    least = min(capabilities, key=lambda text: tuple(map(int, text.split("."))), default=None)
    others = sorted({rank.facts.product for rank in ranks} - {weakest.product})
    return MeasuredDevices(
        device=weakest.model_copy(update={"memory_bytes": memory, "capability": least}),
        processes=len(ranks),
        per_node=min(rank.seen for rank in ranks),
        fp8=all(rank.fp8 for rank in ranks),
        mig=any(rank.mig for rank in ranks),
        peer_access=_all_of([rank.peer_access for rank in ranks]),
        nvlink=_all_of([rank.nvlink for rank in ranks]),
        others=tuple(others[:MOST_OTHERS]),
    )


def _all_of(answers: Sequence[bool | None]) -> bool | None:
    """Return whether all answers are yes; None if one is unknown and none is no."""
    if False in answers:
        return False
    return None if None in answers else True
