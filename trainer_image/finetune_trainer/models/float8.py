"""Linear layers that multiply in fp8 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): weights and inputs
in E4M3, gradients in E5M2, each tensor with its own scale, taken from its largest element at each product. Weights and
their optimizer stay in fp32, and everything but the products of these layers is as with bf16.

torchao does the arithmetic; it is imported where a job asks for it. Not converted are:
- layers outside of the blocks: a head's rounded logits would go straight into the loss, and torchao's own example
  leaves the last layer out;
- routers of a mixture of experts, which choose by small differences and have little to multiply. Its experts are one
  tensor in transformers, no layers;
- layers with a side that is no multiple of 16, for which there is no instruction;
- GPT-2's Conv1D, for which torchao has no form.

FSDP gathers the weights of these layers in fp8, rounded before they are sent: half of the bytes of bf16, and the layers
would round them anyway. Their scales come from one all-reduce after each step of the optimizer. Shards stay in fp32.

State dicts have the ordinary model's names and weights, so checkpoints and saved models do not depend on fp8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_contract.choices import Device
from finetune_contract.facts import FP8_FROM, FP8_MULTIPLE
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError, needed_library
from finetune_trainer.devices.device_units import capability_of, has_fp8
from finetune_trainer.models.adapters import block_linears

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_ROUTERS = frozenset({"gate", "router", "wg"})
"""Names in transformers' models of a layer that chooses experts, or of its parent module."""


@dataclass(frozen=True)
class InFloat8:
    """Result of `convert`: which layers multiply in fp8."""

    layers: tuple[str, ...]
    """Names of the layers that multiply in fp8."""
    left: Mapping[str, tuple[str, ...]]
    """Names of the other linear layers, by the reason for leaving them out."""

    def __str__(self) -> str:
        total = len(self.layers) + sum(len(names) for names in self.left.values())
        others = "".join(f"; except those {why} ({len(names)}, e.g. {names[0]})" for why, names in self.left.items())
        return f"{len(self.layers)} of {total} linear layers multiply in fp8{others}"

    def assert_in_effect(self, model: nn.Module) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT unless exactly `layers` of `model` round their three products as
        requested, from weights in fp32.
        """
        from torchao.float8.float8_linear import Float8Linear

        odd = sorted(_names(model, Float8Linear) ^ set(self.layers))
        _expect(not odd, f"{len(odd)} layers are in another precision than planned, e.g. {odd[:1]}")
        for name in self.layers:
            layer: Any = model.get_submodule(name)
            gathers = layer.config.enable_fsdp_float8_all_gather
            _expect(replace(layer.config, enable_fsdp_float8_all_gather=False) == _recipe(), _rounding(name, layer))
            _expect(layer.weight.dtype == torch.float32, f"the weight of {name} is stored in {layer.weight.dtype}")
            expected = "fp8" if gathers else "bf16"
            problem = f"the weight of {name} is not gathered in {expected}, as its layer is set"
            _expect(gathered_in_float8(layer.weight) == gathers, problem)

    def scale_weights(self, model: nn.Module) -> None:
        """Compute the scales of all weights that FSDP gathers in fp8, with one all-reduce, after the weights have
        changed. Every rank must call it. Weights in host memory are left out: each gather takes their scales.
        """
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        weights = (cast(torch.Tensor, model.get_submodule(name).weight) for name in self.layers)
        if any(
            isinstance(weight, DTensor) and weight.device_mesh.device_type == weight.device.type for weight in weights
        ):
            precompute_float8_dynamic_scale_for_fsdp(model)


def _rounding(name: str, layer: Any) -> str:
    return f"{name} rounds as in {layer.config}"


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise StageError(
            FailureClass.STRATEGY_NOT_IN_EFFECT,
            "Float8NotInEffect",
            f"training.precision fp8 was requested and is not in effect: {problem}.",
            "This is a defect of the image or its libraries; use training.precision bf16 instead.",
        )


def _names(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


def refuse_without_library() -> None:
    """Raise StageError CONFIG `TorchaoMissing` where torchao is not installed."""
    with needed_library(
        "torchao",
        "TorchaoMissing",
        "training.precision is fp8, and torchao, which multiplies in it",
        "Add pip install 'finetune-trainer[fp8]' to the image, or set training.precision to bf16.",
    ):
        import_module("torchao.float8")


def refuse_without_units(device: Device) -> None:
    """Raise StageError CONFIG `NoFp8Units` unless the device of this process multiplies in fp8."""
    why = without_units(device)
    if why is not None:
        raise StageError(
            FailureClass.CONFIG,
            "NoFp8Units",
            f"training.precision is fp8, and {why}.",
            "Set training.precision to auto, or train on GPUs with fp8 units.",
        )


def without_units(device: str) -> str | None:
    """Return the reason why the device of this process, `cpu` or `cuda`, does not multiply in fp8; None if it does."""
    reason = "a CPU has no fp8 units"
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        if has_fp8(properties):
            return None
        capability = capability_of(properties)
        kind = f"architecture {properties.gcnArchName}" if capability is None else f"compute capability {capability}"
        reason = f"{properties.name}, of {kind}, has no fp8 units"
    return f"{reason}; GPUs have them from compute capability {_dotted(FP8_FROM)} on (AMD: from MI300 on)"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def convert(model: nn.Module) -> InFloat8:
    """Convert the linear layers of the blocks to fp8 products, with their parameters as they are. Call it before the
    model is sharded.

    Raise StageError CONFIG `NothingInFp8` for a model without a suitable layer.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    ids, left = _chosen(model)
    # By identity and not by name: a layer with two names is converted under both.
    convert_to_float8_training(model, config=_recipe(), module_filter_fn=lambda module, name: id(module) in ids)
    return InFloat8(tuple(sorted(_names(model, Float8Linear))), left)


