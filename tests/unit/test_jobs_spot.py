"""Training on spot nodes: waiting for one, fallback, preemption, bounds, and cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from finetune_contract.layout import FailureClass
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import CostStatus, FailureStatus, SpotStatus
from reconcile_world import NOON, SPEC, World
from suite_plugins.fuzz import examples

PRICES = ({"product": "cpu", "gpus": 0, "perHour": 3.6, "spotPerHour": 1.2},)
NO_SPOT_NODE = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


def settings_with(**changes: Any) -> Settings:
    return Settings.model_validate_json(json.dumps(changes))


def prepared(served: tuple[LauncherName, ...] = ("job",), changes: Settings | None = None, **spot: Any) -> World:
    """Return a job with spec.spot whose training was created at noon and has no pods yet."""
    world = World(served=served, settings=changes or Settings())
    world.spec = {**SPEC, "resources": {"nodes": 2}, "spot": {"enabled": True, **spot}}
    world.settle()
    world.succeed()
    world.settle()
    assert world.stage("train") == ("Running", 1)
    return world


def starve(world: World) -> None:
    """Give the newest child pods, and none of them a node."""
    for name in world.make_pods(world.newest()):
        pod = world.pods[name]
        del pod["spec"]["nodeName"]
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_SPOT_NODE}
        ]
    world.settle()


def take_away(world: World) -> None:
    """Preempt the node of the last pod: all pods save a checkpoint and end, and so does the attempt."""
    name = world.newest()
    pod = world.pods_of(name)[-1]
    for each in world.pods_of(name):
        world.end_pod(each, 143)
    world.pods[pod]["status"]["conditions"] = [world.condition("DisruptionTarget", "DeletionByTaintManager")]
    world.end_child(name, succeeded=False)
    world.settle()


def train(world: World) -> Any:
    return next(one for one in world.job().status.stages if one.name == "train")


def capacity(world: World) -> tuple[str, int, str | None]:
    stage = train(world)
    return stage.state, stage.attempt, stage.capacity


def placement_of(world: World) -> tuple[str | None, bool]:
    """Return the newest child's capacity label, and whether its pods are restricted to certain nodes."""
    child = world.children[world.newest()]
    return child["metadata"]["labels"].get("finetune.dev/capacity"), "nodeSelectorTerms" in json.dumps(child["spec"])


def failure(world: World) -> FailureStatus:
    found = world.job().status.failure
    assert found is not None
    return found


def spot(world: World) -> SpotStatus:
    found = world.job().status.spot
    assert found is not None
    return found


def cost(world: World) -> CostStatus:
    found = world.job().status.cost
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------- the good way


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "mpijob"])
def test_only_the_training_requests_spot_nodes_and_the_status_has_it(launcher: LauncherName) -> None:
    world = prepared(served=("job", launcher))
    assert placement_of(world) == ("spot", True)
    world.start()
    world.settle()
    kind = world.children["reviews-train-1"]["kind"]
    assert world.job_condition("Running") == (
        "True",
        "StageRunning",
        f"Stage train runs as {kind} reviews-train-1, attempt 1 on spot nodes.",
    )
    plan = world.job().status.plan
    assert plan is not None
    assert plan.capacity == "spot"
    world.succeed()
    world.settle()
    assert placement_of(world) == (None, False)
    assert [(one.name, one.capacity) for one in world.job().status.stages] == [
        ("prepare", None), ("train", "spot"), ("evaluate", None), ("predict", None),
    ]  # fmt: skip


def test_status_without_a_spot_request_has_no_spot_fields() -> None:
    world = World()
    world.settle()
    world.succeed()
    world.settle()
    assert (placement_of(world), world.job().status.spot, train(world).capacity) == ((None, False), None, None)


def test_a_node_that_is_taken_away_costs_no_restart_and_is_counted() -> None:
    world = prepared()
    world.start()
    world.wait(100)
    take_away(world)
    assert (world.job().status.restarts, world.job().status.counted_restarts) == (1, 0)
    world.wait(10)
    assert (capacity(world), placement_of(world)) == (("Running", 2, "spot"), ("spot", True))
    assert spot(world) == SpotStatus(since=NOON, ran_seconds=100, preemptions=1)


