"""Waits of jobs on a real API server with its scheduler and controllers: who ends each, and whether the job is Stalled.

All jobs wait at once, each in its own namespace, and are judged when the longest of the short limits is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from cluster_support.api_access import Object, wait_until
from cluster_support.kubelet import NODE_MARK, ON_STAND_IN
from cluster_support.plays import RUNS, Play
from cluster_support.world import SETTINGS, World, condition, stage_of
from finetune_operator.spec.status_times import stamp
from suite_plugins.patience import patient

NAME = "waits"
LIMITS: Object = {"imagePullSeconds": 3600, "containerConfigSeconds": 3600, "containerCreatingSeconds": 3600}
"""No job fails before it is judged."""
QUIET = Play(waiting=("ContainerCreating", ""))


@dataclass(frozen=True)
class Wait:
    """Wait of a job, and what its status has to say."""

    stalled: bool
    reason: str
    waits_for: str | None
    message: str
    """Part of the message of condition Ready or Running."""
    spec: Object = field(default_factory=dict)
    objects: tuple[Object, ...] = ()
    """Objects in the namespace before the job."""
    play: Play = QUIET
    event: tuple[str, str, str] | None = None
    """Type, reason and message of an event that a kubelet records about the pod."""


def quota(**hard: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"count/jobs.batch" if name == "jobs" else name: text for name, text in hard.items()}},
    }


LIMIT_RANGE: Object = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "tiny"},
    "spec": {"limits": [{"type": "Container", "max": {"memory": "16Mi"}}]},
}
OTHER_POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "other"},
    "spec": {
        **ON_STAND_IN,
        "nodeSelector": {"kubernetes.io/hostname": "stand-in-0"},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "other",
                "image": "nothing:1",
                "resources": {"requests": {"cpu": "200"}},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}
"""Most of a stand-in's CPU."""


def on(**labels: str) -> Object:
    return {"template": {"nodeSelector": {NODE_MARK: "true", **labels}}}


NO_CONFIG_MAP = 'MountVolume.SetUp failed for volume "config" : configmap "nowhere" not found'
NO_CLASS = 'storageclass.storage.k8s.io "no-such-class" not found'
ATTACHED = (
    'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be attached '
    "to another"
)
NO_KEY = 'MountVolume.SetUp failed for volume "s" : references non-existent secret key: token'
NO_DRIVER = (
    'MountVolume.MountDevice failed for volume "v" : driver name nfs.example.com not found in the list of registered '
    "CSI drivers"
)
NO_NETWORK = "Failed to create pod sandbox: plugin type=calico failed: connection refused"

WAITS: dict[str, Wait] = {
    "an absent claim": Wait(
        True,
        "ClaimNotBound",
        "Person",
        'persistentvolumeclaim "no-such-claim" not found',
        {"storage": {"workspace": "pvc://no-such-claim", "storageClassName": None, "size": None}},
    ),
    "an absent storage class": Wait(
        True, "ClaimNotBound", "Person", NO_CLASS, {"storage": {"storageClassName": "no-such-class"}}
    ),
    "an absent service account": Wait(
        True,
        "PodsRefused",
        "Person",
        'serviceaccount "nobody" not found',
        {"template": {"serviceAccountName": "nobody"}},
    ),
    "a quota of no pods": Wait(True, "QuotaExceeded", "Person", "exceeded quota: small", objects=(quota(pods="0"),)),
    "a quota that another pod uses": Wait(
        False, "QuotaExceeded", "Capacity", "exceeded quota: small", objects=(OTHER_POD, quota(pods="1"))
    ),
    "a quota of no batch Jobs": Wait(
        True, "QuotaExceeded", "Person", "exceeded quota: small", objects=(quota(jobs="0"),)
    ),
    "a LimitRange below the request": Wait(
        True, "PodsRefused", "Person", "memory limit of 16Mi", objects=(LIMIT_RANGE,)
    ),
    "a node selector without a node": Wait(
        True, "Unschedulable", "Person", "didn't match Pod's node affinity/selector", on(zone="moon")
    ),
    "more memory than any node has": Wait(
        True, "Unschedulable", "Person", "Insufficient memory", {"resources": {"memory": "4000Gi"}}
    ),
    "a node that another pod fills": Wait(
        False,
        "Unschedulable",
        "Capacity",
        "Insufficient cpu",
        {**on(**{"kubernetes.io/hostname": "stand-in-0"}), "resources": {"cpu": "100"}},
        objects=(OTHER_POD,),
    ),
    "an image that cannot be pulled": Wait(
        True, "ImagePull", "Person", "Back-off pulling", play=Play(waiting=("ImagePullBackOff", "Back-off pulling x"))
    ),
    "a Secret that is not there": Wait(
        True,
        "ContainerConfig",
        "Person",
        "hub-tokens",
        {"secrets": {"hubToken": {"name": "hub-tokens", "key": "token"}}},
    ),
    "a ConfigMap that is not there": Wait(
        True, "FailedMount", "Person", '"nowhere" not found', event=("Warning", "FailedMount", NO_CONFIG_MAP)
    ),
    "a volume on another node": Wait(
        False,
        "FailedAttachVolume",
        "Controller",
        "Multi-Attach error",
        event=("Warning", "FailedAttachVolume", ATTACHED),
    ),
    "a network that is not ready": Wait(
        False,
        "FailedCreatePodSandBox",
        "Controller",
        "connection refused",
        event=("Warning", "FailedCreatePodSandBox", NO_NETWORK),
    ),
    "a key that a Secret lacks": Wait(
        True, "FailedMount", "Person", "references non-existent", event=("Warning", "FailedMount", NO_KEY)
    ),
    "a storage driver that the node lacks": Wait(
        False, "FailedMount", "Controller", "registered CSI drivers", event=("Warning", "FailedMount", NO_DRIVER)
    ),
    "a long pull": Wait(
        False, "InProgress", None, "to start", event=("Normal", "Pulling", 'Pulling image "trainer:1"')
    ),
}


