"""What is publicly known about common GPUs, so that a plan can be made for a machine that is not here.

Memory is what the driver reports as total (a little below the number in the product's name). Throughput is the dense
peak of the data sheet: with sparsity, sheets show twice as much. A product that is not in the table is not guessed from
its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune_contract.choices import Precision
from finetune_contract.facts import DeviceFacts

MIB = 1 << 20


@dataclass(frozen=True)
class GpuModel:
    """One product."""

    name: str
    chip: str
    """The word that every spelling of the product holds, e.g. `A100` in `NVIDIA-A100-SXM4-80GB`."""
    memory_gb: int
    """The number in the product's name; tells variants of a chip apart."""
    memory_mib: int
    bf16: bool
    half_tflops: float
    """Dense peak of bf16 (of fp16 where there is no bf16) matrix products with fp32 sums, in 10^12 operations a
    second.
    """
    fp32_tflops: float
    """Peak of plain fp32; TF32 is not counted, as PyTorch leaves it off."""
    link_gigabytes: float
    """What one GPU sends to others of its node, in 10^9 bytes a second: one direction of NVLink as on the boards with 8
    of them (half of what data sheets add up), of 16 lanes of PCIe where there is none.
    """

    def facts(self) -> DeviceFacts:
        """This product as the planner sees a device."""
        return DeviceFacts(product=self.name, memory_bytes=self.memory_mib * MIB, bf16=self.bf16)

    def peak_flops(self, precision: Precision) -> float:
        """Operations a second at `precision`; bf16 without units for it runs as fp32 does. In fp8 there are twice as
        many as in bf16, by the data sheets of all products that have it.
        """
        if precision == "fp8":
            return 2 * self.half_tflops * 1e12
        half = precision == "fp16" or (precision == "bf16" and self.bf16)
        return (self.half_tflops if half else self.fp32_tflops) * 1e12


GPU_MODELS: tuple[GpuModel, ...] = (
    GpuModel("T4", "T4", 16, 15_360, False, 65.0, 8.1, 16.0),
    GpuModel("V100-16GB", "V100", 16, 16_160, False, 125.0, 15.7, 150.0),
    GpuModel("V100-32GB", "V100", 32, 32_510, False, 125.0, 15.7, 150.0),
    GpuModel("A10G", "A10G", 24, 23_028, True, 70.0, 35.0, 32.0),
    GpuModel("L4", "L4", 24, 23_034, True, 121.0, 30.3, 32.0),
    GpuModel("L40S", "L40S", 48, 46_068, True, 362.0, 91.6, 32.0),
    GpuModel("A100-40GB", "A100", 40, 40_960, True, 312.0, 19.5, 300.0),
    GpuModel("A100-80GB", "A100", 80, 81_920, True, 312.0, 19.5, 300.0),
    GpuModel("H100", "H100", 80, 81_559, True, 989.0, 67.0, 450.0),
    GpuModel("H200", "H200", 141, 143_771, True, 989.0, 67.0, 450.0),
    GpuModel("B200", "B200", 180, 183_359, True, 2250.0, 75.0, 900.0),
)
"""Ordered by chip and memory: a name that does not tell variants apart means the smaller one."""


def find_gpu(product: str) -> GpuModel | None:
    """The table's entry for a product however it is spelled (`a100-80gb`, `NVIDIA-H100-80GB-HBM3`); None when it is not
    there.
    """
    words = set(re.split(r"[^A-Z0-9]+", product.upper()))
    variants = [gpu for gpu in GPU_MODELS if gpu.chip in words]
    for gpu in variants:
        if words & {f"{gpu.memory_gb}GB", f"{gpu.memory_gb}G", str(gpu.memory_gb)}:
            return gpu
    return variants[0] if variants else None


PCIE_GIGABYTES = 16.0
"""Of 16 lanes of the third generation, in 10^9 bytes a second and direction; later ones have twice that and more."""


def link_bytes(product: str) -> float | None:
    """Bytes a second that a GPU sends to others of its node; None for a product that is not in the table. One that is
    named a PCIe card has no NVLink to all others.
    """
    gpu = find_gpu(product)
    if gpu is None:
        return None
    is_card = "PCIE" in product.upper()
    return 1e9 * (min(gpu.link_gigabytes, PCIE_GIGABYTES) if is_card else gpu.link_gigabytes)


_WITHOUT_FP8 = frozenset({"T4", "V100", "A10G", "A100"})
"""Chips below compute capability 8.9 (Ada), from which on tensor cores multiply in fp8."""


def has_fp8(product: str) -> bool:
    """Whether a product of the table has units for fp8; False for one that is not there."""
    gpu = find_gpu(product)
    return gpu is not None and gpu.chip not in _WITHOUT_FP8
