"""Position of a process among the data, pipeline, tensor and sequence ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_contract.choices import RankOrder
from finetune_contract.trainer_job import Strategy
from finetune_trainer.core.token_shards import TokenShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, PIPELINE, TENSOR, SEQUENCE = "data", "pipeline", "tensor", "sequence"
_NAMES = {"D": DATA, "P": PIPELINE, "T": TENSOR}


@dataclass(frozen=True)
class MeshShape:
    """Processes in each dimension; with `data` alone, every process has the whole model (or its shard of it)."""

    data: int
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    """Processes that each have a slice of the same rows; neighbours, as they exchange most."""
    order: RankOrder = "DPT"
    """Order of the dimensions but `sequence`; neighbouring ranks differ in the last."""

    @staticmethod
    def of(strategy: Strategy, data_parallel: int) -> MeshShape:
        """Return the mesh of `strategy` with `data_parallel` replicas of the model."""
        degree = 1 if strategy.pipeline is None else strategy.pipeline.degree
        return MeshShape(data_parallel, degree, strategy.tensor, strategy.sequence, strategy.rank_order)

    @property
    def size(self) -> int:
        """Total number of processes."""
        return self.data * self.pipeline * self.tensor * self.sequence

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions, in order."""
        return (*(_NAMES[letter] for letter in self.order), SEQUENCE)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions, in order."""
        return tuple(getattr(self, name) for name in self.names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the name of each dimension -> the coordinate of process `rank` in it."""
        coordinates: dict[str, int] = {}
        for name in reversed(self.names):
            rank, coordinates[name] = divmod(rank, getattr(self, name))
        return coordinates

    def data_rank(self, rank: int) -> int:
        """Return the part of the data that process `rank` reads: processes of one replica, or with slices of the same
        rows, read the same.
        """
        return self.coordinates(rank)[DATA]

    def token_shard(self, rank: int) -> TokenShard:
        """Return the slice of the rows' tokens that process `rank` computes."""
        return TokenShard(self.coordinates(rank)[SEQUENCE], self.sequence)

    def build(self, device: str) -> DeviceMesh:
        """Build the mesh of process groups; every process must call it."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device, self.sizes, mesh_dim_names=self.names)
