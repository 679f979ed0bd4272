"""Detection of trained weights that a step may leave without a gradient, which DistributedDataParallel must know: it
waits for the gradient of each weight unless it searches, in each step, for those without.

The graph of one micro-batch shows them, without a backward pass. Models that choose layers or experts for each batch
always count as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

LossOf: TypeAlias = Callable[[torch.nn.Module], torch.Tensor]
"""Function that computes a model's loss of a micro-batch."""

_CHOOSES = re.compile(r"layer_?drop|experts$")
"""Pattern of config names: the probability of leaving out a layer, the number of experts."""


def may_leave_weights_unused(model: PreTrainedModel, loss_of: LossOf) -> bool:
    """Return whether a step may leave trained weights of `model` without a gradient. Keeps the model's mode; draws no
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
    return any(parameter.requires_grad and id(parameter) not in used for parameter in model.parameters())


def _chooses(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config().to_dict()
    return any(_CHOOSES.search(name) and isinstance(value, int | float) and value for name, value in config.items())


def _leaves(loss: torch.Tensor) -> set[int]:
    """Return the ids of the weights that the backward pass of `loss` reaches."""
    reached: set[int] = set()
    seen: set[Any] = {loss.grad_fn}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if (weight := getattr(node, "variable", None)) is not None:
            reached.add(id(weight))
        more = {following for following, _ in node.next_functions} - seen
        seen |= more
        nodes += more
    return reached
