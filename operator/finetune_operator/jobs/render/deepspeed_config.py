"""DeepSpeed configuration of a plan: a model dump with every number decided, never `auto`.

transformers would resolve `auto` at start-up, invisibly to the plan. Numbers that transformers has too are equal, as it
compares them and refuses a difference. The user's own keys, which the plan has checked, are merged last.

There is no `steps_per_print`, as accelerate always replaces it with infinity. There is no `optimizer` section, not even
with offload: accelerate turns the Trainer's AdamW into DeepSpeed's CPU Adam and keeps its parameter groups, while an
optimizer created by DeepSpeed would decay biases and norms as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from finetune_contract.choices import Device, OffloadDevice, ZeroStage
from finetune_contract.trainer_job import World
from finetune_operator.jobs.render.merging import merge
from finetune_operator.plan.memory.adapter_sizes import trained_parameters
from finetune_operator.plan.memory.exchange_memory import (
    PREFETCH_BUCKET_ELEMENTS,
    overlaps_communication,
    reduce_bucket_elements,
)
from finetune_operator.plan.memory.memory_workload import largest_layer
from finetune_operator.plan.memory.state_memory import (
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAMETER_BUFFERS,
    NVME_SUB_GROUP_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    nvme_buffer_elements,
)
from finetune_operator.plan.types.plan_types import JobPlan

OFFLOAD_FOLDER = "/offload"
"""Mount path of the volume for files of offloaded state."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Enabled(_Section):
    """Section with a switch only."""

    enabled: bool


class OffloadOptimizer(_Section):
    """Placement of optimizer state."""

    device: OffloadDevice
    pin_memory: bool
    """True on GPUs: page-locked host memory copies faster to them. On CPU nothing is copied."""
    nvme_path: str | None = None
    """Folder of the files; None without files, or if the trainer uses a folder of the job."""
    buffer_count: int | None = None


class OffloadParameters(OffloadOptimizer):
    """Placement of parameters."""

    buffer_size: int | None = None
    """Elements."""
    max_in_cpu: int | None = None
    """Elements kept in host memory in spite of `nvme`; DeepSpeed's default, 10^9, is all of them for most models."""


class ZeroOptimization(_Section):
    """ZeRO stage, and the sizes and places of the sharded state."""

    stage: ZeroStage
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParameters | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_bucket_size: int | None = None
    """Size in elements, as all sizes here."""
    allgather_bucket_size: int | None = None
    sub_group_size: int | None = None
    stage3_prefetch_bucket_size: int | None = None
    stage3_param_persistence_threshold: int | None = None
    stage3_max_live_parameters: int | None = None
    stage3_max_reuse_distance: int | None = None
    stage3_gather_16bit_weights_on_model_save: bool | None = None


class DeepSpeedConfig(_Section):
    """Keys that a plan decides."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    bf16: Enabled
    fp16: Enabled
    zero_optimization: ZeroOptimization
    zero_allow_untested_optimizer: Literal[True] = True
    """True, as DeepSpeed calls all optimizers but its own and Adam untested; Adafactor and SGD work, since they are
    element- or matrix-wise.
    """
    wall_clock_breakdown: bool = False


def deepspeed_config(plan: JobPlan) -> dict[str, JsonValue] | None:
    """Return the configuration of `plan`, the user's keys merged last; None if it does not train with DeepSpeed."""
    training = plan.trainer.training
    if training is None or training.strategy.name != "deepspeed":
        return None
    config = DeepSpeedConfig(
        # DeepSpeed multiplies by all processes, including those that read the same rows (sequence parallelism).
        train_batch_size=training.batch.global_batch_size * training.strategy.sequence,
        train_micro_batch_size_per_gpu=training.batch.micro_batch_size,
        gradient_accumulation_steps=training.batch.gradient_accumulation,
        gradient_clipping=training.max_grad_norm,
        bf16=Enabled(enabled=training.precision == "bf16"),
        fp16=Enabled(enabled=training.precision == "fp16"),
        zero_optimization=_zero(plan),
    )
    return merge(config.model_dump(mode="json", exclude_none=True), plan.deepspeed_overrides)


def _zero(plan: JobPlan) -> ZeroOptimization:
    assert plan.trainer.training is not None
    training, model = plan.trainer.training, plan.model
    strategy, device = training.strategy, training.world.device
    stage = strategy.zero_stage or 0
    if stage == 0:
        return ZeroOptimization(stage=0)
    bucket = reduce_bucket_elements(trained_parameters(model, training.adapter).trained)
    shared = ZeroOptimization(
        stage=stage,
        offload_optimizer=_offload_optimizer(plan, strategy.offload_optimizer, device),
        overlap_comm=overlaps_communication(device),
        contiguous_gradients=True,
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
    )
    if stage < 3:
        return shared
    # DeepSpeed's defaults keep up to 10^9 parameters gathered: all of them for most models, so stage 3 saves nothing.
    return shared.model_copy(
        update={
            "offload_param": _offload_parameters(plan, strategy.offload_parameters, training.world),
            "sub_group_size": NVME_SUB_GROUP_ELEMENTS if strategy.offload_optimizer == "nvme" else SUB_GROUP_ELEMENTS,
            "stage3_prefetch_bucket_size": min(model.parameters, PREFETCH_BUCKET_ELEMENTS),
            "stage3_param_persistence_threshold": 10 * model.hidden_size,
            "stage3_max_live_parameters": 2 * largest_layer(model),
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    )


def _offload_optimizer(plan: JobPlan, where: OffloadDevice, device: Device) -> OffloadOptimizer | None:
    if where == "none":
        return None
    files = {"nvme_path": _folder(plan), "buffer_count": NVME_OPTIMIZER_BUFFERS} if where == "nvme" else {}
    return OffloadOptimizer.model_validate({"device": where, "pin_memory": device == "cuda", **files})


def _offload_parameters(plan: JobPlan, where: OffloadDevice, world: World) -> OffloadParameters | None:
    if where == "none":
        return None
    files: dict[str, object] = {}
    if where == "nvme":
        files = {
            "nvme_path": _folder(plan),
            "buffer_count": NVME_PARAMETER_BUFFERS,
            "buffer_size": nvme_buffer_elements(plan.model, world.size),
            "max_in_cpu": 0,
        }
    return OffloadParameters.model_validate({"device": where, "pin_memory": world.device == "cuda", **files})


def _folder(plan: JobPlan) -> str | None:
    """Return the folder of offloaded state: a volume in pods; None on this machine, where the trainer has a folder."""
    return None if plan.launcher == "local" else OFFLOAD_FOLDER


def uses_offload_folder(config: Mapping[str, JsonValue]) -> bool:
    """Return whether a DeepSpeed configuration uses the pods' own volume; the user's keys may name another path."""
    zero = config.get("zero_optimization")
    sections = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    return any(isinstance(section, dict) and section.get("nvme_path") == OFFLOAD_FOLDER for section in sections)
