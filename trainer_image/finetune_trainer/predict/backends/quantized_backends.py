"""Backends that quantize the linear layers of the model's blocks, on CPUs and GPUs: weights in 8 or 4 bits by
bitsandbytes, products in fp8 by torchao.

Embeddings and heads stay as they are, as in training. The other tensors of the copy are the model's own.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune_contract.choices import Precision
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.unused_libraries import allow_import
from finetune_trainer.models.adapters import block_linears
from finetune_trainer.predict.backends.backend_protocol import Batch, ForwardPass, Machine, NotAvailable
from finetune_trainer.predict.backends.torch_backends import copied_in
from finetune_trainer.predict.pod_processes import is_placed

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

OUTLIERS_FROM = 6.0
"""Magnitude of an input from which its column is multiplied in full precision: the value of the paper (Dettmers et al.,
"LLM.int8()", 2022, section 3.2), and the default of transformers.
"""


@dataclass(frozen=True)
class EightBitBackend:
    """Weights and inputs in 8 bits, as in LLM.int8(); columns of inputs with outliers are not rounded."""

    name: str = "bnb-int8"
    lossy: bool = True

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason if the layers cannot be quantized here."""
        return _missing_library("bitsandbytes", "qlora") or _unsuitable(model)

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Return a copy of the model with quantized layers."""
        # It warns in each product that it rounds inputs to fp16 first.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return _copied(model, _eight_bit_layer)


@dataclass(frozen=True)
class FourBitBackend:
    """Weights in NF4, as in QLoRA; products in the model's precision, on a GPU with units for it in bf16."""

    name: str = "bnb-nf4"
    lossy: bool = True

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason if the layers cannot be quantized here."""
        return _missing_library("bitsandbytes", "qlora") or _unsuitable(model)

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Return a copy of the model with quantized layers; NotAvailable for a layer that cannot be packed."""
        from finetune_trainer.devices.device_units import TORCH_TYPES
        from finetune_trainer.models.four_bits import FourBitLinear, odd_weights

        odd = [name for name, layer in _layers(model).items() if odd_weights(layer)]
        if odd:
            raise NotAvailable(f"{odd[0]} has a number of weights that cannot be packed, 8 to a number")
        computed_in = TORCH_TYPES[_four_bit_precision(model)]
        return _copied(model, lambda layer: FourBitLinear(cast(Any, layer), computed_in))


@dataclass(frozen=True)
class EightBitFloatBackend:
    """Products in fp8, the rest in bf16, as in training with fp8."""

    name: str = "fp8"
    lossy: bool = True

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason without units for fp8, and for a model without suitable layers."""
        from finetune_trainer.models.float8 import refuse_without_layers, without_units

        why = without_units(model.device.type) or _missing_library("torchao", "fp8") or _unsuitable(model)
        if why is not None:
            return why
        try:
            refuse_without_layers(cast(Any, model))
        except StageError as error:
            return error.message
        return None

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Return a copy of the model in bf16 whose layers multiply in fp8."""
        import torch

        allow_import("torchao")
        from finetune_trainer.models.float8 import convert

        whole = copied_in(cast("nn.Module", model), torch.bfloat16)
        convert(whole)
        return cast(ForwardPass, whole)


def _missing_library(package: str, extra: str) -> str | None:
    allow_import(package)
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed (pip install 'finetune-trainer[{extra}]')"
    return None


def _unsuitable(model: PreTrainedModel) -> str | None:
    if is_placed(cast(Any, model)):
        return "the model's layers are on several GPUs"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model's weights are quantized already"
    return None if _layers(model) else "the model has no linear layers in blocks"


def _layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by name."""
    module = cast("nn.Module", model)
    return {linear.name: module.get_submodule(linear.name) for linear in block_linears(module)}


def _copied(model: PreTrainedModel, quantized: Any) -> ForwardPass:
    """Return a copy of the model whose layers are replaced by `quantized(layer)`. The layers themselves are not copied:
    a model that takes more than half of a GPU leaves no room for them.
    """
    layers = _layers(model)
    whole = cast("nn.Module", copy.deepcopy(model, {id(layer): layer for layer in layers.values()}))
    for name, layer in layers.items():
        whole.set_submodule(name, quantized(layer).to(model.device).eval())
    return cast(ForwardPass, whole)


def _eight_bit_layer(layer: nn.Module) -> nn.Module:
    import bitsandbytes as bnb
    from torch import nn

    from finetune_trainer.models.four_bits import outputs_by_inputs

    weight = outputs_by_inputs(layer).float().cpu().contiguous()
    outputs, inputs = weight.shape
    made = bnb.nn.Linear8bitLt(
        inputs, outputs, bias=False, has_fp16_weights=False, threshold=OUTLIERS_FROM, device="meta"
    )
    made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(cast(Any, layer.bias).detach().clone(), requires_grad=False)
    return cast("nn.Module", made)


def _four_bit_precision(model: PreTrainedModel) -> Precision:
    import torch

    from finetune_trainer.devices.device_units import has_bf16

    if model.dtype == torch.bfloat16:
        return "bf16"
    on_gpu = model.device.type == "cuda"
    return "bf16" if on_gpu and has_bf16(torch.cuda.get_device_properties(model.device)) else "fp32"


EIGHT_BIT, FOUR_BIT, FP8 = EightBitBackend(), FourBitBackend(), EightBitFloatBackend()
