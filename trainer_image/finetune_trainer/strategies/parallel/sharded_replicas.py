"""FSDP over the replicas of a model that tensor or pipeline parallelism spreads: what a process has of the model is
divided among the processes that have the same of other replicas.

The layers are split and cut first, and must compute as the whole model; then `fully_shard` of torch divides the slices
over the data ranks, with gradients and optimizer state. In a pipeline, weights stay gathered, and gradients whole, from
the first micro-batch of a pass to its last: each stage would otherwise gather its weights for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_contract.choices import StrategyName
from finetune_contract.report import TimePart
from finetune_trainer.strategies.fsdp import expect_groups, mixed_precision, shard_group
from finetune_trainer.strategies.fsdp_groups import Group, groups_of, transformer_blocks
from finetune_trainer.strategies.parallel.mesh import DATA, PIPELINE, TENSOR
from finetune_trainer.strategies.parallel.model_parallel import ModelParallel
from finetune_trainer.strategies.parallel.sharded_tensors import is_sharded, placement_of
from finetune_trainer.strategies.strategy_protocol import Placed, expect

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedReplicas(ModelParallel):
    """A mesh of data, pipeline and tensor ranks whose data ranks share one copy of all state."""

    name: StrategyName = "fsdp"
    _norm_over = (DATA, TENSOR, PIPELINE)

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts in which weights are gathered and gradients reduced, too."""
        return ("forward", "backward", "optimizer") if self.pipeline is None else ("forward_backward", "optimizer")

    def arguments(self) -> Mapping[str, object]:
        """Disable autocast: FSDP casts parameters as it gathers them."""
        return {"bf16": False}

    def _groups_in(self, model: PreTrainedModel) -> list[Group]:
        """Return the groups of shards beside the root's. A stage of a pipeline keeps its weights gathered."""
        if self.pipeline is None:
            return groups_of(model, releases=self._settings.fsdp_sharding != "grad-op")
        return [Group(block, releases=False) for block in transformer_blocks(model)]

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Split and cut the model, which must compute as the whole one, then shard blocks and the rest."""
        from torch.distributed.fsdp import fully_shard

        model = super().prepare_model(model)
        assert self._mesh is not None
        mesh, (inner, outer) = self._mesh[DATA], mixed_precision(self._precision)
        for group in self._groups_in(model):
            shard_group(group, mesh=mesh, mp_policy=inner)
        if self.pipeline is None:
            fully_shard(model, mesh=mesh, mp_policy=outer, reshard_after_forward=False)
            return model
        for stage in self.pipeline.stages_with_weights():
            fully_shard(stage, mesh=mesh, mp_policy=inner, reshard_after_forward=False)
        return model

    def _compute_in_precision(self) -> None:
        assert self.pipeline is not None
        self.pipeline.compute_in(self._precision, autocast=False)

    def _overlap(self, model: PreTrainedModel) -> None:
        """Do nothing: FSDP averages gradients as it reduces them."""

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect what model parallelism has, every parameter in shards over the data ranks, and groups as requested."""
        from torch.distributed.tensor import DTensor

        held = dict(placed.model.named_parameters())
        whole = [name for name, value in held.items() if not is_sharded(value, DATA)]
        problem = f"{len(whole)} of {len(held)} parameters are whole on each data rank, e.g. {whole[:1]}"
        expect(not whole, self._label, "ParameterNotSharded", problem)
        for name, value in held.items():
            assert isinstance(value, DTensor)
            ranks = value.device_mesh[DATA].size()
            problem = f"{name} is spread as {placement_of(value, DATA)} over {ranks} data ranks of {self.shape.data}"
            expect(ranks == self.shape.data, self._label, "WrongMesh", problem)
        super().assert_in_effect(placed)
        roots = [placed.model] if self.pipeline is None else list(self.pipeline.stages)
        for root in roots:
            inside = {id(module) for module in root.modules()}
            groups = [group for group in self._groups_in(placed.model) if id(group.module) in inside]
            expect_groups(root, groups, self._settings)
