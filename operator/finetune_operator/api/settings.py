"""Administrator's settings for all jobs: allow-lists and prices.

A cluster's operator reads them from one YAML file, which `settings_check` checks; the `finetune` command without a
cluster uses `LOCAL_SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, StringConstraints

from finetune_operator.api.network_types import EgressRule, Peer, Port
from finetune_operator.api.pod_types import Toleration
from finetune_operator.api.types import (
    CURRENCY_PATTERN,
    HTTPS_PATTERN,
    Count,
    DnsLabel,
    Image,
    NonNegative,
    ObjectName,
    Quantity,
    RunPolicySpec,
    Scheme,
    SecretSpec,
    SpecModel,
    Text,
)

TRAINER_IMAGE = "finetune-trainer:0.1.0"
"""Name and tag of the trainer image that `images/` builds; an installation sets its registry in the settings."""
OPERATOR_IMAGE = "finetune-operator:0.1.0"
"""Name and tag of the operator image, which the manifests and the chart install."""

CLUSTER_SCHEMES: tuple[Scheme, ...] = ("hf", "s3", "gs", "az", "pvc")
"""Schemes for a cluster. `file` and `pkg` name data on the machine that runs the job: in a cluster that is a pod, where
they mean nothing.
"""


class Price(SpecModel):
    """Price of one hour of one node."""

    product: Text = Field(description="GPU product as in accelerator.product; cpu for a node without GPUs.")
    gpus: int = Field(ge=0, description="GPUs on the node, a count.")
    per_hour: float = Field(ge=0, description="Price of the node for one hour, in `currency`.")
    spot_per_hour: float | None = Field(
        default=None, ge=0, description="The same on spot capacity. Left out: not offered."
    )


LabelKey: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317)
]
ResourceName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[-a-z0-9.]+/[-A-Za-z0-9_.]+$", max_length=253)]


class HardwareLabel(SpecModel):
    """A node label that tells of a product."""

    key: LabelKey = Field(description="Key, e.g. nvidia.com/gpu.product. Required.")
    values: Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)] = Field(
        description="Values that nodes with the product have. Required."
    )


class HardwareRow(SpecModel):
    """A GPU that the built-in table lacks, or what differs from it."""

    name: Text = Field(
        description="Product, e.g. RTX-6000. One of the built-in table: the fields that are given take the place of "
        "its own. Required."
    )
    aliases: Annotated[tuple[Text, ...], Field(max_length=64)] = Field(
        default=(), description="Other names that jobs, prices and node labels have for it. Left out: none."
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of one as the driver reports it, e.g. 48Gi. Left out for a product that the built-in table "
        "lacks: 15 GiB are assumed.",
    )
    capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = Field(
        default=None,
        description="CUDA compute capability, e.g. 8.9: bf16 from 8.0, fp8 from 8.9, fp16 with a scaled loss from 7.0. "
        "Left out: bf16 and no fp8, unless precisions says otherwise.",
    )
    precisions: Annotated[tuple[Literal["bf16", "fp16", "fp8"], ...], Field(max_length=3)] | None = Field(
        default=None, description="Precisions that it has units for, in place of what capability says."
    )
    half_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Dense peak in bf16, in 10^12 operations a second. Left out: no times are estimated for it.",
    )
    fp32_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Peak in plain fp32, likewise. Left out: no times are estimated in fp32."
    )
    link_gigabytes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="What one sends to the others of its node, in 10^9 bytes a second and direction. Left out: not "
        "known.",
    )
    memory_gigabytes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Bandwidth of its memory, in 10^9 bytes a second. Left out: passes and optimizer steps are counted "
        "without the time that memory takes.",
    )
    network_gigabytes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Share of one GPU in the network of its node, in 10^9 bytes a second and direction: 50 for 400 "
        "Gbit/s a GPU. Left out: 100 Gbit/s for 8 GPUs, or the figure of the built-in table.",
    )
    host_gigabytes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Bandwidth between a GPU and host memory, in 10^9 bytes a second and direction. Left out: 16, or "
        "the figure of the built-in table.",
    )
    labels: Annotated[tuple[HardwareLabel, ...], Field(max_length=16)] = Field(
        default=(), description="Labels of nodes with it; pods go to nodes that have one of them. Left out: none."
    )
    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Price of one GPU for one hour, in `currency`, for nodes that prices has no row for. Left out: "
        "none.",
    )
    spot_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="The same on spot capacity. Left out: not offered."
    )


NODE_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "node.kubernetes.io/instance-type",
)


class Nodes(SpecModel):
    """Sources of the facts about the GPUs of nodes."""

    read: bool = Field(
        default=True,
        description="Whether it reads nodes, which is a right in the cluster: plans then rest on what nodes with the "
        "job's labels have. Default true; the chart with watchNamespaces says false, unless rbac.nodes is true.",
    )
    product_labels: Annotated[tuple[LabelKey, ...], Field(max_length=16)] = Field(
        default=NODE_LABELS,
        description="Labels that name a node's product; the first that a node has, and whose value is known, counts. "
        "Default: those of GPU feature discovery, AMD's node labeller, GKE, Karpenter and cloud instance types.",
    )


class Defaults(SpecModel):
    """Defaults of jobs."""

    image: Image = Field(default=TRAINER_IMAGE, description="Trainer image of jobs that name none.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled. Left out: Kubernetes' default."
    )
    image_pull_secrets: tuple[SecretSpec, ...] = Field(
        default=(), description="Secrets for pulling images, which have to be in the job's namespace. Left out: none."
    )
    storage_class_name: ObjectName | None = Field(
        default=None, description="Class of claims that are made for jobs. Left out: the cluster's default."
    )
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"], ...] | None = Field(
        default=None,
        description="Access modes of those claims. Left out: ReadWriteMany for jobs of several nodes, or of "
        "several pods that prepare, else ReadWriteOnce.",
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="Priority class of pods. Left out: the cluster's default."
    )
    ttl_seconds_after_finished: NonNegative | None = Field(
        default=None, description="Seconds after its end until a job is deleted. Left out: it stays."
    )
    termination_grace_seconds: Annotated[int, Field(ge=1, le=86_400)] = Field(
        default=120, description="Seconds that a pod has to save a checkpoint when it is told to stop. Default 120."
    )
    gpu_resource: ResourceName = Field(
        default="nvidia.com/gpu",
        description="Resource by which pods ask for GPUs, for jobs without accelerator.resource, e.g. amd.com/gpu. "
        "Default nvidia.com/gpu.",
    )
    rdma_resource: ResourceName = Field(
        default="rdma/ib",
        description="Device that pods of jobs with resources.network rdma ask for, as the nodes' device plugin names "
        "it. Default rdma/ib.",
    )
    efa_interfaces: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="EFA interfaces of a pod of jobs with resources.network efa, a count. Default 1."
    )


class Limits(SpecModel):
    """Limits of the operator's patience with troubles that may pass by themselves."""

    image_pull_seconds: Count = Field(
        default=600, description="Until a job whose image cannot be pulled has failed. Default 600."
    )
    container_config_seconds: Count = Field(
        default=120,
        description="Until a job whose container cannot be made (a missing Secret) has failed. Default 120.",
    )
    unschedulable_seconds: Count | None = Field(
        default=None, description="Until a job whose pods find no node has failed. Left out: it waits, and says so."
    )
    gang_seconds: Annotated[int, Field(ge=0, le=1500)] = Field(
        default=900,
        description="Until a training some of whose pods hold nodes while others find none is stopped and leaves them; "
        "it starts again later, which counts as no restart. Below the 1800 s after which its processes would give up. "
        "0: never. Default 900.",
    )
    progress_seconds: NonNegative = Field(
        default=1800,
        description="Until an attempt that has reported progress and shows none any more is stopped and starts again, "
        "for jobs without runPolicy.progressDeadlineSeconds. 0: never. Default 1800.",
    )
    restart_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=10, description="Delay before the first restart; it doubles with each failure in a row. Default 10."
    )
    free_restarts: Count = Field(
        default=50,
        description="Restarts of one stage that are free of charge within freeRestartsSeconds, a count. Later ones "
        "count against runPolicy.maxRestarts, as does one for which nothing shows that the infrastructure did it and "
        "which came no further than those before. Default 50.",
    )
    free_restarts_seconds: Count = Field(default=86_400, description="See freeRestarts. Default 86400, a day.")
    restart_delay_most_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=300, description="Longest delay before a restart. Default 300."
    )


