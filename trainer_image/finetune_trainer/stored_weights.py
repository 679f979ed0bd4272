"""Weights in the types of their files until a strategy places them.

A file of safetensors is mapped: weights that keep its type take no memory of a process, and the processes of a node
share the pages. Converted at once to fp32, each process would hold the whole model: 4 bytes a parameter, 2 TiB on a
node of 8 processes for 70 billion. So a model is loaded as it is stored, and each weight is converted where it stays:
on the device, or a block at a time before it is sharded. Conversion of bf16 and fp16 to fp32 is exact, so that the
training is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune_contract.choices import Precision

_COMPUTED_IN: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type to which autocast converts the weights of linear layers."""


def as_stored(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `build` loads by `from_pretrained` in fp32, with the weights of files in the files' types.

    New weights, such as those of a head, are in fp32 and drawn as ever; so are buffers.
    """
    with _types_of_files():
        model = build()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return model


@contextmanager
def _types_of_files() -> Iterator[None]:
    """Have transformers load weights without a conversion.

    Its plan of types, by patterns of names, is for parts of a model that stay in fp32 (transformers 5.23,
    `core_model_loading.convert_and_load_state_dict_in_model`); the type None leaves a tensor as it is. An argument
    `dtype` would also build the modules in it, with their constants rounded.
    """
    given: Any = PreTrainedModel._get_dtype_plan

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        quantized = getattr(model.config, "quantization_config", None) is not None
        return dict(given(model, dtype)) if quantized else {"*": None}

    PreTrainedModel._get_dtype_plan = plan  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = given  # type: ignore[method-assign]


def in_training_type(
    parameters: Iterable[nn.Parameter], narrow: frozenset[int] = frozenset(), device: torch.device | str | None = None
) -> None:
    """Move parameters to `device`, if one is given, and convert them to fp32 there, one after the other.

    `narrow`: those of `narrow_weights`, which keep their type. Integers do, too.
    """
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
        if parameter.is_floating_point() and id(parameter) not in narrow:
            parameter.data = parameter.data.float()


def narrow_weights(model: nn.Module, precision: Precision) -> frozenset[int]:
    """Return the ids of frozen weights that stay in 16 bits: those of linear layers that are stored in the type in
    which autocast computes them. It would convert a copy in fp32 to just these numbers in every forward pass.

    Embeddings and norms are computed in fp32, also those whose weight a linear layer shares.
    """
    computed_in = _COMPUTED_IN.get(precision)
    mine: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear | Conv1D) and name == "weight"
            (mine if linear and not parameter.requires_grad and parameter.dtype == computed_in else others).add(
                id(parameter)
            )
    return frozenset(mine - others)
