"""GPUs of a cluster's nodes, by their labels and allocatable resources: the nodes that can run a job's pods, and the
GPUs of these.

Pure: nodes are arguments. Missing facts are reported as unknown, never guessed: a node that has GPUs and no label of
theirs has an unknown GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from finetune_contract.byte_text import MIB, human_bytes
from finetune_contract.facts import DeviceFacts
from finetune_operator.plan.hardware.assumed_hardware import LEAST_GPU_MEMORY, UNKNOWN_GPU
from finetune_operator.plan.hardware.devices import (
    GpuModel,
    find_gpu,
    has_bf16,
    link_bytes,
    mig_memory,
    mig_product,
    product_labels,
)
from finetune_operator.plan.hardware.gpu_table import Labels
from finetune_operator.plan.hardware.network_devices import nodes_network
from finetune_operator.plan.types.plan_types import NodesFacts
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import Defaults, Settings
from finetune_operator.spec.types import FineTuneJobSpec

MEMORY_LABELS = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
"""Labels with the memory of a GPU in MiB."""
AMD_MEMORY_LABEL = "amd.com/gpu.vram"
"""Label with the memory of a GPU and its unit, e.g. 192G."""
CAPABILITY_LABELS = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")
SHARES_LABEL = "nvidia.com/gpu.replicas"
"""Label with the number of pods that share a GPU by time-slicing or MPS; allocatable GPUs are then shares."""
MOST_NAMED = 4
_NEVER = frozenset({"NoSchedule", "NoExecute"})


def gpu_resource(spec: FineTuneJobSpec, defaults: Defaults) -> str:
    """Return the resource by which the pods of a job request GPUs."""
    return spec.resources.accelerator.resource or defaults.gpu_resource


def gpu_taints(resource: str) -> tuple[str, ...]:
    """Return taint keys that reserve nodes for pods with GPUs: the resource's name, and its vendor's for whole GPUs."""
    return tuple(dict.fromkeys((f"{resource.partition('/')[0]}/gpu", resource)))


def requested_labels(spec: FineTuneJobSpec, settings: Settings) -> Labels:
    """Return labels of which each node with the job's product has one; {} if the job names no product."""
    product = spec.resources.accelerator.product
    if product is None:
        return {}
    labels = product_labels(product, settings.hardware)
    ours = {*settings.nodes.product_labels, *(label.key for row in settings.hardware for label in row.labels)}
    return {key: values for key, values in labels.items() if key in ours} or labels


