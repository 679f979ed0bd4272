"""Weights in the types of their files until a strategy places them.

A file of safetensors is mapped: weights that keep its type take no memory of a process, and the processes of a node
share the pages. Converted at once to fp32, each process would hold the whole model: 4 bytes a parameter, 2 TiB on a
node of 8 processes for 70 billion. So a model is loaded as it is stored, and each weight is converted where it stays:
on the device, or a block at a time before it is sharded. Conversion of bf16 and fp16 to fp32 is exact, so that the
training is the same.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_contract.choices import Precision
from finetune_trainer.core.library_patches import types_of_loaded_weights
from finetune_trainer.devices.device_units import TORCH_TYPES

log = logging.getLogger(__name__)

_WORTH_WARNING = 2**30
"""Bytes of weights in a process's own memory above which the log warns of them."""


def as_stored(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `build` loads by `from_pretrained` in fp32, with the weights of files in the files' types.

    New weights, such as those of a head, are in fp32 and drawn as ever. Buffers are in the types that the model gives
    them, and weights whose files hold whole numbers are in fp32, so that they are trained.
    """
    with _types_of_files() as as_built:
        model = build()
    for name, tensor in model.state_dict(keep_vars=True).items():
        built = as_built.get(name)
        if built is not None and not (isinstance(tensor, nn.Parameter) and tensor.is_floating_point()):
            tensor.data = tensor.data.to(built.dtype)
            tensor.requires_grad_(built.requires_grad)
    return model


@contextmanager
def _types_of_files() -> Iterator[dict[str, torch.Tensor]]:
    """Have transformers load weights without a conversion, and yield the state of the model before loading; none of
    a quantized model, which is converted as ever.

    Its plan of types, by patterns of names, is for parts of a model that stay in fp32 (transformers 5.23,
    `core_model_loading.convert_and_load_state_dict_in_model`); the type None leaves a tensor as it is. An argument
    `dtype` would also build the modules in it, with their constants rounded.
    """
    given: Any = PreTrainedModel._get_dtype_plan
    as_built: dict[str, torch.Tensor] = {}

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        if getattr(model.config, "quantization_config", None) is not None:
            return dict(given(model, dtype))
        as_built.update(model.state_dict(keep_vars=True))
        return {"*": None}

    with types_of_loaded_weights(plan):
        yield as_built


def in_training_type(
    parameters: Iterable[nn.Parameter],
    narrow: Mapping[int, torch.dtype] = MappingProxyType({}),
    device: torch.device | str | None = None,
) -> None:
    """Move parameters to `device`, if one is given, and convert them there, one after the other: to fp32, or to the
    type in `narrow`. Integers keep theirs. Weights in 4 bits stay: `Module.to` moves them with their scales.
    """
    for parameter in parameters:
        if _is_packed(parameter):
            continue
        parameter.data = parameter.data.to(device)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(narrow.get(id(parameter), torch.float32))


def place_on(device: torch.device | str, model: nn.Module, precision: Precision) -> None:
    """Move the parameters of `model` to `device`, in the types in which they are trained with `precision`."""
    in_training_type(model.parameters(), narrow_weights(model, precision), device)


def is_converted(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` may be stored in another type than it is trained in: all but integers and 4 bits."""
    return parameter.is_floating_point() and not _is_packed(parameter)


def _is_packed(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` holds weights in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def log_private_weights(model: nn.Module) -> None:
    """Log how much of `model`, which is loaded as stored, this process holds in memory of its own until it is placed:
    weights of other files than safetensors, and those that are converted or merged while they are read.
    """
    weights = [parameter for parameter in model.parameters() if is_converted(parameter)]
    private = private_bytes(weights)
    if private is None:
        return
    log.log(
        logging.WARNING if private >= _WORTH_WARNING else logging.INFO,
        "Until the model is spread, each process holds %.2f of its %.2f GiB in its own memory; the rest is mapped from "
        "safetensors files.",
        private / 2**30,
        sum(weight.nbytes for weight in weights) / 2**30,
    )


def private_bytes(weights: Iterable[torch.Tensor]) -> int | None:
    """Return the bytes of `weights` in host memory that is not mapped from a file; None where the system does not list
    mappings.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    mapped: list[tuple[int, int]] = []
    for line in lines:
        # start-end permissions offset device inode path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].startswith("/dev/"):
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            mapped.append((start, end))
    starts = [start for start, _ in mapped]

    def is_mapped(address: int) -> bool:
        at = bisect_right(starts, address) - 1
        return at >= 0 and address < mapped[at][1]

    return sum(weight.nbytes for weight in weights if weight.device.type == "cpu" and not is_mapped(weight.data_ptr()))


def narrow_weights(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Return the frozen weights that are trained with in 16 bits: id -> type, that in which autocast computes them. It
    would convert a copy in fp32 to just these numbers in every forward pass.

    These are the weights of linear layers. Embeddings and norms are computed in fp32, also those whose weight a linear
    layer shares, and so is the norm of each column that DoRA takes of its layers' weights.
    """
    computed_in = TORCH_TYPES.get(precision, torch.float32)
    mine: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        if len(getattr(module, "lora_magnitude_vector", ())):
            others.add(id(cast(Any, module).get_base_layer().weight))
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear | Conv1D) and name == "weight" and is_converted(parameter)
            (mine if linear and not parameter.requires_grad else others).add(id(parameter))
    return {} if computed_in is torch.float32 else dict.fromkeys(mine - others, computed_in)
