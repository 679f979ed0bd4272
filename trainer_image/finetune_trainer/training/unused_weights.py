"""Whether a step may leave trained weights without a gradient, which DistributedDataParallel has to know: it waits for
the gradient of each weight unless it looks, in each step, for those that get none.

The graph of one micro-batch tells, without a backward pass. Models that choose layers or experts anew for each batch
count as such whatever that graph has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

LossOf: TypeAlias = Callable[[torch.nn.Module], torch.Tensor]
"""The loss of a micro-batch by a model."""

_CHOOSES = re.compile(r"layer_?drop|experts$")
"""In names of a config: the chance that a layer is left out, the number of experts."""


def may_leave_weights_unused(model: PreTrainedModel, loss_of: LossOf) -> bool:
    """Return whether a step may leave trained weights of `model` without a gradient. Keep the model's mode; draw no
    random numbers.
    """
    if _chooses(model):
        return True
    training = model.training
    model.train(False)
    try:
        used = _leaves(loss_of(model))
    finally:
        model.train(training)
    return any(each.requires_grad and id(each) not in used for each in model.parameters())


def _chooses(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config().to_dict()
    return any(_CHOOSES.search(name) and isinstance(value, int | float) and value for name, value in config.items())


def _leaves(loss: torch.Tensor) -> set[int]:
    """Ids of the weights that the backward pass of `loss` comes to."""
    found: set[int] = set()
    seen: set[Any] = {loss.grad_fn}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if (weight := getattr(node, "variable", None)) is not None:
            found.add(id(weight))
        more = {following for following, _ in node.next_functions} - seen
        seen |= more
        nodes += more
    return found
