"""Findings of `finetune doctor`: each fact read from a cluster, judged for a job.

Pure: `judge` takes each part as a value or as the reason why it could not be read, and returns findings. Parts that the
caller may not read are reported as unknown, never taken for missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from finetune_contract.byte_text import human_bytes
from finetune_operator.jobs.missing_objects import LookUp
from finetune_operator.plan.hardware.gpu_nodes import Node, facts_of_nodes, gpu_kinds, gpu_resource
from finetune_operator.plan.hardware.network_devices import (
    EFA,
    EFA_HUGE_PAGES,
    EFA_INTERFACES,
    HUGE_PAGES,
    default_resource,
    device_kind,
    nodes_network,
)
from finetune_operator.spec.launcher_rows import BUILT_IN, TRAINING, LauncherName, launcher
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.schema.served_schema import UPGRADE, in_status, listed
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobSpec

State: TypeAlias = Literal["ok", "gap", "unknown", "note"]
Value = TypeVar("Value")

SHARED_PROVISIONERS = (
    "efs.csi.aws.com", "fsx.csi.aws.com", "filestore.csi.storage.gke.io", "gcsfuse.csi.storage.gke.io",
    "file.csi.azure.com", "kubernetes.io/azure-file", "azurelustre.csi.azure.com", "nfs.csi.k8s.io",
    "cephfs.csi.ceph.com", "driver.longhorn.io", "beegfs.csi.netapp.com", "lustre.csi.storage.gke.io",
)  # fmt: skip
"""Provisioners whose volumes several nodes can write to, by their own documentation."""
SINGLE_PROVISIONERS = (
    "ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "pd.csi.storage.gke.io", "disk.csi.azure.com",
    "rbd.csi.ceph.com", "rancher.io/local-path", "kubernetes.io/aws-ebs", "kubernetes.io/gce-pd",
    "kubernetes.io/azure-disk", "k8s.io/minikube-hostpath", "kubernetes.io/no-provisioner", "topolvm.io",
    "cinder.csi.openstack.org", "csi.vsphere.vmware.com",
)  # fmt: skip
"""Provisioners whose volumes one node can write to."""
POLICY_GROUPS = {
    "projectcalico.org": "Calico",
    "crd.projectcalico.org": "Calico",
    "cilium.io": "Cilium",
    "crd.antrea.io": "Antrea",
    "k8s.ovn.org": "OVN-Kubernetes",
    "networking.k8s.aws": "the network policy agent of Amazon's VPC CNI",
}
"""API groups of network plugins that enforce policies."""
BUILD_IMAGES = (
    "no image is published: build it with make images, push it to your registry, and name that in the settings' "
    "defaults.image (docs/install.md)"
)
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
PODSECURITY = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class Known(Generic[Value]):
    """A part of the surroundings: its value, or the reason why it is unknown."""

    value: Value | None = None
    reason: str = ""


@dataclass(frozen=True)
class Surroundings:
    """Readable state of a cluster."""

    server: str
    namespace: str
    version: Known[str]
    own_version: str
    """Version of the command."""
    served: Known[tuple[LauncherName, ...]]
    serves_jobs: Known[bool]
    lacking: Known[tuple[str, ...]]
    """Fields and values of this version's FineTuneJob that the served one lacks, see `served_schema.lacking`."""
    groups: Known[tuple[str, ...]]
    """API groups that are served."""
    queues: Known[tuple[str, ...]]
    """Kueue's local queues of the namespace."""
    operators: Known[tuple[Mapping[str, Any], ...]]
    """Deployments of the operator."""
    nodes: Known[tuple[Mapping[str, Any], ...]]
    classes: Known[tuple[Mapping[str, Any], ...]]
    namespace_labels: Known[Mapping[str, str]]
    quotas: Known[tuple[Mapping[str, Any], ...]]
    leftover_claims: Known[tuple[int, ...]] = Known(())
    """Bytes of each claim of the namespace whose job was deleted."""


