"""Endpoints that scale to zero: KEDA's HTTP add-on sets the number of servers, and the operator leaves it alone."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.endpoints.decide.autoscaling import has_autoscaler
from finetune_operator.endpoints.decide.idle_state import ACCEPT_SECONDS, idle_scaling_view, scales_to_zero
from finetune_operator.spec.status_times import stamp
from reconcile_world import SPEC, World
from rollout_world import NAME, edit, led_to, revision, stands, status, there

IDLE = {"scaleToZeroAfterSeconds": 600}
KIND = "HTTPScaledObject"


def sleepy(**endpoint: Any) -> World:
    """Return an endpoint that scales to zero, whose first revision serves with one server."""
    endpoint = {"idle": IDLE, **endpoint}
    world = World(spec={"task": SPEC["task"], "model": SPEC["model"], "endpoint": endpoint}, http_scaled_objects=True)
    world.settle()
    stands(world, 1, 1)
    return world


def scaled(world: World, count: int, available: int, number: int = 1) -> None:
    """Scale the servers of a revision as KEDA does."""
    world.servers[f"{NAME}-{number}"]["spec"]["replicas"] = count
    world.servers[f"{NAME}-{number}"]["metadata"]["generation"] += 1
    stands(world, number, available)


def replicas(world: World, number: int = 1) -> int:
    found: int = world.servers[f"{NAME}-{number}"]["spec"]["replicas"]
    return found


def reasons(world: World) -> list[str]:
    return [one.reason for one in world.events]


def test_keda_scales_the_deployment_in_place_of_an_autoscaler() -> None:
    world = sleepy(maxReplicas=4, targetRequestsInFlight=8)
    assert world.others[KIND, NAME]["apiVersion"] == "http.keda.sh/v1alpha1"
    assert world.others[KIND, NAME]["spec"] == {
        "hosts": [f"{NAME}.team.svc"],
        "scaleTargetRef": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": f"{NAME}-1",
            "service": NAME,
            "port": 80,
        },
        "replicas": {"min": 0, "max": 4},
        "scaledownPeriod": 600,
        "initialCooldownPeriod": 900,
        "scalingMetric": {"concurrency": {"targetValue": 8}},
        "timeouts": {"conditionWait": "900s", "responseHeader": "900s"},
    }
    assert ("HorizontalPodAutoscaler", NAME) not in world.others
    assert not has_autoscaler(world.job())
    assert any("all servers end after 600 s without requests" in one for one in world.status["plan"]["reasons"])
    assert not any("custom metrics" in one for one in world.status["plan"]["reasons"])


def test_one_server_at_most_is_scaled_as_well() -> None:
    found = sleepy().others[KIND, NAME]["spec"]
    assert found["replicas"] == {"min": 0, "max": 1}
    assert found["scalingMetric"] == {"concurrency": {"targetValue": 100}}


def test_endpoint_without_servers_is_ready_and_idle() -> None:
    world = sleepy()
    scaled(world, 0, 0)
    since = world.now
    ready = world.job_condition("Ready")
    assert ready[:2] == ("True", "EndpointIdle")
    assert f"interceptor of KEDA's HTTP add-on with the header Host: {NAME}.team.svc starts one" in ready[2]
    assert status(world).idle_since == since
    assert world.status["phase"] == "Serving"
    assert replicas(world) == 0, "the operator starts no server itself"
    world.wait(60)
    assert status(world).idle_since == since


def test_request_starts_servers_again_without_a_warning() -> None:
    world = sleepy()
    scaled(world, 0, 0)
    scaled(world, 1, 0)
    assert world.job_condition("Ready")[:2] == ("False", "WaitingForPods")
    assert status(world).idle_since is None
    stands(world, 1, 1)
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady")
    assert reasons(world)[-3:] == ["EndpointReady", "EndpointIdle", "EndpointReady"]
    assert not [one for one in world.events if one.type == "Warning"]


def test_number_of_servers_is_left_to_keda() -> None:
    world = sleepy(maxReplicas=4)
    scaled(world, 3, 3)
    assert replicas(world) == 3
    edit(world, idle={"scaleToZeroAfterSeconds": 60}, maxReplicas=4)
    assert replicas(world) == 3
    assert world.others[KIND, NAME]["spec"]["scaledownPeriod"] == 60
    assert there(world) == [1], "the time is not part of a revision"
    edit(world, idle=IDLE, maxReplicas=2)
    assert replicas(world) == 2
    scaled(world, 0, 0)
    edit(world, idle=IDLE, maxReplicas=3)
    applied = next(one for one in reversed(world.applied) if one["kind"] == "Deployment")
    assert "replicas" not in applied["spec"], "KEDA may start a server at this moment"


def test_new_revision_of_an_idle_endpoint_starts_before_it_takes_over() -> None:
    world = sleepy()
    scaled(world, 0, 0)
    edit(world, idle=IDLE, maxQueue=7)
    assert (replicas(world, 2), replicas(world, 1)) == (1, 0)
    assert (led_to(world), world.others[KIND, NAME]["spec"]["scaleTargetRef"]["name"]) == (1, f"{NAME}-1")
    assert world.job_condition("Ready")[:2] == ("True", "EndpointIdle")
    stands(world, 2, 1)
    assert (led_to(world), there(world)) == (2, [2])
    assert world.others[KIND, NAME]["spec"]["scaleTargetRef"]["name"] == f"{NAME}-2"
    scaled(world, 0, 0, number=2)
    assert (replicas(world, 2), revision(world, 2).state) == (0, "Serving")


def test_servers_return_and_keda_lets_go_once_idle_is_removed() -> None:
    world = sleepy(maxReplicas=4)
    scaled(world, 0, 0)
    edit(world, maxReplicas=4)
    assert (KIND, NAME) not in world.others
    assert ("HorizontalPodAutoscaler", NAME) in world.others
    assert replicas(world) == 1
    stands(world, 1, 1)
    assert status(world).idle_since is None
    edit(world, idle=IDLE, maxReplicas=4)
    assert (KIND, NAME) in world.others
    assert ("HorizontalPodAutoscaler", NAME) not in world.others


def test_object_of_keda_is_deleted_with_the_servers() -> None:
    world = sleepy()
    scaled(world, 0, 0)
    world.spec = {**world.spec, "runPolicy": {"suspend": True}}
    world.generation += 1
    world.settle()
    assert (KIND, NAME) not in world.others
    assert there(world) == []


def test_without_keda_the_endpoint_is_refused() -> None:
    world = World(spec={"task": SPEC["task"], "model": SPEC["model"], "endpoint": {"idle": IDLE}})
    world.settle()
    text = world.job_condition("Planned")[2]
    assert "spec.endpoint.idle" in text
    assert "the cluster has to serve HTTPScaledObject (http.keda.sh/v1alpha1)" in text
    assert "install KEDA and its HTTP add-on" in text
    assert not world.servers


def test_kserve_is_not_chosen_for_an_endpoint_that_scales_to_zero() -> None:
    world = World(
        spec={"task": SPEC["task"], "model": SPEC["model"], "endpoint": {"idle": IDLE}},
        http_scaled_objects=True,
        kserve=True,
    )
    world.settle()
    assert world.servers[f"{NAME}-1"]["kind"] == "Deployment"
    assert any("spec.endpoint.idle needs a Deployment" in one for one in world.status["plan"]["reasons"])


def reported(world: World, *conditions: dict[str, str]) -> None:
    """Set the state of the HTTPScaledObject, and reconcile once it is overdue."""
    metadata = {"name": NAME, "creationTimestamp": stamp(world.now)}
    world.idle_scaling = idle_scaling_view({"metadata": metadata, "status": {"conditions": list(conditions)}})
    world.wait(ACCEPT_SECONDS + 1)


@pytest.mark.parametrize(
    ("conditions", "why"),
    [
        ((), "the operator of the KEDA HTTP add-on has not reported on it"),
        (({"type": "Ready", "status": "False", "message": "no such Deployment"},), "no such Deployment"),
    ],
    ids=["nobody reports", "refused"],
)
@pytest.mark.parametrize("count", [0, 1])
def test_object_that_scales_nothing_is_reported(conditions: Any, why: str, count: int) -> None:
    world = sleepy()
    scaled(world, count, count)
    reported(world, *conditions)
    assert f"KEDA does not scale the servers: {why}." in world.job_condition("Ready")[2]
    assert reasons(world).count("IdleScalingNotReady") == 1
    world.wait(60)
    assert reasons(world).count("IdleScalingNotReady") == 1
    reported(world, {"type": "Ready", "status": "True", "message": "done"})
    assert "KEDA does not scale" not in world.job_condition("Ready")[2]


def test_objects_are_read_only_for_endpoints_that_scale_to_zero() -> None:
    assert scales_to_zero(sleepy().job())
    world = sleepy()
    edit(world)
    assert not scales_to_zero(world.job())
