"""Waits and who ends each, by texts of Kubernetes components as recorded or as their sources print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import JsonValue

from finetune_operator.jobs.outcomes.start_events import EventSource, newest_event, wanted_events
from finetune_operator.jobs.outcomes.wait_ends import mounting_end, refusal_end, scheduling_end
from finetune_operator.jobs.state.decision_types import StartEvent
from finetune_operator.spec.status_times import stamp
from reconcile_world import NOON, World, limits

FULL = (
    "0/4 nodes are available: 1 node(s) had untolerated taint(s), 3 Insufficient nvidia.com/gpu. preemption: 0/4 nodes "
    "are available: 1 Preemption is not helpful for scheduling, 3 No preemption victims found for incoming pod."
)
TOO_LARGE = (
    "0/4 nodes are available: 4 Insufficient memory. preemption: 0/4 nodes are available: 4 Preemption is not helpful "
    "for scheduling."
)
NO_LABEL = (
    "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector. preemption: 0/4 nodes are available:"
    " 4 Preemption is not helpful for scheduling."
)
STARTING = NO_LABEL.replace("4 node", "1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, 3 node")
CORDONED = NO_LABEL.replace("4 node", "1 node(s) were unschedulable, 3 node")
NEVER = "0/4 nodes are available: {}. preemption: not eligible due to preemptionPolicy=Never."
UNBOUND = (
    "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/4 nodes are available: 4 "
    "Preemption is not helpful for scheduling."
)
SCALES = StartEvent("Pod", "a", "TriggeredScaleUp", "pod triggered scale-up", warning=False)
DECLINES = StartEvent("Pod", "a", "NotTriggerScaleUp", "pod didn't trigger scale-up", warning=False)
NO_CLASS = StartEvent("PersistentVolumeClaim", "c", "ProvisioningFailed", 'storageclass "x" not found')
NO_VOLUME = StartEvent("PersistentVolumeClaim", "c", "FailedBinding", "no persistent volumes available", warning=False)
EXTERNAL = StartEvent("PersistentVolumeClaim", "c", "ExternalProvisioning", "Waiting for a volume", warning=False)

SCHEDULING: dict[str, tuple[str, tuple[StartEvent, ...], str]] = {
    "all nodes are full": (FULL, (), "Capacity"),
    "no node is large enough": (TOO_LARGE, (), "Person"),
    "no node has the label": (NO_LABEL, (), "Person"),
    "no node has the label, and the autoscaler adds one": (NO_LABEL, (SCALES,), "Capacity"),
    "no node has the label, and the autoscaler has none": (NO_LABEL, (DECLINES,), "Person"),
    "a node is starting": (STARTING, (), "Capacity"),
    "a node is cordoned": (CORDONED, (), "Capacity"),
    "a pod that preempts nobody, full nodes": (NEVER.format("4 Insufficient cpu"), (), "Capacity"),
    "a pod that preempts nobody, no label": (NEVER.format("4 node(s) didn't match"), (), "Person"),
    "a cluster without nodes": ("no nodes available to schedule pods", (), "Person"),
    "another scheduler's text": ("gang is not ready", (), "Capacity"),
    "an absent claim": ('0/4 nodes are available: persistentvolumeclaim "x" not found.', (), "Person"),
    "a claim of an absent class": (UNBOUND, (NO_CLASS,), "Person"),
    "a claim without class and volume": (UNBOUND, (NO_VOLUME,), "Person"),
    "a claim whose volume is being made": (UNBOUND, (EXTERNAL,), "Controller"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "events", "expected"), SCHEDULING.values(), ids=SCHEDULING.keys())
def test_pod_without_node_waits_for(message: str, events: tuple[StartEvent, ...], expected: str) -> None:
    assert scheduling_end(message, events).waits_for == expected


def test_absence_of_spot_nodes_is_no_fault() -> None:
    assert scheduling_end(NO_LABEL, (), spot=True).waits_for == "Capacity"


FORBIDDEN = 'Error creating: pods "x" is forbidden: '
REFUSALS = {
    "a quota of none": (
        FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0",
        ("QuotaExceeded", "Person"),
    ),
    "a quota that others use": (
        FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=8, limited: pods=8",
        ("QuotaExceeded", "Capacity"),
    ),
    "one of two amounts is too large": (
        FORBIDDEN
        + "exceeded quota: q, requested: pods=1,requests.memory=64Gi, used: pods=8,requests.memory=0, limited: "
        "pods=8,requests.memory=32Gi",
        ("QuotaExceeded", "Person"),
    ),
    "amounts in other units": (
        FORBIDDEN + "exceeded quota: q, requested: cpu=1500m, used: cpu=7, limited: cpu=8",
        ("QuotaExceeded", "Capacity"),
    ),
    "a second quota is too small": (
        FORBIDDEN
        + "exceeded quota: a, requested: pods=1, used: pods=8, limited: pods=8, exceeded quota: b, requested: "
        "cpu=2, used: cpu=0, limited: cpu=1",
        ("QuotaExceeded", "Person"),
    ),
    "a LimitRange": (
        FORBIDDEN + "maximum memory usage per Container is 16Mi, but limit is 2Gi",
        ("PodsRefused", "Person"),
    ),
}


@pytest.mark.parametrize(("message", "expected"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refused_pod_waits_for(message: str, expected: tuple[str, str]) -> None:
    end = refusal_end(message)
    assert (end.reason, end.waits_for) == expected


MOUNTS = {
    'MountVolume.SetUp failed for volume "c" : configmap "nope" not found': ("FailedMount", "Person"),
    'MountVolume.SetUp failed for volume "s" : references non-existent secret key: token': ("FailedMount", "Person"),
    'MountVolume.SetUp failed for volume "c" : object "n"/"c" not registered': ("FailedMount", "Controller"),
    'MountVolume.MountDevice failed for volume "v" : driver name x not found in the list of registered CSI drivers': (
        "FailedMount",
        "Controller",
    ),
}


@pytest.mark.parametrize(("message", "expected"), MOUNTS.items(), ids=[text[-30:] for text in MOUNTS])
def test_pod_on_its_node_waits_for(message: str, expected: tuple[str, str]) -> None:
    end = mounting_end(StartEvent("Pod", "a", "FailedMount", message))
    assert (end.reason, end.waits_for) == expected


def test_reason_of_an_event_that_anybody_wrote_is_not_a_reason_of_ours() -> None:
    assert mounting_end(StartEvent("Pod", "a", "any text\n", "")).reason == "ContainerCreating"


def event(second: int, reason: str, message: str, kind: str = "Warning", **more: JsonValue) -> Mapping[str, JsonValue]:
    at = f"2026-01-01T12:00:{second:02}Z"
    involved: JsonValue = {"kind": "Pod", "name": "a"}
    return {"involvedObject": involved, "type": kind, "reason": reason, "message": message, "lastTimestamp": at, **more}


PULLING = event(30, "Pulling", "Pulling image", "Normal")
NEWEST: dict[str, tuple[list[Mapping[str, JsonValue]], str | None]] = {
    "none": ([], None),
    "the newest": ([event(3, "FailedMount", "b"), event(2, "FailedMount", "a")], "b"),
    "a pull after a mount that failed first": ([event(3, "FailedMount", "b"), PULLING], "Pulling image"),
    "a warning of the same second as another": ([event(30, "FailedMount", "b"), PULLING], "b"),
    "not the scheduler's": ([event(9, "Scheduled", "to a node", "Normal"), event(2, "FailedMount", "a")], "a"),
    "times in microseconds": (
        [PULLING, event(1, "New", "new", lastTimestamp=None, eventTime="2026-01-01T12:00:31.500000Z")],
        "new",
    ),
    "a series": (
        [PULLING, event(1, "New", "new", series={"lastObservedTime": "2026-01-01T12:00:31.500000Z", "count": 2})],
        "new",
    ),
    "unreadable ones are left out": ([PULLING, {"involvedObject": "nonsense"}], "Pulling image"),
    "without control characters": ([event(1, "New", "a\x1b[2Jb")], "a\ufffd[2Jb"),
    "without secrets": ([event(1, "New", "password=hunter22")], "password=(hidden)"),
}


@pytest.mark.parametrize(("values", "expected"), NEWEST.values(), ids=NEWEST.keys())
def test_newest_event_is_what_the_object_waits_for(values: list[Mapping[str, JsonValue]], expected: str | None) -> None:
    world = World()
    found = newest_event(world.job(), values)
    assert (None if found is None else found.message) == expected


def test_events_are_read_of_a_child_without_pods_and_of_a_pod_on_its_node() -> None:
    world = World()
    world.settle()
    world.settle()
    (child,) = world.observed().children
    late = NOON + timedelta(seconds=61)
    assert wanted_events(world.job(), (child,), (), NOON + timedelta(seconds=59)) == ()
    assert wanted_events(world.job(), (child,), (), late) == (
        EventSource(child.ref.kind, child.ref.name, child.ref.uid),
    )
    world.make_pods(child.ref.name)
    (pod,) = world.observed().pods

    def wanted(**fields: object) -> tuple[tuple[str, str], ...]:
        pods = (replace(pod, **fields),)
        return tuple((one.kind, one.name) for one in wanted_events(world.job(), (child,), pods, late))

    of_pod = ("Pod", pod.name)
    assert wanted(node="node-1", scheduled=NOON) == (of_pod,)
    assert wanted(node="node-1", scheduled=NOON + timedelta(seconds=30)) == ()
    assert wanted(node=None, unschedulable=FULL) == ()
    assert wanted(node=None, unschedulable=UNBOUND, claims=("c",)) == (of_pod, ("PersistentVolumeClaim", "c"))
    assert wanted(phase="Running") == ()


# --------------------------------------------------------------------------------------------------- Stalled, and again


def without_node(message: str) -> JsonValue:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


def waiting_world(message: str) -> World:
    """Return a job whose first pod finds no node."""
    world = World()
    world.settle()
    (pod,) = world.make_pods("reviews-prepare-1")
    world.pods[pod]["status"]["conditions"] = without_node(message)
    world.settle()
    return world


def told(world: World) -> tuple[str, str, str, str | None]:
    """Return status and reason of Stalled, the reason of Ready, and who ends the wait."""
    stage = world.job().status.stages[0]
    return *world.job_condition("Stalled")[:2], world.job_condition("Ready")[1], stage.waiting_for


def test_wait_for_a_person_is_stalled_after_a_minute_with_one_event() -> None:
    world = waiting_world(NO_LABEL)
    assert told(world) == ("False", "Progressing", "Unschedulable", "Person")
    world.wait(59)
    assert told(world)[0] == "False"
    world.wait(1)
    assert told(world) == ("True", "Unschedulable", "Unschedulable", "Person")
    assert "It does not go on until somebody acts." in world.job_condition("Stalled")[2]
    for _ in range(3):
        world.wait(600)
    assert [one.reason for one in world.events if one.type == "Warning"] == ["Unschedulable"]
    world.start()
    world.settle()
    assert told(world) == ("False", "Progressing", "InProgress", None)


def test_wait_for_capacity_is_stalled_after_the_limit_of_the_settings() -> None:
    world = waiting_world(FULL)
    world.wait(3599)
    assert told(world) == ("False", "Progressing", "Unschedulable", "Capacity")
    world.wait(1)
    assert told(world) == ("True", "Unschedulable", "Unschedulable", "Capacity")
    assert f"It has waited for capacity since {stamp(NOON)}." in world.job_condition("Stalled")[2]
    assert world.phase == "Preparing"


def test_wait_for_capacity_is_never_stalled_without_a_limit() -> None:
    world = waiting_world(FULL)
    world.settings = limits(capacitySeconds=0)
    world.wait(1_000_000)
    assert told(world)[0] == "False"


def test_full_nodes_that_become_unfit_are_stalled_a_minute_later() -> None:
    world = waiting_world(FULL)
    world.wait(1000)
    (pod,) = world.pods
    world.pods[pod]["status"]["conditions"] = without_node(NO_LABEL)
    world.settle()
    assert told(world) == ("False", "Progressing", "Unschedulable", "Person")
    world.wait(60)
    assert told(world)[0] == "True"


def test_quota_that_others_use_is_no_stall_until_the_limit() -> None:
    world = World()
    world.refuse["Job"] = (403, REFUSALS["a quota that others use"][0])
    world.settle()
    assert told(world) == ("False", "Progressing", "QuotaExceeded", "Capacity")
    for _ in range(13):
        world.wait(300)
    assert told(world) == ("True", "QuotaExceeded", "QuotaExceeded", "Capacity")
    assert [one.reason for one in world.events if one.type == "Warning"] == ["QuotaExceeded"]
    del world.refuse["Job"]
    world.wait(300)
    world.make_pods("reviews-prepare-1")
    world.start()
    world.settle()
    assert told(world) == ("False", "Progressing", "InProgress", None)


def test_quota_below_the_request_is_stalled_at_once() -> None:
    world = World()
    world.refuse["Job"] = (403, REFUSALS["a quota of none"][0])
    world.settle()
    assert told(world) == ("True", "QuotaExceeded", "QuotaExceeded", "Person")


def on_its_node(event: StartEvent | None) -> World:
    """Return a job whose first pod has a node, and this newest event after a minute."""
    world = World()
    world.settle()
    (pod,) = world.make_pods("reviews-prepare-1")
    world.pods[pod]["spec"]["nodeName"] = "node-1"
    world.settle()
    world.wait(60)
    world.start_events = () if event is None else (replace(event, name=pod),)
    world.settle()
    return world


def test_absent_config_map_stalls_and_then_fails_the_job() -> None:
    world = on_its_node(StartEvent("Pod", "", "FailedMount", 'configmap "nope" not found'))
    assert told(world) == ("True", "FailedMount", "FailedMount", "Person")
    world.wait(60)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.reason) == ("Failed", "ContainerConfig", "FailedMount")


def test_volume_of_another_node_stalls_later_and_fails_by_its_own_limit() -> None:
    world = on_its_node(StartEvent("Pod", "", "FailedAttachVolume", "Multi-Attach error"))
    assert told(world) == ("False", "Progressing", "FailedAttachVolume", "Controller")
    world.wait(540)
    assert told(world)[0] == "True"
    world.wait(1199)
    assert world.phase == "Preparing"
    world.wait(1)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.reason) == ("Failed", "ContainerCreating", "FailedAttachVolume")


def test_pull_of_an_image_is_never_stalled() -> None:
    world = on_its_node(StartEvent("Pod", "", "Pulling", "Pulling image", warning=False))
    world.wait(100_000)
    assert told(world) == ("False", "Progressing", "InProgress", None)


def test_claim_of_an_absent_class_is_stalled_after_the_same_minute() -> None:
    world = waiting_world(UNBOUND)
    assert told(world) == ("False", "Progressing", "ClaimNotBound", "Controller")
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)  # events are read then
    world.wait(60)
    world.start_events = (NO_CLASS,)
    world.settle()
    assert told(world) == ("True", "ClaimNotBound", "ClaimNotBound", "Person")
    assert 'Claim c: storageclass "x" not found' in world.job_condition("Stalled")[2]
