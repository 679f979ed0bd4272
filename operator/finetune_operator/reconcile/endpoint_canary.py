"""Canary of a new revision: a Gateway leads a share of the requests to it before it takes over.

A canary is one revision of few servers with a Service of its own, to which the HTTPRoute gives the share of
spec.endpoint.traffic.canaryPercent. Nothing judges it here: whoever watches it removes canaryPercent, and it takes
over, or changes spec.endpoint back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune_operator.api.types import CanaryStatus, TrafficSpec
from finetune_operator.reconcile.reconcile_state import ReconcileState
from finetune_operator.reconcile.reconcile_types import EndpointView


@dataclass(frozen=True)
class Canary:
    """Canary after one reconcile."""

    servers: int
    """Number of its servers."""
    status: CanaryStatus | None = None
    """None before all of its servers are ready, and once none answers any more: the Gateway leads nothing to it."""


def canary_servers(percent: int, running: int) -> int:
    """Return the number of servers that get `percent` of the requests beside `running` others, and no more requests
    each than those do.
    """
    return math.ceil(running * percent / (100 - percent))


def next_canary(
    state: ReconcileState, traffic: TrafficSpec, percent: int, target_view: EndpointView | None, serving: EndpointView
) -> Canary:
    """Return the canary of the wanted revision beside the one that serves, after this reconcile."""
    stored = None if state.status.endpoint is None else state.status.endpoint.canary
    servers = canary_servers(percent, serving.replicas)
    if target_view is None:
        return Canary(servers)
    same = stored is not None and (stored.revision, stored.weight) == (target_view.revision, percent)
    if stored is not None and same and target_view.available:
        led = stored.model_copy(update={"gateway": traffic.gateway, "hostnames": traffic.hostnames})
        return Canary(stored.servers, led)
    if not target_view.ready or target_view.replicas != servers:
        return Canary(servers)
    led = CanaryStatus(
        revision=target_view.revision,
        servers=servers,
        weight=percent,
        gateway=traffic.gateway,
        hostnames=traffic.hostnames,
        start_time=state.now,
    )
    return Canary(servers, led)
