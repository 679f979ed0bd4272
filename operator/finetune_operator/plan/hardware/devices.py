"""GPUs by name: the built-in table, extended by the settings' `hardware`.

A product in neither is not guessed from its name; `assumed_hardware` has the assumptions for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from finetune_contract.byte_text import MIB
from finetune_contract.facts import BF16_FROM, FP8_FROM, DeviceFacts
from finetune_operator.plan.hardware.gpu_table import (
    GPU_MODELS,
    GpuModel,
    Labels,
    capability_numbers,
)
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings_nodes import HardwareRow
from finetune_operator.spec.tables.machine_types import KARPENTER_LABEL, NVIDIA_LABEL

__all__ = [
    "GPU_MODELS",
    "GpuModel",
    "find_gpu",
    "has_bf16",
    "has_fp8",
    "link_bytes",
    "mig_memory",
    "mig_product",
    "product_labels",
    "scales_fp16",
]

Rows = tuple[HardwareRow, ...]
"""Rows of the settings' `hardware`."""
PCIE_GIGABYTES = 16.0
"""Bandwidth of PCIe 3.0 x16, in 10^9 bytes a second and direction; later generations have at least twice that."""
FP16_FROM = 7
"""Compute capability of Volta, the first chips whose tensor cores multiply in fp16."""
_FORMS = ("PCIE", "NVL")
_SLICE = re.compile(r"MIG[- ]([1-7])[CG]\.([0-9]+)GB(?:[.+].*)?$")
SLICES = 7
"""Compute slices of a whole GPU; a MIG profile names its number of slices."""
MIG_SHARE = 5 / 6
"""Least share of the memory in a MIG profile's name that an instance has: 4.75 of 5 GiB on an A100, 20 of 24 on a
GB200.
"""


def find_gpu(product: str, rows: Rows = ()) -> GpuModel | None:
    """Return the entry of a product in any spelling (`a100-80gb`, `NVIDIA-H100-80GB-HBM3`, `nvidia-tesla-a100`); None
    if neither table has it. A MIG instance gives a part of its GPU.
    """
    upper = product.upper()
    match = _SLICE.search(upper)
    if match is not None:
        whole = find_gpu(product[: match.start()].rstrip("-. "), rows)
        return None if whole is None else _part(whole, int(match[1]), int(match[2]))
    # The settings' names come first, and label values before words: p4d.24xlarge does not contain its GPU's name.
    for row in rows:
        if _plain(product) in (_plain(name) for name in _names(row)):
            return _of_row(row)
    built_in = _built_in(product)
    return None if built_in is None else _overridden(built_in, rows)


@lru_cache(maxsize=256)
def _built_in(product: str) -> GpuModel | None:
    exact = (gpu for gpu in GPU_MODELS for values in gpu.labels.values() if product in values)
    return next(exact, None) or next(_variants(product.upper()), None)


def _names(row: HardwareRow) -> Iterator[str]:
    yield row.name
    yield from row.aliases
    for label in row.labels:
        yield from label.values


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "-", name.upper()).strip("-")


def _variants(upper: str) -> Iterator[GpuModel]:
    """Yield the built-in entries that a spelling may mean, the likeliest first."""
    words = set(re.split(r"[^A-Z0-9]+", upper))
    forms = {gpu.form for gpu in GPU_MODELS if gpu.chip in words} & (words & set(_FORMS) or {""})
    gpus = [gpu for gpu in GPU_MODELS if gpu.chip in words and gpu.form in (forms or {""})]
    named = [gpu for gpu in gpus if words & {f"{gpu.memory_gb}GB", f"{gpu.memory_gb}G", str(gpu.memory_gb)}]
    yield from named or gpus


def _part(whole: GpuModel, slices: int, memory_gb: int) -> GpuModel:
    """Return the entry of a MIG instance of a GPU, which has no NVLink to others."""
    share = slices / SLICES
    return replace(
        whole,
        name=f"{whole.name}-MIG-{slices}g.{memory_gb}gb",
        memory_gb=memory_gb,
        memory_mib=round(memory_gb * 1024 * MIG_SHARE),
        half_tflops=whole.half_tflops * share,
        fp32_tflops=whole.fp32_tflops * share,
        units=round(whole.units * share),
        link_gigabytes=min(whole.link_gigabytes, PCIE_GIGABYTES),
        bandwidth=whole.bandwidth * memory_gb / whole.memory_gb,
        labels={},
        gpu_hour=None,
        spot_gpu_hour=None,
    )


def mig_memory(resource: str) -> int | None:
    """Return the least bytes of an instance of a MIG resource (`nvidia.com/mig-3g.40gb`); None for other resources."""
    match = _SLICE.search(resource.upper())
    return None if match is None else round(int(match[2]) * 1024 * MIG_SHARE) * MIB


