"""Checkpoints by parameter name for single, ddp and fsdp, in shards (`shard_files.py`).

They do not depend on the division, so a run can continue from them with another number of processes and with another of
these strategies. Earlier releases gathered the whole state on rank 0, which wrote `weights.pt` and `optimizer.pt`; runs
continue from those, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.trainer_job import WHOLE_CHECKPOINTS
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.core.distributed import barrier
from finetune_trainer.core.files import FileEntry
from finetune_trainer.strategies.strategy_protocol import Placed, ReplicaStep, WeightsPlace, tied_names

if TYPE_CHECKING:
    import torch

    from finetune_trainer.strategies.optimizer_state import NamedState
    from finetune_trainer.strategies.shard_files import StagedState

WEIGHTS = "weights.pt"
OPTIMIZER = "optimizer.pt"
"""Files of a checkpoint by an earlier release."""
_WEIGHT = "weights/"
_STATE = "optimizer/"
"""Prefixes of names in the index: `weights/<parameter>`, and `optimizer/<key>/<parameter>` for the optimizer's."""


def _is_main() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class FullState:
    """Base of strategies: `write_weights`, `save` and `load` by torch's state-dict functions."""

    shards_itself = False
    takes_weights: WeightsPlace = "device"
    scales_loss = False

    @property
    def replica_step(self) -> ReplicaStep | None:
        """None: every process has a replica of its own."""
        return None

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return an empty context: there is no exchange to skip."""
        return nullcontext()

    def write_weights(self, placed: Placed, path: Path) -> FileEntry | None:
        """Gather one weight after another on every process, and write them on rank 0."""
        from finetune_trainer.checkpoint.tensor_files import TensorForm, storage_order, write_gathered

        weights = _weights(placed)
        forms = {name: TensorForm.of(value) for name, value in weights.items()}
        gathered = (_whole(weights[name]) for name in storage_order(forms))
        return write_gathered(path, forms, gathered, main=_is_main())

    def save(self, placed: Placed, folder: Path) -> Mapping[str, FileEntry]:
        """Write the shards of this process; of state that every process has, a share."""
        return self._staged(placed, copied=False).write(folder)

    def stage(self, placed: Placed) -> StagedState:
        """Copy the shards of this process; of state that every process has, a share."""
        return self._staged(placed, copied=True)

    def _staged(self, placed: Placed, *, copied: bool) -> StagedState:
        from finetune_trainer.strategies.optimizer_state import named_state, parameter_names
        from finetune_trainer.strategies.shard_files import stage_state

        weights = _weights(placed)  # first, as it returns parameters that a forward pass gathered to their shards
        optimizer = named_state(placed.optimizer, parameter_names(placed.model))
        return stage_state(*stored_form(weights, optimizer), copied=copied)

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Read the shards that this process needs."""
        from finetune_trainer.strategies.optimizer_state import parameter_names

        if is_gathered(part):
            _load_gathered(placed, part)
        else:
            load_shards(placed.optimizer, _weights(placed), parameter_names(placed.model), part)

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Allow any number of processes and any of the three strategies."""
        if manifest_strategy in WHOLE_CHECKPOINTS:
            return None
        return f"it was written by strategy {manifest_strategy}, which keeps its state in shards of its own"


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor. Every process must call it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    barrier()  # see `write_gathered`
    # Shards in host memory are gathered by the backend of the mesh.
    on_mesh: Any = value.detach().to(value.device_mesh.device_type)
    whole: torch.Tensor = on_mesh.full_tensor()
    return whole


def is_gathered(part: CheckpointPart) -> bool:
    """Return True for the state as an earlier release wrote it."""
    return (part.folder / WEIGHTS).exists()


def _weights(placed: Placed) -> dict[str, torch.Tensor]:
    """Return the weights and buffers, or the trained ones, as the model has them: tied ones under their first name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(ignore_frozen_params=placed.adapted)
    state: dict[str, Any] = get_model_state_dict(placed.wrapped, options=options)
    tied = tied_names(placed.model)
    return {name: _plain(value) for name, value in state.items() if name not in tied}


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a weight as an ordinary tensor in the same memory: FSDP gathers those of layers in fp8 by a class of
    torchao's, whose tensors have no memory of their own.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    local: Any = detached.to_local()
    if not hasattr(local, "fsdp_pre_all_gather"):
        return value
    return DTensor.from_local(
        local._tensor, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def stored_form(
    weights: Mapping[str, torch.Tensor], optimizer: NamedState
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and the rest, as `stage_state` takes them."""
    numbers: dict[str, dict[str, Any]] = {}
    for (name, key), value in optimizer.numbers.items():
        numbers.setdefault(name, {})[key] = value
    tensors = {f"{_WEIGHT}{name}": value for name, value in weights.items()}
    tensors |= {f"{_STATE}{key}/{name}": value for (name, key), value in optimizer.tensors.items()}
    return tensors, {"groups": list(optimizer.groups), "numbers": numbers}


def load_shards(
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    part: CheckpointPart,
) -> None:
    """Fill the weights and the optimizer of this process, whose parameters and other weights have these names in the
    checkpoint.
    """
    import torch

    from finetune_trainer.strategies.optimizer_state import NamedState, load_named_state
    from finetune_trainer.strategies.shard_files import INDEX, read_index, read_state, unreadable

    index = read_index(part)
    tensors = {f"{_WEIGHT}{name}": value for name, value in weights.items()}
    state: dict[tuple[str, str], torch.Tensor] = {}
    for stored, described in index.tensors.items():
        key, _, name = stored.removeprefix(_STATE).partition("/")
        if stored.startswith(_STATE) and name in parameters:
            form, parameter = described.form, parameters[name]
            # Moments are divided as their parameter is; a step and other small state is whole on every process.
            divided = form.shape == tuple(parameter.shape) and form.shape
            made = torch.zeros_like(parameter) if divided else torch.zeros(form.shape)
            state[name, key] = tensors[stored] = made.detach().to(form.dtype)
    read_state(part, index, tensors)
    try:
        stored_numbers = index.rest["numbers"].items()
        numbers = {(name, key): value for name, entries in stored_numbers for key, value in entries.items()}
        load_named_state(optimizer, parameters, NamedState(state, numbers, index.rest["groups"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"has settings that the optimizer cannot load: {type(error).__name__}: {error}"
        raise unreadable(part.folder / INDEX, why) from error


def _load_gathered(placed: Placed, part: CheckpointPart) -> None:
    """Read a checkpoint of an earlier release on rank 0, which sends the others their shares."""
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    from finetune_trainer.checkpoint.tensor_files import read_pickled

    weights: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    if _is_main():
        weights = read_pickled(part, part.folder / WEIGHTS)
        optimizer = read_pickled(part, part.folder / OPTIMIZER)
    barrier()
    everyone = torch.distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=everyone, strict=not placed.adapted)
    set_model_state_dict(placed.wrapped, weights, options=options)
    set_optimizer_state_dict(placed.wrapped, placed.optimizer, optimizer, options=options)
