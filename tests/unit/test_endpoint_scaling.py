"""Autoscaling of an endpoint: by CPU use, or by requests in flight where the cluster serves custom metrics."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.endpoints.decide.autoscaling import INACTIVE_SECONDS, autoscaler_view, has_autoscaler
from finetune_operator.endpoints.decide.endpoint_parts import is_due
from finetune_operator.endpoints.render.endpoint_objects import REQUESTS_IN_FLIGHT, revision_digest
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Network, Settings
from finetune_operator.spec.types.network_types import Peer
from finetune_trainer.serving.serving_metrics import ServingMetrics
from planning_support.cases import job
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


def answering_world(endpoint: dict[str, Any]) -> World:
    """Return a job with one server that answers."""
    world = endpoint_world(False, endpoint)
    world.server["status"] = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 1}
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


INACTIVE = "the HPA was unable to compute the replica count: failed to get cpu utilization"


def ready_message(world: World) -> str:
    return world.job_condition("Ready")[2]


def autoscaler(world: World, status: str, message: str = "") -> dict[str, Any]:
    """Return the autoscaler with its controller's condition, since now."""
    condition = {"type": "ScalingActive", "status": status, "message": message, "lastTransitionTime": world.after(0)}
    return {"status": {"conditions": [condition]}}


def test_autoscaler_without_metrics_is_reported_once_after_three_minutes() -> None:
    world = answering_world({"maxReplicas": 3})
    world.autoscaler = autoscaler_view(autoscaler(world, "False", INACTIVE))
    world.settle()
    assert "under load" not in ready_message(world)
    assert "AutoscalerInactive" not in world.event_reasons()
    world.wait(INACTIVE_SECONDS)
    assert f"Servers are not added under load: {INACTIVE}." in ready_message(world)
    assert "kubectl describe hpa -n team" in ready_message(world)
    world.wait(600)
    assert world.event_reasons().count("AutoscalerInactive") == 1
    world.autoscaler = autoscaler_view(autoscaler(world, "True"))
    world.settle()
    assert "under load" not in ready_message(world)


@pytest.mark.parametrize(("status", "conditions"), [("True", True), ("Unknown", True), ("False", False)])
def test_autoscaler_that_works_or_was_not_judged_is_not_reported(status: str, conditions: bool) -> None:
    world = answering_world({"maxReplicas": 3})
    world.autoscaler = autoscaler_view(autoscaler(world, status, INACTIVE) if conditions else {"status": {}})
    world.wait(2 * INACTIVE_SECONDS)
    assert "under load" not in ready_message(world)
    assert "AutoscalerInactive" not in world.event_reasons()


def test_endpoint_without_autoscaler_is_not_reconciled_for_one() -> None:
    assert not has_autoscaler(answering_world({}).job())
    assert not has_autoscaler(answering_world({"replicas": 2, "maxReplicas": 2}).job())
    assert has_autoscaler(answering_world({"replicas": 2, "maxReplicas": 3}).job())


def test_autoscaler_is_read_again_at_intervals() -> None:
    assert is_due(float("inf"), False)
    assert [is_due(age, False) for age in (10, 60)] == [False, True]
    assert [is_due(age, True) for age in (60, 599, 600)] == [False, True, True]


def test_processes_of_other_stages_replace_no_servers() -> None:
    spec = {"resources": {"nodes": 2, "gpusPerNode": 4, "network": "rdma"}, "endpoint": {}, "predict": {}}
    planned = plan(job(spec), Facts(), CLUSTER_SETTINGS)
    evaluation, predict, training = planned.trainer.evaluation, planned.trainer.predict, planned.trainer.training
    assert evaluation is not None
    assert predict is not None
    assert training is not None
    assert (evaluation.processes, predict.processes, training.world.network) == (4, 4, "rdma")
    before = planned.trainer.model_copy(
        update={
            "evaluation": evaluation.model_copy(update={"processes": 1}),
            "predict": predict.model_copy(update={"processes": 1}),
            "training": training.model_copy(update={"world": training.world.model_copy(update={"network": None})}),
        }
    )
    context = RenderContext("team", job(spec).spec, CLUSTER_SETTINGS, None)
    assert revision_digest(planned, context) == revision_digest(planned.model_copy(update={"trainer": before}), context)
