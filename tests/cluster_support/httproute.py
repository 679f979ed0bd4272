"""HTTPRoutes on an API server: a small stand-in for the Gateway API's definition.

The stand-in has the fields that the operator writes, with the bounds of the real definition (Gateway API 1.5,
config/crd/standard), and refuses others; nothing leads requests by it.
"""

from __future__ import annotations

import json

from cluster_support.api_access import Api, Object, path_of
from cluster_support.control_plane import Cluster
from finetune_operator.endpoints.kinds import (
    GATEWAY_GROUP,
    ROUTE_API,
    ROUTE_KIND,
    ROUTE_PLURAL,
)

DEFINITION = f"{ROUTE_PLURAL}.{GATEWAY_GROUP}"
_LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_HOST = {
    "type": "string",
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    "maxLength": 253,
}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}


def _object(required: tuple[str, ...] = (), **fields: Object) -> Object:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


def _list(item: Object, most: int) -> Object:
    return {"type": "array", "items": item, "maxItems": most}


def definition() -> Object:
    """Return the CustomResourceDefinition."""
    parent = _object(("name",), group={"type": "string"}, kind={"type": "string"}, namespace=_LABEL, name=_NAME)
    port = {"type": "integer", "minimum": 1, "maximum": 65535}
    weight = {"type": "integer", "minimum": 0, "maximum": 1_000_000, "default": 1}
    backend = _object(
        ("name",), group={"type": "string"}, kind={"type": "string"}, name=_NAME, port=port, weight=weight
    )
    spec = _object(
        parentRefs=_list(parent, 32),
        hostnames=_list(_HOST, 16),
        rules=_list(_object(backendRefs=_list(backend, 16)), 16),
    )
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"kind": ROUTE_KIND, "plural": ROUTE_PLURAL, "singular": "httproute"}
    schema = {"openAPIV3Schema": _object(("spec",), spec=spec, status=status)}
    approved = {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION, "annotations": approved},
        "spec": {
            "group": GATEWAY_GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
            ],
        },
    }


def install_httproutes(cluster: Cluster) -> None:
    """Serve HTTPRoutes, by the stand-in unless the cluster serves them already."""
    api = Api(cluster.access)
    if api.get(path_of("apiextensions.k8s.io/v1", "customresourcedefinitions", name=DEFINITION)) is None:
        cluster.must("apply", "--server-side", "-f", "-", stdin=json.dumps(definition()))
    cluster.wait_served(DEFINITION)


def weights(api: Api, namespace: str, name: str) -> dict[str, int]:
    """Return the weight of each Service of an HTTPRoute; empty if there is none."""
    found = api.get(path_of(ROUTE_API, ROUTE_PLURAL, namespace, name))
    rules = (found or {}).get("spec", {}).get("rules", [])
    return {one["name"]: one["weight"] for rule in rules for one in rule["backendRefs"]}
