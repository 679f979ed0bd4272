"""Canaries: a new revision answers a share of the requests, then takes over or is rolled back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.api.types import CanaryStatus, TrafficSpec
from finetune_operator.reconcile.decide import decide
from finetune_operator.reconcile.endpoint_canary import (
    UNREAD_SECONDS,
    canary_servers,
    reading,
    reading_seconds,
    servers_to_read,
)
from finetune_operator.reconcile.observed import pod_view
from finetune_operator.reconcile.reconcile_types import CanaryReading, PodView, RequestCounts
from finetune_operator.rendering.render_types import ProgressEndpoint
from reconcile_world import World
from rollout_world import NAME, edit, history, led_to, revision, roll_back, serving, stands, status, there

FINE = RequestCounts(requests=100, errors=0, seconds=4.0)
TRAFFIC = {"canarySeconds": 60}


def canary(replicas: int = 3, traffic: dict[str, Any] | None = None, **endpoint: Any) -> World:
    """Return an endpoint whose second revision is a canary."""
    traffic = TRAFFIC if traffic is None else traffic
    world = serving(replicas=replicas, traffic=traffic)
    edit(world, replicas=replicas, traffic=traffic, **{"maxQueue": 7, **endpoint})
    stands(world, 2, world.servers[f"{NAME}-2"]["spec"]["replicas"])
    return world


def reads(world: World, new: RequestCounts = FINE, old: RequestCounts = FINE, seconds: float = 10) -> None:
    """Let time pass, and read the requests that both revisions answered in it."""
    world.now += timedelta(seconds=seconds)
    world.canary_reading = CanaryReading(world.now, seconds, ((1, old), (2, new)))
    world.settle()


def now(world: World) -> CanaryStatus:
    found = status(world).canary
    assert found is not None
    return found


def pod(world: World, name: str, number: int, **status_: Any) -> None:
    """Add a running server of a revision."""
    world.pods[name] = {
        "child": f"{NAME}-{number}",
        "metadata": {
            "name": name,
            "uid": name,
            "labels": world.servers[f"{NAME}-{number}"]["spec"]["template"]["metadata"]["labels"],
            "creationTimestamp": world.after(0),
        },
        "spec": {"nodeName": "node-0"},
        "status": {"phase": "Running", "podIP": "10.0.0.1", **status_},
    }


def test_canary_is_few_servers_that_share_the_service() -> None:
    world = serving(replicas=4, traffic={"canaryPercent": 34})
    before = world.servers[f"{NAME}-1"]
    edit(world, replicas=4, traffic={"canaryPercent": 34}, maxQueue=7)
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 2
    stands(world, 2, 1)
    assert (led_to(world), status(world).canary) == (1, None), "both of its servers have to be ready"
    stands(world, 2, 2)
    assert (led_to(world), there(world), now(world).servers) == (None, [1, 2], 2)
    assert world.servers[f"{NAME}-1"] == before, "the servers that answer are left as they are"
    assert (status(world).revision, status(world).target) == (1, 2)
    assert revision(world, 2).canary_result == "Running"
    ready, reason, message = world.job_condition("Ready")
    assert (ready, reason) == ("True", "EndpointReady")
    assert "Revision 2 is a canary with 2 servers." in message
    assert "with 2 servers as a canary" in next(one.message for one in world.events if one.reason == "RevisionStarted")
    assert world.event_reasons()[-1] == "CanaryStarted"


def test_canary_takes_over_after_its_time_with_all_servers() -> None:
    world = canary()
    for _ in range(5):
        reads(world)
    assert (now(world).measured_seconds, now(world).passed_time) == (50, None)
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 1
    reads(world)
    assert now(world).passed_time is not None
    assert world.servers[f"{NAME}-2"]["spec"]["replicas"] == 3
    assert (led_to(world), there(world)) == (None, [1, 2]), "one server of three is no take-over"
    stands(world, 2, 2)
    assert led_to(world) is None
    stands(world, 2, 3)
    assert (led_to(world), there(world), status(world).canary) == (2, [2], None)
    assert history(world) == [(1, "Ended", "Superseded"), (2, "Serving", None)]
    assert revision(world, 2).canary_result == "Passed"
    assert revision(world, 2).canary_message == (
        "0 of 600 requests failed, mean latency 40 ms in 60 s; "
        "revision 1: 0 of 600 requests failed, mean latency 40 ms."
    )
    kinds = ("Canary", "Revision")
    assert [one for one in world.event_reasons() if one.startswith(kinds)] == [
        "RevisionStarted", "CanaryStarted", "CanaryPassed", "RevisionServes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        pytest.param(
            RequestCounts(100, 5, 4.0), RequestCounts(100, 1, 4.0), "5 of its 100 requests failed (5.0 %), and 1.0 %",
            id="errors",
        ),
        pytest.param(
            RequestCounts(50, 0, 4.0), FINE, "its mean latency is 80 ms, 2.0 times that of revision 1", id="latency"
        ),
    ],
)  # fmt: skip
def test_canary_beyond_a_bound_is_rolled_back(new: RequestCounts, old: RequestCounts, message: str) -> None:
    world = canary()
    reads(world, new, old)
    assert (led_to(world), there(world), status(world).canary) == (1, [1], None)
    assert (status(world).target, status(world).rolled_back_from) == (1, 2)
    assert history(world) == [(1, "Serving", None), (2, "Ended", "CanaryFailed")]
    failed = revision(world, 2)
    assert failed.canary_result == "Failed"
    assert message in (failed.message or "")
    ready, reason, shown = world.job_condition("Ready")
    assert (ready, reason) == ("True", "EndpointReady")
    assert f"Revision 2 is held back: Its canary failed: {message}" in shown
    (event,) = (one for one in world.events if one.reason == "CanaryFailed")
    assert (event.type, message in event.message) == ("Warning", True)
    world.wait(3600)
    assert there(world) == [1], "it is not started again"
    assert world.event_reasons().count("CanaryFailed") == 1
    assert "RolledBack" not in world.event_reasons()


@pytest.mark.parametrize(
    ("new", "old"),
    [
        pytest.param(RequestCounts(8, 4, 1.0), FINE, id="few errors before its end"),
        pytest.param(RequestCounts(1000, 6, 40.0), FINE, id="errors below the bound"),
        pytest.param(RequestCounts(100, 9, 4.0), RequestCounts(100, 9, 4.0), id="errors that both have"),
        pytest.param(RequestCounts(49, 0, 49.0), FINE, id="few slow requests"),
        pytest.param(RequestCounts(100, 0, 5.9), FINE, id="latency below the bound"),
        pytest.param(RequestCounts(), RequestCounts(), id="no requests"),
    ],
)
def test_canary_within_its_bounds_goes_on(new: RequestCounts, old: RequestCounts) -> None:
    world = canary()
    reads(world, new, old)
    assert (led_to(world), there(world)) == (None, [1, 2])
    assert (now(world).canary.requests, now(world).serving.requests) == (new.requests, old.requests)


def test_single_error_counts_at_the_end_of_a_canary() -> None:
    world = canary()
    reads(world, RequestCounts(8, 1, 0.1))
    for _ in range(5):
        reads(world, RequestCounts())
    assert (status(world).rolled_back_from, there(world)) == (2, [1])


def test_exit_of_its_server_rolls_a_canary_back() -> None:
    world = canary()
    exited = {"terminated": {"exitCode": 139, "reason": "Error"}}
    pod(world, "evicted", 2, reason="Evicted", containerStatuses=[{"name": "pytorch", "state": exited}])
    world.settle()
    assert status(world).canary is not None, "an evicted server is no fault of the revision"
    crashed = {"name": "pytorch", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": exited}
    pod(world, "crashed", 2, containerStatuses=[crashed])
    world.settle()
    assert there(world) == [1]
    assert revision(world, 2).message == "Its canary failed: the server in pod crashed exited with code 139."


def test_next_change_after_a_failed_canary_is_another_canary() -> None:
    world = canary()
    reads(world, RequestCounts(100, 50, 4.0))
    edit(world, replicas=2, traffic=TRAFFIC, maxQueue=7)
    assert world.servers[f"{NAME}-1"]["spec"]["replicas"] == 2, "the serving revision can be scaled meanwhile"
    assert there(world) == [1]
    stands(world, 1, 2)
    edit(world, replicas=2, traffic=TRAFFIC, maxQueue=8)
    assert (there(world), status(world).target, status(world).rolled_back_from) == ([1, 3], 3, None)
    stands(world, 3, 1)
    assert (led_to(world), now(world).revision, now(world).canary.requests) == (None, 3, 0)


def test_failed_revision_is_tried_again_on_request() -> None:
    world = canary()
    reads(world, RequestCounts(100, 50, 4.0))
    for request in ("2:2", None):
        roll_back(world, request)
        assert (there(world), status(world).target, status(world).rolled_back_from) == ([1, 2], 2, None)
        assert revision(world, 2).canary_result is None
        stands(world, 2, 1)
        assert now(world).canary.requests == 0
        reads(world, RequestCounts(100, 50, 4.0))
        assert (there(world), status(world).rolled_back_from) == ([1], 2)


def test_failed_image_leaves_the_servers_as_they_are() -> None:
    world = serving(traffic=TRAFFIC)
    before = world.servers[f"{NAME}-1"]
    for number, image in ((2, "new"), (3, "newer")):
        defaults = world.settings.defaults.model_copy(update={"image": f"registry.example/trainer:{image}"})
        world.settings = world.settings.model_copy(update={"defaults": defaults})
        world.settle()
        assert there(world) == [1, number]
        stands(world, number, 1)
        world.now += timedelta(seconds=10)
        counts = ((1, FINE), (number, RequestCounts(100, 50, 4.0)))
        world.canary_reading = CanaryReading(world.now, 10, counts)
        world.settle()
        assert (there(world), led_to(world), status(world).rolled_back_from) == ([1], 1, number)
        assert world.servers[f"{NAME}-1"] == before
        assert world.stage("serve") == ("Running", 1)


def test_rollback_and_change_end_a_canary_at_once() -> None:
    world = canary()
    roll_back(world, "2:1")
    assert (there(world), led_to(world), status(world).canary) == ([1], 1, None)
    assert (revision(world, 2).reason, revision(world, 2).canary_result) == ("RolledBack", "Aborted")
    world = canary()
    edit(world, replicas=3, traffic=TRAFFIC)
    assert (there(world), led_to(world), status(world).canary) == ([1], 1, None)
    assert revision(world, 2).canary_result == "Aborted"


def test_canary_ends_while_the_job_is_suspended() -> None:
    world = canary()
    world.edit(suspend=True)
    world.settle()
    assert (there(world), status(world).canary, revision(world, 2).canary_result) == ([], None, "Aborted")
    world.edit(suspend=False)
    world.settle()
    assert there(world) == [2], "nothing answers, so that there is nothing to compare with"


def test_resumed_job_serves_the_revision_before_a_failed_canary() -> None:
    world = canary()
    reads(world, RequestCounts(100, 50, 4.0))
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert (there(world), status(world).rolled_back_from) == ([1], 2)


def test_rollback_needs_no_canary() -> None:
    world = canary()
    for _ in range(6):
        reads(world)
    stands(world, 2, 3)
    roll_back(world, "2:1")
    assert world.servers[f"{NAME}-3"]["spec"]["replicas"] == 3
    stands(world, 3, 3)
    assert (there(world), led_to(world), status(world).rolled_back_from) == ([3], 3, 2)


def test_canary_takes_over_where_nothing_else_answers() -> None:
    world = canary()
    stands(world, 1, 0)
    assert (led_to(world), there(world)) == (2, [2])


def test_canary_without_readings_neither_ends_nor_passes() -> None:
    world = canary()
    reads(world)
    failure = "The metrics of revision 2 cannot be read: pod a: no answer within 3 s."
    for _ in range(3):
        world.now += timedelta(seconds=UNREAD_SECONDS / 2)
        world.canary_reading = CanaryReading(world.now, failure=failure)
        world.settle()
    assert (led_to(world), now(world).measured_seconds, now(world).problem) == (None, 10, failure)
    assert world.job_condition("Stalled")[:2] == ("True", "CanaryNotMeasured")
    assert failure in world.job_condition("Stalled")[2]
    assert world.event_reasons().count("CanaryNotMeasured") == 2, "at its begin, and when the job is stalled"
    reads(world)
    assert (now(world).problem, now(world).measured_seconds) == (None, 20)
    assert world.job_condition("Stalled")[0] == "False"


def test_reading_counts_once_and_without_ready_servers_not_as_time() -> None:
    world = canary()
    reads(world)
    world.settle()
    assert now(world).canary.requests == 100
    stands(world, 2, 0)
    reads(world)
    assert (now(world).canary.requests, now(world).measured_seconds) == (200, 10)


@pytest.mark.parametrize("reached", ["starts", "is opened", "fails"])
def test_pass_that_ends_early_during_a_canary_is_made_up_for(reached: str) -> None:
    for writes in range(1, 5):
        world = serving(traffic=TRAFFIC)
        world.spec["endpoint"]["maxQueue"] = 7
        world.generation += 1
        if reached == "starts":
            world.step(crash_after=writes)
        world.settle()
        world.servers[f"{NAME}-2"]["status"] = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 1}
        if reached == "is opened":
            world.step(crash_after=writes)
        world.settle()
        assert led_to(world) is None
        world.now += timedelta(seconds=10)
        world.canary_reading = CanaryReading(world.now, 10, ((1, FINE), (2, RequestCounts(100, 50, 4.0))))
        if reached == "fails":
            world.step(crash_after=writes)
        world.settle()
        assert (there(world), led_to(world)) == ([1], 1)


def test_service_is_written_again_with_each_reading() -> None:
    world = canary()
    world.others["Service", NAME]["spec"]["selector"]["finetune.dev/attempt"] = "1"
    reads(world)
    assert led_to(world) is None


@pytest.mark.parametrize(
    ("percent", "running", "servers"),
    [(None, 9, 1), (10, 9, 1), (10, 20, 2), (34, 2, 1), (50, 3, 3), (20, 3, 1)],
)
def test_share_of_a_canary_is_at_most_its_percentage(percent: int | None, running: int, servers: int) -> None:
    assert canary_servers(TrafficSpec.model_validate({"canaryPercent": percent}), running) == servers


def test_operator_may_read_servers_during_canaries_only() -> None:
    for traffic, peers in ((None, 1), (TRAFFIC, 2)):
        world = World(spec={"task": "text-classification", "model": {"uri": "hf://a/b"}, "endpoint": {}})
        world.spec["endpoint"] = {} if traffic is None else {"traffic": traffic}
        world.settle()
        world.servers.clear()
        progress = ProgressEndpoint("https://operator:8443", "PEM", "finetune-system")
        decision = decide(world.job(), world.observed(), world.now, world.settings, progress)
        policy = next(one for one in decision.apply if one["kind"] == "NetworkPolicy")
        assert len(policy["spec"]["ingress"][0]["from"]) == peers  # type: ignore[index, call-overload]


# ------------------------------------------------------------------------------------------------------------ readings


def view(world: World, name: str) -> PodView:
    found = pod_view(world.pods[name])
    assert found is not None
    return found


def test_servers_of_both_revisions_are_read_during_a_canary() -> None:
    world = serving(traffic={"canarySeconds": 8})
    pod(world, "old", 1)
    pods = world.observed().pods
    assert servers_to_read(world.job(), pods) == {}
    edit(world, traffic={"canarySeconds": 8}, maxQueue=7)
    pod(world, "new", 2)
    pod(world, "starting", 2, phase="Pending")
    stands(world, 2, 1)
    found = servers_to_read(world.job(), world.observed().pods)
    assert {number: [one.name for one in pods] for number, pods in found.items()} == {1: ["old"], 2: ["new"]}
    assert found[1][0].address == "10.0.0.1"
    assert reading_seconds(world.job()) == 2.0


def test_reading_is_the_difference_between_two_counters() -> None:
    world = canary()
    for name, number in (("old", 1), ("new", 2), ("again", 2)):
        pod(world, name, number)
    started = {"name": "pytorch", "state": {"running": {"startedAt": world.after(5)}}}
    pod(world, "added", 1, containerStatuses=[started])
    servers = {1: (view(world, "old"), view(world, "added")), 2: (view(world, "new"), view(world, "again"))}
    counts = RequestCounts(100, 1, 5.0)
    at = world.now + timedelta(seconds=10)
    first = reading(servers, 2, dict.fromkeys(("old", "added", "new", "again"), counts), None, at, 0.0)
    assert first == CanaryReading(at)
    read: dict[str, RequestCounts | str] = {
        "old": RequestCounts(150, 1, 6.0),
        "added": RequestCounts(7, 0, 0.5),
        "new": RequestCounts(110, 3, 5.5),
        "again": RequestCounts(4, 0, 0.1),
    }
    before = {"old": counts, "new": counts, "again": counts}
    second = reading(servers, 2, read, before, at, 10.0)
    assert dict(second.counts) == {1: RequestCounts(57, 0, 1.5), 2: RequestCounts(14, 2, 0.6)}
    assert second.seconds == 10.0


@pytest.mark.parametrize(
    ("unread", "failure"),
    [
        (("new",), "The metrics of revision 2 cannot be read: pod new: refused."),
        (("old", "added"), "The metrics of revision 1 cannot be read: pod old: refused."),
        (("old",), None),
    ],
    ids=["canary", "all that serve", "one that serves"],
)
def test_reading_needs_the_canary_and_one_serving_server(unread: tuple[str, ...], failure: str | None) -> None:
    world = canary()
    for name, number in (("old", 1), ("added", 1), ("new", 2)):
        pod(world, name, number)
    servers = {1: (view(world, "old"), view(world, "added")), 2: (view(world, "new"),)}
    read: dict[str, RequestCounts | str] = {
        name: "refused" if name in unread else FINE for name in ("old", "added", "new")
    }
    assert reading(servers, 2, read, {}, world.now, 10.0).failure == failure
