"""Administrator's settings for all jobs: allow-lists and prices.

A cluster's operator reads them from one YAML file, which `settings_check` checks; the `finetune` command without a
cluster uses `LOCAL_SETTINGS`.
"""

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, StringConstraints

from finetune_operator.spec.settings.settings_allow import Allow, Globs
from finetune_operator.spec.settings.settings_nodes import HardwareRow, NodeNetwork, Nodes, ResourceName, Spot
from finetune_operator.spec.types import (
    CURRENCY_PATTERN,
    HTTPS_PATTERN,
    Count,
    DnsLabel,
    Image,
    NonNegative,
    ObjectName,
    RunPolicySpec,
    Scheme,
    SecretSpec,
    SpecModel,
    Text,
)
from finetune_operator.spec.types.network_types import EgressRule, IpBlock, Peer, Port
from finetune_operator.spec.types.selector_types import LabelSelector

TRAINER_IMAGE = "finetune-trainer:0.1.0"
"""Name and tag of the trainer image that `images/` builds; an installation sets its registry in the settings."""
OPERATOR_IMAGE = "finetune-operator:0.1.0"
"""Name and tag of the operator image, which the manifests and the chart install."""

VLLM_IMAGE = "vllm/vllm-openai:v0.33.0"
"""vLLM's own image of its OpenAI-compatible server, of the version whose options `vllm_server.py` writes."""

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


class Defaults(SpecModel):
    """Defaults of jobs."""

    image: Image = Field(default=TRAINER_IMAGE, description="Trainer image of jobs without an image of their own.")
    vllm_image: Image = Field(
        default=VLLM_IMAGE, description="Image of the servers of endpoints with optimization vllm."
    )
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
        " nodes or several pods that prepare, else to ReadWriteOnce. Jobs whose pods cannot share such a claim are "
        "refused.",
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
    container_creating_seconds: Count = Field(
        default=1800,
        description="Seconds until a job fails because the node cannot prepare its container: it cannot attach or "
        "mount a volume, or create the pod's network. A pull of the image does not count. Defaults to 1800.",
    )
    unschedulable_seconds: Count | None = Field(
        default=None,
        description="Seconds until a job fails because its pods cannot be scheduled. If unset, it waits and reports "
        "the reason.",
    )
    capacity_seconds: NonNegative = Field(
        default=3600,
        description="Seconds until a job that waits for free nodes or quota is Stalled. It goes on waiting, and is no "
        "longer Stalled once its pods run. 0 disables it. Defaults to 3600.",
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
        default=5,
        description="Minimum seconds between two updates of progress in a job's status. There are fewer of an attempt "
        "that has run for more than 5 minutes (every sixtieth of its time, at least every 30 s), and with more than 50 "
        "running jobs (10 a second for all of them). Defaults to 5.",
    )


def _pods_in(namespace: str) -> Peer:
    return Peer.model_construct(
        namespace_selector=LabelSelector.model_construct(match_labels={"kubernetes.io/metadata.name": namespace})
    )


RESOLVERS = (
    _pods_in("kube-system"),
    _pods_in("openshift-dns"),
    Peer.model_construct(ip_block=IpBlock.model_construct(cidr="169.254.20.10/32")),
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
    url_hosts: Globs = Field(
        default=(),
        description="Globs of hosts, e.g. mlflow.example.com or *.tracking.svc. If a variable of a job's template.env, "
        "such as MLFLOW_TRACKING_URI, or predict.server has a URL with such a host, the job's pods may reach its port: "
        "at that IP address, in the namespace of a Service, or at any address for another name, as policies have no "
        "names. Defaults to none.",
    )
    endpoint_clients: Annotated[tuple[Peer, ...], Field(max_length=64)] = Field(
        default=(),
        description="Peers outside the job's namespace that may reach the servers of endpoints, as peers of a "
        "Kubernetes NetworkPolicy, e.g. an ingress controller and Prometheus. Defaults to none.",
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
    defaults: Defaults = Field(
        default=Defaults.model_construct(), description="Defaults of fields that a job leaves unset."
    )
    limits: Limits = Field(default=Limits.model_construct(), description="Timeouts and retries.")
    progress: Progress = Field(default=Progress.model_construct(), description="Progress reports of pods.")
    spot: Spot = Field(default=Spot.model_construct(), description="Spot nodes.")
    spark: Spark = Field(
        default=Spark.model_construct(),
        description="Image and service account of engine spark in preparation and predict.",
    )
    network_policy: Network = Field(
        default=Network.model_construct(), description="Network access of the pods of jobs."
    )

    allow: Allow = Field(
        default=Allow.model_construct(),
        description="Resources of their namespace that jobs may use, and their maximum size.",
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
    nodes: Nodes = Field(default=Nodes.model_construct(), description="Sources of facts about the GPUs of nodes.")
    network: NodeNetwork = Field(
        default=NodeNetwork.model_construct(), description="Network between the nodes of a training with GPUs."
    )
    planning: Planning = Field(default=Planning.model_construct(), description="Margins of plans.")

    def progress_deadline(self, policy: RunPolicySpec) -> int:
        """Return the seconds without progress after which an attempt is stopped: the job's, or else ours; 0: never."""
        return policy.progress_deadline_seconds or self.limits.progress_seconds


CLUSTER_SETTINGS = Settings.model_construct()
LOCAL_SETTINGS = Settings.model_construct(schemes=get_args(Scheme))
