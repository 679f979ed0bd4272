"""Findings of `finetune doctor`: each fact read from a cluster, judged for a job.

Pure: `judge` takes each part as a value or as the reason why it could not be read, and returns findings. Parts that the
caller may not read are reported as unknown, never taken for missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from finetune_operator.api.quantities import parse_quantity
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJob, FineTuneJobSpec
from finetune_operator.launchers.launcher_rows import BUILT_IN, TRAINING, LauncherName, launcher
from finetune_operator.planning.gpu_nodes import Node, gpu_kinds, gpu_resource, told_by

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
LINKS = ("rdma/", "vpc.amazonaws.com/efa")
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
PODSECURITY = "pod-security.kubernetes.io/enforce"
MOST_NODES = 8


@dataclass(frozen=True)
class Known(Generic[Value]):
    """A part of the surroundings: its value, or the reason why it is unknown."""

    value: Value | None = None
    why_not: str = ""


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


@dataclass(frozen=True)
class Finding:
    """A row of the result."""

    topic: str
    state: State
    found: str
    hint: str = field(default="")


def judge(there: Surroundings, job: FineTuneJob | None, settings: Settings) -> tuple[Finding, ...]:
    """Return all findings, with a hint for each gap; without `job`, for jobs of any kind."""
    spec = None if job is None else job.spec
    parts: tuple[Callable[[Surroundings, FineTuneJobSpec | None, Settings], Iterator[Finding]], ...] = (
        _api, _operator, _launchers, _queue, _gpus, _network, _storage, _security, _quota, _policies, _images,
    )  # fmt: skip
    return tuple(finding for part in parts for finding in part(there, spec, settings))


def _unknown(topic: str, known: Known[Any]) -> Finding:
    return Finding(topic, "unknown", known.why_not)


# ------------------------------------------------------------------------------------------------------------- software


def _api(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if there.version.value is None:
        yield _unknown("API server", there.version)
    else:
        yield Finding("API server", "ok", f"{there.version.value} at {there.server}")
    if there.serves_jobs.value is None:
        yield _unknown("FineTuneJob", there.serves_jobs)
    elif there.serves_jobs.value:
        yield Finding("FineTuneJob", "ok", "is served")
    else:
        hint = "install the operator: kubectl apply --server-side -k manifests/operator (docs/install.md)"
        yield Finding("FineTuneJob", "gap", "is not served", hint)


def _operator(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    found = there.operators.value
    if found is None:
        yield _unknown("operator", there.operators)
        return
    if not found:
        yield Finding("operator", "gap", "no Deployment of it", "install it (docs/install.md), or name its namespace")
    for each in found:
        where, ready = each["metadata"]["namespace"], each.get("status", {}).get("readyReplicas", 0)
        containers = each["spec"]["template"]["spec"]["containers"]
        image = next((str(one["image"]) for one in containers), "")
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        words = f"{ready} of {each['spec'].get('replicas', 1)} replicas ready in {where}, image {image}"
        if not ready:
            yield Finding(
                "operator", "gap", words, f"kubectl -n {where} describe deployment {each['metadata']['name']}"
            )
        elif tag and tag != there.own_version:
            hint = f"install finetune-operator=={tag} here, or the operator of {there.own_version} there"
            yield Finding("operator", "gap", f"{words}; this command is of version {there.own_version}", hint)
        else:
            yield Finding("operator", "ok", words)


def _launchers(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    served = there.served.value
    if served is None:
        yield _unknown("launchers", there.served)
        return
    yield Finding("launchers", "ok", f"{', '.join(served)} are served" if len(served) > 1 else f"{served[0]} is served")
    asked: list[LauncherName] = [] if spec is None or spec.launcher == "auto" else [spec.launcher]
    asked += ["sparkapplication"] if spec is not None and spec.preparation.engine == "spark" else []
    for name in asked:
        if name not in served and name not in BUILT_IN:
            row = launcher(name)
            others = " or ".join(one for one in served if one in TRAINING)
            hint = f"install {row.installed_by}" + (f", or set launcher to auto or {others}" if others else "")
            yield Finding(f"launcher {name}", "gap", f"the job asks for it, and {row.served_as} is not served", hint)


def _queue(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    groups = there.groups.value
    if groups is None:
        yield _unknown("queue", there.groups)
    elif "kueue.x-k8s.io" not in groups:
        yield Finding("queue", "note", "Kueue is not served: pods of several nodes are scheduled one by one")
    elif there.queues.value is None:
        yield _unknown("queue", there.queues)
    else:
        names = ", ".join(there.queues.value)
        yield Finding("queue", "note", f"Kueue is served; local queues of {there.namespace}: {names or 'none'}")


# ---------------------------------------------------------------------------------------------------------------- nodes


def parsed_nodes(raw: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes as the planner reads them."""
    from finetune_operator.planning.gpu_nodes import read_node

    return tuple(map(read_node, raw))


