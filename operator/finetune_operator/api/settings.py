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

    product: Text = Field(description="GPU product as in accelerator.product; cpu for a node without GPUs. Required.")
    gpus: int = Field(ge=0, description="Number of GPUs on the node. Required.")
    per_hour: float = Field(ge=0, description="Price of the node per hour, in `currency`. Required.")
    spot_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="Price of the node per hour on spot capacity, in `currency`. If unset, it has no spot price.",
    )


LabelKey: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317)
]
ResourceName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[-a-z0-9.]+/[-A-Za-z0-9_.]+$", max_length=253)]


class HardwareLabel(SpecModel):
    """Label of nodes with a GPU product."""

    key: LabelKey = Field(description="Key of the label, e.g. nvidia.com/gpu.product. Required.")
    values: Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)] = Field(
        description="Values of the label on nodes with the product. Required."
    )


class HardwareRow(SpecModel):
    """GPU missing from the built-in table, or overrides of its values."""

    name: Text = Field(
        description="GPU product, e.g. RTX-6000. For a product of the built-in table, the fields that are set override"
        " the table's. Required."
    )
    aliases: Annotated[tuple[Text, ...], Field(max_length=64)] = Field(
        default=(), description="Other names of the product in jobs, prices and node labels. Defaults to none."
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of one GPU as the driver reports it, e.g. 48Gi. Defaults to the value of the built-in "
        "table, else to 15 GiB.",
    )
    capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = Field(
        default=None,
        description="CUDA compute capability, e.g. 8.9: bf16 from 8.0, fp8 from 8.9, fp16 with loss scaling from 7.0. "
        "If unset, bf16 without fp8, unless precisions is set.",
    )
    precisions: Annotated[tuple[Literal["bf16", "fp16", "fp8"], ...], Field(max_length=3)] | None = Field(
        default=None, description="Supported precisions. Defaults to those of capability."
    )
    half_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Dense peak performance in bf16, in TFLOP/s (10^12 operations per second). If unset, times are not"
        " estimated.",
    )
    fp32_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Peak performance in plain fp32, in TFLOP/s. If unset, times in fp32 are not estimated.",
    )
    link_gigabytes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Bandwidth from one GPU to the others of its node, in 10^9 bytes per second and direction. If "
        "unset, it is not known.",
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
        default=(),
        description="Labels of nodes with the product; pods are scheduled to nodes with one of them. Defaults to none.",
    )
    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Price of one GPU per hour, in `currency`, for nodes without a row in prices. If unset, it has no "
        "price.",
    )
    spot_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Price of one GPU per hour on spot capacity, in `currency`. If unset, it has no spot price.",
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
        description="Whether the operator reads nodes, so that plans rest on the GPUs of nodes with the job's labels. "
        "Needs a cluster-wide permission. Defaults to true; the chart with watchNamespaces sets false, "
        "unless rbac.nodes is true.",
    )
    product_labels: Annotated[tuple[LabelKey, ...], Field(max_length=16)] = Field(
        default=NODE_LABELS,
        description="Labels with the GPU product of a node; the first with a known value decides. Defaults to those of"
        " GPU feature discovery, AMD's node labeller, GKE, Karpenter and cloud instance types.",
    )


