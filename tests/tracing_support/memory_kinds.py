"""Kinds of the storages that are live at the peak of a traced run: parameters, gradients, activations and so on.

Parameters, gradients and optimizer state are marked by the objects that hold them. Gathered weights are marked where
they are gathered or resized; the rest goes by the phase and the operator that made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tracing_support.trace import Made, Trace

_OF_DEEPSPEED = {
    "optimizer": ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
    "gradients": ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"),
    "parameters": ("bit16_groups_flat", "fp16_partitioned_groups_flat"),
    "buffers": ("ipg_buckets", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer", "ipg_buffer"),
}
"""Kind -> fields of DeepSpeed's ZeRO optimizers, versions 0.19."""


def mark_states(trace: Trace, model: torch.nn.Module, optimizer: Any) -> None:
    """Mark parameters, gradients and optimizer state as they are now."""
    trace.mark("parameters", _shards(model.parameters()))
    trace.mark("gradients", _shards(each.grad for each in model.parameters()))
    if optimizer is None:
        return
    each = optimizer
    while each is not None:  # accelerate's wrapper, ZeRO's optimizer, torch's
        for kind, names in _OF_DEEPSPEED.items():
            for name in names:
                trace.mark(kind, _tensors([getattr(each, name, None)]))
        each, innermost = getattr(each, "optimizer", None), each
    trace.mark("optimizer", _tensors(innermost.state.values()))


def _shards(tensors: Iterable[Any]) -> Iterator[Any]:
    for each in tensors:
        yield getattr(each, "ds_tensor", each)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        for each in tree_leaves(vars(value) if hasattr(value, "__dict__") and not torch.is_tensor(value) else value):
            if torch.is_tensor(each):
                yield each


def kinds_at_peak(trace: Trace, vocabulary: int, tokens: int) -> dict[str, int]:
    """Return the bytes of each kind at the highest peak; `tokens`: those of a micro-batch on this process."""
    parts: Counter[str] = Counter()
    for made, size in trace.at_peak:
        parts[_kind(trace, made, vocabulary, tokens)] += size
    return dict(parts)


def _kind(trace: Trace, made: Made, vocabulary: int, tokens: int) -> str:
    if (marked := trace.kinds.get(made.serial)) is not None:
        return marked
    if made.source is not None and trace.kinds.get(made.source) in ("parameters", "gathered"):
        return "copies"
    elements = prod(made.shape)
    if (
        made.shape
        and vocabulary in made.shape
        and elements >= (tokens - 1) * vocabulary // 2
        and made.shape[0] != vocabulary
    ):
        return "logits"
    match made.phase:
        case "forward" | "forward_backward":
            return "activations"
        case "backward" | "rest" | "communication":
            return "backward"
        case "start" | "optimizer":
            return "optimizer" if elements > 1024 else "other"
    return "other"


def largest_of(trace: Trace, vocabulary: int, tokens: int, count: int = 60) -> list[str]:
    """Return the largest groups of like storages at the peak, as lines for a developer."""
    groups: Counter[tuple[Any, ...]] = Counter()
    numbers: Counter[tuple[Any, ...]] = Counter()
    for made, size in trace.at_peak:
        group = (_kind(trace, made, vocabulary, tokens), made.phase, made.operator, made.shape, str(made.dtype))
        groups[group] += size
        numbers[group] += 1
    return [
        f"{size / 2**20:10.1f} MiB {numbers[group]:3} x {' '.join(map(str, group))}"
        for group, size in groups.most_common(count)
    ]