def test_a_failure_of_the_program_is_no_preemption() -> None:
    world = prepared()
    world.start()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    assert spot(world).preemptions == 0


# -------------------------------------------------------------------------------------------------------- without nodes


def test_wait_for_a_spot_node_is_a_condition_and_one_event() -> None:
    world = prepared()
    starve(world)
    pod = world.pods_of("reviews-train-1")[0]
    message = (
        f"Pod {pod} finds no spot node: it waits without a limit, as spot.maxWaitSeconds is not set. "
        f"Scheduler: {NO_SPOT_NODE}"
    )
    assert world.job_condition("Running") == ("False", "WaitingForSpot", message)
    writes = world.writes
    for _ in range(5):
        world.wait(3600)
    assert (world.writes, capacity(world)) == (writes + 1, ("Running", 1, "spot"))  # Stalled after an hour
    assert [note.message for note in world.events if note.reason == "WaitingForSpot"] == [message]


def test_pods_that_wait_for_something_else_do_not_wait_for_spot_nodes() -> None:
    world = prepared(fallbackToOnDemand=True)
    world.make_pods("reviews-train-1")
    world.wait(3600)
    assert world.job_condition("Running")[1] == "WaitingForPods"
    assert capacity(world) == ("Running", 1, "spot")


def test_with_a_fallback_the_next_attempt_goes_to_any_nodes() -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    assert "at 2026-01-01T12:10:00Z the training falls back to any nodes." in world.job_condition("Running")[2]
    assert world.decide().requeue_at == NOON + timedelta(seconds=600)
    world.now += timedelta(seconds=600)
    world.step()
    assert capacity(world) == ("Failed", 1, "onDemand")
    assert (world.job().status.restarts, world.job().status.failure) == (0, None)
    world.step()
    assert list(world.children) == ["reviews-prepare-1"]
    world.wait(61)
    assert (capacity(world), placement_of(world)) == (("Running", 2, "onDemand"), ("onDemand", False))
    world.start()
    world.succeed()
    world.settle()
    assert capacity(world) == ("Succeeded", 2, "onDemand")
    messages = [note.message for note in world.events if note.reason in ("SpotUnavailable", "StageStarted")]
    assert messages[1:4] == [
        "Stage train runs as Job reviews-train-1, attempt 1 on spot nodes.",
        "Pod reviews-train-1-0 found no spot node for 10 min: attempt 2 of train runs on any nodes "
        f"(spot.fallbackToOnDemand). Scheduler: {NO_SPOT_NODE}",
        "Stage train runs as Job reviews-train-2, attempt 2 on any nodes.",
    ]


def test_a_gang_of_which_one_pod_finds_no_node_falls_back_as_a_whole() -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    first = world.pods["reviews-train-1-0"]
    first["status"], first["spec"]["nodeName"] = {"phase": "Running"}, "node-0"
    world.wait(599)
    assert capacity(world) == ("Running", 1, "spot")
    world.wait(1)
    assert capacity(world)[2] == "onDemand"


def test_after_a_fallback_the_training_stays_on_any_nodes() -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    world.wait(600)
    world.wait(61)
    world.start()
    take_away(world)
    world.wait(20)
    assert (capacity(world), placement_of(world)) == (("Running", 3, "onDemand"), ("onDemand", False))
    assert spot(world).preemptions == 0


def test_resumed_job_looks_for_spot_nodes_again() -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    world.wait(600)
    world.wait(61)
    world.start()
    world.edit(suspend=True)
    world.settle()
    world.wait(61)
    world.edit(suspend=False)
    world.settle()
    assert (capacity(world), placement_of(world)) == (("Running", 3, "spot"), ("spot", True))


def test_job_suspended_between_attempts_requests_spot_nodes_again() -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    world.wait(600)
    assert capacity(world) == ("Failed", 1, "onDemand")
    world.edit(suspend=True)
    world.settle()
    world.wait(61)
    world.edit(suspend=False)
    world.settle()
    assert (capacity(world), placement_of(world)) == (("Running", 2, "spot"), ("spot", True))