class Defaults(SpecModel):
    """Defaults of jobs."""

    image: Image = Field(default=TRAINER_IMAGE, description="Trainer image of jobs without an image of their own.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Pull policy of the image. Defaults to Kubernetes' own default."
    )
    image_pull_secrets: tuple[SecretSpec, ...] = Field(
        default=(), description="Secrets for pulling images, which must exist in the job's namespace. Defaults to none."
    )
    storage_class_name: ObjectName | None = Field(
        default=None,
        description="Storage class of claims that the operator creates. Defaults to the cluster's default.",
    )
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"], ...] | None = Field(
        default=None,
        description="Access modes of claims that the operator creates. Defaults to ReadWriteMany for jobs with several"
        " nodes or several pods that prepare, else to ReadWriteOnce.",
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="Priority class of pods. Defaults to the cluster's default."
    )
    ttl_seconds_after_finished: NonNegative | None = Field(
        default=None, description="Seconds after a job finishes until it is deleted. If unset, it is not deleted."
    )
    termination_grace_seconds: Annotated[int, Field(ge=1, le=86_400)] = Field(
        default=120,
        description="Grace period of a pod in seconds, in which it saves a checkpoint before it is terminated. "
        "Defaults to 120.",
    )
    gpu_resource: ResourceName = Field(
        default="nvidia.com/gpu",
        description="Extended resource for GPUs that pods request, for jobs without accelerator.resource, e.g. "
        "amd.com/gpu. Defaults to nvidia.com/gpu.",
    )
    rdma_resource: ResourceName = Field(
        default="rdma/ib",
        description="Extended resource that pods request for resources.network rdma if the nodes' devices are not "
        "known, as the nodes' device plugin names it. Defaults to rdma/ib.",
    )
    efa_interfaces: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None,
        description="Number of EFA interfaces that a pod requests. If unset, its share of those that the nodes "
        "advertise; if these are not known, those of the instance type in its node selector, else 1.",
    )


class NetworkDeviceRow(SpecModel):
    """Network device of nodes, and the requests of a pod for it."""

    resource: ResourceName = Field(
        description="Extended resource, as the nodes' device plugin names it, e.g. nvidia.com/hostdev. Required."
    )
    transport: Literal["rdma", "efa"] = Field(
        default="rdma", description="Value of resources.network that requests it: rdma or efa. Defaults to rdma."
    )
    per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="Number of devices that a pod requests, e.g. 1 for a shared device plugin. If unset, perGpu "
        "decides; without both, the pod's share of the node's devices, by its GPUs.",
    )
    per_gpu: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="Number of devices that a pod requests for each of its GPUs. Defaults to perNode."
    )
    huge_pages: Quantity | None = Field(
        default=None, description="Huge pages of 2 MiB that a pod requests with it, e.g. 5120Mi. Defaults to none."
    )
    env: Annotated[dict[str, str], Field(max_length=64)] = Field(
        default={}, description="Environment variables of pods that request it, e.g. NCCL_IB_HCA. Defaults to none."
    )


class NodeNetwork(SpecModel):
    """Network between the nodes of a training with GPUs."""

    devices: Annotated[tuple[NetworkDeviceRow, ...], Field(max_length=64)] = Field(
        default=(),
        description="Network devices in addition to the known ones: vpc.amazonaws.com/efa, rdma/*, and resources of "
        "nvidia.com with rdma in their name. A row for a known one replaces its requests. Defaults to none.",
    )
    host_network: bool = Field(
        default=False,
        description="Whether training pods that request network devices use their node's network. Refused by the "
        "PodSecurity levels baseline and restricted, and network policies do not apply to such pods. "
        "Defaults to false.",
    )
    socket_interface: Annotated[str, StringConstraints(pattern=r"^[-A-Za-z0-9_.,=^]*$", max_length=253)] = Field(
        default="eth0",
        description="Interface of pods for TCP between nodes, as NCCL_SOCKET_IFNAME; pods with hostNetwork leave it to "
        "NCCL, as an empty text does. Defaults to eth0, the first interface of a pod.",
    )


