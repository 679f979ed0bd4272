"""Revisions of an endpoint: when a new one takes over, which one serves until then, and rollbacks."""

from __future__ import annotations

import pytest

from reconcile_world import World
from rollout_world import (
    NAME,
    edit,
    history,
    led_to,
    revision,
    roll_back,
    rolled_out,
    serving,
    stands,
    status,
    there,
)


def test_new_revision_takes_over_once_all_of_its_servers_are_ready() -> None:
    world = serving(replicas=2)
    before = world.servers[f"{NAME}-1"]
    edit(world, replicas=2, maxQueue=7)
    assert (there(world), led_to(world)) == ([1, 2], 1)
    assert world.servers[f"{NAME}-1"] == before, "the servers that answer are left as they are"
    assert world.job_condition("Ready")[:2] == ("True", "EndpointReady")
    stands(world, 2, 1)
    assert (there(world), led_to(world)) == ([1, 2], 1)
    stands(world, 2, 2)
    assert (there(world), led_to(world)) == ([2], 2)
    assert (status(world).revision, status(world).target, world.stage("serve")) == (2, 2, ("Running", 2))
    assert history(world) == [(1, "Ended", "Superseded"), (2, "Serving", None)]
    assert revision(world, 2).endpoint == {"maxQueue": 7}
    assert [one for one in world.event_reasons() if one.startswith("Revision")] == ["RevisionStarted", "RevisionServes"]


def test_old_servers_are_deleted_after_the_status_names_the_new_ones() -> None:
    world = serving()
    edit(world, maxQueue=7)
    raw = world.servers[f"{NAME}-2"]
    raw["status"] = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 1}
    taking = world.step()
    assert "Service" in [one["kind"] for one in taking.apply]
    assert taking.remove == () or f"{NAME}-1" not in [ref.name for ref in taking.remove]
    assert there(world) == [1, 2]
    going = world.step()
    assert [(ref.kind, ref.name) for ref in going.remove] == [
        ("ConfigMap", f"{NAME}-1"), ("Deployment", f"{NAME}-1"),
    ]  # fmt: skip


def test_unready_revision_leaves_the_previous_one_serving() -> None:
    world = serving()
    edit(world, maxQueue=7)
    labels = world.servers[f"{NAME}-2"]["spec"]["template"]["metadata"]["labels"]
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    world.pods["new"] = {
        "child": f"{NAME}-2",
        "metadata": {"name": "new", "uid": "new", "labels": labels, "creationTimestamp": world.after(0)},
        "spec": {"nodeName": "node-0"},
        "status": {"phase": "Pending", "containerStatuses": [{"name": "pytorch", **waiting}]},
    }
    world.settle()
    ready, reason, message = world.job_condition("Ready")
    assert (ready, reason) == ("True", "EndpointReady")
    assert "of revision 1 available" in message
    assert "Revision 2 is not ready: Pod new cannot start: ImagePullBackOff: no such image" in message
    assert revision(world, 2).reason == "ImagePullBackOff"
    assert world.event_reasons().count("RevisionNotReady") == 1
    stands(world, 2, 0, "has timed out progressing")
    assert world.job_condition("Stalled")[:2] == ("True", "RolloutStuck")
    assert (there(world), led_to(world)) == ([1, 2], 1)
    edit(world)
    assert (there(world), led_to(world)) == ([1], 1)
    assert history(world) == [(1, "Serving", None), (2, "Ended", "NeverReady")]
    assert world.job_condition("Stalled")[0] == "False"


def test_revision_takes_over_with_one_server_where_none_answers() -> None:
    world = serving(replicas=2)
    edit(world, replicas=2, maxQueue=7)
    stands(world, 1, 0)
    assert led_to(world) == 1
    stands(world, 2, 1)
    assert (there(world), led_to(world)) == ([2], 2)


def test_number_of_servers_makes_no_revision() -> None:
    world = serving()
    edit(world, replicas=3)
    assert (there(world), status(world).target) == ([1], 1)
    assert world.servers[f"{NAME}-1"]["spec"]["replicas"] == 3
    assert history(world) == [(1, "Serving", None)]


def test_new_revision_starts_with_the_replicas_of_the_autoscaler() -> None:
    world = serving(replicas=1, maxReplicas=5)
    world.servers[f"{NAME}-1"]["spec"]["replicas"] = 4
    edit(world, replicas=1, maxReplicas=5, maxQueue=7)
    scaled = ("HorizontalPodAutoscaler", NAME)
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 4
    assert world.others[scaled]["spec"]["scaleTargetRef"]["name"] == f"{NAME}-1"
    world.servers[f"{NAME}-1"]["spec"]["replicas"] = 5
    world.settle()
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 5
    stands(world, 2, 5)
    assert world.others[scaled]["spec"]["scaleTargetRef"]["name"] == f"{NAME}-2"
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 5


