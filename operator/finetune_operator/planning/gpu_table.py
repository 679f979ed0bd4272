"""Public data of GPUs: the built-in table, which the settings' `hardware` extends and overrides.

Memory is the driver's total (a little below the number in the product's name). Throughput is the dense peak of the
vendor's data sheet: with sparsity, sheets show twice as much. Bandwidth of memory, the generation of PCIe and the
number of multiprocessors are from the same data sheets. The network is that of the usual node with 8 of them, divided
by its GPUs: T4 of g4dn.12xlarge (50 Gbit/s for 4), V100 of p3.16xlarge (25 Gbit/s) and p3dn (100), A10G and L4 of
g5.48xlarge and g6.48xlarge (100), L40S of g6e.48xlarge (400), A100 of p4d (400; Azure's ND A100 v4 has 1,600), H100,
H200 and B200 of p5, p5en and p6 (3,200), B300 of p6-b300 (6,400), MI300X of Azure's ND MI300X v5 (3,200), MI250X of a
Frontier node (800), A800, H800 and H20 of HGX boards with an adapter of 200 or 400 Gbit/s for each GPU, GH200 and GB200
with one of 400 Gbit/s. Cards that are sold alone leave it open: `CARD_NETWORK`. Label values are those of GPU feature
discovery (NVML's name of the device, spaces as `-`), of AMD's node labeller, GKE's name of the accelerator and
Karpenter's short name; `machine_types` adds the clouds' machine types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from finetune_contract.byte_text import MIB
from finetune_contract.choices import Precision
from finetune_contract.facts import TF32_FROM, DeviceFacts
from finetune_operator.api.machine_types import (
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


def _nvidia(*products: str, gke: tuple[str, ...] = (), karpenter: str = "") -> Labels:
    found = {NVIDIA_LABEL: products, GKE_LABEL: gke, KARPENTER_LABEL: (karpenter,) * bool(karpenter)}
    return {key: values for key, values in found.items() if values}


def _with_types(model: GpuModel) -> GpuModel:
    types = types_of(model.name)
    return replace(model, labels={**model.labels, TYPE_LABEL: types}) if types else model


_PRODUCTS = (
    # Below compute capability 8.0 there are no units for bf16. Sources: NVIDIA's data sheets of each product.
    GpuModel("T4", "T4", 16, 15_360, "7.5", 65.0, 8.1, 16.0, bandwidth=320.0, units=40, network=1.56, host=16.0,
             bf16=False,
             labels=_nvidia("Tesla-T4", gke=("nvidia-tesla-t4",), karpenter="t4")),
    GpuModel("V100-16GB", "V100", 16, 16_160, "7.0", 125.0, 15.7, 150.0, bandwidth=900.0, units=80,
             network=0.39, host=16.0, bf16=False,
             labels=_nvidia("Tesla-V100-SXM2-16GB", gke=("nvidia-tesla-v100",))),
    GpuModel("V100-32GB", "V100", 32, 32_510, "7.0", 125.0, 15.7, 150.0, bandwidth=900.0, units=80,
             network=1.56, host=16.0, bf16=False,
             labels=_nvidia("Tesla-V100-SXM2-32GB", "Tesla-V100-SXM3-32GB")),
    GpuModel("V100-PCIE-16GB", "V100", 16, 16_160, "7.0", 112.0, 14.0, 16.0, bandwidth=900.0, units=80, host=16.0,
             form="PCIE", bf16=False,
             labels=_nvidia("Tesla-V100-PCIE-16GB")),
    GpuModel("V100-PCIE-32GB", "V100", 32, 32_510, "7.0", 112.0, 14.0, 16.0, bandwidth=900.0, units=80, host=16.0,
             form="PCIE", bf16=False,
             labels=_nvidia("Tesla-V100-PCIE-32GB")),
    # Ampere. A10G is Amazon's own, and the sheet of g5 instances gives its figures.
    GpuModel("A10", "A10", 24, 23_028, "8.6", 125.0, 31.2, 32.0, bandwidth=600.0, units=72, host=32.0,
             labels=_nvidia("NVIDIA-A10")),
    GpuModel("A10G", "A10G", 24, 23_028, "8.6", 70.0, 35.0, 32.0, bandwidth=600.0, units=80, network=1.56, host=32.0,
             labels=_nvidia("NVIDIA-A10G", karpenter="a10g")),
    GpuModel("A30", "A30", 24, 24_258, "8.0", 165.0, 10.3, 32.0, bandwidth=933.0, units=56, host=32.0,
             labels=_nvidia("NVIDIA-A30")),
    GpuModel("A40", "A40", 48, 46_068, "8.6", 149.7, 37.4, 32.0, bandwidth=696.0, units=84, host=32.0,
             labels=_nvidia("NVIDIA-A40")),
    GpuModel("A6000", "A6000", 48, 49_140, "8.6", 154.8, 38.7, 32.0, bandwidth=768.0, units=84, host=32.0,
             labels=_nvidia("NVIDIA-RTX-A6000")),
    GpuModel("A100-40GB", "A100", 40, 40_960, "8.0", 312.0, 19.5, 300.0, bandwidth=1555.0, units=108,
             network=6.25, host=32.0,
             labels=_nvidia("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB", gke=("nvidia-tesla-a100",))),
    GpuModel("A100-80GB", "A100", 80, 81_920, "8.0", 312.0, 19.5, 300.0, bandwidth=2039.0, units=108,
             network=6.25, host=32.0,
             labels=_nvidia("NVIDIA-A100-SXM4-80GB", "A100-SXM4-80GB", gke=("nvidia-a100-80gb",))),
    GpuModel("A100-PCIE-40GB", "A100", 40, 40_960, "8.0", 312.0, 19.5, 32.0, bandwidth=1555.0, units=108, host=32.0,
             form="PCIE",
             labels=_nvidia("NVIDIA-A100-PCIE-40GB", "A100-PCIE-40GB")),
    GpuModel("A100-PCIE-80GB", "A100", 80, 81_920, "8.0", 312.0, 19.5, 32.0, bandwidth=1935.0, units=108, host=32.0,
             form="PCIE",
             labels=_nvidia("NVIDIA-A100-80GB-PCIe")),
    GpuModel("A800-80GB", "A800", 80, 81_920, "8.0", 312.0, 19.5, 200.0, bandwidth=2039.0, units=108,
             network=25.0, host=32.0, labels=_nvidia("NVIDIA-A800-SXM4-80GB")),
    GpuModel("A800-PCIE-80GB", "A800", 80, 81_920, "8.0", 312.0, 19.5, 32.0, bandwidth=1935.0, units=108, host=32.0,
             form="PCIE",
             labels=_nvidia("NVIDIA-A800-80GB-PCIe")),
    # Ada and later multiply in fp8 too.
    GpuModel("L4", "L4", 24, 23_034, "8.9", 121.0, 30.3, 32.0, bandwidth=300.0, units=58, network=1.56, host=32.0,
             fp8=True,
             labels=_nvidia("NVIDIA-L4", gke=("nvidia-l4",), karpenter="l4")),
    GpuModel("RTX-4090", "4090", 24, 24_564, "8.9", 165.2, 82.6, 32.0, bandwidth=1008.0, units=128, host=32.0,
             fp8=True,
             labels=_nvidia("NVIDIA-GeForce-RTX-4090")),
    GpuModel("L20", "L20", 48, 46_068, "8.9", 119.5, 59.8, 32.0, bandwidth=864.0, units=92, host=32.0,
             fp8=True, labels=_nvidia("NVIDIA-L20")),
    GpuModel("L40", "L40", 48, 46_068, "8.9", 181.0, 90.5, 32.0, bandwidth=864.0, units=142, host=32.0,
             fp8=True, labels=_nvidia("NVIDIA-L40")),
    GpuModel("L40S", "L40S", 48, 46_068, "8.9", 362.0, 91.6, 32.0, bandwidth=864.0, units=142, network=6.25, host=32.0,
             fp8=True,
             labels=_nvidia("NVIDIA-L40S", karpenter="l40s")),
    # Hopper. H800 and H20 are for other markets: fewer links, and for H20 less throughput.
    GpuModel("H100", "H100", 80, 81_559, "9.0", 989.0, 67.0, 450.0, bandwidth=3350.0, units=132,
             network=50.0, host=64.0, fp8=True,
             labels=_nvidia("NVIDIA-H100-80GB-HBM3", gke=("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
                            karpenter="h100")),
    GpuModel("H100-PCIE", "H100", 80, 81_559, "9.0", 756.0, 51.0, 64.0, bandwidth=2000.0, units=114, host=64.0,
             form="PCIE", fp8=True,
             labels=_nvidia("NVIDIA-H100-PCIe")),
    GpuModel("H100-NVL", "H100", 94, 95_830, "9.0", 835.0, 60.0, 64.0, bandwidth=3900.0, units=132, host=64.0,
             form="NVL", fp8=True,
             labels=_nvidia("NVIDIA-H100-NVL")),
    GpuModel("H800", "H800", 80, 81_559, "9.0", 989.0, 67.0, 200.0, bandwidth=3350.0, units=132,
             network=50.0, host=64.0, fp8=True, labels=_nvidia("NVIDIA-H800")),
    GpuModel("H800-PCIE", "H800", 80, 81_559, "9.0", 756.0, 51.0, 64.0, bandwidth=2000.0, units=114, host=64.0,
             form="PCIE", fp8=True,
             labels=_nvidia("NVIDIA-H800-PCIe")),
    GpuModel("H20", "H20", 96, 97_871, "9.0", 148.0, 44.0, 450.0, bandwidth=4000.0, units=78, network=50.0, host=64.0,
             fp8=True, labels=_nvidia("NVIDIA-H20")),
    GpuModel("GH200", "GH200", 96, 97_871, "9.0", 989.0, 67.0, 450.0, bandwidth=4000.0, units=132,
             network=50.0, host=450.0, fp8=True,
             labels=_nvidia("NVIDIA-GH200-480GB")),
    GpuModel("H200", "H200", 141, 143_771, "9.0", 989.0, 67.0, 450.0, bandwidth=4800.0, units=132,
             network=50.0, host=64.0, fp8=True,
             labels=_nvidia("NVIDIA-H200", gke=("nvidia-h200-141gb",), karpenter="h200")),
    GpuModel("H200-NVL", "H200", 141, 143_771, "9.0", 835.0, 60.0, 64.0, bandwidth=4800.0, units=132, host=64.0,
             form="NVL", fp8=True,
             labels=_nvidia("NVIDIA-H200-NVL")),
    # Blackwell. B300: data sheet of HGX B300, 36 PFLOP/s for 8 with sparsity.
    GpuModel("B200", "B200", 180, 183_359, "10.0", 2250.0, 75.0, 900.0, bandwidth=8000.0, units=148,
             network=50.0, host=64.0, fp8=True,
             labels=_nvidia("NVIDIA-B200", gke=("nvidia-b200",), karpenter="b200")),
    GpuModel("GB200", "GB200", 186, 189_471, "10.0", 2500.0, 80.0, 900.0, bandwidth=8000.0, units=152,
             network=50.0, host=450.0, fp8=True,
             labels=_nvidia("NVIDIA-GB200", gke=("nvidia-gb200",))),
    GpuModel("B300", "B300", 270, 275_040, "10.3", 2250.0, 75.0, 900.0, bandwidth=8000.0, units=148,
             network=100.0, host=128.0, fp8=True,
             labels=_nvidia("NVIDIA-B300-SXM6-AC", karpenter="b300")),
    # AMD's data sheets. Each of the two dies of an MI250X is a device of its own. MI300X: fp8 of another form (FNUZ).
    GpuModel("MI250X", "MI250X", 64, 65_520, "", 191.5, 23.9, 50.0, bandwidth=1638.0, units=110,
             network=12.5, host=32.0, labels={AMD_LABEL: ("AMD_Instinct_MI250X",)}),
    GpuModel("MI300X", "MI300X", 192, 196_592, "", 1307.0, 163.4, 448.0, bandwidth=5300.0, units=304,
             network=50.0, host=64.0, fp8=True,
             labels={AMD_LABEL: ("AMD_Instinct_MI300X_OAM",)}),
)  # fmt: skip
GPU_MODELS: tuple[GpuModel, ...] = tuple(map(_with_types, _PRODUCTS))
"""Built-in table, ordered by generation and memory: a name that fits several variants means the smaller one."""
