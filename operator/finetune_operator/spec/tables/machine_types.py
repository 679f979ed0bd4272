"""Labels of nodes with GPUs, and machine types of clouds by their documentation: `machine_types.csv`, read once.

Plans read the product from the type of a node, and hints the number of GPUs from a type in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

NVIDIA_LABEL = "nvidia.com/gpu.product"
AMD_LABEL = "amd.com/gpu.product-name"
GKE_LABEL = "cloud.google.com/gke-accelerator"
KARPENTER_LABEL = "karpenter.k8s.aws/instance-gpu-name"
TYPE_LABEL = "node.kubernetes.io/instance-type"
PRODUCT_LABELS = (NVIDIA_LABEL, AMD_LABEL, GKE_LABEL, KARPENTER_LABEL, TYPE_LABEL)
"""Labels of nodes from which the product of their GPUs follows, in the order in which they are read."""


@cache
def _types() -> Mapping[str, tuple[int, str]]:
    """Return machine type -> its GPUs, and the product by whose types nodes are selected. That is empty for types of
    Google Cloud: GKE labels such nodes with the accelerator, so that plans read that.
    """
    # `finetune validate` of a valid file needs only the labels above.
    from finetune_operator.spec.tables import rows

    return {row["type"]: (int(row["gpus"]), row["product"]) for row in rows("machine_types.csv")}


def types_of(product: str) -> tuple[str, ...]:
    """Return the machine types by which nodes with a product of the built-in table are selected."""
    return tuple(name for name, (_, of) in _types().items() if of == product)


def gpus_of(machine_type: str) -> int | None:
    """Return the number of GPUs of a machine; None if the table lacks the type."""
    row = _types().get(machine_type)
    return None if row is None else row[0]
