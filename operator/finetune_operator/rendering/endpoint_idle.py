"""HTTPScaledObject of an endpoint that scales to zero: KEDA's HTTP add-on sets the number of servers by it.

KEDA creates an autoscaler of its own for the Deployment, so the endpoint has none beside it. It scales the revision
that serves; the next one starts with at least one server, and is scaled once it has taken over.
"""

from __future__ import annotations

from finetune_operator.launchers.idle_kind import IDLE_API, IDLE_KIND
from finetune_operator.planning.plan_types import Servers
from finetune_operator.rendering.render_types import Manifest
from finetune_operator.rendering.templates import document

REQUESTS_PER_SERVER = 100
"""Average number of requests in flight per server above which servers are added, by default; the add-on's own."""


def idle_host(service: str, namespace: str) -> str:
    """Return the host of requests to the interceptor. It names Service and namespace, so that no endpoint can get the
    requests of another one.
    """
    return f"{service}.{namespace}.svc"


def idle_scaling(
    metadata: Manifest, servers: Servers, target: str, service: tuple[str, str, int], start_seconds: int
) -> Manifest:
    """Return the HTTPScaledObject. `target`: Deployment to scale; `service`: name, namespace and port of the Service
    that selects its pods; `start_seconds`: longest start of a server, for which requests are held.
    """
    name, namespace, port = service
    return document(
        "server_idle",
        version=IDLE_API,
        kind=IDLE_KIND,
        metadata=metadata,
        host=idle_host(name, namespace),
        target=target,
        service=name,
        port=port,
        most=servers.most,
        idle_seconds=servers.idle_seconds,
        start_seconds=start_seconds,
        requests=servers.target_requests or REQUESTS_PER_SERVER,
        wait=f"{start_seconds}s",
    )