class Limits(SpecModel):
    """Timeouts and retries for failures that may resolve by themselves."""

    image_pull_seconds: Count = Field(
        default=600, description="Seconds until a job fails because its image cannot be pulled. Defaults to 600."
    )
    container_config_seconds: Count = Field(
        default=120,
        description="Seconds until a job fails because its container cannot be created (e.g. a missing Secret). "
        "Defaults to 120.",
    )
    unschedulable_seconds: Count | None = Field(
        default=None,
        description="Seconds until a job fails because its pods cannot be scheduled. If unset, it waits and reports "
        "the reason.",
    )
    gang_seconds: Annotated[int, Field(ge=0, le=1500)] = Field(
        default=900,
        description="Seconds until a partially scheduled training is stopped, so that it releases its nodes. It starts"
        " again later, which does not count as a restart. Must be below 1800 s, the time-out of its "
        "processes. 0 disables it. Defaults to 900.",
    )
    progress_seconds: NonNegative = Field(
        default=1800,
        description="Seconds without progress until an attempt is restarted, if it has reported progress before, for "
        "jobs without runPolicy.progressDeadlineSeconds. 0 disables it. Defaults to 1800.",
    )
    restart_delay_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=10,
        description="Back-off before the first restart, in seconds; it doubles with each failure in a row. Defaults to"
        " 10.",
    )
    free_restarts: Count = Field(
        default=50,
        description="Maximum number of free restarts of a stage within freeRestartsSeconds. A restart counts against "
        "runPolicy.maxRestarts if it exceeds this number, or if nothing shows an infrastructure cause and "
        "the attempt progressed no further than earlier ones. Defaults to 50.",
    )
    free_restarts_seconds: Count = Field(
        default=86_400, description="Window of freeRestarts, in seconds. Defaults to 86400 (one day)."
    )
    restart_delay_most_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=300, description="Maximum back-off before a restart, in seconds. Defaults to 300."
    )


ProgressTokens: TypeAlias = Literal["review", "keys"]


class Progress(SpecModel):
    """Progress reports of pods to the operator."""

    enabled: bool = Field(default=True, description="Whether pods report progress to the operator. Defaults to true.")
    url: Annotated[str, StringConstraints(pattern=HTTPS_PATTERN, max_length=1024)] | None = Field(
        default=None,
        description="Address of the progress server for pods, as https://host:port. Defaults to the Service finetune-"
        "operator-progress in the operator's namespace.",
    )
    tokens: ProgressTokens = Field(
        default="review",
        description="Verification of the tokens in reports. review: a TokenReview of the API server, which needs a "
        "cluster-wide permission; keys: the API server's public keys, which every service account may "
        "read. Defaults to review; the chart with watchNamespaces sets keys, unless rbac.tokenReview is "
        "true.",
    )
    status_seconds: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        default=5, description="Minimum seconds between two updates of progress in a job's status. Defaults to 5."
    )


def _pods_in(namespace: str) -> Peer:
    return Peer.model_validate({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}})


RESOLVERS = (
    _pods_in("kube-system"),
    _pods_in("openshift-dns"),
    Peer.model_validate({"ipBlock": {"cidr": "169.254.20.10/32"}}),
)