@pytest.fixture(scope="module")
def operator_settings() -> Object:
    return {**SETTINGS, "limits": LIMITS}


@pytest.fixture(scope="module")
def worlds(new_world: Callable[[], AbstractContextManager[World]]) -> Iterator[dict[str, World]]:
    """Start all jobs; record the events that kubelets would."""
    with ExitStack() as stack:
        worlds = {row: stack.enter_context(new_world()) for row in WAITS}
        for number, (row, wait) in enumerate(WAITS.items()):
            world, name = worlds[row], f"{NAME}-{number}"
            world.kubelet.playbook.other = RUNS
            for one in wait.objects:
                world.api.create(world.path(one["apiVersion"], f"{one['kind'].lower()}s"), one)
            world.kubelet.playbook.set(name, "prepare", wait.play)
            world.apply(name, wait.spec)
        for number, (row, wait) in enumerate(WAITS.items()):
            if wait.event is not None:
                record_event(worlds[row], f"{NAME}-{number}", wait.event)
        yield worlds


def record_event(world: World, name: str, event: tuple[str, str, str]) -> None:
    """Record an event about the pod of the job, as its node would."""

    def scheduled() -> Object | None:
        return next((pod for pod in world.pods(name) if pod["spec"].get("nodeName")), None)

    pod, now = wait_until(scheduled, f"{name} has a pod on a node"), stamp(datetime.now(UTC))
    metadata, (kind, reason, message) = pod["metadata"], event
    involved = {"apiVersion": "v1", "kind": "Pod", **{key: metadata[key] for key in ("namespace", "name", "uid")}}
    world.api.create(
        world.path("v1", "events"),
        {
            "metadata": {"generateName": f"{name}-"},
            "involvedObject": involved,
            "type": kind,
            "reason": reason,
            "message": message,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "kubelet"},
        },
    )


@pytest.mark.parametrize("row", WAITS)
def test_wait_says_who_ends_it_and_is_stalled_if_that_is_a_person(worlds: dict[str, World], row: str) -> None:
    wait, world = WAITS[row], worlds[row]
    name = f"{NAME}-{list(WAITS).index(row)}"

    def told(status: Object) -> bool:
        shown = condition(status, "Ready")["reason"], condition(status, "Stalled")["status"]
        return shown == (wait.reason, str(wait.stalled))

    status = world.wait(name, f"{wait.reason}, Stalled {wait.stalled}", told, patient(150))
    stage = stage_of(status, "prepare")
    assert stage is not None
    assert stage.get("waitingFor") == wait.waits_for
    assert wait.message in condition(status, "Running")["message"]
    warnings = [one for one in world.events(name) if one[:2] == ("Warning", wait.reason)]
    if wait.stalled:
        stalled = condition(status, "Stalled")
        assert stalled["reason"] == wait.reason
        assert wait.message in stalled["message"]
        world.cluster.must("wait", "--for=condition=Stalled", f"finetunejob/{name}", "-n", world.namespace)
        world.wait_event(name, "the event", lambda kind, reason, _: (kind, reason) == ("Warning", wait.reason))
    else:
        assert warnings == []
    shown = world.cluster.must("get", "finetunejob", name, "-n", world.namespace)
    assert wait.reason in shown.splitlines()[1].split()