ProgressTokens: TypeAlias = Literal["review", "keys"]


class Progress(SpecModel):
    """Progress reports of pods to the operator."""

    enabled: bool = Field(default=True, description="Whether they do. Default true.")
    url: Annotated[str, StringConstraints(pattern=HTTPS_PATTERN, max_length=1024)] | None = Field(
        default=None,
        description="Address of the progress server as pods see it, https://host:port. Left out: the operator's "
        "Service finetune-operator-progress in its own namespace.",
    )
    tokens: ProgressTokens = Field(
        default="review",
        description="How the operator knows whose token a report carries. review: it asks the API server for a "
        "TokenReview, which is a right in the cluster. keys: it verifies the token by the API server's public keys, "
        "which every service account may read. Default review; the chart with watchNamespaces says keys, unless "
        "rbac.tokenReview is true.",
    )
    status_seconds: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        default=5, description="Least time between two writes of one job's progress into its status. Default 5."
    )


def _pods_in(namespace: str) -> Peer:
    return Peer.model_validate({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}})


RESOLVERS = (
    _pods_in("kube-system"),
    _pods_in("openshift-dns"),
    Peer.model_validate({"ipBlock": {"cidr": "169.254.20.10/32"}}),
)


class Network(SpecModel):
    """Network access of the pods of jobs: each job gets its own NetworkPolicy."""

    enabled: bool = Field(default=True, description="Whether jobs get one. Default true.")
    egress_ports: Annotated[tuple[Port, ...], Field(max_length=64)] = Field(
        default=(443,),
        description="TCP ports at which pods reach any address, for the Hub, object stores and proxies. Default 443.",
    )
    dns: Annotated[tuple[Peer, ...], Field(max_length=16)] = Field(
        default=RESOLVERS,
        description="Resolvers, which pods reach at ports 53 and 5353, as peers of Kubernetes' NetworkPolicy. Where "
        "nodes resolve names themselves, as with Cloud DNS for GKE (169.254.169.254/32), name their addresses. "
        "Default: pods in kube-system and openshift-dns, and NodeLocal DNSCache.",
    )
    extra_egress: Annotated[tuple[EgressRule, ...], Field(max_length=64)] = Field(
        default=(),
        description="Further rules as Kubernetes' NetworkPolicy has them, e.g. an object store in the cluster. Left "
        "out: none.",
    )