@dataclass(frozen=True)
class Finding:
    """A row of the result."""

    topic: str
    state: State
    found: str
    hint: str = field(default="")


def judge(
    cluster: Surroundings,
    job: FineTuneJob | None,
    settings: Settings,
    named: LookUp | None = None,
    images: Mapping[str, tuple[str | None, str]] | None = None,
) -> tuple[Finding, ...]:
    """Return all findings, with a hint for each gap; without `job`, for jobs of any kind. `named`: the objects that the
    job names; `images`: there or absent for each image that a registry was asked for, and the reason for neither.
    """
    spec = None if job is None else job.spec
    parts: tuple[Callable[[Surroundings, FineTuneJobSpec | None, Settings], Iterator[Finding]], ...] = (
        _api, _operator, _launchers, _queue, _gpus, _network, _storage, _claims, _security, _quota, _policies,
    )  # fmt: skip
    findings = [finding for part in parts for finding in part(cluster, spec, settings)]
    return (*findings, *_named(named or LookUp()), _image(cluster, spec, settings, images or {}))


def _unknown(topic: str, known: Known[Any]) -> Finding:
    return Finding(topic, "unknown", known.reason)


# ------------------------------------------------------------------------------------------------------------- software


def _api(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if cluster.version.value is None:
        yield _unknown("API server", cluster.version)
    else:
        yield Finding("API server", "ok", f"{cluster.version.value} at {cluster.server}")
    if cluster.serves_jobs.value is None:
        yield _unknown("FineTuneJob", cluster.serves_jobs)
    elif cluster.serves_jobs.value:
        yield _kind(cluster.lacking)
    else:
        hint = "build and push the images (make images), then install the operator (docs/install.md)"
        yield Finding("FineTuneJob", "gap", "is not served", hint)


def _kind(lacking: Known[tuple[str, ...]]) -> Finding:
    if lacking.value is None:
        return Finding("FineTuneJob", "ok", f"is served; its fields are unknown: {lacking.reason}")
    if not lacking.value:
        return Finding("FineTuneJob", "ok", "is served, with all fields of this version")
    hint = f"upgrade the CRD: {UPGRADE}"
    if not in_status(lacking.value):
        return Finding("FineTuneJob", "gap", f"is served without {listed(lacking.value)}", hint)
    text = f"is served without {listed(in_status(lacking.value))}, which the operator of this version waits for"
    return Finding("FineTuneJob", "gap", text, hint)


def _operator(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    deployments = cluster.operators.value
    if deployments is None:
        yield _unknown("operator", cluster.operators)
        return
    if not deployments:
        yield Finding(
            "operator",
            "gap",
            "no Deployment found",
            "build and push its images (make images), install it (docs/install.md), or set --operator-namespace",
        )
    for deployment in deployments:
        namespace, ready = deployment["metadata"]["namespace"], deployment.get("status", {}).get("readyReplicas", 0)
        containers = deployment["spec"]["template"]["spec"]["containers"]
        image = next((str(one["image"]) for one in containers), "")
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        text = f"{ready} of {deployment['spec'].get('replicas', 1)} replicas ready in {namespace}, image {image}"
        if not ready:
            hint = f"kubectl -n {namespace} describe deployment {deployment['metadata']['name']}"
            if "/" not in image:
                hint = f"{image} names no registry, and none publishes it: build and push it (docs/install.md); {hint}"
            yield Finding("operator", "gap", text, hint)
        elif tag and tag != cluster.own_version:
            hint = f"install finetune-operator=={tag} here, or operator {cluster.own_version} in the cluster"
            yield Finding("operator", "gap", f"{text}; this command has version {cluster.own_version}", hint)
        else:
            yield Finding("operator", "ok", text)


def _launchers(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    served = cluster.served.value
    if served is None:
        yield _unknown("launchers", cluster.served)
        return
    yield Finding("launchers", "ok", f"{', '.join(served)} are served" if len(served) > 1 else f"{served[0]} is served")
    requested: list[LauncherName] = [] if spec is None or spec.launcher == "auto" else [spec.launcher]
    requested += ["sparkapplication"] if spec is not None and spec.preparation.engine == "spark" else []
    for name in requested:
        if name not in served and name not in BUILT_IN:
            row = launcher(name)
            others = " or ".join(one for one in served if one in TRAINING)
            hint = f"install {row.installed_by}" + (f", or set launcher to auto or {others}" if others else "")
            yield Finding(f"launcher {name}", "gap", f"the job requires it, and {row.served_as} is not served", hint)


def _queue(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    groups = cluster.groups.value
    if groups is None:
        yield _unknown("queue", cluster.groups)
    elif "kueue.x-k8s.io" not in groups:
        yield Finding("queue", "note", "Kueue is not served: the pods of a multi-node job are scheduled one by one")
    elif cluster.queues.value is None:
        yield _unknown("queue", cluster.queues)
    else:
        names = ", ".join(cluster.queues.value)
        yield Finding("queue", "note", f"Kueue is served; local queues of {cluster.namespace}: {names or 'none'}")


# ---------------------------------------------------------------------------------------------------------------- nodes


def parsed_nodes(raw: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes as the planner reads them."""
    from finetune_operator.plan.hardware.gpu_nodes import read_node

    return tuple(map(read_node, raw))


def _gpus(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if cluster.nodes.value is None:
        hint = "request permission to list nodes, or set resources.accelerator.product"
        yield Finding("GPU nodes", "unknown", cluster.nodes.reason, hint)
        return
    nodes = parsed_nodes(cluster.nodes.value)
    resources = {name for node in nodes for name in node.allocatable if _is_gpu(name)}
    for resource in sorted(resources):
        for kind in gpu_kinds(nodes, resource, settings):
            link = "links unknown" if kind.link is None else f"{kind.link / 1e9:g} GB/s to the node's other GPUs"
            bf16 = "bf16" if kind.device.bf16 else "no bf16"
            guessed = kind.speed == 0 and "no label" in kind.how
            hint = "run GPU feature discovery, or add the node's labels to settings.hardware" if guessed else ""
            yield Finding(f"GPU nodes, {resource}", "gap" if guessed else "ok", f"{kind.words}; {bf16}; {link}", hint)
    requires_gpus = spec is not None and spec.resources.gpus_per_node != 0
    if not resources:
        hint = "install the GPUs' device plugin, or set resources.gpusPerNode to 0"
        yield Finding(
            "GPU nodes", "gap" if requires_gpus else "note", "no node has allocatable GPUs", hint * requires_gpus
        )
    if spec is None or not requires_gpus:
        return
    facts, gpus = facts_of_nodes(nodes, spec, settings), spec.resources.gpus_per_node
    resource = gpu_resource(spec, settings.defaults)
    if facts.gpu is None or "pods wait" in facts.words:
        hint = "change resources.accelerator, gpusPerNode or the template's nodeSelector, or add such nodes"
        yield Finding(f"GPUs of the job, {gpus} x {resource}", "gap", facts.words, hint)
    else:
        yield Finding(f"GPUs of the job, {gpus} x {resource}", "ok", facts.words)


def _is_gpu(resource: str) -> bool:
    return resource.endswith(".com/gpu") or resource.startswith(("nvidia.com/gpu.", "nvidia.com/mig-"))


def _network(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if cluster.nodes.value is None:
        return  # reported above
    nodes = parsed_nodes(cluster.nodes.value)
    yield from _devices([node for node in nodes if any(map(_is_gpu, node.allocatable))], settings)
    if spec is None or spec.resources.nodes == 1 or spec.resources.gpus_per_node == 0:
        return
    topic, asked = "network of the job", spec.resources.network
    network = facts_of_nodes(nodes, spec, settings).network
    if asked == "tcp" or network is None:
        return
    if asked == "auto":
        everywhere = [device.resource for device in network.devices if device.nodes == network.nodes]
        hint = "install the device plugin on all of them, or set resources.network to rdma or efa for some of them"
        if everywhere:
            yield Finding(topic, "ok", f"auto requests {everywhere[0]}, which all its nodes have")
        elif network.devices:
            yield Finding(topic, "gap", "auto uses TCP: not all of its nodes have the devices", hint)
        else:
            yield Finding(topic, "note", "auto uses TCP: its nodes advertise no devices")
        return
    kinds = {device.resource: device_kind(device.resource, settings) for device in network.devices}
    names = [name for name, kind in kinds.items() if kind is not None and kind.transport == asked]
    if names:
        yield Finding(topic, "ok", f"{asked} requests {names[0]}")
    else:
        name = default_resource(asked, settings)
        hint = f"install the device plugin for {name}, or set resources.network to auto"
        yield Finding(topic, "gap", f"the job requires {asked}, and its nodes advertise none", hint)


def _devices(nodes: Sequence[Node], settings: Settings) -> Iterator[Finding]:
    """Yield the network devices of all nodes with GPUs, and what these lack."""
    there = nodes_network(((node.labels, node.allocatable) for node in nodes), settings.defaults.gpu_resource, settings)
    listed = [f"{device.resource} on {device.nodes} (at least {device.count} each)" for device in there.devices]
    if not nodes:
        yield Finding("network between nodes", "note", "no node has GPUs")
    elif not listed:
        yield Finding("network between nodes", "note", "no node with GPUs advertises RDMA or EFA devices: TCP")
    else:
        yield Finding("network between nodes", "ok", f"of {len(nodes)} nodes with GPUs: {', '.join(listed)}")
    for instance in there.without_plugin:
        text = f"such a node has {EFA_INTERFACES[instance]} EFA interfaces, and advertises none"
        hint = "install the EFA device plugin, and launch such nodes with EFA interfaces"
        yield Finding(f"EFA, {instance}", "gap", text, hint)
    with_efa = [node.allocatable.get(HUGE_PAGES, "0") for node in nodes if node.allocatable.get(EFA, "0") != "0"]
    least = min(map(parse_quantity, with_efa), default=None)
    if least is not None and least < parse_quantity(EFA_HUGE_PAGES):
        text = f"a node with EFA has {human_bytes(float(least))} of {HUGE_PAGES}, and pods use {EFA_HUGE_PAGES}"
        yield Finding("EFA, huge pages", "gap", text, "reserve them on the nodes (vm.nr_hugepages); EFA works without")


# -------------------------------------------------------------------------------------------------------------- storage


def _storage(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    shared = spec is None or spec.resources.nodes > 1 or spec.preparation.pods > 1
    if spec is not None and spec.storage.workspace is not None:
        yield Finding("storage", "note", f"the job uses its own claim, {spec.storage.workspace}")
        return
    if cluster.classes.value is None:
        yield _unknown("storage", cluster.classes)
        return
    classes = {str(item["metadata"]["name"]): str(item.get("provisioner", "")) for item in cluster.classes.value}
    default = next(
        (
            str(item["metadata"]["name"])
            for item in cluster.classes.value
            if item["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true"
        ),
        None,
    )
    configured = (None if spec is None else spec.storage.storage_class_name) or settings.defaults.storage_class_name
    name = configured or default
    shared_classes = [storage_class for storage_class, provisioner in classes.items() if _shares(provisioner)]
    others = f"classes that several nodes can write to: {', '.join(shared_classes) or 'none known'}"
    if name is None or name not in classes:
        problem = "there is no default storage class" if name is None else f"there is no storage class {name}"
        hint = f"set storage.storageClassName to one of {', '.join(classes)}" if classes else "install a CSI driver"
        yield Finding("storage", "gap", f"{problem}; {others}", hint)
        return
    shares, text = _shares(classes[name]), f"class {name} of {classes[name]}"
    if not shared:
        yield Finding("storage", "ok", f"{text}; one node writes at a time, which every class supports")
    elif shares:
        yield Finding("storage", "ok", f"{text}: several nodes can write (ReadWriteMany)")
    elif shares is None:
        hint = "check the driver's documentation for ReadWriteMany: multi-node jobs need it"
        yield Finding("storage", "unknown", f"{text}; support for several writing nodes is unknown; {others}", hint)
    else:
        hint = (
            f"set storage.storageClassName to {shared_classes[0]}"
            if shared_classes
            else "install a driver for shared files, such as NFS"
        )
        state: State = "note" if spec is None and shared_classes else "gap"
        yield Finding("storage", state, f"{text}: only one node can write; {others}", hint)


def _claims(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    sizes, topic = cluster.leftover_claims.value, "claims of deleted jobs"
    if sizes is None:
        yield _unknown(topic, cluster.leftover_claims)
    elif sizes:
        text = f"{len(sizes)} claim{'s' * (len(sizes) > 1)} with {human_bytes(sum(sizes))}, which nothing uses"
        hint = f"finetune prune -n {cluster.namespace} lists them, and deletes them with --yes"
        yield Finding(topic, "note", text, hint)
    else:
        yield Finding(topic, "ok", "none")


def _shares(provisioner: str) -> bool | None:
    # Rook prefixes the driver's name with its namespace.
    if provisioner.endswith(SHARED_PROVISIONERS):
        return True
    return False if provisioner.endswith(SINGLE_PROVISIONERS) else None


# ------------------------------------------------------------------------------------------------------------ namespace


def _security(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    topic = f"namespace {cluster.namespace}"
    allowed = settings.namespaces
    if allowed and cluster.namespace not in allowed:
        hint = f"use one of {', '.join(allowed)}, or add it to namespaces in the settings"
        yield Finding(topic, "gap", "the operator's settings do not allow this namespace", hint)
    labels = cluster.namespace_labels.value
    if labels is None:
        yield _unknown(topic, cluster.namespace_labels)
        return
    level = labels.get(PODSECURITY)
    text = "no PodSecurity level" if level is None else f"PodSecurity {level}"
    yield Finding(topic, "ok", f"{text}; job pods meet restricted, the strictest level")


def _quota(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if cluster.quotas.value is None:
        yield _unknown("quota", cluster.quotas)
        return
    if not cluster.quotas.value:
        yield Finding("quota", "ok", "the namespace has none")
    needed = {} if spec is None else _needed(spec, settings)
    for quota in cluster.quotas.value:
        name, status = f"quota {quota['metadata']['name']}", quota.get("status", {})
        hard: Mapping[str, str] = status.get("hard") or quota.get("spec", {}).get("hard") or {}
        used: Mapping[str, str] = status.get("used") or {}
        text = ", ".join(f"{used.get(key, '0')} of {most} {key}" for key, most in sorted(hard.items()))
        short = [key for key, amount in needed.items() if key in hard and amount > _remaining(hard, used, key)]
        unset = [] if spec is None else sorted(_unset(spec) & hard.keys())
        if short:
            missing = ", ".join(f"{needed[key]:g} {key}" for key in short)
            hint = "wait for other jobs to end, request fewer nodes, or raise the quota"
            yield Finding(name, "gap", f"used: {text}; the job needs {missing}", hint)
        elif unset:
            hint = "set resources.cpu and resources.memory: this quota rejects pods that do not set them"
            yield Finding(name, "gap", f"it limits {', '.join(unset)}, which the job's pods do not set", hint)
        else:
            yield Finding(name, "ok", f"used: {text}")


def _remaining(hard: Mapping[str, str], used: Mapping[str, str], key: str) -> float:
    try:
        return float(parse_quantity(hard[key]) - parse_quantity(used.get(key, "0")))
    except ValueError:
        return float("inf")


def _needed(spec: FineTuneJobSpec, settings: Settings) -> dict[str, float]:
    """Return the total resources of the training's pods, by the names of quotas."""
    nodes, resources = spec.resources.nodes, spec.resources
    needed: dict[str, float] = {"pods": nodes}
    if resources.gpus_per_node not in ("auto", 0):
        needed[f"requests.{gpu_resource(spec, settings.defaults)}"] = nodes * int(resources.gpus_per_node)
    for key, text in (("cpu", resources.cpu), ("memory", resources.memory)):
        if text is not None:
            needed |= dict.fromkeys((key, f"requests.{key}", f"limits.{key}"), nodes * float(parse_quantity(text)))
    return needed


def _unset(spec: FineTuneJobSpec) -> set[str]:
    """Return the resources that a quota can bound and the job's pods leave unset; memory is requested of all."""
    unset = {"cpu", "requests.cpu", "limits.cpu"} if spec.resources.cpu is None else set()
    return unset | ({"limits.memory"} if spec.resources.memory is None else set())


def _policies(cluster: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    groups = cluster.groups.value
    if groups is None:
        yield _unknown("network policies", cluster.groups)
        return
    plugins = dict.fromkeys(POLICY_GROUPS[group] for group in groups if group in POLICY_GROUPS)
    if plugins:
        yield Finding("network policies", "ok", f"enforced by {', '.join(plugins)}")
    else:
        hint = "ask the cluster's administrator: without enforcement, the network access of job pods is not limited"
        yield Finding("network policies", "unknown", "no network plugin that enforces them was found", hint)


def _named(named: LookUp) -> Iterator[Finding]:
    """Yield the objects of the cluster that the job names."""
    if named.existing:
        yield Finding("named objects", "ok", ", ".join(named.existing))
    for problem in (*named.conflicts, *named.absent):
        value = "" if problem.value is None else f" {problem.value}"
        yield Finding(problem.path, "gap", f"{problem.rule} (value{value})" if value else problem.rule, problem.hint)
    for text in named.unread:
        yield Finding("named objects", "unknown", text)


def image_of(spec: FineTuneJobSpec | None, settings: Settings) -> str:
    """Return the image of the job's pods."""
    return (None if spec is None else spec.image) or settings.defaults.image


def _image(
    cluster: Surroundings,
    spec: FineTuneJobSpec | None,
    settings: Settings,
    images: Mapping[str, tuple[str | None, str]],
) -> Finding:
    image = image_of(spec, settings)
    secrets = [secret.name for secret in settings.defaults.image_pull_secrets]
    secrets += [] if spec is None else [secret.name for secret in spec.template.image_pull_secrets]
    source = (
        f", pulled with Secret {', '.join(secrets)} of {cluster.namespace}" if secrets else ", pulled without a Secret"
    )
    nodes = []
    for node in cluster.nodes.value or ():
        names = {str(name) for entry in node.get("status", {}).get("images") or () for name in entry.get("names") or ()}
        if any(name == image or name.endswith(f"/{image}") for name in names):
            nodes.append(str(node["metadata"]["name"]))
    state, reason = images.get(image, (None, ""))
    if nodes:
        return Finding("image", "ok", f"{image}: {len(nodes)} node{'s have' if len(nodes) > 1 else ' has'} it{source}")
    if "/" not in image:
        text = f"{image} names no registry, and no node is known to have it{source}"
        return Finding("image", "gap", text, f"{BUILD_IMAGES}, or load it into each node")
    if state == "absent":
        return Finding("image", "gap", f"{image}: its registry does not have it{source}", BUILD_IMAGES)
    if state == "there":
        return Finding("image", "ok", f"{image}: its registry has it{source}")
    hint = "only a pull shows whether the registry has it; finetune images lists all images to pull"
    why = f"; {reason}" if reason else ""
    return Finding("image", "unknown", f"{image}{source}; no node is known to have it{why}", hint)
