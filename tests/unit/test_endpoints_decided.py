"""The endpoint of a job: its creation and deletion, and its status."""

from __future__ import annotations

import json
from typing import Any

from finetune_contract.choices import Stage
from finetune_operator.endpoints.decide.endpoint_view import endpoint_view
from reconcile_world import SPEC, World

ALONE: dict[str, Any] = {"task": SPEC["task"], "model": SPEC["model"], "endpoint": {}}
NAME = "reviews-endpoint"
FIRST = "reviews-endpoint-1"
URL = "http://reviews-endpoint.team.svc"


def serving(available: int = 0, **changes: Any) -> World:
    """Return a job that only serves, with its Deployment."""
    world = World(spec={**ALONE, **changes})
    world.settle()
    assert world.server is not None
    stands(world, available)
    return world


def stands(world: World, available: int, stuck: str | None = None) -> None:
    """Set the status of the Deployment, for its newest generation."""
    conditions = [] if stuck is None else [{"type": "Progressing", "status": "False", "message": stuck}]
    world.server["status"] = {
        "availableReplicas": available,
        "updatedReplicas": 1,
        "observedGeneration": world.server["metadata"]["generation"],
        "conditions": conditions,
    }
    world.settle()


def pod(world: World, status: dict[str, Any], name: str = "reviews-endpoint-a") -> None:
    """Add a server's pod, with a container in that state."""
    labels = world.server["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "creationTimestamp": world.after(0)}
    status = {"phase": "Pending", "containerStatuses": [{"name": "pytorch", **status}]}
    world.pods[name] = {"child": FIRST, "metadata": metadata, "spec": {"nodeName": "node-0"}, "status": status}
    world.settle()


def edit(world: World, **changes: Any) -> None:
    world.spec = {**world.spec, **changes}
    world.generation += 1
    world.settle()


def url(world: World) -> str | None:
    artifacts = world.job().status.artifacts
    return None if artifacts is None else artifacts.endpoint_url


def test_job_is_ready_with_an_address_while_a_server_answers() -> None:
    world = serving()
    assert world.job_condition("Ready")[:2] == ("False", "WaitingForPods")
    assert url(world) is None
    stands(world, 1)
    assert (world.phase, world.job_condition("Ready")[:2]) == ("Serving", ("True", "EndpointReady"))
    assert url(world) == URL
    assert world.event_reasons().count("EndpointReady") == 1


def test_ready_that_is_lost_has_the_reason_of_the_pod() -> None:
    world = serving(1)
    pod(world, {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}})
    stands(world, 0)
    status, reason, message = world.job_condition("Ready")
    assert (status, reason) == ("False", "ImagePullBackOff")
    assert "no such image" in message
    assert world.phase != "Failed"
    assert world.event_reasons().count("EndpointNotReady") == 1
    stands(world, 1)
    assert world.job_condition("Ready")[0] == "True"


def test_crashing_server_is_reported_with_its_termination_message() -> None:
    world = serving()
    ended = {"exitCode": 65, "reason": "Error", "message": "no model lies there", "finishedAt": world.after(0)}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    pod(world, {"state": state, "lastState": {"terminated": ended}, "restartCount": 3})
    status, reason, message = world.job_condition("Ready")
    assert (status, reason) == ("False", "CrashLoopBackOff")
    assert "exited with code 65: no model lies there" in message
    assert world.phase != "Failed"


def test_a_rollout_that_is_stuck_stalls_the_job_until_it_goes_on() -> None:
    world = serving()
    stands(world, 0, "has timed out progressing")
    assert world.job_condition("Stalled")[:2] == ("True", "ProgressDeadlineExceeded")
    assert world.job_condition("Ready")[:2] == ("False", "ProgressDeadlineExceeded")
    stands(world, 1)
    assert world.job_condition("Stalled")[0] == "False"
    stands(world, 1, "has timed out progressing")
    assert world.job_condition("Stalled")[:2] == ("True", "RolloutStuck")
    assert world.job_condition("Ready")[0] == "True"
    assert world.event_reasons().count("RolloutStuck") == 1


def test_endpoint_added_to_a_succeeded_job_is_served_and_removed() -> None:
    world = World()
    world.settle()
    for _ in range(4):
        if world.phase != "Succeeded":
            world.succeed()
            world.settle()
    assert world.phase == "Succeeded"
    made = list(world.created)
    edit(world, endpoint={})
    assert world.server is not None
    stands(world, 1)
    assert world.phase == "Serving"
    assert world.job().status.completion_time is None
    edit(world, endpoint=None)
    assert (world.server, world.phase, url(world)) == (None, "Succeeded", None)
    assert {kind for kind, name in world.others if name.startswith(NAME)} == set()
    assert world.created == made


def test_a_suspended_job_has_no_servers() -> None:
    world = serving(1)
    world.edit(suspend=True)
    world.settle()
    assert (world.server, world.phase, url(world)) == (None, "Suspended", None)
    assert {kind for kind, name in world.others if name.startswith(NAME)} == set()
    world.edit(suspend=False)
    world.settle()
    stands(world, 1)
    assert (world.phase, url(world)) == ("Serving", URL)


def test_a_name_that_is_taken_stalls_the_job_and_is_tried_again() -> None:
    world = World(spec=json.loads(json.dumps(ALONE)), refuse={"Deployment": (409, "it is of somebody else")})
    world.settle()
    assert world.job_condition("Stalled")[:2] == ("True", "NameTaken")
    assert world.phase != "Failed"
    assert world.event_reasons().count("NameTaken") == 1
    world.refuse = {}
    world.wait(3600)
    assert world.server is not None
    assert world.job_condition("Stalled")[0] == "False"


def test_objects_that_one_server_does_not_need_are_deleted_on_a_change() -> None:
    world = serving(2, endpoint={"replicas": 2, "maxReplicas": 3})
    scaled = {"HorizontalPodAutoscaler", "PodDisruptionBudget"}
    assert scaled <= {kind for kind, _ in world.others}
    world.server["spec"]["replicas"] = 3
    edit(world)
    assert world.server["spec"]["replicas"] == 3, "what the autoscaler asked for stays"
    edit(world, endpoint={})
    assert not scaled & {kind for kind, _ in world.others}
    assert world.server["spec"]["replicas"] == 1


def test_a_deployment_without_the_labels_of_a_job_is_no_endpoint() -> None:
    world = serving()
    view = endpoint_view(world.server)
    assert view is not None
    assert (view.ref.name, view.revision) == (FIRST, 1)
    labels = world.server["metadata"]["labels"]
    for changed in ({}, {**labels, "finetune.dev/stage": Stage.TRAIN.value}):
        assert endpoint_view({**world.server, "metadata": {**world.server["metadata"], "labels": changed}}) is None
