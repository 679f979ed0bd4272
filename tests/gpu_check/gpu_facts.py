"""Facts of the machine that the figures of a report depend on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from finetune_operator.plan.hardware.devices import find_gpu

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "bitsandbytes", "torchao", "liger-kernel")
GIB = 1 << 30
MEMORY = "memory, GiB"
"""Fact with the memory of each GPU."""


def facts() -> dict[str, Any]:
    """Return the machine's GPUs, libraries and processor, by name."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found["GPUs"] = count
    found["CUDA of torch"] = torch.version.cuda or torch.version.hip or "none"
    if not count:
        return found
    all_of_them = [torch.cuda.get_device_properties(each) for each in range(count)]
    found["names"] = sorted({each.name for each in all_of_them})
    found[MEMORY] = [each.total_memory / GIB for each in all_of_them]
    found["compute capability"] = sorted({f"{each.major}.{each.minor}" for each in all_of_them})
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "RCCL"  # type: ignore[no-untyped-call]
    peers = [torch.cuda.can_device_access_peer(0, other) for other in range(1, count)]
    found["peers of GPU 0"] = f"{sum(peers)} of {count - 1}"
    known = find_gpu(all_of_them[0].name)
    found["row in the table of GPUs"] = "none: add it to finetune_operator.plan" if known is None else known.name
    return found
