"""The DeepSpeed configuration of a plan: a model dump with every number decided, never `auto`.

`auto` would be filled by transformers at start-up, out of the sight of the plan. Numbers that transformers knows too
are the same numbers, as it compares them and refuses a difference. The user's own keys, which the plan has checked, are
merged last.

There is no `steps_per_print`, as accelerate replaces it with infinity, whatever it is. There is no `optimizer` section,
with offload either: accelerate turns the Trainer's AdamW into DeepSpeed's CPU Adam and keeps its parameter groups,
while an optimizer made by DeepSpeed would decay biases and norms as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from finetune_contract.choices import Device, OffloadDevice, ZeroStage
from finetune_contract.trainer_job import World
from finetune_operator.planning.adapter_sizes import trained_parameters
from finetune_operator.planning.memory import (
    NVME_OPTIMIZER_BUFFERS,
    NVME_PARAMETER_BUFFERS,
    NVME_SUB_GROUP_ELEMENTS,
    PREFETCH_BUCKET_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    largest_layer,
    nvme_buffer_elements,
    overlaps_communication,
    reduce_bucket_elements,
)
from finetune_operator.planning.plan_types import JobPlan
from finetune_operator.rendering.merging import merge

OFFLOAD_FOLDER = "/offload"
"""Where pods mount the volume for files of offloaded state."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Enabled(_Section):
    """A section that is only switched on or off."""

    enabled: bool


class OffloadOptimizer(_Section):
    """Where optimizer state lies."""

    device: OffloadDevice
    pin_memory: bool
    """Page-locked host memory copies faster to a GPU; on CPU nothing is copied."""
    nvme_path: str | None = None
    """Folder of the files; None without files, and where the trainer takes one of the job's own."""
    buffer_count: int | None = None


class OffloadParameters(OffloadOptimizer):
    """Where parameters lie."""

    buffer_size: int | None = None
    """Elements."""
    max_in_cpu: int | None = None
    """Elements that stay in host memory in spite of `nvme`; DeepSpeed's default is 10^9, which for most models is all
    of them.
    """


class ZeroOptimization(_Section):
    """What is divided over the ranks."""

    stage: ZeroStage
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParameters | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_bucket_size: int | None = None
    """Elements, as all sizes here."""
    allgather_bucket_size: int | None = None
    sub_group_size: int | None = None
    stage3_prefetch_bucket_size: int | None = None
    stage3_param_persistence_threshold: int | None = None
    stage3_max_live_parameters: int | None = None
    stage3_max_reuse_distance: int | None = None
    stage3_gather_16bit_weights_on_model_save: bool | None = None


class DeepSpeedConfig(_Section):
    """The keys that a plan decides."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    bf16: Enabled
    fp16: Enabled
    zero_optimization: ZeroOptimization
    zero_allow_untested_optimizer: Literal[True] = True
    """DeepSpeed calls every optimizer but its own and Adam untested; Adafactor and SGD are element- or matrix-wise and
    work.
    """
    wall_clock_breakdown: bool = False


def deepspeed_config(plan: JobPlan) -> dict[str, JsonValue] | None:
    """The whole configuration of `plan`, the user's keys merged last; None when it does not train with DeepSpeed."""
    training = plan.trainer.training
    if training is None or training.strategy.name != "deepspeed":
        return None
    config = DeepSpeedConfig(
        # DeepSpeed multiplies by all processes: it does not know that some read the same rows.
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
    # DeepSpeed's defaults keep up to 10^9 parameters gathered, which for most models is all of them: then stage 3
    # saves nothing.
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
    """Where files of offloaded state go: in pods a volume, else a folder of the job that the trainer knows."""
    return None if plan.launcher == "local" else OFFLOAD_FOLDER


def uses_offload_folder(config: Mapping[str, JsonValue]) -> bool:
    """Whether a DeepSpeed configuration writes to the pods' own volume: the user's keys may name another place."""
    zero = config.get("zero_optimization")
    sections = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    return any(isinstance(each, dict) and each.get("nvme_path") == OFFLOAD_FOLDER for each in sections)