def mig_product(product: str | None, resource: str) -> str | None:
    """Return the product of a MIG instance for a job that names the whole GPU's."""
    if product is None or mig_memory(resource) is None:
        return product
    return f"{product}-MIG-{resource.rpartition('/mig-')[2]}"


# --------------------------------------------------------------------------------------------------- the settings' rows


def _overridden(gpu: GpuModel, rows: Rows) -> GpuModel:
    """Return a built-in entry with the overrides of the settings' row of the same name."""
    row = next((row for row in rows if _plain(row.name) == _plain(gpu.name)), None)
    return gpu if row is None else _with(gpu, row)


def _of_row(row: HardwareRow) -> GpuModel:
    built_in = next((gpu for gpu in GPU_MODELS if _plain(gpu.name) == _plain(row.name)), None)
    return _with(built_in or GpuModel(row.name, "", 0, 0, "", 0.0, 0.0, 0.0), row)


def _with(gpu: GpuModel, row: HardwareRow) -> GpuModel:
    changes: dict[str, object] = {
        name: value
        for name, value in (
            ("capability", row.capability),
            ("half_tflops", row.half_tflops),
            ("fp32_tflops", row.fp32_tflops),
            ("link_gigabytes", row.link_gigabytes),
            ("bandwidth", row.memory_gigabytes),
            ("network", row.network_gigabytes),
            ("host", row.host_gigabytes),
            ("gpu_hour", row.gpu_hour),
            ("spot_gpu_hour", row.spot_gpu_hour),
        )
        if value is not None
    }
    if row.memory is not None:
        memory = parse_quantity(row.memory)
        changes |= {"memory_mib": int(memory) // MIB, "memory_gb": round(memory / 10**9)}
    capability = row.capability
    if capability is not None:
        numbers = capability_numbers(capability)
        changes |= {"bf16": numbers >= BF16_FROM, "fp8": numbers >= FP8_FROM}
    if row.precisions is not None:
        changes |= {"bf16": "bf16" in row.precisions, "fp8": "fp8" in row.precisions}
    if row.labels:
        changes["labels"] = {**gpu.labels, **{label.key: label.values for label in row.labels}}
    return replace(gpu, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- facts


def link_bytes(product: str, rows: Rows = ()) -> float | None:
    """Return the bytes a second that a GPU sends to others of its node; None for a product that is not in the table. A
    product named as a PCIe card has no NVLink to all others.
    """
    gpu = find_gpu(product, rows)
    if gpu is None or not gpu.link_gigabytes:
        return None
    is_card = "PCIE" in product.upper() and gpu.form != "PCIE"
    return 1e9 * (min(gpu.link_gigabytes, PCIE_GIGABYTES) if is_card else gpu.link_gigabytes)


def has_fp8(device: DeviceFacts, rows: Rows = ()) -> bool | None:
    """Return whether a device has units for fp8; None if unknown."""
    gpu = find_gpu(device.product, rows)
    if gpu is not None:
        return gpu.fp8
    if not device.bf16:
        return False
    return None if device.capability is None else capability_numbers(device.capability) >= FP8_FROM


def has_bf16(capability: str | None) -> bool:
    """Return whether a device of this compute capability has units for bf16; assumed if it is unknown."""
    return not capability or capability_numbers(capability) >= BF16_FROM


def scales_fp16(device: DeviceFacts, rows: Rows = ()) -> bool:
    """Return whether a device has units for fp16 and none for bf16: Volta and Turing, compute capability 7.x."""
    gpu = find_gpu(device.product, rows)
    capability = device.capability or (None if gpu is None else gpu.capability)
    return not device.bf16 and bool(capability) and capability_numbers(str(capability))[0] == FP16_FROM


# --------------------------------------------------------------------------------------------------------------- labels


def product_labels(product: str, rows: Rows = ()) -> Labels:
    """Return label values, by key, of nodes with a product, in all variants that the name leaves open: `A100` gives
    those of 40 and of 80 GB. A label's value gives itself alone, and so does a product in neither table, as the value
    of GPU feature discovery's label.
    """
    given = [label for row in rows if _plain(product) in map(_plain, (row.name, *row.aliases)) for label in row.labels]
    if given:
        return {label.key: label.values for label in given}
    for values in (gpu.labels for gpu in _all(rows)):
        for key, known in values.items():
            if product in known and key != KARPENTER_LABEL:  # its values are product names in common spelling
                return {key: (product,)}
    labels: dict[str, list[str]] = {}
    if _SLICE.search(product.upper()) is None:
        for gpu in _variants(product.upper()):
            for key, known in _overridden(gpu, rows).labels.items():
                labels[key] = [*labels.get(key, ()), *(value for value in known if value not in labels.get(key, ()))]
    return {key: tuple(known) for key, known in labels.items()} or {NVIDIA_LABEL: (product,)}


def _all(rows: Rows) -> Iterator[GpuModel]:
    yield from map(_of_row, rows)
    yield from GPU_MODELS
