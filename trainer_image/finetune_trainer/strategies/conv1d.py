"""Tensor parallelism for GPT-2, for which transformers has no plan: its layers are Conv1D, not Linear.

A Conv1D keeps its weight as (inputs, outputs), and one of them makes queries, keys and values in one product. The
division is that of Shoeybi et al., "Megatron-LM" (2019), section 3: heads and the width of the feed-forward layer are
dealt out, so that a layer sums over the processes twice forward and twice backward. The styles are registered with
transformers, which applies them as it does its own.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_QUERY_KEY_VALUE = 3
"""Matrices side by side in the weight of `c_attn`."""
_LAYER_PLAN = {
    "attn": "conv1d_heads",
    "attn.c_attn": "packed_colwise_conv1d",
    "attn.c_proj": "rowwise_conv1d",
    "mlp.c_fc": "colwise_conv1d",
    "mlp.c_proj": "rowwise_conv1d",
}
FAMILIES = ("gpt2",)
"""Values of a config's `model_type` that have a plan here."""


def conv1d_plan(model: PreTrainedModel) -> dict[str, str]:
    """Module of `model`, layers as `*`, -> style, for a family of `FAMILIES`; empty for others."""
    if model.config.model_type not in FAMILIES:
        return {}
    _register()
    body = model.base_model_prefix
    plan = {f"{body}.h.*.{name}": style for name, style in _LAYER_PLAN.items()}
    plan[f"{body}.wte"] = "embedding_rowwise"
    if model.get_output_embeddings() is not None:  # type: ignore[no-untyped-call]
        plan["lm_head"] = "colwise_gather_output"
    return plan


def widths(model: PreTrainedModel) -> dict[str, int]:
    """What the degree has to divide beside the heads: the field of the config -> its value."""
    inner = getattr(model.config, "n_inner", None)
    return {"n_inner": inner} if model.config.model_type in FAMILIES and inner is not None else {}


@cache
def _register() -> None:
    """Makes transformers know the styles."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _AllReduceBackward, _AllReduceForward
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    # What transformers leaves without types, or with others than it is used with.
    styles: Any = ALL_PARALLEL_STYLES
    sum_forward: Any = _AllReduceForward
    sum_backward: Any = _AllReduceBackward

    def shard(module: Any, name: str, mesh: DeviceMesh, placement: Any) -> None:
        whole = module._parameters[name]
        part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module._parameters[name] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)

    def local(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    class Columns(TensorParallelLayer):
        """Each process makes some of the outputs from all inputs: of each of `packed` matrices side by side."""

        def __init__(self, packed: int = 1) -> None:
            self._packed = packed

        def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
            last = module._parameters[param].ndim - 1
            packed = self._packed
            shard(module, param, mesh, Shard(last) if packed == 1 else _StridedShard(last, split_factor=packed))

        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            group = mesh.get_group()

            def forward(states: torch.Tensor) -> torch.Tensor:
                # Each process has a part of the gradient of the inputs.
                states = sum_backward.apply(states, group)
                return functional.linear(states, local(module.weight).t(), local(module.bias))

            module.forward = forward
            return module

    class Rows(TensorParallelLayer):
        """Each process makes a part of all outputs from some of the inputs; the bias is whole, and added once."""

        def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
            if param == "weight":
                shard(module, param, mesh, Shard(0))

        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            group = mesh.get_group()

            def forward(states: torch.Tensor) -> torch.Tensor:
                part = functional.linear(states, local(module.weight).t())
                summed: torch.Tensor = sum_forward.apply(part, group)
                bias: torch.Tensor = module.bias
                return summed + bias.to(summed.dtype)

            module.forward = forward
            return module

    class Heads(TensorParallelLayer):
        """Attention over this process's heads, whose number GPT-2 takes from the width of what `c_attn` makes."""

        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            module.split_size //= mesh.size()
            return module

    styles.register("conv1d_heads", Heads())
    styles.register("packed_colwise_conv1d", Columns(packed=_QUERY_KEY_VALUE))
    styles.register("colwise_conv1d", Columns())
    styles.register("rowwise_conv1d", Rows())
