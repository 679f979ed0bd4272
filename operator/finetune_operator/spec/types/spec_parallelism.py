"""Distribution of the model over devices."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_contract.choices import OffloadDevice, PipelineSchedule, Sharding
from finetune_operator.spec.types.field_types import (
    PLACEMENT_PATTERN,
    Auto,
    Count,
    FreeObject,
    SpecModel,
    StrategyChoice,
)


class OffloadSpec(SpecModel):
    """State that is kept outside of device memory."""

    optimizer: OffloadDevice = Field(
        default="none",
        description="Location of the optimizer state. none: on the device; cpu: in host memory, needs deepspeed with "
        "ZeRO stage 1 or higher; nvme: in files on the node's disk, needs ZeRO stage 3. With fsdp it "
        "follows the parameters. Defaults to none.",
    )
    parameters: OffloadDevice = Field(
        default="none",
        description="Location of the parameters. none: on the device; cpu: in host memory, needs ZeRO stage 3 or fsdp;"
        " nvme: in files on the node's disk, needs ZeRO stage 3. Defaults to none.",
    )
    activations: Literal["none", "cpu"] = Field(
        default="none",
        description="Location of saved activations until the backward pass. none: on the device; cpu: in host memory, "
        "with any strategy. Defaults to none.",
    )


class PipelineSpec(SpecModel):
    """Pipeline parallelism: layers in stages on several processes, split for the fastest slowest stage."""

    degree: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Pipeline-parallel degree: the processes that the layers are spread over, a count. Defaults to 1: "
        "no pipeline, unless strategy auto needs one.",
    )
    micro_batches: Auto | Count = Field(
        default="auto",
        description="Micro-batches per pass of the schedule, a count; must divide the micro-batches of a step. More of"
        " them reduce the idle share, (degree - 1) / (microBatches + degree - 1). Defaults to auto: all "
        "micro-batches of a step.",
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="Order of the micro-batches. gpipe: all forward, then all backward; 1f1b: equally fast, with fewer "
        "activations in memory; interleaved: two stages per process, half the idle time. Defaults to 1f1b.",
    )


class ParallelismSpec(SpecModel):
    """Distribution of the model over devices. A setting takes effect or is an error; it is never replaced silently."""

    strategy: StrategyChoice = Field(
        default="auto",
        description="Parallelism strategy: single, ddp, fsdp or deepspeed. Defaults to auto: the cheapest that fits "
        "the memory; if none fits, ddp or fsdp with the smallest tensor and pipeline degrees that fit, or "
        "with rows of text divided among processes.",
    )
    zero_stage: Auto | Annotated[int, Field(ge=0, le=3)] = Field(
        default="auto",
        description="ZeRO stage, 0 to 3, of strategy deepspeed or auto. With tensor or pipeline parallelism 1, of "
        "strategy ddp or auto: the replicas divide the optimizer state. Defaults to auto: the lowest stage that fits.",
    )
    sharding: Sharding = Field(
        default="full",
        description="State that fsdp shards. full: all state over all processes; grad-op: gradients and optimizer "
        "state, while parameters stay gathered between the forward and backward pass; hybrid: all state "
        "within a node, with a replica on each node. With tensor or pipeline parallelism full and grad-op shard "
        "over the replicas. Needs strategy fsdp. Defaults to full.",
    )
    offload: OffloadSpec = Field(
        default=OffloadSpec.model_construct(),
        description="State outside of device memory. Offload of optimizer state and parameters needs strategy "
        "deepspeed or fsdp. If unset, nothing is offloaded unless strategy auto needs it.",
    )
    tensor: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Tensor-parallel degree: the processes that each layer is sharded over, by the model's plan in "
        "transformers, a count. Must divide its attention heads, key-value heads and feed-forward width. Defaults"
        " to 1: no tensor parallelism, unless strategy auto needs it.",
    )
    pipeline: PipelineSpec = Field(
        default=PipelineSpec.model_construct(), description="Pipeline parallelism. If unset, there is no pipeline."
    )
    sequence: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Sequence-parallel degree: the processes that share the tokens of a row, a count, for rows whose "
        "activations exceed the memory of one process. Must divide the model's attention and key-value heads, "
        "which they exchange for tokens. Needs task text-generation. Defaults to 1: no sequence parallelism, "
        "unless strategy auto needs it.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = Field(
        default="auto",
        description="Recomputation of activations in the backward pass, to save memory. full: all of each block; "
        "selective: all but the results of matrix products and fused attention; none: nothing. Defaults to"
        " auto: none, or full if memory needs it.",
    )
    placement: Annotated[str, StringConstraints(pattern=PLACEMENT_PATTERN, max_length=7)] = Field(
        default="cluster",
        description="Placement of ranks. cluster (DPT): the tensor- and pipeline-parallel ranks of a replica are "
        "neighbours, on one node if they fit; spread (PTD): they are apart. Or the order of D, P and T in "
        "the device mesh, neighbouring ranks last. Defaults to cluster.",
    )
    deepspeed_config: FreeObject = Field(
        default={},
        description="Overrides, merged last into the DeepSpeed configuration; unknown keys are an error. Needs "
        "strategy deepspeed. If unset, nothing is overridden.",
    )

    @property
    def model_ranks(self) -> int:
        """Processes that hold one replica of the model together by tensor and pipeline parallelism."""
        return self.tensor * self.pipeline.degree

    @property
    def replica_ranks(self) -> int:
        """Processes that read the same rows: those that hold a replica of the model, or slices of the rows."""
        return self.model_ranks * self.sequence