SPOT_NODES: tuple[dict[str, str], ...] = (
    {"eks.amazonaws.com/capacityType": "SPOT"},
    {"karpenter.sh/capacity-type": "spot"},
    {"cloud.google.com/gke-spot": "true"},
    {"kubernetes.azure.com/scalesetpriority": "spot"},
)
"""Labels that EKS' managed node groups, Karpenter (also in EKS' Auto Mode and AKS' node auto-provisioning), GKE and AKS
set by themselves.
"""
SPOT_TOLERATIONS = (
    Toleration(key="cloud.google.com/gke-spot", operator="Equal", value="true", effect="NoSchedule"),
    Toleration(key="kubernetes.azure.com/scalesetpriority", operator="Equal", value="spot", effect="NoSchedule"),
)
"""Tolerations of the taints that GKE (Autopilot and auto-provisioned pools) and AKS set; EKS and Karpenter set none."""


class Spot(SpecModel):
    """Labels of spot nodes, and the patience of jobs with spec.spot."""

    nodes: Annotated[
        tuple[Annotated[dict[str, str], Field(max_length=16)], ...], Field(min_length=1, max_length=16)
    ] = Field(
        default=SPOT_NODES,
        description="Labels of spot nodes: a node that has all labels of one of the items is one. Default: as EKS, "
        "Karpenter, GKE and AKS label theirs.",
    )
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = Field(
        default=SPOT_TOLERATIONS,
        description="Taints of spot nodes that pods bear. Default: those of GKE and AKS.",
    )
    fallback_after_seconds: Count = Field(
        default=600,
        description="How long a pod waits for a spot node until the training of a job with fallbackToOnDemand goes to "
        "any node. Default 600.",
    )