class Network(SpecModel):
    """Network access of the pods of jobs, by a NetworkPolicy for each job."""

    enabled: bool = Field(default=True, description="Whether each job gets a NetworkPolicy. Defaults to true.")
    egress_ports: Annotated[tuple[Port, ...], Field(max_length=64)] = Field(
        default=(443,),
        description="TCP ports at which pods may reach any address, for the Hub, object stores and proxies. Defaults "
        "to 443.",
    )
    dns: Annotated[tuple[Peer, ...], Field(max_length=16)] = Field(
        default=RESOLVERS,
        description="DNS resolvers, which pods may reach at ports 53 and 5353, as peers of a Kubernetes NetworkPolicy."
        " If nodes resolve names themselves, as with Cloud DNS for GKE (169.254.169.254/32), add their "
        "addresses. Defaults to pods in kube-system and openshift-dns, and NodeLocal DNSCache.",
    )
    extra_egress: Annotated[tuple[EgressRule, ...], Field(max_length=64)] = Field(
        default=(),
        description="Additional egress rules of a Kubernetes NetworkPolicy, e.g. for an object store in the cluster. "
        "Defaults to none.",
    )
    endpoint_clients: Annotated[tuple[Peer, ...], Field(max_length=64)] = Field(
        default=(),
        description="Peers outside the job's namespace that may reach the servers of endpoints, as peers of a "
        "Kubernetes NetworkPolicy, e.g. an ingress controller and Prometheus. Defaults to none.",
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
    """Labels of spot nodes, and the fallback of jobs with spec.spot."""

    nodes: Annotated[
        tuple[Annotated[dict[str, str], Field(max_length=16)], ...], Field(min_length=1, max_length=16)
    ] = Field(
        default=SPOT_NODES,
        description="Labels of spot nodes: a node with all labels of one item is a spot node. Defaults to the labels "
        "of EKS, Karpenter, GKE and AKS.",
    )
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = Field(
        default=SPOT_TOLERATIONS,
        description="Tolerations of the taints of spot nodes. Defaults to those for GKE and AKS.",
    )
    fallback_after_seconds: Count = Field(
        default=600,
        description="Seconds that a pod waits for a spot node before the training of a job with fallbackToOnDemand "
        "uses any nodes. Defaults to 600.",
    )


class Spark(SpecModel):
    """Image and service account of engine spark in preparation and predict. Both are required to use it."""

    image: Image | None = Field(
        default=None,
        description="Image with Java, Spark and the trainer, for Spark stages only. If unset, engine spark is refused.",
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="Service account of the Spark driver, in each namespace with such jobs; it needs permission to "
        "create pods, services, config maps and claims there. Anyone who may create jobs can run a pod "
        "with it. If unset, engine spark is refused.",
    )


Globs: TypeAlias = Annotated[tuple[Text, ...], Field(max_length=256)]
ANY = ("*",)
HARMLESS_ENV = (
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_*", "NCCL_IB_*", "NCCL_P2P_*", "NCCL_SHM_*", "NCCL_NVLS_*"),
    *("NCCL_NET_GDR_*", "NCCL_ALGO", "NCCL_PROTO", "NCCL_*_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_CROSS_NIC", "NCCL_TIMEOUT", "GLOO_SOCKET_*", "TORCH_NCCL_*_WAIT", "TORCH_NCCL_*_HANDLING"),
    *("TORCH_NCCL_*_SEC", "TORCH_NCCL_*_SIZE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_ON_TIMEOUT"),
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
    """Resources of a namespace that jobs may use, and limits of their size."""

    profile: Profile = Field(
        default="open",
        description="Defaults of the lists below. open: allow everything, for namespaces whose users may create pods "
        "anyway. strict: allow the service account default, Secrets named finetune-*, no CSI drivers, "
        "tokens, priority classes or annotations, and only variables that name no other code or server. "
        "Defaults to open.",
    )
    service_accounts: Globs | None = Field(
        default=None, description="Globs of service accounts that a job may use. Defaults to those of the profile."
    )
    secrets: Globs | None = Field(
        default=None,
        description="Globs of Secrets that a job may reference in any field. Defaults to those of the profile.",
    )
    config_maps: Globs | None = Field(
        default=None, description="Globs of ConfigMaps that a job may reference. Defaults to any."
    )
    claims: Globs | None = Field(
        default=None,
        description="Globs of claims that a job may use, in pvc:// URIs and in volumes; the claim of its own workspace"
        " is always allowed. Defaults to any.",
    )
    csi_drivers: Globs | None = Field(
        default=None,
        description="Globs of CSI drivers that a job may use for volumes of its pods; some expose secrets to any pod. "
        "Defaults to those of the profile.",
    )
    token_audiences: Globs | None = Field(
        default=None,
        description="Globs of token audiences that a job may project into its pods; api stands for that of the API "
        "server. Defaults to those of the profile.",
    )
    priority_classes: Globs | None = Field(
        default=None,
        description="Globs of priority classes that a job may use. The classes system-* of Kubernetes are never "
        "allowed. Defaults to those of the profile.",
    )
    env: Globs | None = Field(
        default=None, description="Globs of environment variables that a job may set. Defaults to those of the profile."
    )
    annotations: Globs | None = Field(
        default=None,
        description="Globs of annotations that a job may set on its pods. Defaults to those of the profile.",
    )
    max_nodes: Count | None = Field(
        default=None, description="Maximum number of nodes of a job. If unset, there is no limit."
    )
    max_gpus: NonNegative | None = Field(
        default=None, description="Maximum number of GPUs of a job over all its nodes. If unset, there is no limit."
    )
    max_workers: Count | None = Field(
        default=None, description="Maximum number of workers that prepare or predict. If unset, there is no limit."
    )
    max_storage: Quantity | None = Field(
        default=None,
        description="Maximum size of a claim created for a job: its workspace, or a volume of one of its pods, e.g. "
        "500Gi. If unset, there is no limit.",
    )
    max_cost: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Maximum cost of a job, in `currency`, at the prices below. A job is refused if its estimate is "
        "higher or its nodes have no price, and is stopped with a checkpoint once it has cost this much. "
        "If unset, there is no limit.",
    )

    def names(self, which: AllowedNames) -> tuple[str, ...]:
        """Return the globs of one list: its own, or else the profile's."""
        configured: tuple[str, ...] | None = getattr(self, which)
        return PROFILES[self.profile][which] if configured is None else configured


class Planning(SpecModel):
    """Margins of plans."""

    memory_margin: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.06,
        description="Share of a GPU's memory that a plan leaves free where it can, as estimates have errors and "
        "fragments of memory cannot be used. A job that fits only without it runs, and its plan shows that. "
        "Default 0.06.",
    )
    save_megabytes_per_second: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=200.0,
        description="Rate at which a node writes checkpoints to the workspace, in MB/s; plans count the time of saving "
        "with it. Network disks of clouds take 125 to 280 by default. Default 200.",
    )
    learn_from_jobs: bool = Field(
        default=False,
        description="Whether the operator corrects the estimates of a job by finished jobs of its namespace with the "
        "same model, strategy and device: the time of a step in both directions, memory upwards only. Default false.",
    )


