"""Common parts of pods, as typed values that render to Kubernetes' JSON: environment, volumes, resources, affinity,
security context, the pod itself.

They decide nothing about a job; `trainer_pod.py` does. This module fixes the rules for every pod of ours: PodSecurity
`restricted` is met by construction, no API token is mounted, the root file system is read-only, and the kubelet's
`$(NAME)` expansion never changes text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from finetune_contract.layout import DEFAULT_REPORT_PATH
from finetune_operator.jobs.render.merging import join, merge
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.render.spot_affinity import only_on, only_with
from finetune_operator.spec.types import SecretKeySpec, SecretSpec

CONTAINER_NAME = "pytorch"
"""Container name in every kind but one, as PyTorchJob accepts no other."""
SERVED_CONTAINER_NAME = "kserve-container"
"""Container name in an InferenceService, as KServe accepts no other."""
USER_ID = 1000
"""User mpiuser of the image; a number, since `runAsNonRoot` cannot check a name."""


def literal(text: str) -> str:
    """Escape `text` for the kubelet, which expands `$(NAME)` and reads `$$` as one `$`.

    Kubernetes, third_party/forked/golang/expansion/expand.go: in command, args and env values.
    """
    return text.replace("$", "$$")


# ---------------------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class PodLabel:
    """Label of the pod itself, which a controller may have added."""

    label: str


@dataclass(frozen=True)
class EnvVar:
    """Variable of the container: a text, one key of a Secret, or a label of the pod."""

    name: str
    value: str | SecretKeySpec | PodLabel

    def manifest(self) -> Manifest:
        match self.value:
            case str(text):
                return {"name": self.name, "value": literal(text)}
            case PodLabel(label):
                return {"name": self.name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
            case SecretKeySpec(name=name, key=key):
                return {"name": self.name, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def user_variable(variable: Mapping[str, JsonValue]) -> Manifest:
    """Return a user's Kubernetes EnvVar, escaped so that the kubelet expands no `$(NAME)` in it."""
    value = variable.get("value")
    return {**variable, "value": literal(value)} if isinstance(value, str) else dict(variable)


# -------------------------------------------------------------------------------------------------------------- volumes


@dataclass(frozen=True)
class Volume:
    """Volume of the pod; created by the functions below."""

    name: str
    source: Manifest

    @property
    def claim(self) -> str | None:
        """Return the name of its claim; None if it is another kind of volume."""
        source = self.source.get("persistentVolumeClaim")
        return str(source["claimName"]) if isinstance(source, dict) else None

    def manifest(self) -> Manifest:
        return {"name": self.name, **self.source}


@dataclass(frozen=True)
class Mount:
    """Mount of a volume in the trainer's container."""

    volume: str
    path: str
    read_only: bool = False

    def manifest(self) -> Manifest:
        read_only: Manifest = {"readOnly": True} if self.read_only else {}
        return {"name": self.volume, "mountPath": self.path, **read_only}


def config_volume(name: str, config_map: str) -> Volume:
    """Return a volume with the keys of a ConfigMap as files."""
    return Volume(name, {"configMap": {"name": config_map}})


def claim_volume(name: str, claim: str) -> Volume:
    """Return a volume of a claim; the mount decides whether it is writable."""
    return Volume(name, {"persistentVolumeClaim": {"claimName": claim}})


def scratch_volume(name: str) -> Volume:
    """Return space on the node's disk that is deleted with the pod."""
    return Volume(name, {"emptyDir": {}})


def memory_volume(name: str, size: str) -> Volume:
    """Return space in memory, for /dev/shm; its content counts towards the container's memory."""
    return Volume(name, {"emptyDir": {"medium": "Memory", "sizeLimit": size}})


def token_volume(name: str, audience: str, file: str) -> Volume:
    """Return a token valid for `audience` only (the API server itself refuses it), renewed every hour."""
    token: JsonValue = {"serviceAccountToken": {"audience": audience, "expirationSeconds": 3600, "path": file}}
    return Volume(name, {"projected": {"sources": [token]}})


# ------------------------------------------------------------------------------------------------------------ resources


@dataclass(frozen=True)
class Resources:
    """Resources of a container, as quantities; each of `limits` is also its request."""

    requests: Mapping[str, str]
    """Requests without a limit, but for `ceilings`."""
    limits: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, str] = field(default_factory=dict)
    """Limits of resources in `requests`."""

    def manifest(self) -> Manifest:
        limited: JsonValue = {**self.ceilings, **self.limits}
        limits: Manifest = {"limits": limited} if limited else {}
        return {"requests": {**self.requests, **self.limits}, **limits}


# ------------------------------------------------------------------------------------------------------------- affinity


