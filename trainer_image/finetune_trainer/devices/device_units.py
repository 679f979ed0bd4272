"""Types of torch by precision, and number formats that the units of a GPU multiply in, by its compute capability, or on
AMD by its architecture.

HIP reports a compute capability too, which shows neither: it is 9.0 for an MI250, which has no units for fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finetune_contract.choices import Precision
from finetune_contract.facts import BF16_FROM, FP8_FROM, TF32_FROM

TORCH_TYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Type in which layers compute at a precision; fp8 has layers of its own (`float8`)."""
_AMD_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""Prefixes of AMD's architectures with units for bf16: MI100 and later, RDNA 3 and later."""
_AMD_FP8 = ("gfx94", "gfx95", "gfx12")
"""Prefixes of AMD's architectures whose units multiply in fp8: MI300, MI350 and RDNA 4 (torch's `_scaled_mm` requires
the same).
"""


def capability_of(properties: Any) -> str | None:
    """Return the compute capability of a device's properties, e.g. `8.9`; None for a GPU of AMD."""
    return None if torch.version.hip is not None else f"{properties.major}.{properties.minor}"


def has_bf16(properties: Any) -> bool:
    """Return whether a device with these properties has units for bf16."""
    return _has(properties, BF16_FROM, _AMD_BF16)


def has_tf32(properties: Any) -> bool:
    """Return whether a device with these properties multiplies fp32 in TF32; on AMD torch does not."""
    return _has(properties, TF32_FROM, ())


def has_fp8(properties: Any) -> bool:
    """Return whether a device with these properties has units for fp8."""
    return _has(properties, FP8_FROM, _AMD_FP8)


def _has(properties: Any, least: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    if torch.version.hip is None:
        return (properties.major, properties.minor) >= least
    architecture: str = properties.gcnArchName
    return architecture.startswith(architectures)
