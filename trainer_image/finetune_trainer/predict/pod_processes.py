"""Processes of one pod that evaluate or predict together: their GPUs, and the rows of each.

Each process has a whole model, on one device or with its layers on several, or a slice of one
(`tensor_group`). `visible_gpus` hides all other GPUs from a process, so that the rest of the code uses `cuda:0` and the
next ones. An evaluation deals the batches of one process
out and gathers the answers, so that its metrics are those of one process. A prediction shares the shards of its rows
through files (`prediction_workers`), as several pods do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from finetune_contract.choices import Device
from finetune_contract.inference_settings import InferenceProcesses
from finetune_contract.layout import FailureClass
from finetune_trainer.core.distributed import INSTANCE, PATIENCE, ProcessWorld, disconnect, gathered_on_first
from finetune_trainer.core.failures import StageError
from finetune_trainer.predict.tensor_group import WHOLE_MODEL, WholeModel, joined_group

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune_trainer.tasks.task_protocol import Answer

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class BatchShard:
    """Share of one model in the batches of an evaluation."""

    index: int = 0
    count: int = 1
    """Number of models."""
    group: WholeModel = WHOLE_MODEL
    """Processes that hold the model."""

    def of(self, batches: Sequence[T]) -> Sequence[T]:
        """Return every `count`-th batch. Batches are in the order of their length, so shares take about as long."""
        return batches[self.index :: self.count]

    def gathered(self, answers: list[Answer]) -> list[Answer] | None:
        """Return the answers of all processes, each in its place; None if this process does not lead. `answers`: one
        for each feature, empty for those that no batch of this share has.

        Every process has to call it.
        """
        if self.count == 1:
            return answers if self.group.leads else None
        mine = [(at, answer) for at, answer in enumerate(answers) if answer]
        all_shares = gathered_on_first(mine)
        if all_shares is None:
            return None
        shares = all_shares[:: self.group.size]
        log.info("Rows answered by each process: %s.", ", ".join(f"{len(share):,}" for share in shares))
        every: list[Answer] = [{}] * len(answers)
        for at, answer in (entry for share in all_shares for entry in share):
            every[at] = {**every[at], **answer}
        return every

    def end(self) -> None:
        """Leave the group of processes, once all of them have sent their answers."""
        if self.count * self.group.size > 1:
            disconnect()


ALL_BATCHES = BatchShard()
"""Share of a process that evaluates alone."""


def settle_gpus(world: ProcessWorld, pod: InferenceProcesses, device: Device) -> None:
    """Hide the GPUs of the pod's other processes from this one; call it before CUDA starts."""
    if device == "cuda" and pod.devices > 1:
        visible = visible_gpus(os.environ, world.local_rank, pod.devices_per_process)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)


def visible_gpus(environment: Mapping[str, str], local_rank: int, count: int) -> list[str]:
    """Return the GPUs of a process, as CUDA_VISIBLE_DEVICES names them: `count` neighbouring ones of the pod's.

    Instances of partitioned GPUs go by their identifiers, as CUDA numbers the first one only.
    """
    first = local_rank * count
    given, instances = environment.get("CUDA_VISIBLE_DEVICES"), environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if not given and instances.startswith(INSTANCE):
        given = instances
    if given:
        # Too few of them make the stage fail with `DeviceMissing`.
        return given.split(",")[first : first + count]
    return [str(number) for number in range(first, first + count)]


def evaluation_shard(world: ProcessWorld, pod: InferenceProcesses, device: Device) -> BatchShard:
    """Join the other processes that evaluate; return this one's share. StageError WORLD_SIZE."""
    if world.size != pod.processes:
        raise StageError(
            FailureClass.WORLD_SIZE,
            "WorldSizeMismatch",
            f"{world.size} processes run stage evaluate (started by {world.launcher}), and the plan has "
            f"{pod.processes} (processes of the evaluation in job.json).",
            "Start the stage with --with torchrun for several processes, and with --with process for one.",
        )
    if world.size == 1:
        return ALL_BATCHES
    import torch

    group = joined_group(world, pod, device)
    if not torch.distributed.is_initialized():
        # Answers are in host memory. The first process waits for the slowest one.
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    return BatchShard(world.rank // pod.tensor, pod.models, group)


# ------------------------------------------------------------------------------------------- layers on several devices


def placement(devices: int) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that place about equal shares of a model's layers on so many visible GPUs;
    none for one.
    """
    if devices == 1:
        return {}
    import torch

    free: dict[int | str, int] = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(devices)}
    # Without a limit for host memory, layers that do not fit would go to files; `refuse_host_memory` refuses both.
    return {"device_map": "balanced", "max_memory": {**free, "cpu": _NO_LIMIT}}


_NO_LIMIT = 1 << 60


def places(model: PreTrainedModel) -> set[str]:
    """Return the devices of a model's weights."""
    return {str(parameter.device) for parameter in cast(Any, model).parameters()}


def refuse_host_memory(model: PreTrainedModel) -> None:
    """Raise StageError OUT_OF_MEMORY `LayersDoNotFit` if layers of a placed model are in host memory, from where each
    pass would copy them to a GPU.
    """
    # Weights that are copied for each pass are on the device `meta` in between.
    outside = [name for name, weight in cast(Any, model).named_parameters() if weight.device.type != "cuda"]
    if outside:
        raise StageError(
            FailureClass.OUT_OF_MEMORY,
            "LayersDoNotFit",
            f"{len(outside)} weights of the model, {outside[0]} among them, do not fit the GPUs of this process.",
            "Use GPUs with more memory, or more of them a node, or leave the stage out. A trained model is kept.",
        )


def is_placed(model: torch.nn.Module) -> bool:
    """Return whether the model's layers are on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
