"""Slices of tokens between the split layers of tensor parallelism (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, section 4.2.2).

Attention and feed-forward layers are split over the tensor ranks, and have all tokens; norms and the sums between them
are not split, so that every rank would compute and keep the same. Here each rank has them for a slice of the tokens:
the sum behind a layer becomes a reduce-scatter, and the slices are gathered before the next one, which sends as much.

Known are decoders without dropout between their layers, laid out as Llama; others keep all tokens on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.tensor_parallel import RowwiseParallel

from finetune_trainer.core.library_patches import style_to_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_TO_SLICES = "rowwise_to_shards"
"""Our style for a layer whose outputs are summed up and divided by tokens."""
_STYLE = RowwiseParallel(output_layouts=Shard(1))
_NORMS = ("input_layernorm", "post_attention_layernorm")


def sharded_plan(plan: Mapping[str, str], model: PreTrainedModel, summed: str) -> dict[str, str]:
    """Return `plan` with outputs of layers in slices. `summed`: style of a weight whose gradients are to be summed, as
    those of norms, of which each rank has a part.
    """
    style_to_shards.until_end(_STYLE)
    ends = (".o_proj", ".down_proj")
    changed = {name: _TO_SLICES if name.endswith(ends) else style for name, style in plan.items()}
    body = model.base_model_prefix
    norms = [name for name, _ in model.named_parameters() if name.endswith(tuple(f".{norm}.weight" for norm in _NORMS))]
    return {**changed, **dict.fromkeys([*norms, f"{body}.norm.weight"], summed)}


def shard_tokens_between_layers(model: Any, mesh: DeviceMesh) -> None:
    """Have each rank of `mesh` compute its slice of the tokens between the split layers of `model`."""
    body = model.base_model
    tokens = _TokenShards(mesh)
    body.layers[0].register_forward_pre_hook(tokens.enter, with_kwargs=True)
    for layer in body.layers:
        layer.self_attn.register_forward_pre_hook(tokens.attend, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(tokens.feed)
    body.norm.register_forward_hook(tokens.leave)


class _TokenShards:
    """Hooks of a model; hidden states have the shape (rows, tokens, width)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._length = 0
        """Tokens of a row in the pass that computes."""

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take this rank's slice of the embedded tokens."""
        whole, *others = args
        self._length = whole.shape[1]
        divided = DTensor.from_local(whole, self._mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return (divided.to_local(), *others), kwargs

    def attend(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Gather the tokens for attention, also when a layer is computed again for its backward pass."""
        self._length = kwargs["position_embeddings"][0].shape[1]
        return args, {**kwargs, "hidden_states": self._gathered(_as_computed(kwargs["hidden_states"]))}

    def feed(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather the tokens for the feed-forward layer."""
        return (self._gathered(_as_computed(args[0])), *args[1:])

    def leave(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Gather the tokens behind the last norm. Every rank has the whole gradient of them."""
        return self._gathered(output).to_local(grad_placements=[Replicate()])

    def _gathered(self, states: torch.Tensor) -> DTensor:
        rows, _, width = states.shape
        shape = torch.Size((rows, self._length, width))
        stride = (self._length * width, width, 1)
        slices = DTensor.from_local(states, self._mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
        return slices.redistribute(placements=[Replicate()])


def _as_computed(states: torch.Tensor) -> torch.Tensor:
    """Return `states` in the type of autocast's matrix products, in which half as much is sent."""
    kind = states.device.type
    return states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states