def gather_in_float8(module: nn.Module, ranks: int) -> None:
    """Make FSDP gather the weights of the layers of `module` that multiply in fp8 in that type. Call it before `module`
    is sharded over `ranks` processes, with its weights on their device in fp32.

    torchao 0.18 cannot gather shards of different sizes: a weight whose rows `ranks` does not divide is gathered as the
    others of the model are.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    # Layers that share a weight keep sharing it.
    rounded: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        if not isinstance(layer, Float8Linear) or isinstance(layer.weight, DTensor) or layer.out_features % ranks:
            continue
        weight, config = layer.weight, replace(layer.config, enable_fsdp_float8_all_gather=True)
        if weight not in rounded:
            gathered = WeightWithDynamicFloat8CastTensor(
                weight.detach(), layer.linear_mm_config, config.cast_config_weight.target_dtype
            )
            rounded[weight] = nn.Parameter(gathered, requires_grad=weight.requires_grad)
        layer.config, layer.weight = config, rounded[weight]


def gathered_in_bf16(model: nn.Module) -> tuple[str, ...]:
    """Return the layers of `model` that multiply in fp8 and whose weights FSDP gathers in bf16."""
    from torchao.float8.float8_linear import Float8Linear

    layers = ((name, cast(torch.Tensor, model.get_submodule(name).weight)) for name in _names(model, Float8Linear))
    return tuple(sorted(name for name, weight in layers if not gathered_in_float8(weight)))


def gathered_in_float8(weight: torch.Tensor) -> bool:
    """Return whether FSDP gathers `weight`, sharded or not yet, in fp8."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return isinstance(local, WeightWithDynamicFloat8CastTensor)


def refuse_without_layers(model: nn.Module) -> None:
    """Raise StageError CONFIG `NothingInFp8` for a model (weights are not needed) without a layer that suits fp8."""
    _chosen(model)


def _chosen(model: nn.Module) -> tuple[set[int], Mapping[str, tuple[str, ...]]]:
    """Return the ids of the layers to convert, and the names of the other linear ones by what keeps them from fp8."""
    from transformers.pytorch_utils import Conv1D

    in_blocks = {linear.name for linear in block_linears(model)}
    left, ids = defaultdict(list), set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            why = _why_not(name, module) if name in in_blocks else "outside of the blocks"
            if why is None:
                ids.add(id(module))
            else:
                left[why].append(name)
    reasons = {why: tuple(names) for why, names in left.items()}
    if not ids:
        raise StageError(
            FailureClass.CONFIG,
            "NothingInFp8",
            f"training.precision is fp8, and {InFloat8((), reasons)}.",
            "Set training.precision to bf16.",
        )
    return ids, reasons


def _why_not(name: str, layer: nn.Module) -> str | None:
    """Return the reason that keeps a layer of a block from fp8; None for a suitable layer."""
    if type(layer) is not nn.Linear:
        return f"of type {type(layer).__name__}"
    if _ROUTERS & set(name.split(".")):
        return "that route to experts"
    if layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE:
        return f"with a dimension that is not a multiple of {FP8_MULTIPLE}"
    return None


def _recipe() -> Float8LinearConfig:
    """Scale each tensor as a whole, torchao's fastest recipe. A weight's gradient is a sum over tokens, and only
    padding with zeros would make their number a multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True)