def test_rollback_serves_an_earlier_revision_until_the_spec_changes() -> None:
    world = serving(maxQueue=1)
    rolled_out(world, maxQueue=2)
    rolled_out(world, maxQueue=3)
    roll_back(world, "3:1")
    assert (there(world), led_to(world), status(world).target) == ([3, 4], 3, 4)
    assert world.others["ConfigMap", f"{NAME}-4"]["data"]["job.json"].count('"maxQueue": 1,') == 1
    stands(world, 4, 1)
    assert (there(world), led_to(world)) == ([4], 4)
    assert status(world).rolled_back_from == 3
    assert "Revision 1 is served in place of 3" in (status(world).rollback or "")
    assert revision(world, 4).endpoint == revision(world, 1).endpoint
    assert revision(world, 3).reason == "RolledBack"
    assert world.event_reasons().count("RolledBack") == 1
    assert "Revision 3 is rolled back" in world.job_condition("Ready")[2]
    edit(world, maxQueue=3, replicas=2)
    assert status(world).target == 4, "a number of servers does not end it"
    edit(world, maxQueue=9)
    assert (status(world).target, status(world).rolled_back_from) == (5, None)


def test_rollback_during_a_rollout_drops_the_new_revision_at_once() -> None:
    world = serving(maxQueue=1)
    edit(world, maxQueue=2)
    roll_back(world, "2:1")
    assert (there(world), led_to(world), status(world).target) == ([1], 1, 1)
    assert history(world) == [(1, "Serving", None), (2, "Ended", "RolledBack")]
    roll_back(world, None)
    assert (there(world), status(world).target, status(world).rollback) == ([1, 2], 2, None)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("2:9", "Revision 9 of annotation finetune.dev/rollback is not in the history: choose one of 1."),
        ("x", "FROM:TO"),
    ],
    ids=["unknown", "unreadable"],
)
def test_impossible_rollback_is_reported(request_: str, message: str) -> None:
    world = serving(maxQueue=1)
    rolled_out(world, maxQueue=2)
    roll_back(world, request_)
    assert (there(world), status(world).rolled_back_from) == ([2], None)
    assert message in (status(world).rollback or "")
    assert world.event_reasons().count("RollbackIgnored") == 1


def test_history_is_bounded_and_keeps_the_target_of_a_rollback() -> None:
    world = serving(maxQueue=1)
    for queue in range(2, 8):
        rolled_out(world, maxQueue=queue)
    assert [one.number for one in status(world).revisions] == [3, 4, 5, 6, 7]
    roll_back(world, "7:3")
    stands(world, 8, 1)
    # A new default image creates a new revision of the same content.
    for image in ("a", "b", "c", "d", "e"):
        defaults = world.settings.defaults.model_copy(update={"image": f"registry.example/trainer:{image}"})
        world.settings = world.settings.model_copy(update={"defaults": defaults})
        world.settle()
        target = status(world).target
        assert target is not None
        stands(world, target, 1)
    assert [one.number for one in status(world).revisions] == [3, 7, 9, 10, 11, 12, 13]
    assert status(world).rolled_back_from == 7
    assert revision(world, 13).endpoint == {"maxQueue": 3}


def test_suspended_endpoint_goes_on_with_the_revision_that_served() -> None:
    world = serving(maxQueue=1)
    rolled_out(world, maxQueue=2)
    world.edit(suspend=True)
    world.settle()
    assert there(world) == []
    assert revision(world, 2).reason == "Suspended"
    world.edit(suspend=False)
    world.settle()
    assert (there(world), led_to(world)) == ([2], 2)


def test_lost_status_is_restored_from_running_servers() -> None:
    world = serving()
    edit(world, maxQueue=7)
    world.status.pop("endpoint")
    world.settle()
    assert (there(world), led_to(world)) == ([1, 2], 1)
    assert (status(world).revision, status(world).target) == (1, 2)


def test_pass_that_ends_early_during_the_take_over_is_made_up_for() -> None:
    world = serving()
    edit(world, maxQueue=7)
    raw = world.servers[f"{NAME}-2"]
    raw["status"] = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 1}
    for writes in range(1, 4):
        world.step(crash_after=writes)
        assert there(world) == [1, 2]
    world.settle()
    assert (there(world), led_to(world)) == ([2], 2)


def test_plan_names_no_servers_once_the_endpoint_is_removed() -> None:
    world = World()
    world.spec["endpoint"] = {}
    world.settle()
    for _ in range(4):
        world.succeed()
        world.settle()
    plan = world.job().status.plan
    assert plan is not None
    assert any("in a Deployment" in one for one in plan.reasons)
    del world.spec["endpoint"]
    world.generation += 1
    world.settle()
    plan = world.job().status.plan
    assert plan is not None
    assert not any("server" in one for one in plan.reasons)
    assert (world.phase, world.job().status.endpoint) == ("Succeeded", None)
