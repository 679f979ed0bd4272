"""Weights that FSDP gathers in fp8: those of the blocks' linear layers that multiply in it."""

from __future__ import annotations

from finetune_contract.choices import Precision
from finetune_contract.facts import FP8_MULTIPLE, LinearWidths, ModelFacts
from finetune_contract.trainer_job import Strategy


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
    return outputs % FP8_MULTIPLE == inputs % FP8_MULTIPLE == 0 and outputs % ranks == 0
