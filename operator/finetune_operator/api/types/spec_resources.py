"""Nodes, devices, claims, Secrets, checkpoints and spot capacity of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.types.field_types import (
    DATA_KEY_PATTERN,
    GPU_RESOURCE_PATTERN,
    Auto,
    Count,
    ObjectName,
    Quantity,
    SpecModel,
    Text,
    Uri,
)


class AcceleratorSpec(SpecModel):
    """The GPU to ask for."""

    product: Text | None = Field(
        default=None,
        description="Product by its name, e.g. H100 or A100-80GB (all: docs/hardware.md), or as a node label has it, "
        "e.g. NVIDIA-A100-SXM4-80GB. Pods go to nodes with it. Left out: any.",
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of one device, e.g. 80Gi, for plans made before a node is known; it chooses no node. "
        "Left out: what nodes or tables say of the product, or else 15 GiB.",
    )
    resource: Annotated[str, StringConstraints(pattern=GPU_RESOURCE_PATTERN, max_length=253)] | None = Field(
        default=None,
        description="Resource by which pods ask for the devices: a MIG profile such as nvidia.com/mig-3g.40gb, or "
        "amd.com/gpu. Left out: that of the operator's settings, usually nvidia.com/gpu.",
    )


class ElasticSpec(SpecModel):
    """Bounds between which the number of nodes may change."""

    min_nodes: Count = Field(description="Fewest nodes, a count. Required.")
    max_nodes: Count = Field(description="Most nodes, a count. Required.")


class ResourcesSpec(SpecModel):
    """Resources of a job."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="Nodes for training, a count. Default 1."
    )
    gpus_per_node: Auto | Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="GPUs on each node. Default 0: CPU training. auto: those of the machine, or none "
        "when it has none; only "
        "without a cluster.",
    )
    processes_per_node: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="Processes on each node. Default auto: one a GPU; on CPU 2 when the strategy spreads, else 1.",
    )
    cpu: Quantity | None = Field(
        default=None, description="CPU cores of one node's pod, e.g. 8 or 500m. Left out: no request."
    )
    memory: Quantity | None = Field(
        default=None, description="Memory of one node's pod, e.g. 64Gi. Left out: from the plan."
    )
    shared_memory: Auto | Quantity = Field(
        default="auto", description="Size of /dev/shm, e.g. 8Gi. Default auto: from the plan."
    )
    accelerator: AcceleratorSpec = Field(default=AcceleratorSpec(), description="Left out: any GPU.")
    network: Literal["auto", "tcp", "rdma", "efa"] = Field(
        default="auto",
        description="Network between nodes. With rdma or efa, pods ask for its devices. Default auto: no devices, and "
        "NCCL looks for a network itself.",
    )
    elastic: ElasticSpec | None = Field(
        default=None, description="Not supported yet. Left out: the number of nodes is fixed."
    )


class StorageSpec(SpecModel):
    """Storage of results and caches in a cluster."""

    workspace: Uri | None = Field(
        default=None,
        description="Claim for results, pvc://claim; other schemes are not supported yet. Left out: a new claim.",
    )
    cache: Uri | None = Field(
        default=None,
        description="Claim for downloads and prepared data, pvc://claim; other schemes are not supported yet. "
        "Left out: the workspace.",
    )
    size: Quantity = Field(default="100Gi", description="Size of a claim that the operator makes. Default 100Gi.")
    storage_class_name: ObjectName | None = Field(
        default=None, description="Class of that claim. Left out: the cluster's default."
    )


class SecretKeySpec(SpecModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")
    key: Annotated[str, StringConstraints(pattern=DATA_KEY_PATTERN, max_length=253)] = Field(
        default="token", description="Key in it. Default token."
    )


class CheckpointEverySpec(SpecModel):
    """Interval of checkpoints; exactly one of the two."""

    steps: Count | None = Field(default=None, description="Optimizer steps between two checkpoints, a count.")
    minutes: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None, description="Minutes between two checkpoints."
    )


class CheckpointsSpec(SpecModel):
    """Saved states of the training."""

    every: Auto | CheckpointEverySpec = Field(
        default="auto",
        description="Interval. Default auto: once an epoch and after each 10 minutes of work without one; later where "
        "saving would take more than 3 % of the time.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Checkpoints that stay, a count. Default 3."
    )
    uri: Uri | None = Field(
        default=None, description="Copy of the checkpoints. Not supported yet. Left out: the workspace only."
    )
    on_preemption: bool = Field(default=True, description="Save when the pod is told to stop. Default true.")
    resume: Literal["auto", "never"] = Field(
        default="auto", description="Whether a new attempt continues from the newest good checkpoint. Default auto."
    )
    after_success: Literal["auto", "keep"] = Field(
        default="auto",
        description="What becomes of the checkpoints once all stages have succeeded. Default auto: `finetune run` "
        "deletes them and says so, in a cluster they stay. keep: they stay.",
    )
    signing_key: SecretKeySpec | None = Field(
        default=None,
        description="Secret with a key of 16 bytes or more that checkpoints are signed with; only signed ones are "
        "continued from. Left out: whoever can write to the volume can replace a checkpoint unseen.",
    )


class SpotSpec(SpecModel):
    """Training on capacity that can be taken away. It concerns the train stage; the others are short."""

    enabled: bool = Field(
        default=False, description="Train on spot nodes, as the operator's settings name them. Default false."
    )
    max_run_seconds: Count | None = Field(
        default=None,
        description="Longest training time in seconds: the time in which all pods ran, over all attempts. Then the job "
        "is stopped with a checkpoint. Left out: no bound.",
    )
    max_wait_seconds: Count | None = Field(
        default=None,
        description="Longest time in seconds from the start of the training, waiting for nodes and restarts included. "
        "Left out: no bound.",
    )
    fallback_to_on_demand: bool = Field(
        default=False,
        description="Train on any nodes when no spot node is to be had for as long as the operator's settings say. "
        "Default false: wait.",
    )


class SecretSpec(SpecModel):
    """A whole Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")


class SecretsSpec(SpecModel):
    """References to Secrets. No field takes a token in plain text."""

    hub_token: SecretKeySpec | None = Field(
        default=None, description="Hub token. Left out: only public models and data."
    )
    storage: SecretSpec | None = Field(
        default=None,
        description="Secret whose keys become environment variables of the trainer, e.g. for a program of yours. The "
        "schemes s3://, gs:// and az:// are not supported yet. Left out: none.",
    )
