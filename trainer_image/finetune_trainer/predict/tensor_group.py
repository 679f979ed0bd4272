"""Processes of a pod that hold one model together: tensor parallelism of an evaluation or a prediction.

transformers loads the model by its tensor-parallel plan (ours for GPT-2): each process reads its slices of the weights
from the files, and nothing else. The first process of a group decides which rows come next, as a process with a whole
model does, and sends each batch to the others, which only compute. So rows are claimed, read, encoded and written once.

The order of the messages is that of the passes, so all processes of a group call the collectives of a pass together. A
batch that does not fit the memory of one of them cannot be halved, as the others wait in the middle of the pass. So the
group agrees on the largest batch that fits all of them before the first one (`fitted`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from finetune_contract.choices import Device
from finetune_contract.inference_settings import InferenceProcesses
from finetune_contract.layout import FailureClass
from finetune_trainer.core.distributed import BACKENDS, PATIENCE, ProcessWorld, lowest
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.library_patches import mesh_of_loaded_model
from finetune_trainer.devices.pass_memory import PassMemory, device_memory, fitted_tokens, probe
from finetune_trainer.tasks.task_protocol import Answer, Feature

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Answering: TypeAlias = Callable[[Sequence[Feature]], list[Answer]]
_GROUPS = "groups"
_BEGIN, _SEED, _PROBE, _LOWEST = "begin", "seed", "probe", "lowest"


@dataclass(frozen=True)
class ProbedWay:
    """A way to answer whose memory is measured."""

    answering: Answering
    number: int
    """Its place among the functions that `follow` gets."""
    widths: NDArray[np.int64]
    """Padded tokens of each row alone."""
    features: Callable[[NDArray[np.int64]], Sequence[Feature]]
    """Function that returns the features of rows, by their places in `widths`."""


@dataclass(frozen=True)
class WholeModel:
    """A process that holds a whole model."""

    size: int = 1
    """Processes that hold the model."""

    @property
    def leads(self) -> bool:
        """True for the process that chooses the rows and has all answers."""
        return True

    def loaded(
        self, empty: Callable[[], PreTrainedModel], load: Callable[[Mapping[str, Any]], PreTrainedModel]
    ) -> PreTrainedModel:
        """Return the model, or the slice of this process. `empty`: builds it without weights; `load`: loads it, with
        further arguments of `from_pretrained`.
        """
        return load({})

    def begin(self) -> None:
        """Have the other processes load the model."""

    def has_begun(self) -> bool:
        """Wait for the first process; return whether it needs the model, False if it has ended without."""
        return True

    def seed(self, seed: int) -> None:
        """Have the other processes seed their generators, as this one does."""

    def led(self, answering: Answering, number: int) -> Answering:
        """Return `answering`, the `number`-th way to answer, with the other processes computing their part of it."""
        return answering

    def fitted(self, way: ProbedWay, budget: int) -> int:
        """Return the padded tokens of a batch, at most `budget`, that fit the memory of all processes of the model.

        A process with the whole model halves `budget` until a pass over a batch of the widest rows fits, or one row.
        """
        import torch

        while True:
            wanted, fits = probe(way.widths, budget), True
            try:
                with torch.inference_mode():
                    way.answering(way.features(wanted))
            except torch.OutOfMemoryError:
                fits = len(wanted) == 1  # the stage will report the row
            if fits:
                return budget
            torch.cuda.empty_cache()  # only now, after the error, which holds the tensors of the pass
            budget //= 2

    def lowest(self, budgets: Sequence[int]) -> list[int]:
        """Return the lowest of the budgets that the first processes of all groups call this with, each by its place."""
        return list(budgets)

    def follow(self, answerings: Sequence[Answering], seed: Callable[[int], None]) -> None:
        """Compute this process's part of the batches that the first process sends, until it sends `end`."""

    def end(self) -> None:
        """Release the other processes from `follow`."""


WHOLE_MODEL = WholeModel()


