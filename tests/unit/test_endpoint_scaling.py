"""Autoscaling of an endpoint: by CPU use, or by requests in flight where the cluster serves custom metrics."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.api.network_types import Peer
from finetune_operator.api.settings import Network, Settings
from finetune_operator.api.settings_check import check_settings
from finetune_operator.rendering.endpoint_objects import REQUESTS_IN_FLIGHT
from finetune_trainer.serving.serving_metrics import ServingMetrics
from reconcile_world import SPEC, World

SCALED = {"maxReplicas": 3, "targetRequestsInFlight": 8}
BY_CPU = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
}
BY_REQUESTS = {
    "type": "Pods",
    "pods": {
        "metric": {"name": "finetune_serving_requests_in_flight"},
        "target": {"type": "AverageValue", "averageValue": "8"},
    },
}


def endpoint_world(custom_metrics: bool, endpoint: dict[str, Any], settings: Settings | None = None) -> World:
    """Return a job that only serves, reconciled until nothing changes."""
    spec = {"task": SPEC["task"], "model": SPEC["model"], "endpoint": endpoint}
    world = World(spec=spec, custom_metrics=custom_metrics)
    world.settings = settings or world.settings
    world.settle()
    return world


def scaling(world: World) -> list[dict[str, Any]]:
    """Return the metrics of the autoscaler."""
    found: list[dict[str, Any]] = world.others["HorizontalPodAutoscaler", "reviews-endpoint"]["spec"]["metrics"]
    return found


def reasons(world: World) -> list[str]:
    plan = world.job().status.plan
    assert plan is not None
    return [reason for reason in plan.reasons if "CPU use" in reason]


def test_servers_scale_by_cpu_without_a_target() -> None:
    world = endpoint_world(True, {"maxReplicas": 3})
    assert scaling(world) == [BY_CPU]
    assert reasons(world) == []


def test_servers_scale_by_requests_in_flight_with_a_target() -> None:
    world = endpoint_world(True, SCALED)
    assert scaling(world) == [BY_REQUESTS]
    assert reasons(world) == []


def test_fallback_to_cpu_is_a_reason_of_the_plan_until_metrics_are_served() -> None:
    world = endpoint_world(False, SCALED)
    assert scaling(world) == [BY_CPU]
    assert reasons(world) == [
        "servers are added by CPU use: the cluster does not serve the custom metrics API "
        "(spec.endpoint.targetRequestsInFlight is 8)"
    ]
    world.custom_metrics = True
    world.settle()
    assert scaling(world) == [BY_REQUESTS]
    assert reasons(world) == []


def test_changed_target_starts_no_revision() -> None:
    world = endpoint_world(True, SCALED)
    before = set(world.servers)
    world.spec = {**world.spec, "endpoint": {**SCALED, "targetRequestsInFlight": 20}}
    world.generation += 1
    world.settle()
    assert scaling(world)[0]["pods"]["target"]["averageValue"] == "20"
    assert set(world.servers) == before


def test_servers_export_the_metric_that_autoscalers_read() -> None:
    metrics = ServingMetrics("reviews", "text-classification", "1")
    metrics.in_flight.inc(3)
    assert f"\n{REQUESTS_IN_FLIGHT} 3.0\n" in metrics.text().decode()


def test_peers_of_the_settings_may_reach_servers() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    own = Network(endpointClients=(Peer.model_validate(prometheus),))
    settings = World().settings.model_copy(update={"network_policy": own})
    world = endpoint_world(False, {}, settings)
    rule = world.others["NetworkPolicy", "reviews-endpoint"]["spec"]["ingress"][0]
    assert rule["from"] == [{"podSelector": {}}, prometheus]


@pytest.mark.parametrize("peer", [{}, {"ipBlock": {"cidr": "10.0.0.0/33"}}])
def test_peer_that_selects_nothing_is_refused(peer: dict[str, Any]) -> None:
    settings = {**World().settings.model_dump(by_alias=True, mode="json"), "networkPolicy": {"endpointClients": [peer]}}
    assert [problem for problem in check_settings(settings)[1] if "endpointClients" in problem.path]
