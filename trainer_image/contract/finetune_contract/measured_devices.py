"""GPUs of a training: those that a plan assumes, those that its processes measure, and the rule for a new plan.

The trainer applies the rule before it loads weights, and the operator before it plans again: so both agree on whether
an attempt that ended with `Replanned` had a reason to.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Precision
from finetune_contract.contract_models import Message, Order, Positive
from finetune_contract.facts import DeviceFacts

LESS_MEMORY = 0.02
"""Fraction by which the memory may be below the planned one. Drivers keep about 1 % of what data sheets list."""
MORE_MEMORY = 0.10
"""Fraction by which the memory may be above the planned one before another plan is worth a new start."""

Choice: TypeAlias = Literal["memory", "speed", "precision"]
"""Property of a GPU that choices of a plan depend on."""


class PlannedDevice(Order):
    """GPU that a training is planned for without knowing the nodes it runs on. Omitted from `job.json` if the nodes
    are known, e.g. by their labels.
    """

    product: str
    memory_bytes: int = Field(gt=0)
    bf16: bool
    source: Literal["assumed", "measured"]
    """`measured`: by an earlier attempt of the job, perhaps on another kind of node. Only a weaker GPU changes such a
    plan, so that each new plan is for a weaker one than the last.
    """
    needed_bytes: int = Field(ge=0)
    """Memory of one process by the plan."""
    undecided: tuple[Choice, ...] = ()
    """Properties with which the plan would be another one: `memory` if there were more, `speed` if it were known,
    `precision` if it had units for bf16.
    """


class MeasuredDevices(Message):
    """GPUs of a training as its processes measured them, before weights were loaded."""

    device: DeviceFacts
    """The weakest: least memory and capability of any; bf16 only if all have it."""
    processes: Positive
    """Processes of the training, each with one GPU."""
    per_node: Positive
    """GPUs that a process sees on its node; the least of any."""
    fp8: bool = False
    """True if all have units for fp8."""
    mig: bool = False
    """True if any is an instance of a partitioned GPU."""
    peer_access: bool | None = None
    """True if all GPUs of each node read each other's memory; None: unknown, or one GPU a node."""
    nvlink: bool | None = None
    """True if NVLink connects all GPUs of each node; None: unknown, or one GPU a node."""
    others: tuple[str, ...] = ()
    """Other products among them."""

    @property
    def text(self) -> str:
        """Describe the GPUs, e.g. `NVIDIA L40S 44.4 GiB, capability 8.9 x 8`."""
        device = self.device
        capability = "" if device.capability is None else f", capability {device.capability}"
        mixed = f" (the weakest; also {', '.join(self.others)})" if self.others else ""
        return f"{device.product} {human_bytes(device.memory_bytes)}{capability} x {self.processes}{mixed}"


def plan_change(planned: PlannedDevice, measured: MeasuredDevices, precision: Precision) -> str | None:
    """Return why a training planned for one GPU needs another plan on the measured ones; None if it does not."""
    device = measured.device
    if precision in ("bf16", "fp8") and not device.bf16:
        return f"{device.product} has no units for bf16, and the plan uses them"
    has = f"{device.product} has {human_bytes(device.memory_bytes)}"
    difference = device.memory_bytes / planned.memory_bytes - 1
    if difference < -LESS_MEMORY:
        return f"{has}, and the plan is for {human_bytes(planned.memory_bytes)}"
    if device.memory_bytes < planned.needed_bytes:
        return f"{has}, and the plan needs {human_bytes(planned.needed_bytes)}"
    if planned.source == "measured":
        return None
    if "precision" in planned.undecided and device.bf16 and not planned.bf16:
        return f"{device.product} has units for bf16, and the plan uses none"
    if "memory" in planned.undecided and difference > MORE_MEMORY:
        return f"{has}, and the plan uses {human_bytes(planned.memory_bytes)}"
    if "speed" in planned.undecided and device.product != planned.product:
        return f"the plan is for a GPU of unknown speed, and this is {device.product}"
    return None


def same_kind(one: DeviceFacts, other: DeviceFacts) -> bool:
    """Return whether two GPUs are of one kind of node: the same product with as much memory."""
    largest = max(one.memory_bytes, other.memory_bytes)
    return one.product == other.product and abs(one.memory_bytes - other.memory_bytes) <= LESS_MEMORY * largest