def _gpus(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if there.nodes.value is None:
        hint = "ask for the right to list nodes, or name the GPU by resources.accelerator.product"
        yield Finding("GPU nodes", "unknown", there.nodes.why_not, hint)
        return
    nodes = parsed_nodes(there.nodes.value)
    resources = {
        name
        for node in nodes
        for name in node.allocatable
        if name.endswith(".com/gpu") or name.startswith(("nvidia.com/gpu.", "nvidia.com/mig-"))
    }
    for resource in sorted(resources):
        for kind in gpu_kinds(nodes, resource, settings):
            link = "links not known" if kind.link is None else f"{kind.link / 1e9:g} GB/s to the others of the node"
            bf16 = "bf16" if kind.device.bf16 else "no bf16"
            guessed = kind.speed == 0 and "no label" in kind.how
            hint = "run GPU feature discovery, or add the node's labels to settings.hardware" if guessed else ""
            yield Finding(f"GPU nodes, {resource}", "gap" if guessed else "ok", f"{kind.words}; {bf16}; {link}", hint)
    wants = spec is not None and spec.resources.gpus_per_node != 0
    if not resources:
        hint = "install the GPUs' device plugin, or set resources.gpusPerNode to 0"
        yield Finding("GPU nodes", "gap" if wants else "note", "no node has GPUs that are allocatable", hint * wants)
    if spec is None or not wants:
        return
    told, asked = told_by(nodes, spec, settings), spec.resources.gpus_per_node
    resource = gpu_resource(spec, settings.defaults)
    if told.gpu is None or "pods wait" in told.words:
        hint = "change resources.accelerator, gpusPerNode or the template's nodeSelector, or add such nodes"
        yield Finding(f"GPUs of the job, {asked} x {resource}", "gap", told.words, hint)
    else:
        yield Finding(f"GPUs of the job, {asked} x {resource}", "ok", told.words)


def _network(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if there.nodes.value is None:
        return  # reported above
    nodes = parsed_nodes(there.nodes.value)
    found = sorted({name for node in nodes for name in node.allocatable if name.startswith(LINKS)})
    words = f"nodes offer {', '.join(found)}" if found else "no node offers RDMA or EFA devices"
    asked = None if spec is None or spec.resources.nodes == 1 else spec.resources.network
    wanted = {"rdma": settings.defaults.rdma_resource, "efa": "vpc.amazonaws.com/efa"}.get(asked or "")
    if wanted is not None and wanted not in found:
        hint = f"install the device plugin that offers {wanted}, or set resources.network to auto"
        yield Finding("network between nodes", "gap", f"the job asks for {wanted}; {words}", hint)
    elif asked == "auto" and found:
        hint = "set resources.network to rdma or efa: with auto, pods ask for no device and use TCP"
        yield Finding("network between nodes", "gap", words, hint)
    else:
        yield Finding("network between nodes", "note", words)


# -------------------------------------------------------------------------------------------------------------- storage


def _storage(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    shared = spec is None or spec.resources.nodes > 1 or spec.preparation.pods > 1
    if spec is not None and spec.storage.workspace is not None:
        yield Finding("storage", "note", f"the job brings its own claim, {spec.storage.workspace}")
        return
    if there.classes.value is None:
        yield _unknown("storage", there.classes)
        return
    classes = {str(each["metadata"]["name"]): str(each.get("provisioner", "")) for each in there.classes.value}
    default = next(
        (
            str(each["metadata"]["name"])
            for each in there.classes.value
            if each["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true"
        ),
        None,
    )
    chosen = (None if spec is None else spec.storage.storage_class_name) or settings.defaults.storage_class_name
    name = chosen or default
    many = [each for each, provisioner in classes.items() if _shares(provisioner)]
    others = f"classes with volumes for several nodes: {', '.join(many) or 'none that is known to'}"
    if name is None or name not in classes:
        what = "there is no default storage class" if name is None else f"there is no storage class {name}"
        hint = f"set storage.storageClassName to one of {', '.join(classes)}" if classes else "install a CSI driver"
        yield Finding("storage", "gap", f"{what}; {others}", hint)
        return
    shares, words = _shares(classes[name]), f"class {name} of {classes[name]}"
    if not shared:
        yield Finding("storage", "ok", f"{words}; one node writes at a time, which any class allows")
    elif shares:
        yield Finding("storage", "ok", f"{words}: several nodes can write (ReadWriteMany)")
    elif shares is None:
        hint = "look for ReadWriteMany in the driver's documentation: jobs of several nodes need it"
        yield Finding("storage", "unknown", f"{words}; whether several nodes can write is not known; {others}", hint)
    else:
        hint = f"set storage.storageClassName to {many[0]}" if many else "install a driver for shared files, e.g. NFS"
        state: State = "note" if spec is None and many else "gap"
        yield Finding("storage", state, f"{words}: only one node can write; {others}", hint)


def _shares(provisioner: str) -> bool | None:
    # Rook prefixes the driver's name with its namespace.
    if provisioner.endswith(SHARED_PROVISIONERS):
        return True
    return False if provisioner.endswith(SINGLE_PROVISIONERS) else None


# ------------------------------------------------------------------------------------------------------------ namespace


def _security(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    topic = f"namespace {there.namespace}"
    allowed = settings.namespaces
    if allowed and there.namespace not in allowed:
        hint = f"use one of {', '.join(allowed)}, or have it added to the settings' namespaces"
        yield Finding(topic, "gap", "the operator's settings name other namespaces", hint)
    labels = there.namespace_labels.value
    if labels is None:
        yield _unknown(topic, there.namespace_labels)
        return
    level = labels.get(PODSECURITY)
    words = "no PodSecurity level of its own" if level is None else f"PodSecurity {level}"
    yield Finding(topic, "ok", f"{words}; pods of jobs fit restricted, the strictest")


def _quota(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    if there.quotas.value is None:
        yield _unknown("quota", there.quotas)
        return
    if not there.quotas.value:
        yield Finding("quota", "ok", "the namespace has none")
    needed = {} if spec is None else _needed(spec, settings)
    for quota in there.quotas.value:
        name, status = f"quota {quota['metadata']['name']}", quota.get("status", {})
        hard: Mapping[str, str] = status.get("hard") or quota.get("spec", {}).get("hard") or {}
        used: Mapping[str, str] = status.get("used") or {}
        words = ", ".join(f"{used.get(key, '0')} of {most} {key}" for key, most in sorted(hard.items()))
        short = [key for key, want in needed.items() if key in hard and want > _left(hard, used, key)]
        unset = [] if spec is None else sorted(_unset(spec) & hard.keys())
        if short:
            wants = ", ".join(f"{needed[key]:g} {key}" for key in short)
            hint = "wait until others are done, ask for fewer nodes, or have the quota raised"
            yield Finding(name, "gap", f"used are {words}; the job takes {wants}", hint)
        elif unset:
            hint = "set resources.cpu and resources.memory: a quota on them refuses pods without"
            yield Finding(name, "gap", f"it bounds {', '.join(unset)}, which the job's pods do not say", hint)
        else:
            yield Finding(name, "ok", f"used are {words}")


def _left(hard: Mapping[str, str], used: Mapping[str, str], key: str) -> float:
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


def _policies(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    groups = there.groups.value
    if groups is None:
        yield _unknown("network policies", there.groups)
        return
    plugins = dict.fromkeys(POLICY_GROUPS[group] for group in groups if group in POLICY_GROUPS)
    if plugins:
        yield Finding("network policies", "ok", f"{', '.join(plugins)} is there, which enforces them")
    else:
        hint = "ask the cluster's administrator; where none enforces them, what pods of jobs reach is not bounded"
        yield Finding("network policies", "unknown", "no API of a network plugin that enforces them is served", hint)


def _images(there: Surroundings, spec: FineTuneJobSpec | None, settings: Settings) -> Iterator[Finding]:
    image = (None if spec is None else spec.image) or settings.defaults.image
    secrets = [each.name for each in settings.defaults.image_pull_secrets]
    secrets += [] if spec is None else [each.name for each in spec.template.image_pull_secrets]
    by = f", pulled with Secret {', '.join(secrets)} of {there.namespace}" if secrets else ", pulled without a Secret"
    held = []
    for node in there.nodes.value or ():
        names = {str(name) for each in node.get("status", {}).get("images") or () for name in each.get("names") or ()}
        if any(name == image or name.endswith(f"/{image}") for name in names):
            held.append(str(node["metadata"]["name"]))
    if held:
        yield Finding("image", "ok", f"{image}: {len(held)} node{'s have' if len(held) > 1 else ' has'} it{by}")
    elif "/" not in image:
        hint = "name a registry in the settings' defaults.image, or load the image into each node"
        yield Finding("image", "gap", f"{image} names no registry, and no node is known to have it{by}", hint)
    else:
        hint = "whether a registry gives it is known once a pod has pulled it: finetune images lists all that is pulled"
        yield Finding("image", "unknown", f"{image}{by}; no node is known to have it", hint)