class Spark(SpecModel):
    """Images and service account of engine spark in preparation and predict. It is refused until both are set."""

    image: Image | None = Field(
        default=None, description="Image with Java, Spark and the trainer, for these stages alone. Left out: none."
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="Account of Spark's driver, in each namespace with such jobs; it has to be allowed to make pods, "
        "services, config maps and claims there. Whoever may create jobs can have their pod act as it. Left out: none.",
    )


Globs: TypeAlias = Annotated[tuple[Text, ...], Field(max_length=256)]
ANY = ("*",)
HARMLESS_ENV = (
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_*", "NCCL_IB_*", "NCCL_P2P_*", "NCCL_SHM_*", "NCCL_NVLS_*"),
    *("NCCL_NET_GDR_*", "NCCL_ALGO", "NCCL_PROTO", "NCCL_*_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_CROSS_NIC", "NCCL_TIMEOUT", "GLOO_SOCKET_*", "TORCH_NCCL_*_WAIT", "TORCH_NCCL_*_HANDLING"),
    *("TORCH_NCCL_*_SEC", "TORCH_NCCL_*_SIZE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_SHOW_CPP_STACKTRACES", "TORCH_ALLOW_TF32_*", "TOKENIZERS_PARALLELISM", "TZ", "LANG", "LC_*"),
    *("HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_DISABLE_*", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE"),
    *("WANDB_PROJECT", "WANDB_NAME", "MLFLOW_RUN_ID"),
)
"""Variables that name no other code and no other server, unlike others of the same libraries: NCCL_NET_PLUGIN and
TORCH_EXTENSIONS_DIR name libraries, TRITON_PTXAS_PATH a program, NCCL_COMM_ID a server, and TRITON_CACHE_DIR and
XDG_CACHE_HOME folders with compiled code.
"""
Profile: TypeAlias = Literal["open", "strict"]
AllowedNames: TypeAlias = Literal[
    "service_accounts",
    "secrets",
    "config_maps",
    "claims",
    "csi_drivers",
    "token_audiences",
    "priority_classes",
    "env",
    "annotations",
]
PROFILES: Mapping[Profile, Mapping[AllowedNames, tuple[str, ...]]] = {
    "open": dict.fromkeys(get_args(AllowedNames), ANY),
    "strict": {
        "service_accounts": ("default",),
        "secrets": ("finetune-*",),
        "config_maps": ANY,
        "claims": ANY,
        "csi_drivers": (),
        "token_audiences": (),
        "priority_classes": (),
        "env": HARMLESS_ENV,
        "annotations": (),
    },
}
"""Default of each list, by profile."""


class Allow(SpecModel):
    """Bounds on the use of a namespace by jobs, and on their size."""

    profile: Profile = Field(
        default="open",
        description="What the lists below are where they are left out. open: anything, for namespaces whose users may "
        "create pods all the same. strict: the service account default, Secrets named finetune-*, no CSI drivers, "
        "no tokens, no priority classes, no annotations, and variables that name no other code and no other server. "
        "Default open.",
    )
    service_accounts: Globs | None = Field(
        default=None, description="Globs of service accounts that a job may name. Left out: the profile's."
    )
    secrets: Globs | None = Field(
        default=None, description="Globs of Secrets that a job may name, wherever it does. Left out: the profile's."
    )
    config_maps: Globs | None = Field(
        default=None, description="Globs of ConfigMaps that a job may name. Left out: any."
    )
    claims: Globs | None = Field(
        default=None,
        description="Globs of claims that a job may name, in pvc:// URIs and in volumes; its own workspace needs no "
        "leave. Left out: any.",
    )
    csi_drivers: Globs | None = Field(
        default=None,
        description="Globs of CSI drivers that a job may name for volumes of its pods; some give secrets to whoever "
        "asks. Left out: the profile's.",
    )
    token_audiences: Globs | None = Field(
        default=None,
        description="Globs of audiences of tokens that a job has projected into its pods; api stands for the API "
        "server's own. Left out: the profile's.",
    )
    priority_classes: Globs | None = Field(
        default=None,
        description="Globs of priority classes that a job may name. Those of Kubernetes itself, system-*, are never "
        "allowed. Left out: the profile's.",
    )
    env: Globs | None = Field(
        default=None, description="Globs of environment variables that a job may set. Left out: the profile's."
    )
    annotations: Globs | None = Field(
        default=None, description="Globs of annotations that a job may give its pods. Left out: the profile's."
    )
    max_nodes: Count | None = Field(default=None, description="Most nodes of a job, a count. Left out: no bound.")
    max_gpus: NonNegative | None = Field(
        default=None, description="Most GPUs of a job on all its nodes, a count. Left out: no bound."
    )
    max_workers: Count | None = Field(
        default=None, description="Most workers that prepare or predict, a count. Left out: no bound."
    )
    max_storage: Quantity | None = Field(
        default=None,
        description="Largest claim that is made for a job, its workspace or a volume of one of its pods, e.g. 500Gi. "
        "Left out: no bound.",
    )
    max_cost: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Most that a job may cost, in `currency`, at the prices below: a job is refused whose estimate is "
        "higher or whose nodes have no price, and it ends with a checkpoint when it has cost so much. Left out: no "
        "bound.",
    )

    def names(self, which: AllowedNames) -> tuple[str, ...]:
        """Return the globs of one list: its own, or else the profile's."""
        own: tuple[str, ...] | None = getattr(self, which)
        return PROFILES[self.profile][which] if own is None else own


