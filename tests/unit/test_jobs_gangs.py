"""Trainings of which some pods hold nodes while others find none."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.jobs.state.decision_types import EventNote
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import stamp
from reconcile_world import NOON, SPEC, UID, World

UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
WAITS = "3 of 4 pods hold nodes and wait for the others."
DETAIL = f"Pod {{pod}} is unschedulable: {UNSCHEDULABLE}"


def training(served: tuple[LauncherName, ...] = ("job",), uid: str = UID, **limits: Any) -> World:
    """A training on four nodes, created at noon, whose last worker finds no node."""
    settings = Settings.model_validate_json(json.dumps({"limits": limits}))
    world = World(served=served, settings=settings, uid=uid)
    world.spec = {**SPEC, "resources": {"nodes": 4}}
    world.settle()
    world.succeed()
    world.settle()
    assert world.stage("train") == ("Running", 1)
    half_place(world)
    return world


def on_spot_nodes(fallback: bool) -> World:
    """A training on four spot nodes whose last worker finds none, under an administrator who is patient."""
    body = {"limits": {"gangSeconds": 600}, "spot": {"fallbackAfterSeconds": 1800}}
    world = World(settings=Settings.model_validate_json(json.dumps(body)))
    spot = {"enabled": True, "fallbackToOnDemand": fallback, "maxRunSeconds": 3600, "maxWaitSeconds": 36_000}
    world.spec = {**SPEC, "resources": {"nodes": 4}, "spot": spot}
    world.settle()
    world.succeed()
    world.settle()
    half_place(world)
    return world


def half_place(world: World) -> str:
    """The newest child gets its pods; the last worker, whose name is returned, finds no node."""
    names = world.make_pods(world.newest(), "Running")
    starved = next(name for name in reversed(names) if not name.endswith("launcher"))
    pod = world.pods[starved]
    del pod["spec"]["nodeName"]
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
        ],
    }
    world.settle()
    return starved


def reported(world: World) -> list[EventNote]:
    return [note for note in world.events if note.reason == "GangIncomplete"]


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "mpijob"])
def test_incomplete_gang_is_reported_with_the_time_of_its_end(launcher: LauncherName) -> None:
    world = training((launcher,))
    status, reason, message = world.job_condition("Running")
    assert (status, reason) == ("False", "GangIncomplete")
    starved = next(name for name in world.pods_of(world.newest()) if "nodeName" not in world.pods[name]["spec"])
    assert message == (
        f"{WAITS} At {stamp(NOON + timedelta(seconds=900))} the attempt is stopped to release its nodes, and restarted "
        f"later. {DETAIL.format(pod=starved)}"
    )
    assert reported(world) == []


def test_gang_releases_its_nodes_after_the_limit_without_a_restart() -> None:
    world = training(gangSeconds=600)
    first = world.newest()
    world.wait(599)
    assert world.stage("train") == ("Running", 1)
    world.wait(1)
    assert first not in world.children, "the attempt still holds its nodes"
    (note,) = reported(world)
    assert note.message.startswith("3 of 4 pods hold nodes")
    assert note.message.index("limits.gangSeconds") < note.message.index(UNSCHEDULABLE), (
        "the end of an event may be cut"
    )
    status = world.job().status
    assert (status.restarts, status.counted_restarts, status.failure) == (0, 0, None)
    following = next(stage for stage in status.stages if stage.name == "train").next_attempt_time
    assert following is not None
    assert timedelta(seconds=300) <= following - world.now <= timedelta(seconds=600)
    world.wait((following - world.now).total_seconds())
    assert world.stage("train") == ("Running", 2)
    world.start()
    world.settle()
    assert world.job_condition("Running")[0] == "True"


def test_gang_that_releases_its_nodes_goes_on_waiting_for_capacity() -> None:
    world = training(gangSeconds=600, capacitySeconds=1800)
    stalled = []
    for _ in range(5):
        following = next(one for one in world.job().status.stages if one.name == "train").next_attempt_time
        world.wait(600 if following is None else (following - world.now).total_seconds())
        if following is not None:
            half_place(world)
        stalled.append(world.job_condition("Stalled")[0])
    train = next(one for one in world.job().status.stages if one.name == "train")
    assert (train.attempt, train.waiting_for, train.waiting_since) == (3, "Capacity", NOON)
    assert stalled == sorted(stalled)
    assert set(stalled) == {"False", "True"}
    assert [one.reason for one in world.events].count("Unschedulable") == 1


def test_delays_of_two_jobs_and_of_two_attempts_differ() -> None:
    delays = set()
    for uid in ("uid-1", "uid-2"):
        world = training(uid=uid)
        for _ in range(2):
            world.wait(900)
            following = next(one for one in world.job().status.stages if one.name == "train").next_attempt_time
            assert following is not None
            delays.add(following - world.now)
            world.wait((following - world.now).total_seconds())
            half_place(world)
    assert len(delays) == 4


def test_a_gang_that_gets_its_last_node_trains() -> None:
    world = training()
    world.wait(890)
    for name in world.pods_of(world.newest()):
        world.pods[name]["spec"]["nodeName"] = "node-9"
        world.pods[name]["status"] = {"phase": "Running"}
    world.wait(3600)
    assert world.stage("train") == ("Running", 1)
    assert reported(world) == []


def test_zero_is_never() -> None:
    world = training(gangSeconds=0)
    starved = world.pods_of(world.newest())[-1]
    assert world.job_condition("Running")[1:] == ("GangIncomplete", f"{WAITS} {DETAIL.format(pod=starved)}")
    world.wait(86_400)
    assert world.stage("train") == ("Running", 1)


def test_gang_without_any_placed_pod_waits() -> None:
    world = training()
    for name in world.pods_of(world.newest()):
        pod = world.pods[name]
        pod["spec"].pop("nodeName", None)
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
            ],
        }
    world.settle()
    world.wait(86_400)
    assert world.stage("train") == ("Running", 1)
    assert world.job_condition("Running")[1] == "Unschedulable"


def test_an_image_that_cannot_be_pulled_is_reported_first() -> None:
    world = training()
    name = world.pods_of(world.newest())[0]
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    world.pods[name]["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}],
    }
    world.settle()
    assert "ImagePullBackOff" in world.job_condition("Running")[2]


def test_a_training_that_falls_back_from_spot_nodes_waits_for_that() -> None:
    world = on_spot_nodes(fallback=True)
    world.wait(1799)
    assert world.stage("train") == ("Running", 1)
    world.wait(1)
    assert [note.reason for note in world.events if note.reason in ("SpotUnavailable", "GangIncomplete")] == [
        "SpotUnavailable"
    ]


def test_a_training_that_may_only_run_on_spot_nodes_leaves_them_too() -> None:
    world = on_spot_nodes(fallback=False)
    world.wait(600)
    assert len(reported(world)) == 1
