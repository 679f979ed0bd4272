"""ZeRO stage 1 over the replicas of a model with split layers or stages: the processes that have the same part of the
model divide the optimizer state.

Each weight has one owner among them, who alone has its moments, gets its averaged gradient, steps it, and sends it to
the others. That sends as much as an all-reduce of the gradients: once to the owner, once from it. Weights go whole, so
that checkpoints need no other form than theirs (Rajbhandari et al., "ZeRO", 2020, section 5.1, divides evenly; here the
fullest process has at most one weight more than an even share).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from finetune_contract.plans import owners_of
from finetune_trainer.strategies.parallel.gradient_reducer import copy_parts, pieces
from finetune_trainer.strategies.parallel.mesh import DATA, PIPELINE, TENSOR
from finetune_trainer.strategies.parallel.model_parallel import ModelParallel
from finetune_trainer.strategies.parallel.sharded_tensors import local_part
from finetune_trainer.strategies.strategy_protocol import Placed, expect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from finetune_contract.trainer_job import Training


class ShardedOptimizer(ModelParallel):
    """A mesh whose data ranks each have the optimizer state of some of the weights that they all hold."""

    _norm_over = (DATA, TENSOR, PIPELINE)

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._weights: list[torch.nn.Parameter] = []
        """Trained weights of this process, in the model's order."""
        self._owners: tuple[int, ...] = ()
        """Data rank that steps each of them."""
        self._mine: frozenset[int] = frozenset()
        """Ids of the weights that this process steps."""

    def _overlap(self, model: PreTrainedModel) -> None:
        """Assign the weights to the data ranks, which all do it alike, and have gradients reduced to their
        owners; the others free theirs.
        """
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._owners = owners_of([local_part(weight).numel() for weight in self._weights], self.shape.data)
        here = self.shape.data_rank(distributed.get_rank())
        self._mine = frozenset(
            id(weight) for weight, owner in zip(self._weights, self._owners, strict=True) if owner == here
        )
        self._reduce(model, self._weights, self._owners)

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect what model parallelism has, and each weight with one data rank that steps it."""
        super().assert_in_effect(placed)
        stepped = {id(param) for group in placed.optimizer.param_groups for param in group["params"]}
        counted = torch.tensor([id(weight) in stepped for weight in self._weights], dtype=torch.int32)
        distributed.all_reduce(counted, group=self._replica_group)
        wrong = sum(count != 1 for count in counted.tolist())
        problem = f"{wrong} of {len(self._weights)} weights are not stepped by exactly one data rank"
        expect(not wrong and bool(self._weights), self._label, "OptimizerNotDivided", problem)

    # ------------------------------------------------------------------------------------------------------------ step

    def _steps(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._mine

    def stepped_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups with the weights of this owner."""
        return [{**group, "params": [param for param in group["params"] if self._steps(param)]} for group in groups]

    @torch.no_grad()
    def share_weights(self) -> None:
        """Send each weight from its owner to the other data ranks."""
        if self.shape.data == 1:
            return
        for owner, weights in self._by_owner():
            for piece in pieces([local_part(weight) for weight in weights]):
                flat = torch.cat([weight.flatten() for weight in piece])
                distributed.broadcast(flat, group=self._replica_group, group_src=owner)
                if not self._steps(weights[0]):
                    copy_parts(flat, piece)

    def _by_owner(self) -> Iterator[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Yield each data rank that owns weights, with those weights; in the same order on all data ranks."""
        for owner in sorted(set(self._owners)):
            yield owner, [weight for weight, its in zip(self._weights, self._owners, strict=True) if its == owner]
