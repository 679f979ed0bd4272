"""Layers that an adapter goes into, and the number of parameters that it trains.

LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1) puts B A beside a frozen
weight, with A of rank x inputs and B of outputs x rank: rank x (inputs + outputs) parameters a layer. DoRA (Liu et al.,
"DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, section 4) adds one magnitude for each output. The task's head is
trained in full; peft keeps its initial state beside it.

QLoRA (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, section 3) holds the linear layers of the
blocks in 4 bits, adapted or not, and trains the same parameters as LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.facts import LinearWidths, ModelFacts
from finetune_contract.trainer_job import Adapter
from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.quantities import human_count

PACKED_BYTES = 4 / 8
"""Bytes of a weight in 4 bits without its scales."""
SCALE_BYTES = (8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of the scales for each weight: one of 8 bits for 64 weights, and one of 32 bits for 256 of these scales."""
FOUR_BIT_BYTES = PACKED_BYTES + SCALE_BYTES
_DROPOUT = 0.05
"""Dropout of adapters that the job leaves open (Hu et al., 2021, and Dettmers et al., 2023, have 0.05 to 0.1)."""


def adapted_layers(model: ModelFacts, adapter: Adapter) -> Mapping[str, LinearWidths]:
    """Return the layers of `model` that `adapter` goes into, by their name in the block; all if it names none of them,
    as an assumed model may have other names than the real one.
    """
    wanted = adapter.target_modules
    if wanted is None:
        return model.linear_layers
    named = {n: layer for n, layer in model.linear_layers.items() if any(_matches(target, n) for target in wanted)}
    return named or model.linear_layers


def _matches(target: str, name: str) -> bool:
    """Match as peft does: the whole name or its end after a dot. A target that names one block stands for all."""
    return name == target or name.endswith(f".{target}") or target.endswith(f".{name}")


@dataclass(frozen=True)
class Trained:
    """Counts of a run's parameters."""

    added: int
    """Parameters beside the model's own: the adapter's, and those of the head's initial state."""
    trained: int
    """Parameters with gradients and optimizer state."""


def trained_parameters(model: ModelFacts, adapter: Adapter | None) -> Trained:
    """Count the trained parameters of `model`: all of them if its layers are not known."""
    if adapter is None or not model.linear_layers:
        return Trained(0, model.parameters)
    matrices = sum(
        adapter.rank * (layer.inputs + layer.outputs) + (layer.outputs if adapter.method == "dora" else 0)
        for layer in adapted_layers(model, adapter).values()
    )
    whole = matrices + model.head_parameters
    return Trained(added=whole, trained=whole)


@dataclass(frozen=True)
class AdaptedLayers:
    """Linear layers that an adapter goes into, over all blocks."""

    number: int
    width: int
    """Sum of their inputs and outputs."""


def adapted_sizes(model: ModelFacts, adapter: Adapter | None) -> AdaptedLayers:
    """Return the layers that `adapter` goes into; none without an adapter, and if the model's layers are not known."""
    layers = () if adapter is None else tuple(adapted_layers(model, adapter).values())
    # The n layers of a name have one shape, so that n = n i x n o / (n i o).
    number = sum(round(layer.inputs * layer.outputs / layer.weights) for layer in layers if layer.weights)
    return AdaptedLayers(number, sum(layer.inputs + layer.outputs for layer in layers))


def four_bit_weights(model: ModelFacts, adapter: Adapter | None) -> int:
    """Return the number of weights held in 4 bits; 0 if they are not known."""
    if adapter is None or adapter.method != "qlora":
        return 0
    return sum(layer.weights for layer in model.linear_layers.values())


def narrow_weights(model: ModelFacts, adapter: Adapter | None, head: int) -> int:
    """Return the number of frozen weights that the trainer holds in 16 bits where autocast computes in them: those of
    the blocks' linear layers (but for those in 4 bits, and those that DoRA takes the norm of), and `head` weights of a
    head that is not tied (`finetune_trainer.models.adapters`); 0 if the layers are not known.
    """
    if adapter is None or not model.linear_layers:
        return 0
    head = 0 if model.tied_embeddings else head
    if adapter.method == "qlora":
        return head
    beside = adapted_layers(model, adapter) if adapter.method == "dora" else {}
    return head + sum(layer.weights for name, layer in model.linear_layers.items() if name not in beside)


def largest_linear(model: ModelFacts) -> int:
    """Return the weights of the blocks' largest linear layer. The n layers of a name have one shape, so that i o =
    (n i o)^2 / (n i x n o).
    """
    return max(
        (layer.weights**2 // (layer.inputs * layer.outputs) for layer in model.linear_layers.values()), default=0
    )


def choose_adapter(draft: Draft) -> Draft:
    """Set the adapter that the job asks for, if any; refuse layers that a known model does not have."""
    asked, model = draft.spec.model.adapter, draft.model
    if asked.method == "none":
        return draft
    targets = None if asked.target_modules == "auto" else asked.target_modules
    unknown = [target for target in targets or () if not any(_matches(target, name) for name in model.linear_layers)]
    if unknown and draft.model_known and model.linear_layers:
        return draft.refusing(
            ("model", "adapter", "targetModules"),
            targets,
            f"no linear layer in the blocks of this model is called {' or '.join(unknown)}; there are "
            f"{', '.join(sorted(model.linear_layers))}",
            "set it to auto, or name these or ends of them after a dot",
        )
    dropout = asked.dropout
    if dropout is None:  # it would count as a difference from the untrained model
        dropout = 0.0 if draft.compares else _DROPOUT
    adapter = Adapter(method=asked.method, rank=asked.rank, alpha=asked.alpha, dropout=dropout, target_modules=targets)
    draft = replace(draft, adapter=adapter)
    if model.linear_layers:
        return _explain_four_bits(draft.because(_reason(model, adapter)), adapter)
    return draft.because(f"adapter {adapter.method} of rank {adapter.rank}: as asked").assuming(
        "adapter: the model's layers are not known yet; memory is counted as if every weight were trained"
    )


def _reason(model: ModelFacts, adapter: Adapter) -> str:
    layers, parts = adapted_layers(model, adapter), trained_parameters(model, adapter)
    where = "all linear layers of the blocks" if adapter.target_modules is None else ", ".join(sorted(layers))
    share = parts.trained / model.parameters
    return (
        f"adapter {adapter.method} of rank {adapter.rank} on {where}: {human_count(parts.trained)} parameters are "
        f"trained ({share:.2%} of {human_count(model.parameters)}), {human_count(model.head_parameters)} of them the "
        "head, whole"
    )


def _explain_four_bits(draft: Draft, adapter: Adapter) -> Draft:
    held = four_bit_weights(draft.model, adapter)
    if adapter.method != "qlora":
        return draft
    if not held:
        return draft.assuming(
            "adapter: the weights of the model's linear layers are not known yet; memory is counted as with lora"
        )
    return draft.because(
        f"4 bits: the linear layers of the blocks have {human_count(held)} weights, frozen, that take "
        f"{human_bytes(int(FOUR_BIT_BYTES * held))} in NF4 with double quantization instead of {human_bytes(4 * held)}"
    )
