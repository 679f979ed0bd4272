"""Weights of linear layers in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    pass


def outputs_by_inputs(layer: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer (or GPT-2's Conv1D), one row for each output."""
    from transformers.pytorch_utils import Conv1D

    weight = cast(torch.Tensor, layer.weight).detach()
    return weight.T if isinstance(layer, Conv1D) else weight
