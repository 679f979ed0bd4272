"""An endpoint that KServe runs: the applied objects, its status, and how it replaces a Deployment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reconcile_world import SPEC, World

ALONE: dict[str, Any] = {"task": SPEC["task"], "model": SPEC["model"], "endpoint": {}}
NAME = "reviews-endpoint-1"
URL = "http://reviews-endpoint.team.svc"


def serving(available: int | None = 0, kserve: bool = True, **endpoint: Any) -> World:
    """Return a job that only serves; with None, KServe has not created its Deployment yet."""
    world = World(spec={**ALONE, "endpoint": endpoint}, kserve=kserve)
    world.settle()
    if available is not None:
        follows(world, available)
    return world


def follows(world: World, available: int, name: str = NAME, **status: Any) -> None:
    """Set KServe's Deployment as the InferenceService asks for, with so many servers."""
    service = world.servers[name]
    assert service["kind"] == "InferenceService"
    predictor, made = service["spec"]["predictor"], f"{name}-predictor"
    labels = {**service["metadata"]["labels"], "serving.kserve.io/inferenceservice": name}
    server_status = {"availableReplicas": available, "updatedReplicas": available, "observedGeneration": 1, **status}
    world.predictors[name] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": made, "uid": f"uid-{made}", "labels": labels, **annotations(service)},
        "spec": {"replicas": predictor["minReplicas"]},
        "status": server_status,
    }
    world.settle()


def stands(world: World, available: int, name: str = NAME) -> None:
    """Set the status of a Deployment of ours, with so many servers of its newest generation."""
    found = world.servers[name]
    assert found["kind"] == "Deployment"
    generation = found["metadata"]["generation"]
    found["status"] = {"availableReplicas": available, "updatedReplicas": available, "observedGeneration": generation}
    world.settle()


def kinds(world: World) -> dict[str, str]:
    return {name: raw["kind"] for name, raw in world.servers.items()}


def annotations(service: Any) -> Any:
    return {"annotations": dict(service["metadata"]["annotations"])}


def edit(world: World, **endpoint: Any) -> None:
    world.spec = {**world.spec, "endpoint": endpoint}
    world.generation += 1
    world.settle()


def reasons(world: World) -> str:
    plan = world.job().status.plan
    assert plan is not None
    return " ".join(plan.reasons)


def url(world: World) -> str | None:
    artifacts = world.job().status.artifacts
    return None if artifacts is None else artifacts.endpoint_url


def test_auto_uses_kserve_where_it_is_served_with_a_note() -> None:
    world = serving()
    assert kinds(world) == {NAME: "InferenceService"}
    assert "1 server by KServe in an InferenceService: the cluster serves InferenceService" in reasons(world)
    child = world.job().status.stages[-1].child
    assert child is not None
    assert (child.kind, child.name) == ("InferenceService", NAME)
    follows(world, 1)
    assert (world.phase, world.job_condition("Ready")[:2], url(world)) == ("Serving", ("True", "EndpointReady"), URL)


def test_auto_takes_a_deployment_where_kserve_is_not_served() -> None:
    world = serving(None, kserve=False)
    assert kinds(world) == {NAME: "Deployment"}
    assert "in a Deployment: the cluster is not known to serve KServe's InferenceService" in reasons(world)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"env": [{"name": "PYTHONPATH", "value": "/mine"}]}, "KServe takes the variable PYTHONPATH"),
        ({"labels": {"app": "reviews"}}, "KServe sets app of spec.template on pods itself"),
    ],
)
def test_spec_that_kserve_cannot_serve_uses_a_deployment_or_is_refused(template: Any, why: str) -> None:
    world = World(spec={**ALONE, "template": template}, kserve=True)
    world.settle()
    assert kinds(world) == {NAME: "Deployment"}
    assert f"not by KServe, as {why}" in reasons(world)
    world = World(spec={**ALONE, "template": template, "endpoint": {"runtime": "kserve"}}, kserve=True)
    world.settle()
    assert world.job_condition("Planned")[:2] == ("False", "PlanRefused")
    assert why in world.job_condition("Planned")[2]


def test_requested_kserve_waits_until_the_cluster_serves_it() -> None:
    world = serving(None, kserve=False, runtime="kserve")
    assert world.job_condition("Planned")[:2] == ("False", "PlanRefused")
    assert "install KServe, or set it to auto or deployment" in world.job_condition("Planned")[2]
    world.kserve = True
    world.settle()
    follows(world, 1)
    assert world.job_condition("Ready")[0] == "True"


def test_kserve_without_a_controller_is_reported() -> None:
    world = serving(None)
    status, reason, message = world.job_condition("Ready")
    assert (status, reason) == ("False", "WaitingForKServe")
    assert "check that its controller runs" in message


def test_failure_condition_of_kserve_is_reported() -> None:
    world = serving(None)
    waits = {"type": "PredictorReady", "status": "False", "reason": "MinimumReplicasUnavailable", "message": "No."}
    world.servers[NAME]["status"] = {"conditions": [waits]}
    world.settle()
    assert world.job_condition("Ready")[1] == "WaitingForKServe"
    assert "EndpointNotReady" not in world.event_reasons(), "every server starts so"
    condition = {"type": "PredictorReady", "status": "False", "reason": "ReconcileFailed", "message": "exceeded quota"}
    world.servers[NAME]["status"] = {"conditions": [condition]}
    world.settle()
    assert world.job_condition("Ready") == (
        "False",
        "ReconcileFailed",
        f"KServe reports for InferenceService {NAME}: exceeded quota",
    )
    assert world.phase == "Serving"


