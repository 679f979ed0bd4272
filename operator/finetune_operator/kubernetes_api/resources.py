"""Kinds that the operator and the `finetune` command read or write, and their paths on the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from finetune_operator.endpoints.kinds import (
    IDLE_API,
    IDLE_KIND,
    IDLE_PLURAL,
    KSERVE_API,
    KSERVE_KIND,
    KSERVE_PLURAL,
    ROUTE_API,
    ROUTE_KIND,
    ROUTE_PLURAL,
)
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.launcher_rows import SUPPORTED, LauncherName
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL


@dataclass(frozen=True)
class Resource:
    """One kind of object, and where it is served."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group_kind(self) -> GroupKind:
        """Return the kind without its version, as the store knows it."""
        return GroupKind.of(self.api_version, self.kind)

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of one object, or of the collection."""
        parts = ["/apis" if "/" in self.api_version else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
        return "/".join(parts)


FINETUNE_JOB = Resource(API_VERSION, KIND, PLURAL)
LAUNCHER_RESOURCES: Mapping[LauncherName, Resource] = {
    launcher.name: Resource(launcher.api_version, launcher.kind, launcher.plural) for launcher in SUPPORTED
}
JOB = LAUNCHER_RESOURCES["job"]
POD = Resource("v1", "Pod", "pods")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
SERVICE = Resource("v1", "Service", "services")
CLAIM = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Resource("v1", "Event", "events")
NODE = Resource("v1", "Node", "nodes", namespaced=False)
NETWORK_POLICY = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
INFERENCE_SERVICE = Resource(KSERVE_API, KSERVE_KIND, KSERVE_PLURAL)
HTTP_ROUTE = Resource(ROUTE_API, ROUTE_KIND, ROUTE_PLURAL)
HTTP_SCALED_OBJECT = Resource(IDLE_API, IDLE_KIND, IDLE_PLURAL)
REPLICA_SET = Resource("apps/v1", "ReplicaSet", "replicasets")
CUSTOM_METRICS_GROUP = "custom.metrics.k8s.io"
"""API group that autoscalers read metrics of pods from; an adapter serves it through the API server."""
AUTOSCALER = Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
DISRUPTION_BUDGET = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
SECRET = Resource("v1", "Secret", "secrets")
SERVICE_ACCOUNT = Resource("v1", "ServiceAccount", "serviceaccounts")
STORAGE_CLASS = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
PRIORITY_CLASS = Resource("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False)
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")
_WEBHOOK = "ValidatingWebhookConfiguration"
WEBHOOK = Resource("admissionregistration.k8s.io/v1", _WEBHOOK, f"{_WEBHOOK.lower()}s", namespaced=False)
TOKEN_REVIEW = Resource("authentication.k8s.io/v1", "TokenReview", "tokenreviews", namespaced=False)

RESOURCES = (
    FINETUNE_JOB, *LAUNCHER_RESOURCES.values(), POD, CONFIG_MAP, SERVICE, CLAIM, NETWORK_POLICY, EVENT,
    DEPLOYMENT, INFERENCE_SERVICE, HTTP_ROUTE, HTTP_SCALED_OBJECT, REPLICA_SET, AUTOSCALER, DISRUPTION_BUDGET,
    SECRET, LEASE, TOKEN_REVIEW, WEBHOOK, NODE,
)  # fmt: skip
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in RESOURCES}
OPENID = "openid"
"""Subject of requests about the issuer of tokens; it is not a resource."""


def resource_of(api_version: str, kind: str) -> Resource:
    """Return the resource of a kind. ValueError for one that is not in RESOURCES: the operator has no rights on it."""
    try:
        return _BY_KIND[api_version, kind]
    except KeyError:
        raise ValueError(f"{kind} of {api_version} is not a kind that this operator reads or writes") from None