def avoiding(nodes: Sequence[str]) -> Manifest:
    """Return a preferred affinity to nodes other than `nodes`; not a required one, as there may be no others."""
    if not nodes:
        return {}
    hostname: JsonValue = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    term: JsonValue = {"weight": 100, "preference": {"matchExpressions": [hostname]}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


# ------------------------------------------------------------------------------------------------------------------ pod


@dataclass(frozen=True)
class Container:
    """The only container of a pod."""

    image: str
    command: tuple[str, ...]
    """Argument vector, not passed to a shell."""
    env: tuple[EnvVar, ...]
    mounts: tuple[Mount, ...]
    resources: Resources
    image_pull_policy: str | None = None
    env_from_secret: str | None = None
    """Secret whose keys all become variables."""
    name: str = CONTAINER_NAME
    ports: Mapping[str, int] = field(default_factory=dict)
    ready_port: int | None = None
    """Port that has to answer before the container is ready; None if it is ready once it runs."""
    health: Mapping[str, JsonValue] = field(default_factory=dict)
    """Probes and lifecycle hooks, by their names in Kubernetes."""
    working_folder: str | None = None
    """Working directory; None: the image's."""
    message_policy: Literal["File", "FallbackToLogsOnError"] = "File"
    """Source of the termination message: our programs write a report; of others the kubelet keeps the end of the log.
    """
    user_env: tuple[Mapping[str, JsonValue], ...] = ()
    user_mounts: tuple[Mapping[str, JsonValue], ...] = ()

    def manifest(self) -> Manifest:
        optional: Manifest = {}
        if self.image_pull_policy is not None:
            optional["imagePullPolicy"] = self.image_pull_policy
        if self.env_from_secret is not None:
            optional["envFrom"] = [{"secretRef": {"name": self.env_from_secret}}]
        if self.ports:
            optional["ports"] = [{"name": name, "containerPort": port} for name, port in self.ports.items()]
        if self.working_folder is not None:
            optional["workingDir"] = self.working_folder
        if self.ready_port is not None:
            optional["readinessProbe"] = {"tcpSocket": {"port": self.ready_port}, "periodSeconds": 2}
        return {
            "name": self.name,
            "image": self.image,
            "command": [literal(argument) for argument in self.command],
            "env": self._env(),
            "resources": self.resources.manifest(),
            "volumeMounts": [*(mount.manifest() for mount in self.mounts), *map(dict, self.user_mounts)],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "terminationMessagePath": DEFAULT_REPORT_PATH,
            "terminationMessagePolicy": self.message_policy,
            **optional,
            **self.health,
        }

    def _env(self) -> list[JsonValue]:
        """Return all variables. A user's replaces ours; validation refuses those that may not be replaced."""
        replaced = {variable["name"] for variable in self.user_env}
        ours = (variable for variable in self.env if variable.name not in replaced)
        return [*(variable.manifest() for variable in ours), *map(user_variable, self.user_env)]


@dataclass(frozen=True)
class Pod:
    """Pod template; fields with the prefix `user_` are merged into ours as they were written."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    container: Container
    volumes: tuple[Volume, ...]
    termination_grace_seconds: int
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, JsonValue], ...] = ()
    affinity: Mapping[str, JsonValue] = field(default_factory=dict)
    only_nodes: tuple[Mapping[str, str], ...] = ()
    """Label sets of nodes, one of which has to match in full beside the user's own affinity; () for any node."""
    one_label: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values by label; a node has to have one of these labels with one of its values; {} for any node."""
    image_pull_secrets: tuple[SecretSpec, ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    restart_policy: Literal["Never", "Always"] = "Never"
    """Restart policy; a Deployment accepts `Always` only."""
    host_network: bool = False
    """True if it uses the network of its node; it still resolves the cluster's names."""
    api_token: bool = False
    """True if the token of its service account is mounted."""
    subdomain: str | None = None
    """Headless Service that gives the pod's host name an address."""
    user_labels: Mapping[str, str] = field(default_factory=dict)
    user_annotations: Mapping[str, str] = field(default_factory=dict)
    user_node_selector: Mapping[str, str] = field(default_factory=dict)
    user_affinity: Mapping[str, JsonValue] = field(default_factory=dict)
    user_volumes: tuple[Mapping[str, JsonValue], ...] = ()
    user_security_context: Mapping[str, JsonValue] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        """Return a PodTemplateSpec. The operator finds pods by our labels, so they override the user's."""
        return {
            "metadata": {
                "labels": {**self.user_labels, **self.labels},
                "annotations": {**self.user_annotations, **self.annotations},
            },
            "spec": {
                "restartPolicy": self.restart_policy,
                "automountServiceAccountToken": self.api_token,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": self.termination_grace_seconds,
                "securityContext": merge(_security_context(), self.user_security_context),
                **self._placement(),
                "containers": [self.container.manifest()],
                "volumes": [*(volume.manifest() for volume in self.volumes), *map(dict, self.user_volumes)],
            },
        }

    def _placement(self) -> Manifest:
        """Return the fields of the pod spec that are left out if empty."""
        fields: Manifest = {
            "nodeSelector": {**self.node_selector, **self.user_node_selector},
            "tolerations": [dict(toleration) for toleration in self.tolerations],
            "affinity": only_with(
                only_on(join(self.affinity, self.user_affinity), self.only_nodes),
                [{key: values} for key, values in self.one_label.items()],
            ),
            "imagePullSecrets": [{"name": secret.name} for secret in self.image_pull_secrets],
            "serviceAccountName": self.service_account,
            "priorityClassName": self.priority_class,
            "subdomain": self.subdomain,
            "hostNetwork": self.host_network,
            "dnsPolicy": "ClusterFirstWithHostNet" if self.host_network else None,
        }
        return {name: value for name, value in fields.items() if value}


def _security_context() -> Manifest:
    """Return a security context for PodSecurity `restricted`, with volumes that our group may write to."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Otherwise the kubelet changes the owner of every file of the workspace at each start of a pod.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