class Planning(SpecModel):
    """Margins of plans."""

    memory_margin: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.06,
        description="Share of a GPU's memory that a plan leaves free where it can, as estimates have errors and "
        "fragments of memory cannot be used. A job that fits only without it runs, and its plan shows that. "
        "Default 0.06.",
    )


class Settings(SpecModel):
    """Settings of one installation."""

    namespaces: tuple[DnsLabel, ...] = Field(
        default=(), description="Namespaces whose jobs are run. Left out: all of them."
    )
    defaults: Defaults = Field(default=Defaults(), description="Defaults of jobs.")
    limits: Limits = Field(default=Limits(), description="How long the operator waits.")
    progress: Progress = Field(default=Progress(), description="How pods report progress.")
    spot: Spot = Field(default=Spot(), description="Spot nodes.")
    spark: Spark = Field(default=Spark(), description="What engine spark of preparation and predict runs with.")
    network_policy: Network = Field(default=Network(), description="What the pods of jobs may reach.")

    allow: Allow = Field(default=Allow(), description="What jobs may use of their namespace, and their largest size.")
    schemes: tuple[Scheme, ...] = Field(default=CLUSTER_SCHEMES, description="URI schemes that jobs may use.")
    git_hosts: tuple[str, ...] = Field(
        default=("github.com", "gitlab.com", "huggingface.co"),
        description="Hosts from which training.script may be fetched.",
    )
    images: tuple[str, ...] = Field(default=("*",), description="Globs of images that jobs may name. Default: any.")
    trust_remote_code: tuple[str, ...] = Field(
        default=(), description="Globs of Hub repositories whose code may run (model.trustRemoteCode). Default: none."
    )
    currency: Annotated[str, StringConstraints(pattern=CURRENCY_PATTERN)] = Field(
        default="USD", description="ISO 4217 code of the prices."
    )
    prices: tuple[Price, ...] = Field(default=(), description="Price table. Left out: costs are not estimated.")
    hardware: Annotated[tuple[HardwareRow, ...], Field(max_length=256)] = Field(
        default=(),
        description="GPUs beside those of the built-in table (docs/hardware.md), or in place of its figures.",
    )
    nodes: Nodes = Field(default=Nodes(), description="Sources of the facts about the GPUs of nodes.")
    planning: Planning = Field(default=Planning(), description="Margins of plans.")

    def progress_deadline(self, policy: RunPolicySpec) -> int:
        """Return the seconds without progress after which an attempt is stopped: the job's, or else ours; 0: never."""
        return policy.progress_deadline_seconds or self.limits.progress_seconds


CLUSTER_SETTINGS = Settings()
LOCAL_SETTINGS = Settings(schemes=get_args(Scheme))