# ---------------------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True)
class Node:
    """Name, labels, allocatable resources and taints of a node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()


def read_node(value: Mapping[str, JsonValue]) -> Node:
    """Parse a Node object; missing parts stay empty."""
    metadata, spec, status = (_object(value.get(part)) for part in ("metadata", "spec", "status"))
    taints = spec.get("taints")
    return Node(
        str(metadata.get("name", "")),
        _texts(metadata.get("labels")),
        _texts(status.get("allocatable")),
        tuple(_texts(taint) for taint in taints) if isinstance(taints, list) else (),
    )


def _object(value: JsonValue) -> Mapping[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _texts(value: JsonValue) -> dict[str, str]:
    return {key: str(text) for key, text in _object(value).items()}


# -------------------------------------------------------------------------------------------------- kinds of GPU nodes


@dataclass(frozen=True)
class GpuKind:
    """Nodes with equal GPUs."""

    device: DeviceFacts
    count: int
    """GPUs of one of them, or its MIG instances or shares."""
    shares: int
    """Pods that share one GPU; 1 without sharing."""
    how: str
    """Source of the product's name, e.g. a label."""
    speed: float
    """Peak in bf16, in 10^12 operations a second; 0 if unknown."""
    link: float | None
    """Bytes a second to the other GPUs of the node; None if unknown."""
    nodes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return a description, e.g. `2 nodes with 8 x H100 of 79.6 GiB (label nvidia.com/gpu.product)`."""
        many = f"{len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        shared = f", each shared by {self.shares} pods" if self.shares > 1 else ""
        memory = human_bytes(self.device.memory_bytes)
        return f"{many} with {self.count} x {self.device.product} of {memory}{shared} ({self.how})"


def gpu_kinds(nodes: Iterable[Node], resource: str, settings: Settings) -> tuple[GpuKind, ...]:
    """Return the kinds of nodes that have the resource, the weakest first."""
    names: dict[GpuKind, list[str]] = {}
    for node in nodes:
        if (kind := _kind(node, resource, settings)) is not None:
            names.setdefault(kind, []).append(node.name)
    kinds = [GpuKind(k.device, k.count, k.shares, k.how, k.speed, k.link, tuple(sorted(n))) for k, n in names.items()]
    return tuple(sorted(kinds, key=lambda kind: (kind.device.bf16, kind.device.memory_bytes, kind.speed, kind.words)))


def _kind(node: Node, resource: str, settings: Settings) -> GpuKind | None:
    count = _whole(node.allocatable.get(resource, "0"))
    if count <= 0:
        return None
    product, model, how = _product(node, settings)
    part = mig_memory(resource)
    if part is not None:
        product = mig_product(product, resource)
        model = None if product is None else find_gpu(product, settings.hardware)
        how = f"resource {resource}" if product is None else f"resource {resource}, {how}"
    shares = max(1, _whole(node.labels.get(SHARES_LABEL, "1"))) if part is None else 1
    reported = None if part is not None else _memory(node)
    known = None if model is None else model.memory_mib * MIB
    capability = _capability(node) or (None if model is None else model.capability or None)
    device = DeviceFacts(
        product=product or UNKNOWN_GPU,
        memory_bytes=(reported or part or known or LEAST_GPU_MEMORY) // shares,
        bf16=model.bf16 if model is not None else has_bf16(capability),
        capability=capability,
        # A process measures a whole GPU where pods share it, which says nothing about its share.
        assumed=shares == 1 and (not (reported or part or known) or (model is None and capability is None)),
    )
    speed = 0.0 if model is None else model.half_tflops
    link = None if product is None else link_bytes(product, settings.hardware)
    return GpuKind(device, count, shares, how, speed, link)


def _product(node: Node, settings: Settings) -> tuple[str | None, GpuModel | None, str]:
    """Return the product, its table entry and its source: the first label with a value in a table, else the label of
    GPU feature discovery or AMD's labeller, whose values are the product's own name.
    """
    keys = (label.key for row in settings.hardware for label in row.labels)
    named: tuple[str, str] | None = None
    for key in dict.fromkeys((*settings.nodes.product_labels, *keys)):
        value = node.labels.get(key)
        if value is None:
            continue
        model = find_gpu(value, settings.hardware)
        if model is not None and model.memory_mib:
            return model.name, model, f"label {key}"
        if named is None and not key.endswith("/instance-type"):
            named = (value, key)
    if named is not None:
        return named[0], None, f"label {named[1]}, in no table of GPUs"
    return None, None, "no label has the product"


def _memory(node: Node) -> int | None:
    """Return the memory of one GPU in bytes by a label; None without such a label."""
    for key in MEMORY_LABELS:
        if mib := _whole(node.labels.get(key, "0")):
            return mib * MIB
    try:
        return int(parse_quantity(node.labels[AMD_MEMORY_LABEL].removesuffix("B"))) or None
    except (KeyError, ValueError):
        return None


def _capability(node: Node) -> str | None:
    numbers = [node.labels.get(key, "") for key in CAPABILITY_LABELS]
    return ".".join(numbers) if all(text.isdecimal() for text in numbers) else None


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# ----------------------------------------------------------------------------------------------------- nodes of one job


def facts_of_nodes(nodes: Sequence[Node], spec: FineTuneJobSpec, settings: Settings) -> NodesFacts:
    """Return the GPUs of the nodes that can run a job's pods; the weakest of several kinds."""
    resource, asked = gpu_resource(spec, settings.defaults), spec.resources.gpus_per_node
    least = 1 if asked == "auto" else asked
    fitting = tuple(node for node in nodes if can_run(node, spec, settings))
    kinds = gpu_kinds(fitting, resource, settings)
    large = tuple(kind for kind in kinds if kind.count >= least)
    if not kinds:
        there = gpu_kinds(nodes, resource, settings)
        if not there:
            return NodesFacts(words=f"no node of the cluster has {resource} now")
        return NodesFacts(
            words=f"no node with {resource} fits the job's labels and tolerations now; there are {_listed(there)}"
        )
    small = "" if large else f"no node has {least} GPUs, and pods wait for one; "
    chosen = large or kinds
    names = {name for kind in chosen for name in kind.nodes}
    network = nodes_network(
        ((node.labels, node.allocatable) for node in fitting if node.name in names), resource, settings
    )
    if len({kind.device for kind in chosen}) == 1:
        return NodesFacts(gpu=chosen[0].device, words=f"{small}{_listed(chosen)}", network=network)
    return NodesFacts(
        gpu=chosen[0].device,
        network=network,
        words=f"{small}pods can go to several kinds of nodes: {_listed(chosen)}; the plan is for the weakest, "
        f"{chosen[0].device.product}; resources.accelerator.product chooses one",
    )


