"""HTTPRoute of an endpoint: a Gateway leads requests to its Service, and a share of them to a canary's.

The route stays through rollouts: its rule leads to the endpoint's Service, and during a canary to the canary's own
Service as well, with weights. Whoever asks the endpoint's Service itself gets the serving revision.
"""

from __future__ import annotations

from pydantic import JsonValue

from finetune_operator.api.types import TrafficSpec
from finetune_operator.launchers.route_kind import (
    GATEWAY_GROUP,
    GATEWAY_KIND,
    GATEWAY_LABEL,
    ROUTE_API,
    ROUTE_KIND,
)
from finetune_operator.rendering.render_types import Manifest, RenderContext
from finetune_operator.rendering.templates import document

WHOLE = 100
"""Sum of the weights: they are percentages."""


def route(metadata: Manifest, traffic: TrafficSpec, weights: dict[str, int], port: int) -> Manifest:
    """Return the HTTPRoute. `weights`: share of the requests in percent, by Service."""
    namespace, name = _gateway(traffic)
    parent: Manifest = {"group": GATEWAY_GROUP, "kind": GATEWAY_KIND, "name": name}
    backends: list[JsonValue] = [[service, weight] for service, weight in weights.items()]
    return document(
        "server_route",
        version=ROUTE_API,
        kind=ROUTE_KIND,
        metadata=metadata,
        parent=parent if namespace is None else {**parent, "namespace": namespace},
        hostnames=list(traffic.hostnames),
        backends=backends,
        port=port,
    )


def gateway_peer(context: RenderContext) -> Manifest | None:
    """Return the peer that selects the pods of a Gateway of another namespace; those of the job's own may ask anyway.
    None without one.
    """
    traffic = context.spec.routed_traffic
    namespace, name = (None, "") if traffic is None else _gateway(traffic)
    if namespace is None or namespace == context.namespace:
        return None
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {GATEWAY_LABEL: name}},
    }


def _gateway(traffic: TrafficSpec) -> tuple[str | None, str]:
    """Return namespace and name of the Gateway; None: that of the job."""
    namespace, _, name = (traffic.gateway or "").rpartition("/")
    return namespace or None, name
