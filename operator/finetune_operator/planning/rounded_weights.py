"""Weights that FSDP gathers in fp8: those of the blocks' linear layers that multiply in it."""

from __future__ import annotations

from finetune_contract.choices import Precision
from finetune_contract.facts import LinearWidths, ModelFacts
from finetune_contract.trainer_job import Strategy

_MULTIPLE = 16
"""Divisor of both sides of a layer that multiplies in fp8 (`finetune_trainer.float8`)."""


def rounded_weights(model: ModelFacts, strategy: Strategy, precision: Precision, ranks: int) -> int:
    """Return the number of weights that `ranks` processes of FSDP gather in fp8, of all blocks; 0 in another precision,
    and if the layers are not known.
    """
    if precision != "fp8" or strategy.name != "fsdp":
        return 0
    return sum(each.weights for each in model.linear_layers.values() if each.weights and _divides(each, ranks))


def _divides(layers: LinearWidths, ranks: int) -> bool:
    """Return whether the rows of these layers' weights divide among `ranks`, as torchao requires."""
    # The n layers of a name have one shape: n i o / n i = o.
    outputs, inputs = layers.weights // layers.inputs, layers.weights // layers.outputs
    return outputs % _MULTIPLE == inputs % _MULTIPLE == 0 and outputs % ranks == 0
