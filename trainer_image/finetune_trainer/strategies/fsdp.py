"""Parameters, gradients and optimizer state in shards: FSDP2, `fully_shard` of torch.

We shard the model ourselves and tell the Trainer that it is done. Asked for FSDP, accelerate would do nothing on CPU
but wrap the model in DistributedDataParallel, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune_contract.choices import Device, Precision, StrategyName
from finetune_trainer.strategies.base import Placed, expect, type_name
from finetune_trainer.strategies.full_state import FullState

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class FullySharded(FullState):
    """One group of shards for each transformer block and one for the rest; bf16 by FSDP's own mixed precision."""

    name: StrategyName = "fsdp"

    def __init__(self, precision: Precision, device: Device, world_size: int) -> None:
        self._precision = precision
        self._device = device
        self._world_size = world_size

    def arguments(self) -> Mapping[str, object]:
        """No autocast: FSDP casts parameters as it gathers them."""
        return {"bf16": False}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Shards the blocks, then what is left in the root."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self._device, (self._world_size,), mesh_dim_names=("data",))
        inner = outer = MixedPrecisionPolicy()
        if self._precision == "bf16":
            # Gradients are reduced in fp32: a sum over many ranks loses small ones in bf16. Only the root answers in
            # fp32; what a block answers goes into layers of the root, whose weights are bf16 by then.
            inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outer = replace(inner, output_dtype=torch.float32)
        for block in transformer_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=inner)
        fully_shard(model, mesh=mesh, mp_policy=outer)
        # The Trainer's word for "sharded already": it then neither moves nor wraps the model.
        model._is_distributed_loading_by_transformers = True
        return model

    def assert_in_effect(self, placed: Placed) -> None:
        """Every parameter is a DTensor in shards over all processes, and the blocks are groups of their own."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor, Shard

        found = f"the model is a {type_name(placed.wrapped)}, not sharded by FSDP"
        expect(isinstance(placed.wrapped, FSDPModule), self.name, "NotFullySharded", found)
        for name, parameter in placed.wrapped.named_parameters():
            whole = f"parameter {name} is whole on every process"
            sharded = isinstance(parameter, DTensor) and all(isinstance(each, Shard) for each in parameter.placements)
            expect(sharded, self.name, "ParameterNotSharded", whole)
            assert isinstance(parameter, DTensor)
            size = parameter.device_mesh.size()
            kind = parameter.device_mesh.device_type
            too_few = f"parameter {name} is in {size} shards on {kind}, planned are {self._world_size}"
            placed_right = size == self._world_size and parameter.device_mesh.device_type == self._device
            expect(placed_right, self.name, "WrongMesh", too_few)
        blocks = transformer_blocks(placed.model)
        loose = [block for block in blocks if not isinstance(block, FSDPModule)]
        found = f"{len(loose)} of {len(blocks)} transformer blocks are no groups of their own"
        expect(bool(blocks) and not loose, self.name, "BlocksNotSharded", found)


def transformer_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks of the model: by the class names it gives itself, else the members of its longest module
    list.
    """
    import torch

    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        # Embeddings are named there too by some models; alone in a group they are fine.
        return blocks
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((list(each) for each in lists), key=len, default=[])
