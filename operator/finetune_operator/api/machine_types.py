"""Labels of nodes with GPUs, and machine types of clouds by their documentation: one table for plans and for hints.

Plans read the product from the type of a node, and hints the number of GPUs from a type in a file.
"""

from __future__ import annotations

from collections.abc import Mapping

NVIDIA_LABEL = "nvidia.com/gpu.product"
AMD_LABEL = "amd.com/gpu.product-name"
GKE_LABEL = "cloud.google.com/gke-accelerator"
KARPENTER_LABEL = "karpenter.k8s.aws/instance-gpu-name"
TYPE_LABEL = "node.kubernetes.io/instance-type"
PRODUCT_LABELS = (NVIDIA_LABEL, AMD_LABEL, GKE_LABEL, KARPENTER_LABEL, TYPE_LABEL)
"""Labels of nodes from which the product of their GPUs follows, in the order in which they are read."""


def _sizes(family: str, **gpus: int) -> Mapping[str, int]:
    """Return sizes of an AWS family and their GPUs; `x4` is 4xlarge, `x` xlarge."""
    return {f"{family}.{size.removeprefix('x')}xlarge": count for size, count in gpus.items()}


_FEW = {"x": 1, "x2": 1, "x4": 1, "x8": 1}
_MANY = {**_FEW, "x12": 4, "x16": 1, "x24": 4, "x48": 8}

SELECTED_BY_TYPE: Mapping[str, Mapping[str, int]] = {
    "T4": {
        **_sizes("g4dn", **_FEW, x16=1, x12=4), "g4dn.metal": 8, "Standard_NC4as_T4_v3": 1, "Standard_NC8as_T4_v3": 1,
        "Standard_NC16as_T4_v3": 1, "Standard_NC64as_T4_v3": 4,
    },
    "V100-16GB": _sizes("p3", x2=1, x8=4, x16=8),
    "V100-32GB": {"p3dn.24xlarge": 8, "Standard_ND40rs_v2": 8},
    "A10": {"Standard_NV36ads_A10_v5": 1, "Standard_NV72ads_A10_v5": 2},
    "A10G": _sizes("g5", **_MANY),
    "A100-40GB": {"p4d.24xlarge": 8, "Standard_ND96asr_v4": 8},
    "A100-80GB": {"p4de.24xlarge": 8, "Standard_ND96amsr_A100_v4": 8},
    "A100-PCIE-80GB": {"Standard_NC24ads_A100_v4": 1, "Standard_NC48ads_A100_v4": 2, "Standard_NC96ads_A100_v4": 4},
    "L4": _sizes("g6", **_MANY),
    "L40S": _sizes("g6e", **_MANY),
    "H100": {"p5.4xlarge": 1, "p5.48xlarge": 8, "Standard_ND96isr_H100_v5": 8},
    "H100-NVL": {"Standard_NC40ads_H100_v5": 1, "Standard_NC80adis_H100_v5": 2},
    "H200": {"p5e.48xlarge": 8, "p5en.48xlarge": 8, "Standard_ND96isr_H200_v5": 8},
    "B200": {"p6-b200.48xlarge": 8},
    "B300": {"p6-b300.48xlarge": 8},
    "MI300X": {"Standard_ND96isr_MI300X_v5": 8},
}  # fmt: skip
"""Product -> types of AWS and Azure, whose nodes are selected by their type -> GPUs of a machine."""
_SELECTED_BY_ACCELERATOR: Mapping[str, int] = {
    **{f"{family}-{count}g": count for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu") for count in (1, 2, 4, 8)},
    **{f"g2-standard-{cores}": 1 for cores in (4, 8, 12, 16, 32)},
    "g2-standard-24": 2, "g2-standard-48": 4, "g2-standard-96": 8, "a3-megagpu-8g": 8, "a3-ultragpu-8g": 8,
}  # fmt: skip
"""Type of Google Cloud -> GPUs of a machine. GKE labels such nodes with the accelerator, so that plans read that."""


def types_of(product: str) -> tuple[str, ...]:
    """Return the machine types by which nodes with a product of the built-in table are selected."""
    return tuple(SELECTED_BY_TYPE.get(product, ()))


def gpus_of(machine_type: str) -> int | None:
    """Return the number of GPUs of a machine; None if the table lacks the type."""
    for types in (*SELECTED_BY_TYPE.values(), _SELECTED_BY_ACCELERATOR):
        if machine_type in types:
            return types[machine_type]
    return None