@dataclass(frozen=True, kw_only=True)
class TensorGroup(WholeModel):
    """The processes of one model, of which this is one."""

    rank: int
    """Place of this process among them."""
    first: int
    """Rank of their first process among all processes."""
    mesh: DeviceMesh
    """Mesh of one dimension, of these processes."""
    device: Device
    messages: ProcessGroup
    """Group in host memory for the batches."""
    everyone: ProcessGroup
    """Group in host memory of all processes of the pod."""
    memory: PassMemory | None = None
    """Memory of this process's device; None: unknown, and batches are not bounded by it."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def loaded(
        self, empty: Callable[[], PreTrainedModel], load: Callable[[Mapping[str, Any]], PreTrainedModel]
    ) -> PreTrainedModel:
        """See `WholeModel.loaded`. StageError CONFIG for a model without a plan or with heads that the processes cannot
        share, STRATEGY_NOT_IN_EFFECT `ParameterNotSharded` if a weight of the plan is whole.
        """
        from transformers.distributed.configuration_utils import DistributedConfig

        from finetune_trainer.strategies.parallel.conv1d import conv1d_plan
        from finetune_trainer.strategies.parallel.tensor import split_weights, tensor_plan

        unread = empty()
        planned = split_weights(tensor_plan(unread, self.size))
        config = DistributedConfig(tp_size=self.size, tp_plan=conv1d_plan(unread) or None)
        with self._own_mesh():
            model = load({"distributed_config": config})
        _refuse_whole_weights(model, planned, self.size)
        return model

    def _own_mesh(self) -> AbstractContextManager[None]:
        """Replace the mesh of transformers, which requires that all processes hold one model (5.23,
        `distributed/utils.py`, `initialize_distributed_mesh`), by that of this group.
        """
        place = self._place()
        return mesh_of_loaded_model(lambda _cls, config, device_map=None: (config, place, _OwnMesh(self.mesh)))

    def _place(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device())

    def begin(self) -> None:
        self._send(_BEGIN)

    def has_begun(self) -> bool:
        return bool(self._received() == _BEGIN)

    def seed(self, seed: int) -> None:
        self._send((_SEED, seed))

    def led(self, answering: Answering, number: int) -> Answering:
        def answers(features: Sequence[Feature]) -> list[Answer]:
            self._send((number, features))
            return answering(features)

        return answers

    def fitted(self, way: ProbedWay, budget: int) -> int:
        import torch

        if self.memory is None:
            return budget

        def share_of(wanted: NDArray[np.int64]) -> float:
            features = way.features(wanted)
            self._send((_PROBE, (way.number, features)))
            return self._measured(way.answering, features)

        with torch.inference_mode():
            return fitted_tokens(share_of, way.widths, budget, first=int(way.widths.min()))

    def _measured(self, answering: Answering, features: Sequence[Feature]) -> float:
        """Return the lowest share of all processes of the group; see `PassMemory.share`."""
        assert self.memory is not None, "processes of one group have the same kind of device"
        self.memory.begin()
        answering(features)
        return lowest([self.memory.share()], self.messages)[0]

    def lowest(self, budgets: Sequence[int]) -> list[int]:
        self._send((_LOWEST, budgets))
        return [int(budget) for budget in lowest(budgets, self.everyone)]

    def follow(self, answerings: Sequence[Answering], seed: Callable[[int], None]) -> None:
        import torch

        with torch.inference_mode():
            while (message := self._received()) is not None:
                kind, content = message
                if kind == _SEED:
                    seed(content)
                elif kind == _PROBE:
                    number, features = content
                    self._measured(answerings[number], features)
                elif kind == _LOWEST:
                    lowest(content, self.everyone)
                else:
                    answerings[kind](content)

    def end(self) -> None:
        self._send(None)

    def _send(self, message: object) -> None:
        import torch

        torch.distributed.broadcast_object_list([message], src=self.first, group=self.messages)

    def _received(self) -> Any:
        import torch

        message: list[Any] = [None]
        torch.distributed.broadcast_object_list(message, src=self.first, group=self.messages)
        return message[0]


class _OwnMesh:
    """Stand-in for `TransformersDeviceMesh` with tensor parallelism alone."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of the group, the only one."""
        assert "tp" in dims, f"there are no dimensions {dims}"
        return self._mesh


def joined_group(world: ProcessWorld, pod: InferenceProcesses, device: Device) -> WholeModel:
    """Join the processes that hold one model with this one. Every process of the pod must call it."""
    if pod.tensor == 1:
        return WHOLE_MODEL
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    # The first process of a group may wait for others for long, between two batches.
    torch.distributed.init_process_group(BACKENDS[device].training, timeout=PATIENCE)
    mesh = init_device_mesh(device, (pod.models, pod.tensor), mesh_dim_names=(_GROUPS, "tp"))
    number, rank = divmod(world.rank, pod.tensor)
    groups = [range(first, first + pod.tensor) for first in range(0, pod.processes, pod.tensor)]
    # Every process creates all groups.
    everyone = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    made = [torch.distributed.new_group(list(ranks), backend="gloo", timeout=PATIENCE) for ranks in groups]
    messages = made[number]
    assert isinstance(messages, torch.distributed.ProcessGroup), "this process belongs to its group"
    assert isinstance(everyone, torch.distributed.ProcessGroup), "this process belongs to the group of all"
    first = groups[number][0]
    return TensorGroup(
        size=pod.tensor,
        rank=rank,
        first=first,
        mesh=mesh["tp"],
        device=device,
        messages=messages,
        everyone=everyone,
        memory=device_memory(device),
    )


def held_share(model: PreTrainedModel) -> float:
    """Return the share of the model's weights that this process holds."""
    from torch.distributed.tensor import DTensor

    weights = list(model.parameters())
    held = sum((weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in weights)
    return held / sum(weight.numel() for weight in weights)


def _refuse_whole_weights(model: PreTrainedModel, planned: Sequence[str], size: int) -> None:
    from torch.distributed.tensor import DTensor

    held = dict(model.named_parameters(remove_duplicate=False))

    def is_slice(weight: torch.Tensor) -> bool:
        return isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel()

    whole = [name for name in planned if not is_slice(held[name])]
    if whole or not planned:
        raise StageError(
            FailureClass.STRATEGY_NOT_IN_EFFECT,
            "ParameterNotSharded",
            f"{len(whole)} of {len(planned)} planned weights are whole in each of {size} processes, e.g. {whole[:1]}.",
            "Use an image with the tested version of transformers.",
        )
