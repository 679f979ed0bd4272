"""Checkpoints that hold the whole state once, by parameter name, for single, ddp and fsdp.

They do not depend on the shards, so a run can continue from them with another number of processes and with another of
these strategies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.trainer_job import WHOLE_CHECKPOINTS
from finetune_trainer.checkpoints import CheckpointPart
from finetune_trainer.distributed import barrier
from finetune_trainer.strategies.strategy_protocol import Placed, ReplicaStep, WeightsPlace

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

WEIGHTS = "weights.pt"
OPTIMIZER = "optimizer.pt"


def _options(placed: Placed, *, loading: bool) -> StateDictOptions:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if loading:
        everyone = torch.distributed.is_initialized()
        return StateDictOptions(full_state_dict=True, broadcast_from_rank0=everyone, strict=not placed.adapted)
    return StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=placed.adapted)


def _is_main() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class FullState:
    """Base of strategies: `model_state`, `save` and `load` by torch's state-dict functions."""

    spreads_itself = False
    takes_weights: WeightsPlace = "device"
    scales_loss = False

    @property
    def replica_step(self) -> ReplicaStep | None:
        """None: every process has a replica of its own."""
        return None

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return an empty context: there is no exchange to skip."""
        return nullcontext()

    def model_state(self, placed: Placed) -> dict[str, Any]:
        """Return all weights, or the trained ones, on rank 0; nothing on other ranks."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(placed.wrapped, options=_options(placed, loading=False))
        return state if _is_main() else {}

    def save(self, placed: Placed, folder: Path) -> None:
        """Gather everything on rank 0, which writes it."""
        import torch
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        weights = self.model_state(placed)
        optimizer = get_optimizer_state_dict(placed.wrapped, placed.optimizer, options=_options(placed, loading=False))
        if _is_main():
            torch.save(weights, folder / WEIGHTS)
            torch.save(optimizer, folder / OPTIMIZER)

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Read on rank 0, which sends the others their shares."""
        import torch
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        weights: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        if _is_main():
            weights = torch.load(part.folder / WEIGHTS, map_location="cpu", weights_only=True)
            optimizer = torch.load(part.folder / OPTIMIZER, map_location="cpu", weights_only=True)
        barrier()
        set_model_state_dict(placed.wrapped, weights, options=_options(placed, loading=True))
        set_optimizer_state_dict(placed.wrapped, placed.optimizer, optimizer, options=_options(placed, loading=True))

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Allow any number of processes and any of the three strategies."""
        if manifest_strategy in WHOLE_CHECKPOINTS:
            return None
        return f"it was written by strategy {manifest_strategy}, which keeps its state in shards of its own"