@pytest.mark.parametrize("fallback", [True, False])
def test_unschedulable_limit_of_the_settings_leads_to_a_fallback(fallback: bool) -> None:
    limit = settings_with(limits={"unschedulableSeconds": 100})
    world = prepared(changes=limit, fallbackToOnDemand=fallback)
    starve(world)
    world.wait(100)
    if fallback:
        assert (world.phase, capacity(world)) == ("Training", ("Failed", 1, "onDemand"))
    else:
        assert (world.phase, failure(world).failure_class) == ("Failed", "Unschedulable")


def test_fallback_delay_of_the_settings_is_used() -> None:
    world = prepared(changes=settings_with(spot={"fallbackAfterSeconds": 25}), fallbackToOnDemand=True)
    starve(world)
    assert world.decide().requeue_at == NOON + timedelta(seconds=25)


@pytest.mark.parametrize("writes", range(8))
def test_an_operator_that_dies_during_a_fallback_makes_nothing_twice(writes: int) -> None:
    world = prepared(fallbackToOnDemand=True)
    starve(world)
    world.now += timedelta(seconds=600)
    for _ in range(3):
        world.step(crash_after=writes)
    world.settle()
    world.wait(61)
    assert capacity(world) == ("Running", 2, "onDemand")


def test_the_capacity_of_an_attempt_is_found_again_when_the_status_is_lost() -> None:
    world = prepared(fallbackToOnDemand=True)
    world.status = None
    world.settle()
    assert capacity(world) == ("Running", 1, "spot")
    assert spot(world) == SpotStatus(since=NOON)


# -------------------------------------------------------------------------------------------------------------- bounds


def test_job_past_its_longest_wait_fails_without_spot_nodes() -> None:
    world = prepared(maxWaitSeconds=900)
    starve(world)
    assert "it waits until 2026-01-01T12:15:00Z, the limit of spot.maxWaitSeconds." in world.job_condition("Running")[2]
    assert world.decide().requeue_at == NOON + timedelta(seconds=900)
    world.wait(900)
    assert world.phase == "Failed"
    assert failure(world).model_dump(exclude_none=True) == {
        "failure_class": "SpotUnavailable",
        "reason": "MaxWaitExceeded",
        "message": "Pod reviews-train-1-0 has found no spot node since 2026-01-01T12:00:00Z, and the 900 s of "
        f"spot.maxWaitSeconds are over: {NO_SPOT_NODE}",
        "hint": "In a new job, set spot.fallbackToOnDemand or raise spot.maxWaitSeconds; check that spot.nodes in the "
        "operator's settings are the labels of this cluster's spot nodes.",
        "stage": "train",
        "attempt": 1,
        "pod": "reviews-train-1-0",
    }
    assert list(world.children) == ["reviews-prepare-1"]


def test_waiting_counts_over_all_attempts_and_so_does_running() -> None:
    world = prepared(maxWaitSeconds=900)
    world.start()
    world.wait(400)
    take_away(world)
    world.wait(10)
    starve(world)
    world.wait(489)
    assert world.phase == "Training"
    world.wait(1)
    assert (world.phase, failure(world).failure_class) == ("Failed", "SpotUnavailable")


def test_a_training_that_runs_when_the_longest_time_is_over_is_stopped() -> None:
    world = prepared(maxWaitSeconds=900)
    starve(world)
    world.wait(300)
    world.start()
    world.settle()
    # The world recreates pods when they start.
    world.now += timedelta(seconds=600)
    world.step()
    failure_status = failure(world)
    assert (failure_status.failure_class, failure_status.reason) == ("DeadlineExceeded", "MaxWaitExceeded")
    assert failure_status.message == (
        "900 s have passed since the training began (600 s of them in training), the limit of spot.maxWaitSeconds."
    )
    world.settle()
    assert list(world.children) == ["reviews-prepare-1"]


