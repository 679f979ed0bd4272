"""Styles by which transformers divides the Conv1D layers of GPT-2 over processes; `conv1d` registers them.

A module of its own, because it imports torch.distributed.tensor and transformers' styles, which only a run with tensor
parallelism needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from transformers.distributed.parallel_utils import _AllReduceBackward, _AllReduceForward
from transformers.distributed.tensor_parallel import TensorParallelLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The types in transformers differ from its own use of them.
_sum_forward: Any = _AllReduceForward
_sum_backward: Any = _AllReduceBackward


def _shard(module: Any, name: str, mesh: DeviceMesh, placement: Any) -> None:
    whole = module._parameters[name]
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[name] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Columns(TensorParallelLayer):
    """Computes some of the outputs from all inputs on each process: of each of `packed` matrices side by side."""

    def __init__(self, packed: int = 1) -> None:
        self._packed = packed

    def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
        last = module._parameters[param].ndim - 1
        packed = self._packed
        _shard(module, param, mesh, Shard(last) if packed == 1 else _StridedShard(last, split_factor=packed))

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()

        def forward(states: torch.Tensor) -> torch.Tensor:
            # Each process has a part of the gradient of the inputs.
            states = _sum_backward.apply(states, group)
            return functional.linear(states, _local(module.weight).t(), _local(module.bias))

        module.forward = forward
        return module


class Rows(TensorParallelLayer):
    """Computes a summand of all outputs from some of the inputs on each process; the bias is whole, and added once."""

    def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
        if param == "weight":
            _shard(module, param, mesh, Shard(0))

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()

        def forward(states: torch.Tensor) -> torch.Tensor:
            part = functional.linear(states, _local(module.weight).t())
            summed: torch.Tensor = _sum_forward.apply(part, group)
            bias: torch.Tensor = module.bias
            return summed + bias.to(summed.dtype)

        module.forward = forward
        return module


class Heads(TensorParallelLayer):
    """Attention over this process's heads; GPT-2 derives their number from the output width of `c_attn`."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        module.split_size //= mesh.size()
        return module
