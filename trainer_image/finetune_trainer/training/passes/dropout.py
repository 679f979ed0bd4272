"""Dropout on CPUs from fewer random numbers.

torch draws a dropout mask on a CPU with one thread and one 64-bit random number for each element: for small encoders
that is a tenth of a step in fp32, and a fifth in bf16. Here a random number serves four elements with 16 bits each. The
dropped share is thereby a multiple of 2^-16, and kept elements are scaled by exactly that share, so that the
expectation is exact. The numbers come from torch's own generator: restoring its state (a resumed run, recomputed
activations) repeats the masks.
"""

from __future__ import annotations

import torch
from torch import nn

_LEVELS = 1 << 16


class SharedBitsDropout(nn.Dropout):
    """`nn.Dropout` for plain tensors on a CPU; other tensors are left to that class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return zeros and scaled elements of `input`, of any shape, while training, else `input` itself."""
        dropped = round(self.p * _LEVELS)
        plain = type(input) is torch.Tensor and input.device.type == "cpu"
        if not plain or not self.training or self.inplace or dropped in (0, _LEVELS):
            return super().forward(input)
        kept = _uniform_16_bits(input.numel()).view(input.shape) >= dropped - _LEVELS // 2
        return input * kept * (_LEVELS / (_LEVELS - dropped))


def _uniform_16_bits(count: int) -> torch.Tensor:
    """Return `count` numbers of int16, uniformly distributed."""
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return drawn.view(torch.int16)[:count]


def share_random_bits(model: nn.Module) -> int:
    """Make the dropout layers of `model` draw fewer random numbers; return their number."""
    layers = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Dropout
    ]
    for module, name, child in layers:
        other = SharedBitsDropout(child.p, child.inplace)
        setattr(module, name, other.train(child.training))
    return len(layers)
