"""Public data of GPUs: the built-in table (spec/tables/gpus.csv), which the settings' `hardware` extends and overrides.

Memory is the driver's total (a little below the number in the product's name). Throughput is the dense peak of the
vendor's data sheet, the column `source`: with sparsity, sheets show twice as much. Bandwidth of memory, the generation
of PCIe and the number of multiprocessors are from the same data sheets. The network is that of the usual node with 8 of
them, the column `network_of`, divided by its GPUs. Cards that are sold alone leave it open: `CARD_NETWORK`. Label
values are those of GPU feature discovery (NVML's name of the device, spaces as `-`), of AMD's node labeller, GKE's name
of the accelerator and Karpenter's short name; machine_types.csv adds the clouds' machine types. Each of the two dies of
an MI250X is a device of its own. H800 and H20 are for other markets: fewer links, and for H20 less throughput.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_contract.byte_text import MIB
from finetune_contract.choices import Precision
from finetune_contract.facts import TF32_FROM, DeviceFacts
from finetune_operator.spec.tables import rows
from finetune_operator.spec.tables.machine_types import (
    AMD_LABEL,
    GKE_LABEL,
    KARPENTER_LABEL,
    NVIDIA_LABEL,
    TYPE_LABEL,
    types_of,
)

CARD_NETWORK = 1.56
"""Network of one GPU whose product leaves it open, in 10^9 bytes a second: 100 Gbit/s for a node of 8."""
CARD_HOST = 16.0
"""PCIe of a GPU in no table, in 10^9 bytes a second and direction: 16 lanes of PCIe 3.0."""
Labels = Mapping[str, tuple[str, ...]]
"""Values by label key."""


def capability_numbers(capability: str) -> tuple[int, int]:
    """Return the two numbers of a compute capability."""
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


@dataclass(frozen=True)
class GpuModel:
    """GPU product, or a variant of it."""

    name: str
    chip: str
    """Word in every spelling of the product, e.g. `A100` in `NVIDIA-A100-SXM4-80GB`."""
    memory_gb: int
    """Number in the product's name; distinguishes variants of a chip."""
    memory_mib: int
    capability: str
    """CUDA compute capability; empty for a GPU of another vendor, or if unknown."""
    half_tflops: float
    """Dense peak of bf16 (fp16 without bf16) matrix products with fp32 sums, in 10^12 operations a second; 0 if
    unknown.
    """
    fp32_tflops: float
    """Peak of plain fp32, in the same unit, without TF32 (`tf32_flops`)."""
    link_gigabytes: float
    """Bandwidth of one GPU to others of its node, in 10^9 bytes a second: one direction of NVLink as on boards with 8
    of them (half of the data sheets' sum), or of 16 lanes of PCIe without NVLink; 0 if unknown.
    """
    bandwidth: float = 0.0
    """Bandwidth of its memory, in 10^9 bytes a second; 0 if unknown."""
    units: int = 0
    """Streaming multiprocessors, or AMD's compute units; 0 if unknown."""
    network: float = CARD_NETWORK
    """Share of one GPU in its node's network, in 10^9 bytes a second and direction."""
    host: float = CARD_HOST
    """Bandwidth between the GPU and host memory, in 10^9 bytes a second and direction: 16 lanes of PCIe 3.0 (16), 4.0
    (32), 5.0 (64) or 6.0 (128), or NVLink-C2C (450).
    """
    labels: Labels = field(default_factory=dict)
    form: str = ""
    """Word that distinguishes a card from the module of the same chip: PCIE or NVL; empty for the module."""
    bf16: bool = True
    fp8: bool = False
    gpu_hour: float | None = None
    """Price of one GPU for an hour, in the settings' currency."""
    spot_gpu_hour: float | None = None

    def facts(self) -> DeviceFacts:
        """Return the device facts of this product."""
        return DeviceFacts(
            product=self.name,
            memory_bytes=self.memory_mib * MIB,
            bf16=self.bf16,
            capability=self.capability or None,
        )

    @property
    def tf32_flops(self) -> float:
        """Operations a second in TF32: half of the 16-bit peak by the data sheets of all products that have it; 0 for
        the others, and if unknown.
        """
        has = bool(self.capability) and capability_numbers(self.capability) >= TF32_FROM
        return self.half_tflops * 1e12 / 2 if has else 0.0

    def peak_flops(self, precision: Precision) -> float:
        """Return the operations a second at `precision`; bf16 without units for it runs as fp32 does. fp8 has twice the
        rate of bf16, by the data sheets of all products that have it.
        """
        if precision == "fp8":
            return 2 * self.half_tflops * 1e12
        half = precision == "fp16" or (precision == "bf16" and self.bf16)
        return (self.half_tflops if half else self.fp32_tflops) * 1e12


def _model(row: Mapping[str, str]) -> GpuModel:
    labels = {
        NVIDIA_LABEL: tuple(row["nvidia"].split()),
        GKE_LABEL: tuple(row["gke"].split()),
        KARPENTER_LABEL: tuple(row["karpenter"].split()),
        AMD_LABEL: tuple(row["amd"].split()),
        TYPE_LABEL: types_of(row["name"]),
    }
    return GpuModel(
        row["name"],
        row["chip"],
        int(row["memory_gb"]),
        int(row["memory_mib"]),
        row["capability"],
        float(row["half_tflops"]),
        float(row["fp32_tflops"]),
        float(row["link_gigabytes"]),
        bandwidth=float(row["bandwidth"]),
        units=int(row["units"]),
        network=float(row["network"] or CARD_NETWORK),
        host=float(row["host"]),
        labels={key: values for key, values in labels.items() if values},
        form=row["form"],
        bf16=row["bf16"] == "yes",
        fp8=row["fp8"] == "yes",
    )


GPU_MODELS: tuple[GpuModel, ...] = tuple(map(_model, rows("gpus.csv")))
"""Built-in table, ordered by generation and memory: a name that fits several variants means the smaller one."""
