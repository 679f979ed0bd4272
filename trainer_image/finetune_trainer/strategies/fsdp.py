"""Parameters, gradients and optimizer state in shards: FSDP2, `fully_shard` of torch.

We shard the model ourselves: for FSDP on CPU, accelerate would silently wrap the model in DistributedDataParallel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.report import TimePart
from finetune_contract.trainer_job import Strategy as StrategySettings
from finetune_contract.trainer_job import World
from finetune_trainer.models.stored_weights import in_training_type, narrow_weights
from finetune_trainer.strategies.fsdp_groups import Group, groups_of
from finetune_trainer.strategies.full_state import FullState
from finetune_trainer.strategies.strategy_protocol import Placed, WeightsPlace, computes_in_bf16, expect, type_name

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

    from finetune_trainer.models.four_bits import FourBitLinear

log = logging.getLogger(__name__)


class FullySharded(FullState):
    """One group of shards for each transformer block, for embeddings, for a head, and for the rest; bf16 and fp16 by
    FSDP's own mixed precision, fp16 with a scaled loss.
    """

    name: StrategyName = "fsdp"
    shards_itself = True
    takes_weights: WeightsPlace = "files"
    # Parameters are gathered, gradients reduced, and their norm is taken over all processes.
    communicates_in: tuple[TimePart, ...] = ("forward", "backward", "optimizer")

    def __init__(self, settings: StrategySettings, precision: Precision, world: World) -> None:
        self._settings = settings
        self._precision = precision
        self._world = world
        self.scales_loss = precision == "fp16"

    def arguments(self) -> Mapping[str, object]:
        """Disable autocast: FSDP casts parameters as it gathers them."""
        return {"bf16": False, "fp16": False}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Convert and shard one group after the other, then the rest in the root."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        inner, outer = mixed_precision(self._precision)
        offload = OffloadPolicy()
        if self._settings.offload_parameters == "cpu":
            offload = CPUOffloadPolicy(pin_memory=self._world.device == "cuda")
        mesh = self._mesh()
        # The root stays gathered in any case: torch's default, as it is small.
        again = self._settings.fsdp_sharding != "grad-op"
        narrow = narrow_weights(model, self._precision)
        # On the device, where FSDP puts a whole block before it shards it, also one that it offloads.
        place = self._world.device
        for group in groups_of(model, releases=again):
            in_training_type(_whole(group.module), narrow, place)
            _shard_packed(group.module, place)
            self._round_gathered(group.module)
            shard_group(group, mesh=mesh, mp_policy=inner, offload_policy=offload)
        in_training_type(_whole(model), narrow, place)
        _shard_packed(model, place)
        self._round_gathered(model)
        fully_shard(model, mesh=mesh, mp_policy=outer, reshard_after_forward=False, offload_policy=offload)
        if self._precision == "fp8":
            self._log_gathered(model)
        return model

    @property
    def _shards(self) -> int:
        """Return the number of processes that share one copy of the state."""
        hybrid = self._settings.fsdp_sharding == "hybrid"
        return self._world.processes_per_node if hybrid else self._world.size

    def _round_gathered(self, module: torch.nn.Module) -> None:
        """Have the weights of layers in fp8 gathered in that type."""
        if self._precision == "fp8":
            from finetune_trainer.models.float8 import gather_in_float8

            gather_in_float8(module, self._shards)

    def _log_gathered(self, model: PreTrainedModel) -> None:
        from finetune_trainer.models.float8 import gathered_in_bf16

        if left := gathered_in_bf16(model):
            log.warning(
                "%d layers in fp8 are gathered in bf16: %d processes do not divide the rows of their weights evenly, "
                "e.g. of %s.",
                len(left),
                self._shards,
                left[0],
            )

    @contextmanager
    def accumulating(self, placed: Placed) -> Iterator[None]:
        """Average gradients between the nodes of a hybrid mesh after the last micro-batch only. Within a node, shards
        are reduced after each, or every process would keep whole gradients.
        """
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(placed.model, FSDPModule)
        placed.model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            placed.model.set_requires_all_reduce(True)

    def _mesh(self) -> DeviceMesh:
        """Build a mesh of all processes in one dimension; hybrid: nodes x processes of a node, as ranks are."""
        from torch.distributed.device_mesh import init_device_mesh

        world = self._world
        if self._settings.fsdp_sharding == "hybrid":
            shape = (world.nodes, world.processes_per_node)
            return init_device_mesh(world.device, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(world.device, (world.size,), mesh_dim_names=("data",))

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect every parameter as a DTensor in shards over the planned processes, in the groups of `groups_of`,
        and resharding and offloading as requested.
        """
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        problem = f"the model is a {type_name(placed.wrapped)}, not sharded by FSDP"
        expect(isinstance(placed.wrapped, FSDPModule), self.name, "NotFullySharded", problem)
        for name, parameter in placed.wrapped.named_parameters():
            whole = f"parameter {name} is whole on every process"
            expect(isinstance(parameter, DTensor), self.name, "ParameterNotSharded", whole)
            assert isinstance(parameter, DTensor)
            self._assert_sharded(name, parameter)
        groups = groups_of(placed.model, releases=self._settings.fsdp_sharding != "grad-op")
        expect_groups(placed.model, groups, self._settings)
        if self._precision == "fp8":
            self._assert_rounded(placed.model)

    def _assert_rounded(self, model: torch.nn.Module) -> None:
        """Expect gathers in fp8 of all weights whose rows divide evenly."""
        from finetune_trainer.models.float8 import gathered_in_bf16

        left = gathered_in_bf16(model)
        odd = [name for name in left if cast("torch.nn.Linear", model.get_submodule(name)).out_features % self._shards]
        problem = f"the weights of {len(left) - len(odd)} layers in fp8 are gathered in bf16"
        expect(len(odd) == len(left), self.name, "GatheredInBf16", problem)

    def _assert_sharded(self, name: str, parameter: DTensor) -> None:
        """Expect shards over all processes; hybrid: over those of a node, with a copy on each node."""
        from torch.distributed.tensor import Replicate, Shard

        world, mesh = self._world, parameter.device_mesh
        hybrid = self._settings.fsdp_sharding == "hybrid"
        kinds = [Replicate, Shard] if hybrid else [Shard]
        planned = [world.nodes, world.processes_per_node] if hybrid else [world.size]
        problem = f"parameter {name} is spread as {parameter.placements} over {tuple(mesh.shape)} processes"
        apart = [type(placement) for placement in parameter.placements]
        expect(Shard in apart, self.name, "ParameterNotSharded", problem)
        problem += f" on {mesh.device_type}; planned are {' x '.join(map(str, planned))} on {world.device}"
        right = apart == kinds and list(mesh.shape) == planned and mesh.device_type == world.device
        expect(right, self.name, "WrongMesh", problem)