def test_longest_run_is_summed_over_attempts_without_waiting() -> None:
    world = prepared(maxRunSeconds=1000)
    starve(world)
    world.wait(3600)
    assert world.phase == "Training"
    world.start()
    world.wait(700)
    take_away(world)
    world.wait(200)
    world.start()
    world.settle()
    assert world.decide().requeue_at == world.now + timedelta(seconds=300)
    world.wait(299)
    assert world.phase == "Training"
    world.now += timedelta(seconds=1)
    world.step()
    assert (world.phase, list(world.children)) == ("Failed", ["reviews-prepare-1", "reviews-train-2"])
    assert failure(world).model_dump(exclude_none=True) == {
        "failure_class": "DeadlineExceeded",
        "reason": "MaxRunExceeded",
        "message": "The training has run for 1000 s, the limit of spot.maxRunSeconds.",
        "hint": "Create a new job with a longer spot.maxRunSeconds; the last checkpoint stays in the workspace.",
        "stage": "train",
        "attempt": 2,
    }
    assert spot(world).ran_seconds == 1000
    world.settle()
    # It is deleted, so that its pods save a checkpoint within their grace period.
    assert list(world.children) == ["reviews-prepare-1"]
    assert all("deletionTimestamp" in world.pods[name]["metadata"] for name in world.pods_of("reviews-train-2"))


def test_time_in_suspension_counts_towards_no_bound() -> None:
    world = prepared(maxRunSeconds=1000, maxWaitSeconds=1200)
    world.start()
    world.wait(500)
    world.edit(suspend=True)
    world.settle()
    assert spot(world) == SpotStatus(since=None, waited_seconds=500, ran_seconds=500)
    world.wait(86_400)
    world.edit(suspend=False)
    world.settle()
    world.start()
    world.wait(499)
    assert world.phase == "Training"
    world.wait(1)
    assert failure(world).reason == "MaxRunExceeded"


