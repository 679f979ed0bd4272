"""FSDP over the replicas of a model with split layers: what a process has of the model is divided among the processes
that have the same of other replicas.

The layers are split first, and must compute as the whole model; then `fully_shard` of torch divides the slices over the
data ranks, with gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_contract.choices import StrategyName
from finetune_contract.report import TimePart
from finetune_trainer.strategies.divided_tensors import is_divided, placement_of
from finetune_trainer.strategies.fsdp import expect_groups, mixed_precision, shard_group
from finetune_trainer.strategies.fsdp_groups import groups_of
from finetune_trainer.strategies.mesh import DATA, TENSOR
from finetune_trainer.strategies.model_parallel import ModelParallel
from finetune_trainer.strategies.strategy_protocol import Placed, expect

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedReplicas(ModelParallel):
    """A mesh of data and tensor ranks whose data ranks share one copy of all state."""

    name: StrategyName = "fsdp"
    _norm_over = (DATA, TENSOR)

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts in which weights are gathered and gradients reduced, too."""
        return ("forward", "backward", "optimizer")

    def arguments(self) -> Mapping[str, object]:
        """Disable autocast: FSDP casts parameters as it gathers them."""
        return {"bf16": False}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Split the model, which must compute as the whole one, then shard blocks and the rest."""
        from torch.distributed.fsdp import fully_shard

        model = super().prepare_model(model)
        assert self._mesh is not None
        mesh, (inner, outer) = self._mesh[DATA], mixed_precision(self._precision)
        again = self._settings.fsdp_sharding != "grad-op"
        for group in groups_of(model, releases=again):
            shard_group(group, mesh=mesh, mp_policy=inner)
        fully_shard(model, mesh=mesh, mp_policy=outer, reshard_after_forward=False)
        return model

    def _overlap(self, model: PreTrainedModel) -> None:
        """Do nothing: FSDP averages gradients as it reduces them."""

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect what model parallelism has, every parameter in shards over the data ranks, and groups as requested."""
        from torch.distributed.tensor import DTensor

        held = dict(placed.model.named_parameters())
        whole = [name for name, value in held.items() if not is_divided(value, DATA)]
        found = f"{len(whole)} of {len(held)} parameters are whole on each data rank, e.g. {whole[:1]}"
        expect(not whole, self._label, "ParameterNotSharded", found)
        for name, value in held.items():
            assert isinstance(value, DTensor)
            ranks = value.device_mesh[DATA].size()
            found = f"{name} is spread as {placement_of(value, DATA)} over {ranks} data ranks of {self.shape.data}"
            expect(ranks == self.shape.data, self._label, "WrongMesh", found)
        super().assert_in_effect(placed)
        expect_groups(placed.model, self._settings)