def test_address_given_by_kserve_is_reported() -> None:
    world = serving(1)
    world.servers[NAME]["status"] = {"url": "http://reviews-endpoint-team.example.com"}
    world.settle()
    assert "http://reviews-endpoint-team.example.com" in world.job_condition("Ready")[2]
    assert url(world) == URL


def test_more_servers_do_not_replace_those_that_run() -> None:
    world = serving(1)
    before = json.loads(json.dumps(world.servers[NAME]))
    assert before["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "none"
    edit(world, replicas=2)
    assert list(world.servers) == [NAME]
    after = world.servers[NAME]
    assert (after["spec"]["predictor"]["minReplicas"], after["spec"]["predictor"]["maxReplicas"]) == (2, 2)
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert "PodDisruptionBudget" in {kind for kind, _ in world.others}
    edit(world, replicas=2, maxReplicas=4)
    assert world.servers[NAME]["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "external"
    scaler = world.others["HorizontalPodAutoscaler", "reviews-endpoint"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == f"{NAME}-predictor"
    edit(world)
    assert not {"HorizontalPodAutoscaler", "PodDisruptionBudget"} & {kind for kind, _ in world.others}


def test_verdict_on_servers_before_a_change_is_none_on_those_after_it() -> None:
    world = serving(1, replicas=1, maxReplicas=2)
    stuck = [{"type": "Progressing", "status": "False", "message": "has timed out progressing"}]
    follows(world, 0, conditions=stuck)
    assert world.job_condition("Stalled")[:2] == ("True", "ProgressDeadlineExceeded")
    world.settings = world.settings.model_copy(
        update={"network_policy": world.settings.network_policy.model_copy(update={"enabled": False})}
    )
    world.settle()
    assert world.job_condition("Stalled")[0] == "False", "KServe has not followed the change yet"


def test_servers_of_one_runtime_go_once_those_of_the_other_answer() -> None:
    world = serving(None, kserve=False)
    stands(world, 1)
    world.kserve = True
    world.settle()
    assert kinds(world) == {NAME: "Deployment"}, "auto leaves an endpoint that runs where it is"
    edit(world, runtime="kserve")
    second, third = "reviews-endpoint-2", "reviews-endpoint-3"
    assert kinds(world) == {NAME: "Deployment", second: "InferenceService"}
    follows(world, 0, second)
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady"), "the old servers answer meanwhile"
    follows(world, 1, second)
    assert (kinds(world), world.job_condition("Ready")[0]) == ({second: "InferenceService"}, "True")
    service = world.others["Service", "reviews-endpoint"]
    assert service["spec"]["selector"]["finetune.dev/attempt"] == "2"
    edit(world, runtime="deployment")
    assert kinds(world) == {second: "InferenceService", third: "Deployment"}
    stands(world, 1, third)
    assert (kinds(world), world.job_condition("Ready")[0]) == ({third: "Deployment"}, "True")
    assert "EndpointNotReady" not in world.event_reasons()


def test_kserve_endpoint_is_deleted_with_its_spec_and_on_suspension() -> None:
    world = serving(1)
    world.edit(suspend=True)
    world.settle()
    assert (world.servers, world.phase, url(world)) == ({}, "Suspended", None)
    assert {kind for kind, name in world.others if "endpoint" in name} == set()
    world.edit(suspend=False)
    world.settle()
    follows(world, 1, next(iter(world.servers)))
    assert world.phase == "Serving"
    assert world.job_condition("Ready")[0] == "True"


def test_server_waiting_for_a_volume_of_another_node_is_reported() -> None:
    world = World(spec={**ALONE, "endpoint": {"replicas": 2}, "storage": {"workspace": "pvc://reviews"}})
    world.settle()
    labels = world.server["spec"]["template"]["metadata"]["labels"]
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": world.after(0)}
    for number, state in enumerate(({"running": {"startedAt": world.after(0)}}, {"waiting": waiting()})):
        name = f"{NAME}-{number}"
        metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": world.after(number)}
        status = {
            "phase": "Pending" if "waiting" in state else "Running",
            "conditions": [scheduled],
            "containerStatuses": [{"name": "pytorch", "state": state}],
        }
        spec = {"nodeName": f"node-{number}"}
        world.pods[name] = {"child": NAME, "metadata": metadata, "spec": spec, "status": status}
    stands(world, 1)
    assert "ReadWriteOnce" not in world.job_condition("Ready")[2]
    assert world.decide().requeue_at is not None
    world.wait(61)
    status, _, message = world.job_condition("Ready")
    assert status == "True"
    assert f"Pod {NAME}-1 has waited for its volumes on node node-1" in message
    assert f"while pod {NAME}-0 runs on node node-0" in message
    assert "kubectl get pvc reviews)" in message
    stands(world, 0)
    assert world.job_condition("Ready")[:2] == ("False", "VolumeInUse")


def waiting() -> dict[str, str]:
    return {"reason": "ContainerCreating", "message": ""}