FALLBACKS: dict[str, tuple[dict[str, Any], int]] = {
    "no bound: as long as the settings say": ({}, 600),
    "enough time: as long as the settings say": ({"maxWaitSeconds": 7200, "maxRunSeconds": 3600}, 600),
    "what is left for waiting beside the longest run": ({"maxWaitSeconds": 4000, "maxRunSeconds": 3600}, 400),
    "half of the time is kept for a run that has no bound": ({"maxWaitSeconds": 900}, 450),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_a_fallback_comes_early_enough_for_the_training_to_end_in_time(case: str) -> None:
    bounds, seconds = FALLBACKS[case]
    world = prepared(fallbackToOnDemand=True, **bounds)
    starve(world)
    assert world.decide().requeue_at == NOON + timedelta(seconds=seconds)
    world.wait(seconds)
    assert capacity(world)[2] == "onDemand"


def test_with_no_time_to_wait_the_fallback_comes_at_once() -> None:
    world = prepared(fallbackToOnDemand=True, maxWaitSeconds=3600, maxRunSeconds=3600)
    starve(world)
    assert capacity(world)[2] == "onDemand"


def test_training_time_of_earlier_attempts_reduces_the_reserve() -> None:
    world = prepared(fallbackToOnDemand=True, maxWaitSeconds=4000, maxRunSeconds=3600)
    world.start()
    world.wait(1000)
    take_away(world)
    world.wait(10)
    starve(world)
    # 2,990 s are left, 2,600 s of training among them.
    assert world.decide().requeue_at == world.now + timedelta(seconds=390)


# ---------------------------------------------------------------------------------------------------------------- cost


def priced(**changes: Any) -> World:
    return prepared(changes=settings_with(prices=PRICES), **changes)


def test_spot_nodes_have_their_own_price_and_a_reported_saving() -> None:
    world = priced()
    world.start()
    world.wait(1000)
    take_away(world)
    seconds = 1000 * 2
    assert cost(world) == CostStatus(
        node_seconds=seconds,
        billable_seconds=seconds,
        currency="USD",
        amount=0.666667,
        saved=1.333333,
    )


def test_time_without_a_node_costs_nothing() -> None:
    world = priced(fallbackToOnDemand=True)
    starve(world)
    world.wait(600)
    world.wait(61)
    world.start()
    world.wait(100)
    world.succeed()
    world.settle()
    assert cost(world) == CostStatus(node_seconds=200, billable_seconds=200, currency="USD", amount=0.2)


def test_nodes_are_paid_while_images_are_pulled_and_nothing_runs_then() -> None:
    world = priced()
    pods = world.make_pods("reviews-train-1")
    world.wait(120)
    for name in pods:
        world.pods[name]["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "pytorch", "state": {"running": {"startedAt": stamp(world.now)}}}],
        }
    world.wait(60)
    take_away(world)
    assert (cost(world).node_seconds, cost(world).billable_seconds) == (60 * 2, 180 * 2)
    assert spot(world).ran_seconds == 60


def test_spot_nodes_without_a_price_have_no_amount() -> None:
    without = [{name: value for name, value in PRICES[0].items() if name != "spotPerHour"}]
    world = prepared(changes=settings_with(prices=without))
    world.start()
    world.wait(10)
    world.succeed()
    world.settle()
    assert cost(world) == CostStatus(node_seconds=20, billable_seconds=20, currency="USD")


# --------------------------------------------------------------------------------------------------------------- walks


def newest_running(world: World, act: Callable[[World], object]) -> None:
    running = [name for name in world.created if name in world.children and world.unfinished(name)]
    if running and world.children[running[-1]]["metadata"]["labels"]["finetune.dev/stage"] == "train":
        act(world)


def feed(world: World) -> None:
    """Let the pods find nodes and run."""
    if not world.pods_of(world.newest()) or any(
        "nodeName" not in world.pods[n]["spec"] for n in world.pods_of(world.newest())
    ):
        world.start()


def vanish_of_status(world: World) -> None:
    world.status = {"phase": 7}


ACTIONS: dict[str, Callable[[World], object]] = {
    "pods find no node": lambda w: newest_running(w, lambda x: x.pods_of(x.newest()) or starve(x)),
    "pods find nodes": lambda w: newest_running(w, feed),
    "a node is taken away": lambda w: newest_running(w, lambda x: x.pods_of(x.newest()) and take_away(x)),
    "the training succeeds": lambda w: newest_running(w, lambda x: x.succeed()),
    "the status is lost": lambda w: newest_running(w, vanish_of_status),
    "suspend": lambda w: w.edit(suspend=True),
    "resume": lambda w: w.edit(suspend=False),
    "a minute passes": lambda w: w.wait(60),
    "ten minutes pass": lambda w: w.wait(600),
}
BOUNDS = st.fixed_dictionaries(
    {"fallbackToOnDemand": st.booleans()},
    optional={"maxRunSeconds": st.sampled_from([600, 3600]), "maxWaitSeconds": st.sampled_from([3600, 7200])},
)


@examples(8, everything=25, suppress_health_check=list(HealthCheck))
@given(
    bounds=BOUNDS,
    steps=st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.none() | st.integers(0, 3)), max_size=25),
)
def test_bounds_hold_and_the_job_ends_under_random_actions(
    bounds: dict[str, Any], steps: list[tuple[str, int | None]]
) -> None:
    world = prepared(**bounds)
    for action, dies_after in steps:
        ACTIONS[action](world)
        if dies_after is not None:
            world.step(crash_after=dies_after)
        world.settle()
        if world.phase not in ("Succeeded", "Failed") and (found := world.job().status.spot) is not None:
            assert found.ran_seconds <= bounds.get("maxRunSeconds", 10**9)
            assert found.waited_seconds <= bounds.get("maxWaitSeconds", 10**9)
    world.edit(suspend=False)
    for _ in range(20):
        world.settle()
        if world.phase in ("Succeeded", "Failed"):
            break
        running = [name for name in world.created if name in world.children and world.unfinished(name)]
        if running:
            world.start(running[-1])
            world.succeed(running[-1])
        world.wait(400)
    assert world.phase in ("Succeeded", "Failed")
