"""Nodes, devices, claims, Secrets, checkpoints and spot capacity of a job."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_operator.spec.types.field_types import (
    DATA_KEY_PATTERN,
    GPU_RESOURCE_PATTERN,
    Auto,
    Count,
    ObjectName,
    Quantity,
    SpecModel,
    Supported,
    Text,
    Uri,
)


class AcceleratorSpec(SpecModel):
    """Requested GPU."""

    product: Text | None = Field(
        default=None,
        description="GPU product, e.g. H100 or A100-80GB (full list: docs/hardware.md), or as a node label has it, "
        "e.g. NVIDIA-A100-SXM4-80GB. Pods are scheduled to nodes with this product. If unset, any GPU is "
        "used.",
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of one device, e.g. 80Gi, for plans made before a node is known; it does not select nodes. "
        "Defaults to the value of the nodes or of the product table, else to 15 GiB.",
    )
    resource: Annotated[str, StringConstraints(pattern=GPU_RESOURCE_PATTERN, max_length=253)] | None = Field(
        default=None,
        description="Extended resource that pods request, e.g. amd.com/gpu, or a MIG profile such as "
        "nvidia.com/mig-3g.40gb. Defaults to that of the operator's settings, usually nvidia.com/gpu.",
    )


class ElasticSpec(SpecModel):
    """Bounds of the number of nodes."""

    min_nodes: Count = Field(description="Minimum number of nodes. Required.")
    max_nodes: Count = Field(description="Maximum number of nodes. Required.")


class ResourcesSpec(SpecModel):
    """Resources of a job."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="Number of training nodes. Defaults to 1."
    )
    gpus_per_node: Auto | Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="Number of GPUs per node. auto: all GPUs of the machine, or none if it has none; only without a "
        "cluster. Defaults to 0: training on CPU.",
    )
    processes_per_node: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="Number of processes per node. Defaults to auto: one per GPU; on CPU 2 if the strategy distributes"
        " the training, else 1.",
    )
    cpu: Quantity | None = Field(
        default=None, description="CPU cores of each node's pod, e.g. 8 or 500m. If unset, none are requested."
    )
    memory: Quantity | None = Field(
        default=None, description="Memory of each node's pod, e.g. 64Gi. If unset, the plan decides."
    )
    shared_memory: Auto | Quantity = Field(
        default="auto", description="Size of /dev/shm, e.g. 8Gi. Defaults to auto: the plan decides."
    )
    accelerator: AcceleratorSpec = Field(
        default=AcceleratorSpec.model_construct(), description="GPU that the job requests. If unset, any GPU is used."
    )
    network: Literal["auto", "tcp", "rdma", "efa"] = Field(
        default="auto",
        description="Network between nodes with GPUs. rdma and efa: pods request its devices, and the training fails "
        "if NCCL does not use them; tcp: none. Defaults to auto: the devices that all nodes of the job "
        "advertise, else TCP.",
    )
    elastic: Annotated[ElasticSpec | None, Supported()] = Field(
        default=None, description="Elastic number of nodes. Not supported yet. If unset, the number of nodes is fixed."
    )


class StorageSpec(SpecModel):
    """Storage of results and caches in a cluster."""

    workspace: Annotated[Uri | None, Supported(schemes=("pvc",))] = Field(
        default=None,
        description="Claim for results, as pvc://claim; other schemes are not supported yet. If unset, the operator "
        "creates a claim.",
    )
    cache: Annotated[Uri | None, Supported(schemes=("pvc",))] = Field(
        default=None,
        description="Claim for downloads and prepared data, as pvc://claim; other schemes are not supported yet. "
        "Defaults to the workspace.",
    )
    size: Quantity = Field(default="100Gi", description="Size of a claim that the operator creates. Defaults to 100Gi.")
    storage_class_name: ObjectName | None = Field(
        default=None,
        description="Storage class of a claim that the operator creates. Defaults to that of the operator's settings, "
        "else to the cluster's default.",
    )
    retain: Literal["keep", "delete"] = Field(
        default="keep",
        description="What becomes of a claim that the operator creates, with all results in it, when the job is "
        "deleted: keep or delete. A claim that workspace names is always kept. Defaults to keep, as a time to live, "
        "a GitOps tool or `finetune restart` may delete a job, and its results took longer to make than the job.",
    )


class SecretKeySpec(SpecModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")
    key: Annotated[str, StringConstraints(pattern=DATA_KEY_PATTERN, max_length=253)] = Field(
        default="token", description="Key within the Secret. Defaults to token."
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
        description="Interval between checkpoints. Defaults to auto: once per epoch, and after 10 minutes of work "
        "without a checkpoint; less often if saving takes more than 3 % of the time.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Number of checkpoints to retain. Defaults to 3."
    )
    uri: Annotated[Uri | None, Supported()] = Field(
        default=None,
        description="Location for copies of the checkpoints. Not supported yet. If unset, they are stored in the "
        "workspace only.",
    )
    on_preemption: bool = Field(
        default=True, description="Whether to save a checkpoint when the pod is terminated. Defaults to true."
    )
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="Whether a new attempt resumes from the newest valid checkpoint: auto or never. Defaults to auto.",
    )
    after_success: Literal["auto", "keep"] = Field(
        default="auto",
        description="Retention after all stages have succeeded, when nothing reads the checkpoints any more. auto: "
        "they are deleted, and an event or `finetune run` reports their size; keep: they are retained. Checkpoints of "
        "a program of your own are always retained. Defaults to auto.",
    )
    signing_key: SecretKeySpec | None = Field(
        default=None,
        description="Secret key of at least 16 bytes that signs checkpoints; a job resumes only from signed ones. If "
        "unset, anyone with write access to the volume can replace a checkpoint unnoticed.",
    )


class SpotSpec(SpecModel):
    """Training on capacity that can be reclaimed. Applies to the train stage only; the others are short."""

    enabled: bool = Field(
        default=False,
        description="Whether to train on spot nodes, as defined in the operator's settings. Defaults to false.",
    )
    max_run_seconds: Count | None = Field(
        default=None,
        description="Maximum training time in seconds: the time in which all pods run, over all attempts. The job is "
        "then stopped with a checkpoint. If unset, there is no limit.",
    )
    max_wait_seconds: Count | None = Field(
        default=None,
        description="Maximum time in seconds from the start of the training, including restarts and the wait for "
        "nodes. If unset, there is no limit.",
    )
    fallback_to_on_demand: bool = Field(
        default=False,
        description="Whether to train on any nodes if no spot node is available within fallbackAfterSeconds of the "
        "operator's settings. Defaults to false: the job waits.",
    )


class SecretSpec(SpecModel):
    """A whole Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")


class SecretsSpec(SpecModel):
    """References to Secrets. No field takes a token in plain text."""

    hub_token: SecretKeySpec | None = Field(
        default=None, description="Secret key with the Hub token. If unset, only public models and data are accessible."
    )
    storage: SecretSpec | None = Field(
        default=None,
        description="Secret whose keys become environment variables of the trainer, e.g. for your own program. The "
        "schemes s3://, gs:// and az:// are not supported yet. Defaults to none.",
    )
