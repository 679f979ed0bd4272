"""Distribution of the model over devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_contract.choices import OffloadDevice, PipelineSchedule, Sharding
from finetune_operator.api.types.field_types import Auto, Count, FreeObject, SpecModel, StrategyChoice


class OffloadSpec(SpecModel):
    """State that is kept outside of device memory."""

    optimizer: OffloadDevice = Field(
        default="none",
        description="Where optimizer state lies: none, on the device; cpu, in host memory, with deepspeed from ZeRO "
        "stage 1 on; nvme, in files on the node's disk, with ZeRO stage 3. With fsdp it goes where parameters go. "
        "Default none.",
    )
    parameters: OffloadDevice = Field(
        default="none",
        description="Where parameters lie: none, on the device; cpu, in host memory, with ZeRO stage 3 or fsdp; nvme, "
        "in files on the node's disk, with ZeRO stage 3. Default none.",
    )
    activations: Literal["none", "cpu"] = Field(
        default="none",
        description="Where saved activations lie until the backward pass: none, on the device; cpu, in host memory, "
        "with any strategy. Default none.",
    )


class PipelineSpec(SpecModel):
    """Pipeline parallelism: the layers in stages on several processes, cut so that the dearest stage is as cheap as can
    be.
    """

    degree: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that the layers are spread over, a count. Default 1: none, unless auto has to.",
    )
    micro_batches: Auto | Count = Field(
        default="auto",
        description="Micro-batches of one pass of the schedule, a count; they divide those of a step. "
        "Default auto: all of a step. More of them leave less of the time idle, (degree - 1) / (microBatches + "
        "degree - 1).",
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="Order of the micro-batches: gpipe (all forward, then all backward), 1f1b (as short, with the "
        "activations of fewer micro-batches), interleaved (two stages a process, idle half as long). Default 1f1b.",
    )


class ParallelismSpec(SpecModel):
    """Distribution of the model over devices. What is asked for is in effect or an error, never replaced in silence."""

    strategy: StrategyChoice = Field(
        default="auto",
        description="single, ddp, fsdp or deepspeed. Default auto: the cheapest that fits the memory; where none does, "
        "ddp with the smallest tensor and pipeline degrees that fit, or rows of text in slices.",
    )
    zero_stage: Auto | Annotated[int, Field(ge=0, le=3)] = Field(
        default="auto",
        description="DeepSpeed ZeRO stage, 0 to 3. Default auto: the lowest that fits. Needs "
        "strategy deepspeed or auto.",
    )
    sharding: Sharding = Field(
        default="full",
        description="What fsdp divides: full, all state over all processes; grad-op, gradients and optimizer state, "
        "while parameters stay gathered between forward and backward pass; hybrid, all state inside a node, with a "
        "copy on each node. Default full. Needs strategy fsdp.",
    )
    offload: OffloadSpec = Field(
        default=OffloadSpec(),
        description="Of state needs strategy deepspeed or fsdp. Left out: nothing is offloaded unless auto has to.",
    )
    tensor: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that each layer is split over, by the plan that transformers has for the model; a count "
        "that divides its attention and key-value heads and feed-forward width. Default 1: none, unless auto has to.",
    )
    pipeline: PipelineSpec = Field(default=PipelineSpec(), description="Left out: no pipeline.")
    sequence: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that the tokens of a row are divided among, a count that divides the model's attention "
        "and key-value heads, which they exchange for tokens: for rows whose activations are too large for one "
        "process. Needs task text-generation. Default 1: none, unless auto has to.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = Field(
        default="auto",
        description="Recompute activations in the backward pass to save memory: full, all of each block; selective, "
        "all but the results of matrix products and fused attention; none. Default auto: none, or full when needed.",
    )
    placement: Annotated[str, StringConstraints(pattern=r"^(cluster|spread|[DPT]{1,3})$", max_length=7)] = Field(
        default="cluster",
        description="Which ranks are neighbours: cluster (DPT) keeps the tensor- and pipeline-parallel ranks of a "
        "replica together, on one node where they fit, spread (PTD) puts them apart, or the order of D, P and T in the "
        "device mesh, that of neighbouring ranks last. Default cluster.",
    )
    deepspeed_config: FreeObject = Field(
        default={},
        description="Merged last into the DeepSpeed configuration; needs strategy deepspeed, and unknown keys "
        "are an error. Left out: nothing.",
    )

    @property
    def model_ranks(self) -> int:
        """Processes that hold one replica of the model together by tensor and pipeline parallelism."""
        return self.tensor * self.pipeline.degree

    @property
    def replica_ranks(self) -> int:
        """Processes that read the same rows: those that hold a replica of the model, or slices of the rows."""
        return self.model_ranks * self.sequence
