"""Settings of the cluster's nodes: their GPUs, labels and networks."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_operator.spec.tables.machine_types import PRODUCT_LABELS
from finetune_operator.spec.types import (
    Count,
    Quantity,
    SpecModel,
    Text,
)
from finetune_operator.spec.types.selector_types import Toleration

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


class Nodes(SpecModel):
    """Sources of the facts about the GPUs of nodes."""

    read: bool = Field(
        default=True,
        description="Whether the operator reads nodes, so that plans rest on the GPUs of nodes with the job's labels. "
        "Needs a cluster-wide permission. Defaults to true; the chart with watchNamespaces sets false, "
        "unless rbac.nodes is true.",
    )
    product_labels: Annotated[tuple[LabelKey, ...], Field(max_length=16)] = Field(
        default=PRODUCT_LABELS,
        description="Labels with the GPU product of a node; the first with a known value decides. Defaults to those of"
        " GPU feature discovery, AMD's node labeller, GKE, Karpenter and cloud instance types.",
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
    Toleration.model_construct(key="cloud.google.com/gke-spot", operator="Equal", value="true", effect="NoSchedule"),
    Toleration.model_construct(
        key="kubernetes.azure.com/scalesetpriority", operator="Equal", value="spot", effect="NoSchedule"
    ),
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