def _listed(kinds: Sequence[GpuKind]) -> str:
    more = len(kinds) - MOST_NAMED
    return ", ".join(kind.words for kind in kinds[:MOST_NAMED]) + (f" and {more} more kinds" if more > 0 else "")


def can_run(node: Node, spec: FineTuneJobSpec, settings: Settings) -> bool:
    """Return whether labels and taints of a node allow the scheduler to place a pod of the training there."""
    template, labels = spec.template, requested_labels(spec, settings)
    if any(node.labels.get(key) != value for key, value in template.node_selector.items()):
        return False
    if labels and not any(node.labels.get(key) in values for key, values in labels.items()):
        return False
    tolerations: list[Mapping[str, JsonValue]] = [
        {"key": key, "operator": "Exists"} for key in gpu_taints(gpu_resource(spec, settings.defaults))
    ]
    tolerations += template.tolerations
    if spec.spot.enabled:
        tolerations += [
            toleration.model_dump(mode="json", by_alias=True, exclude_none=True)
            for toleration in settings.spot.tolerations
        ]
    if any(taint.get("effect") in _NEVER and not _tolerates(tolerations, taint) for taint in node.taints):
        return False
    return _in_affinity(node, template.affinity)


def _tolerates(tolerations: Iterable[Mapping[str, JsonValue]], taint: Mapping[str, str]) -> bool:
    # Kubernetes' own taints are temporary: a node that is cordoned or not ready returns unchanged.
    if str(taint.get("key", "")).partition("/")[0] in ("node.kubernetes.io", "node.cloudprovider.kubernetes.io"):
        return True
    for toleration in tolerations:
        key, effect = toleration.get("key") or "", toleration.get("effect") or ""
        exists = toleration.get("operator") == "Exists"
        if effect in ("", taint.get("effect")) and (
            (exists and key in ("", taint.get("key")))
            or (key == taint.get("key") and (toleration.get("value") or "") == taint.get("value", ""))
        ):
            return True
    return False


def _in_affinity(node: Node, affinity: Mapping[str, JsonValue]) -> bool:
    required = _object(_object(affinity.get("nodeAffinity")).get("requiredDuringSchedulingIgnoredDuringExecution"))
    terms = required.get("nodeSelectorTerms")
    if not isinstance(terms, list):
        return True
    return any(_in_term(node, _object(term)) for term in terms)


def _in_term(node: Node, term: Mapping[str, JsonValue]) -> bool:
    if not any(term.values()):
        return False
    expressions = [(row, node.labels) for row in _rows(term.get("matchExpressions"))]
    expressions += [(row, {"metadata.name": node.name}) for row in _rows(term.get("matchFields"))]
    return all(_holds(expression, labels) for expression, labels in expressions)


def _rows(value: JsonValue) -> Iterator[Mapping[str, JsonValue]]:
    yield from (_object(item) for item in value) if isinstance(value, list) else ()


def _holds(expression: Mapping[str, JsonValue], labels: Mapping[str, str]) -> bool:
    given = expression.get("values")
    values = [str(value) for value in given] if isinstance(given, list) else []
    value = labels.get(str(expression.get("key")))
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator if value is not None and values:
            one, other = _whole(value), _whole(values[0])
            return one > other if operator == "Gt" else one < other
        case _:
            return False
