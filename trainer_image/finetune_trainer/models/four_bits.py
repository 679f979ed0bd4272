"""Frozen linear layers in 4 bits, as in QLoRA (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023,
section 3): NF4 in blocks of 64 weights, whose scales are 8-bit numbers themselves, in blocks of 256. A matrix product
dequantizes the weight to the precision of the training, in the forward pass and again in the backward pass.

bitsandbytes does the arithmetic; this module is imported only where a job asks for it. Weights are rounded on the CPU,
also where a GPU computes with them later: so all processes, a resumed run and the merge at the end have the same ones,
to the last bit where the same number of threads takes the scales' mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune_contract.choices import Precision
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.device_units import TORCH_TYPES

# -------------------------------------------------------------------------------------------------------------- weights


def outputs_by_inputs(layer: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer (or GPT-2's Conv1D), one row for each output."""
    from transformers.pytorch_utils import Conv1D

    weight = cast(torch.Tensor, layer.weight).detach()
    return weight.T if isinstance(layer, Conv1D) else weight


# --------------------------------------------------------------------------------------------------------------- layers

_STORED_AS = torch.float32
"""Storage type of packed weights, eight to a number. Models ask a layer's weight for its type and convert inputs to it,
T5 without a check: bytes would round them to whole numbers. FSDP casts what it gathers to the precision of the training
unless it has this type already, so there it is the storage type (bitsandbytes' `bnb_4bit_quant_storage`).
"""
_STORED_TOGETHER = 8


class FourBitLinear(bnb.nn.Linear4bit):  # type: ignore[misc]  # mypy skips the library
    """A linear layer (or GPT-2's Conv1D) with its weight in 4 bits and its bias as it was, both frozen.

    The packed weight is a column of numbers of type `stored_as`; its scales are in `quant_state`, no parameters.
    """

    def __init__(
        self, layer: nn.Linear | Conv1D, computed_in: torch.dtype, stored_as: torch.dtype = _STORED_AS
    ) -> None:
        weight = outputs_by_inputs(layer)
        super().__init__(weight.shape[1], weight.shape[0], bias=False, compute_dtype=computed_in, device="meta")
        packed, state = _rounded(weight, stored_as)
        state.dtype = computed_in  # type to which a product dequantizes
        self.weight = bnb.nn.Params4bit(
            packed,
            requires_grad=False,
            quant_state=state,
            compress_statistics=True,
            quant_type=state.quant_type,
            quant_storage=stored_as,
            module=self,
            bnb_quantized=True,
        )
        self.quant_state = state
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.train(layer.training)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute as a linear layer: under autocast in its precision, else in that of `inputs`.

        bitsandbytes' own forward (0.50) rewrites the weight when a model is evaluated on a CPU with units for bf16, and
        from then on passes no gradient, with only a warning from torch; it also changes the bias.
        """
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: torch.Tensor = bnb.matmul_4bit(
            inputs.to(self.compute_dtype), self.weight, quant_state=self.quant_state, bias=bias
        )
        return product if torch.is_autocast_enabled(inputs.device.type) else product.to(inputs.dtype)

    def shard_on(self, device: torch.device | str) -> None:
        """Move the packed weight and its scales to `device`, and make the weight an ordinary parameter, which FSDP
        divides and gathers as any other. The scales, 3 % of the layer, stay whole on each process.
        """
        self.quant_state.to(device)
        self.weight = nn.Parameter(self.weight.data.to(device), requires_grad=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Without the scales, which are no parameters: no part of a frozen layer is in a checkpoint.
        super(bnb.nn.Linear4bit, self)._save_to_state_dict(destination, prefix, keep_vars)


def hold(model: nn.Module, names: Sequence[str], precision: Precision, *, divided: bool = False) -> None:
    """Replace the layers of `names` by FourBitLinear, one after the other; `divided`: FSDP will divide the model.

    Raise StageError CONFIG `OddWeight` for a layer that cannot be packed.
    """
    for name in names:
        layer = cast("nn.Linear | Conv1D", model.get_submodule(name))
        if odd_weights(layer):
            raise StageError(
                FailureClass.CONFIG,
                "OddWeight",
                f"model.adapter.method is qlora, and {name} has {layer.weight.numel()} weights, not a multiple of "
                f"{_STORED_TOGETHER}.",
                "Set model.adapter.method to lora.",
            )
        computed_in = TORCH_TYPES[precision]
        model.set_submodule(name, FourBitLinear(layer, computed_in, computed_in if divided else _STORED_AS))
    cast(Any, model).is_loaded_in_4bit = True  # peft reads it


def odd_weights(layer: nn.Module) -> bool:
    """Return whether the number of a layer's weights keeps them from being packed."""
    return cast(torch.Tensor, layer.weight).numel() % _STORED_TOGETHER != 0


def is_held(layer: nn.Module, precision: Precision) -> bool:
    """Return whether `layer` computes with a weight in 4 bits as in QLoRA, in `precision`."""
    if not isinstance(layer, FourBitLinear):
        return False
    state, bits = layer.quant_state, 8 * layer.weight.element_size() * layer.weight.numel()
    return (
        state is not None
        and (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
        and not layer.weight.requires_grad
        and bits == 4 * layer.in_features * layer.out_features
        and layer.compute_dtype == state.dtype == TORCH_TYPES[precision]
    )


def round_weights(model: nn.Module, names: Sequence[str]) -> None:
    """Give the ordinary layers of `names` the weights with which FourBitLinear would compute."""
    for name in names:
        weight = outputs_by_inputs(model.get_submodule(name))
        weight.copy_(dequantize_4bit(*_rounded(weight, _STORED_AS)))


def _rounded(weight: torch.Tensor, stored_as: torch.dtype) -> tuple[torch.Tensor, QuantState]:
    packed, state = quantize_4bit(
        weight.float().cpu().contiguous(),
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=stored_as,
    )
    return packed, state
