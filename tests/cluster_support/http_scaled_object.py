"""HTTPScaledObjects on an API server: a small stand-in for the definition of KEDA's HTTP add-on.

The stand-in has the spec of the real definition (kedacore/http-add-on 0.12, config/crd/bases) without its descriptions
and its column of states, and refuses other fields; nothing scales by it.
"""

from __future__ import annotations

import json

from cluster_support.api_access import Api, Object, path_of
from cluster_support.control_plane import Cluster
from finetune_operator.endpoints.kinds import IDLE_API, IDLE_GROUP, IDLE_KIND, IDLE_PLURAL

DEFINITION = f"{IDLE_PLURAL}.{IDLE_GROUP}"
_TEXT: Object = {"type": "string"}
_COUNT: Object = {"type": "integer", "format": "int32"}
_ONE_PORT = {
    "rule": "has(self.portName) != has(self.port)",
    "message": "must define either the 'portName' or the 'port'",
}


def _object(required: tuple[str, ...] = (), **fields: Object) -> Object:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


def definition() -> Object:
    """Return the CustomResourceDefinition."""
    named: Object = {"service": _TEXT, "port": _COUNT, "portName": _TEXT}
    target = _object(("service",), **named, name=_TEXT, kind=_TEXT, apiVersion=_TEXT)
    failover = _object(("service",), **named, timeoutSeconds={**_COUNT, "default": 30})
    value: Object = {"type": "integer", "default": 100}
    rate = _object(targetValue=value, granularity={**_TEXT, "default": "1s"}, window={**_TEXT, "default": "1m"})
    header = _object(("name",), name={**_TEXT, "minLength": 1}, value=_TEXT)
    spec = _object(
        ("scaleTargetRef",),
        hosts={"type": "array", "items": _TEXT},
        pathPrefixes={"type": "array", "items": _TEXT},
        headers={
            "type": "array",
            "items": header,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
        scaleTargetRef={**target, "x-kubernetes-validations": [_ONE_PORT]},
        coldStartTimeoutFailoverRef={**failover, "x-kubernetes-validations": [_ONE_PORT]},
        replicas=_object(min=_COUNT, max=_COUNT),
        scaledownPeriod=_COUNT,
        initialCooldownPeriod=_COUNT,
        targetPendingRequests=_COUNT,
        scalingMetric=_object(concurrency=_object(targetValue=value), requestRate=rate),
        timeouts=_object(conditionWait=_TEXT, responseHeader=_TEXT),
    )
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"kind": IDLE_KIND, "plural": IDLE_PLURAL, "singular": "httpscaledobject"}
    version = IDLE_API.rpartition("/")[2]
    schema = {"openAPIV3Schema": _object(spec=spec, status=status)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {
            "group": IDLE_GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {"name": version, "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
            ],
        },
    }


def install_http_scaled_objects(cluster: Cluster) -> None:
    """Serve HTTPScaledObjects, by the stand-in unless the cluster serves them already."""
    api = Api(cluster.access)
    if api.get(path_of("apiextensions.k8s.io/v1", "customresourcedefinitions", name=DEFINITION)) is None:
        cluster.must("apply", "--server-side", "-f", "-", stdin=json.dumps(definition()))
    cluster.wait_served(DEFINITION)