class Settings(SpecModel):
    """Settings of one installation."""

    namespaces: tuple[DnsLabel, ...] = Field(
        default=(), description="Namespaces whose jobs the operator runs. Defaults to all."
    )
    defaults: Defaults = Field(default=Defaults(), description="Defaults of fields that a job leaves unset.")
    limits: Limits = Field(default=Limits(), description="Timeouts and retries.")
    progress: Progress = Field(default=Progress(), description="Progress reports of pods.")
    spot: Spot = Field(default=Spot(), description="Spot nodes.")
    spark: Spark = Field(
        default=Spark(), description="Image and service account of engine spark in preparation and predict."
    )
    network_policy: Network = Field(default=Network(), description="Network access of the pods of jobs.")

    allow: Allow = Field(
        default=Allow(), description="Resources of their namespace that jobs may use, and their maximum size."
    )
    schemes: tuple[Scheme, ...] = Field(default=CLUSTER_SCHEMES, description="URI schemes that jobs may use.")
    git_hosts: tuple[str, ...] = Field(
        default=("github.com", "gitlab.com", "huggingface.co"),
        description="Hosts that training.script may be cloned from.",
    )
    images: tuple[str, ...] = Field(default=("*",), description="Globs of images that jobs may use. Defaults to any.")
    trust_remote_code: tuple[str, ...] = Field(
        default=(),
        description="Globs of Hub repositories whose code may run (model.trustRemoteCode). Defaults to none.",
    )
    currency: Annotated[str, StringConstraints(pattern=CURRENCY_PATTERN)] = Field(
        default="USD", description="ISO 4217 code of the currency of all prices."
    )
    prices: tuple[Price, ...] = Field(default=(), description="Prices of nodes. If unset, costs are not estimated.")
    hardware: Annotated[tuple[HardwareRow, ...], Field(max_length=256)] = Field(
        default=(),
        description="GPUs in addition to the built-in table (docs/hardware.md), or overrides of its values.",
    )
    nodes: Nodes = Field(default=Nodes(), description="Sources of facts about the GPUs of nodes.")
    network: NodeNetwork = Field(
        default=NodeNetwork(), description="Network between the nodes of a training with GPUs."
    )
    planning: Planning = Field(default=Planning(), description="Margins of plans.")

    def progress_deadline(self, policy: RunPolicySpec) -> int:
        """Return the seconds without progress after which an attempt is stopped: the job's, or else ours; 0: never."""
        return policy.progress_deadline_seconds or self.limits.progress_seconds


CLUSTER_SETTINGS = Settings()
LOCAL_SETTINGS = Settings(schemes=get_args(Scheme))