def mixed_precision(precision: Precision) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return the policies of the blocks and of the root.

    Gradients are reduced in fp32: a sum over many ranks loses small ones in bf16, and exceeds the range of fp16. Only
    the root's output is fp32; a block's output goes into layers of the root, whose weights are in 16 bits by then.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not computes_in_bf16(precision) and precision != "fp16":
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    return inner, replace(inner, output_dtype=torch.float32)


def shard_group(group: Group, **settings: Any) -> None:
    """Shard the weights of a group by `fully_shard` with these `settings`."""
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(group.module, reshard_after_forward=group.releases, **settings)
    sharded.set_unshard_in_backward(group.gathers_for_backward)


def expect_groups(model: torch.nn.Module, groups: Sequence[Group], settings: StrategySettings) -> None:
    """Expect `groups`, which release their weights as requested, and shards in the requested place; torch has these in
    private fields only.
    """
    from torch.distributed.fsdp import FSDPModule

    loose = [group for group in groups if not isinstance(group.module, FSDPModule)]
    problem = f"{len(loose)} of {len(groups)} modules (transformer blocks, embedding, head) have no groups of their own"
    expect(bool(groups) and not loose, settings.label, "BlocksNotSharded", problem)
    requested = {id(group.module): group.releases for group in groups}
    offloaded = settings.offload_parameters == "cpu"
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module, group in ((owner, group) for owner in sharded for group in owner._get_fsdp_state()._fsdp_param_groups):
        if id(module) in requested:
            released = group.post_forward_mesh_info is not None
            problem = f"a {type_name(module)} {'releases' if released else 'keeps'} its parameters after forward"
            expect(released == requested[id(module)], settings.label, "WrongSharding", f"{problem}, not as requested")
        moved = all(param.offload_to_cpu for param in group.fsdp_params)
        problem = f"shards are {'in host memory' if moved else 'on the device'}, requested was the opposite"
        expect(moved == offloaded, settings.label, "WrongOffload", problem)


def _whole(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of `module` that are not in shards yet."""
    from torch.distributed.tensor import DTensor

    return [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]


def _shard_packed(module: torch.nn.Module, device: str) -> None:
    """Prepare layers in 4 bits for their division (`finetune_trainer.models.four_bits`)."""
    for layer in module.modules():
        # Layers of peft around one show its weight as their own.
        if hasattr(layer, "shard_on") and getattr(layer.weight, "quant_state", None) is not None:
            cast("FourBitLinear", layer).shard_on(device)
