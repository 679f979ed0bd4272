"""Jobs whose users, nodes or operator intervene, on a real API server: suspension, deletion, restarts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.operator_process import USER, OperatorProcess
from cluster_support.plays import RUNS, SUCCEEDS, Play
from cluster_support.world import (
    BASE,
    CHILD_KINDS,
    SETTINGS,
    World,
    condition,
    conditions,
    merged,
    namespace_for_pods,
    states,
)
from finetune_operator.jobs.render.render_types import JOB_LABEL
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

STAGES = ("prepare", "train", "evaluate", "predict")
ONE_EACH = dict.fromkeys(STAGES, ("Succeeded", 1))


@pytest.mark.parametrize("meanwhile", ["the stage goes on", "the stage ends"])
def test_an_operator_that_is_killed_in_each_stage_goes_on_where_it_was(world: World, meanwhile: str) -> None:
    for stage in STAGES:
        world.kubelet.playbook.set("killed", stage, RUNS)
    world.apply("killed")
    for stage in STAGES:
        world.wait_running("killed", stage)
        world.operator.kill()
        if meanwhile == "the stage ends":
            world.kubelet.switch_play("killed", stage, SUCCEEDS)
            done = lambda name=stage: world.pods("killed", name)[0]["status"]["phase"] == "Succeeded"  # noqa: E731
            wait_until(done, f"the pod of {stage} has ended")
        world.operator.start()
        if meanwhile == "the stage goes on":
            world.kubelet.switch_play("killed", stage, SUCCEEDS)
    status = world.wait_phase("killed", "Succeeded")
    assert (states(status), status["restarts"]) == (ONE_EACH, 0)
    assert world.children("killed") == [f"killed-{stage}-1" for stage in STAGES]


def test_stopped_operator_exits_cleanly_and_its_successor_continues(world: World) -> None:
    world.kubelet.playbook.set("rolled", "train", RUNS)
    world.apply("rolled")
    world.wait_running("rolled", "train")
    assert world.operator.terminate() == 0
    world.operator.start()
    world.kubelet.switch_play("rolled", "train", SUCCEEDS)
    assert states(world.wait_phase("rolled", "Succeeded")) == ONE_EACH


def test_nothing_of_a_leader_is_left_when_it_stops(world: World, cluster: Cluster, tmp_path: Path) -> None:
    """kopf waits five seconds for tasks that do not end, in which a rollout waits too."""
    world.operator.terminate()
    leader = OperatorProcess(cluster, tmp_path, SETTINGS, name="operator-1", options=["--log-level", "debug"])
    leader.start()
    try:
        wait_until(lambda: "this replica leads now" in leader.logs(), "it leads")
    finally:
        leader.terminate()
        world.operator.start()
    assert "Hung tasks stopping is skipped: no tasks given." in leader.logs()


def test_jobs_that_were_made_while_no_operator_ran_are_run(world: World) -> None:
    world.operator.kill()
    world.apply("early")
    world.operator.start()
    assert states(world.wait_phase("early", "Succeeded")) == ONE_EACH


def test_a_stand_by_does_nothing_until_the_leader_is_gone(world: World, cluster: Cluster, tmp_path: Path) -> None:
    second = OperatorProcess(cluster, tmp_path, SETTINGS, name="operator-1")
    second.start(wait=False)
    try:
        world.kubelet.playbook.set("two", "train", RUNS)
        world.apply("two")
        world.wait_running("two", "train")
        world.operator.kill()
        world.kubelet.switch_play("two", "train", SUCCEEDS)
        status = world.wait_phase("two", "Succeeded")
        assert (states(status), status["restarts"]) == (ONE_EACH, 0)
    finally:
        second.terminate()
        world.operator.start()


def test_an_api_server_that_restarts_loses_nothing(world: World) -> None:
    world.kubelet.playbook.set("away", "train", RUNS)
    world.apply("away")
    world.wait_running("away", "train")
    world.cluster.restart_api_server()
    world.kubelet.switch_play("away", "train", SUCCEEDS)
    status = world.wait_phase("away", "Succeeded")
    assert (states(status), status["restarts"]) == (ONE_EACH, 0)


def test_suspended_job_stops_its_pods_and_resumes_when_released(world: World) -> None:
    world.kubelet.playbook.set("pause", "train", RUNS, attempt=1)
    world.apply("pause")
    world.wait_running("pause", "train")
    world.change("pause", {"runPolicy": {"suspend": True}})
    status = world.wait_phase("pause", "Suspended")
    assert conditions(status)["Ready"] == "False"
    wait_until(
        lambda: not world.pods("pause", "train"), "nothing runs any more", detail=lambda: world.describe("pause")
    )
    world.change("pause", {"runPolicy": {"suspend": False}})
    status = world.wait_phase("pause", "Succeeded")
    assert (states(status)["train"], status["restarts"]) == (("Succeeded", 2), 0)


def test_a_job_that_is_made_suspended_waits(world: World) -> None:
    world.apply("asleep", {"runPolicy": {"suspend": True}})
    world.wait_phase("asleep", "Suspended")
    assert world.children("asleep") == []
    world.change("asleep", {"runPolicy": {"suspend": False}})
    assert states(world.wait_phase("asleep", "Succeeded")) == ONE_EACH


def test_kopf_stores_nothing_in_objects_and_takes_nothing_of_others(world: World) -> None:
    """kopf removes its own finalizer where no handler needs one, and reads its annotations. Here another operator that
    is built on kopf has left them, one of them broken.
    """
    finalizers = ["kopf.zalando.org/KopfFinalizerMarker", "example.com/kept"]
    annotations = {"kopf.zalando.org/last-handled-configuration": "{broken", "kopf.zalando.org/start": "{}"}
    body = {"apiVersion": API_VERSION, "kind": KIND, "spec": merged(BASE, {"predict": None, "evaluation": None})}
    metadata = {"name": "shared", "finalizers": finalizers, "annotations": annotations}
    world.api.create(world.path(API_VERSION, PLURAL), {**body, "metadata": metadata})
    world.wait_phase("shared", "Succeeded")
    job = world.job("shared")["metadata"]
    assert (job["finalizers"], job["annotations"]) == (finalizers, annotations)
    assert {one["manager"] for one in job["managedFields"]} <= {"finetune-operator", "python-requests"}
    objects = [item for kind in (("v1", "pods"), *CHILD_KINDS) for item in world.of_job("shared", *kind)]
    assert len(objects) >= 4
    assert "kopf" not in json.dumps(objects)
    world.api.patch(world.path(API_VERSION, PLURAL, "shared"), {"metadata": {"finalizers": None}})


def test_a_job_goes_when_its_time_to_live_is_over_and_its_results_stay(world: World) -> None:
    history = world.record("brief")
    world.apply("brief", {"runPolicy": {"ttlSecondsAfterFinished": 2}})
    world.wait_gone("brief")
    # A get may come too late to see its end, but the watch reports it.
    ended = lambda: any(job.get("status", {}).get("phase") == "Succeeded" for job in history.shown)  # noqa: E731
    wait_until(ended, "it has succeeded", detail=lambda: history.shown[-1:])
    left = ["persistentvolumeclaims/brief-workspace"]
    wait_until(lambda: world.everything("brief") == left, "only the claim is left")


def _while_a_stage_runs(world: World) -> None:
    world.wait_running("gone", "train")


def _after_its_end(world: World) -> None:
    world.wait_running("gone", "train")
    world.kubelet.switch_play("gone", "train", SUCCEEDS)
    world.wait_phase("gone", "Succeeded")


def _between_two_stages(world: World) -> None:
    world.wait("gone", "prepare is done", lambda status: states(status)["prepare"][0] == "Succeeded")


def _while_no_operator_runs(world: World) -> None:
    world.wait_running("gone", "train")
    world.operator.kill()


MOMENTS: dict[str, Callable[[World], None]] = {
    "at once": lambda world: None,
    "between two stages": _between_two_stages,
    "while a stage runs": _while_a_stage_runs,
    "while no operator runs": _while_no_operator_runs,
    "after its end": _after_its_end,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_is_deleted_leaves_nothing_but_the_claim(world: World, moment: str) -> None:
    world.kubelet.playbook.set("gone", "train", RUNS)
    world.apply("gone")
    MOMENTS[moment](world)
    world.delete("gone")
    world.wait_gone("gone")
    if not world.operator.running:
        world.operator.start()
    may_stay = {"persistentvolumeclaims/gone-workspace"}

    def left() -> set[str]:
        return set(world.everything("gone")) - may_stay

    # The garbage collector learns of a new kind of owner every 30 s.
    wait_until(lambda: not left(), "it is gone", detail=left)
    world.catch_up()
    # Objects just created when the job was deleted are collected as well, and its Job's pod with them.
    wait_until(lambda: not left(), "it is gone for good", detail=left)


def test_a_job_that_is_deleted_in_the_foreground_gets_no_more_children(world: World) -> None:
    world.kubelet.playbook.set("slow", "train", Play(lasts=None, stops_after=1.0))
    world.apply("slow")
    world.wait_running("slow", "train")
    mark = world.cluster.audit_mark()
    world.api.delete(world.path(API_VERSION, PLURAL, "slow"), propagationPolicy="Foreground")
    world.wait_gone("slow")
    may_stay = {"persistentvolumeclaims/slow-workspace"}
    wait_until(lambda: set(world.everything("slow")) <= may_stay, "it is gone", detail=lambda: world.everything("slow"))
    world.catch_up()
    assert [name for _, name in _creations(world, mark) if name.startswith("slow-")] == []


def test_a_job_of_the_same_name_can_follow_at_once(world: World) -> None:
    """The first one's objects still exist then, in a cluster whose garbage collector has much to do."""
    first = world.apply("again")
    world.wait_phase("again", "Succeeded")
    mark = world.cluster.audit_mark()
    with world.cluster.slow_controllers():
        world.delete("again")
        second = world.apply("again")
        wait_until(lambda: (409, "again-network") in _creations(world, mark), "the operator has met the old objects")
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    status = world.wait_phase("again", "Succeeded")
    assert (states(status), status["restarts"]) == (ONE_EACH, 0)
    assert len(world.of_job("again", "v1", "persistentvolumeclaims")) == 1


def test_retain_delete_deletes_the_claim_with_its_job(world: World) -> None:
    world.kubelet.playbook.set("frugal", "prepare", RUNS)
    spec = {"storage": {"retain": "delete"}}
    world.apply("frugal", spec)
    world.wait_running("frugal", "prepare")
    (first,) = world.of_job("frugal", "v1", "persistentvolumeclaims")
    world.kubelet.playbook.set("frugal", "prepare", SUCCEEDS)
    # A job of the same name does not take over the claim that is about to go.
    with world.cluster.slow_controllers():
        world.delete("frugal")
        world.apply("frugal", spec)
    world.wait_phase("frugal", "Succeeded")
    (second,) = world.of_job("frugal", "v1", "persistentvolumeclaims")
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    world.delete("frugal")
    wait_until(lambda: not world.everything("frugal"), "all is gone", detail=lambda: world.everything("frugal"))


def test_claim_of_an_orphaning_deletion_stays_with_its_results(world: World) -> None:
    world.apply("orphan", {"storage": {"retain": "delete"}})
    world.wait_phase("orphan", "Succeeded")
    world.api.delete(world.path(API_VERSION, PLURAL, "orphan"), propagationPolicy="Orphan")
    world.wait_gone("orphan")
    (claim,) = world.of_job("orphan", "v1", "persistentvolumeclaims")
    assert claim["metadata"].keys() & {"ownerReferences", "deletionTimestamp"} == set()


def test_metrics_count_claims_of_deleted_jobs(world: World) -> None:
    for name in ("deleted", "read"):
        world.apply(name)
        world.wait_phase(name, "Succeeded")
        world.delete(name)
    world.apply("kept", {"model": {"uri": "pvc://read-workspace/read/model"}})
    world.wait_phase("kept", "Succeeded")
    world.operator.terminate()
    world.operator.start()
    jobs = {_place(job) for job in world.api.items(path_of(API_VERSION, PLURAL))}
    # Other tests of this module leave claims too.
    claims = [
        claim
        for claim in world.api.items(path_of("v1", "persistentvolumeclaims"), labelSelector=JOB_LABEL)
        if (claim["metadata"]["namespace"], claim["metadata"]["labels"][JOB_LABEL]) not in jobs
        and _place(claim) != (world.namespace, "read-workspace")
        and "deletionTimestamp" not in claim["metadata"]
    ]
    assert (world.namespace, "deleted-workspace") in map(_place, claims)
    expected = (float(len(claims)), float(len(claims) * 2**30))
    shown = lambda: _values(world, "finetune_leftover_claims", "finetune_leftover_claim_bytes")  # noqa: E731
    wait_until(lambda: shown() == expected, f"the metrics are {expected}", detail=shown)


def _place(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _values(world: World, *names: str) -> tuple[float, ...]:
    lines = dict(line.split(" ") for line in world.operator.metrics().splitlines() if line[:1] != "#")
    return tuple(float(lines[name]) for name in names)


def test_new_job_waits_for_pods_of_a_deleted_job_with_its_name(world: World) -> None:
    world.kubelet.playbook.set("heir", "prepare", RUNS)
    world.apply("heir")
    world.wait_running("heir", "prepare")
    world.kubelet.playbook.set("heir", "prepare", SUCCEEDS)
    mark = world.cluster.audit_mark()
    with world.cluster.slow_controllers():
        world.delete("heir")
        world.apply("heir")

        def waits(status: Object) -> bool:
            return "deleted job of this name" in condition(status, "Running").get("message", "")

        world.wait("heir", "it waits", waits)
        assert [name for _, name in _creations(world, mark) if name.startswith("heir-")] == []
    status = world.wait_phase("heir", "Succeeded")
    assert (states(status), status["restarts"]) == (ONE_EACH, 0)


def _creations(world: World, mark: int) -> list[tuple[int, str]]:
    """Return the API server's answers to the operator's creations, with the names."""
    return [
        (entry["responseStatus"]["code"], entry["objectRef"].get("name", ""))
        for entry in world.cluster.audit(mark, USER)
        if entry["verb"] == "create" and entry["objectRef"].get("namespace") == world.namespace
    ]


def test_a_namespace_can_be_deleted_with_a_job_in_it(world: World, cluster: Cluster) -> None:
    with namespace_for_pods(cluster) as doomed:
        inside = dataclasses.replace(world, namespace=doomed)
        inside.kubelet.playbook.set("inside", "train", RUNS)
        inside.apply("inside")
        inside.wait_running("inside", "train")
    # Objects are deleted in any order: a child before its job, while nothing new may be created.
    inside.wait_gone("inside")
    wait_until(
        lambda: inside.everything("inside") == [], "all of it is gone", detail=lambda: inside.everything("inside")
    )
    world.catch_up()
    assert world.operator.running
    assert "Traceback" not in world.operator.logs()


def test_a_namespace_that_ends_gets_no_creations_and_no_failures(world: World, cluster: Cluster) -> None:
    """Its pods and children go first: the jobs stay, as those of a GitOps tool that waits for what they own."""
    names = [f"held-{number}" for number in range(4)]
    with namespace_for_pods(cluster) as doomed:
        inside = dataclasses.replace(world, namespace=doomed)
        for name in names:
            inside.kubelet.playbook.set(name, "train", RUNS)
            inside.apply(name)
        for name in names:
            inside.wait_running(name, "train")
            inside.api.patch(inside.path(API_VERSION, PLURAL, name), {"metadata": {"finalizers": ["example.com/held"]}})
        mark = world.cluster.audit_mark()
    left = {f"persistentvolumeclaims/{name}-workspace" for name in names}
    wait_until(lambda: all(set(inside.everything(name)) <= left for name in names), "their objects are gone")
    world.catch_up()
    tried = [entry for entry in world.cluster.audit(mark, USER) if entry["objectRef"].get("namespace") == doomed]
    # A dry run stores nothing: it shows that the namespace ends.
    creations = [entry["requestURI"] for entry in tried if entry["verb"] == "create"]
    assert [uri for uri in creations if "dryRun" not in uri] == []
    statuses = [inside.status(name) for name in names]
    found = [(status["phase"], status["restarts"], status.get("failure")) for status in statuses]
    assert found == [("Training", 0, None)] * len(names)
    for name in names:
        inside.api.patch(inside.path(API_VERSION, PLURAL, name), {"metadata": {"finalizers": []}})
    path = path_of("v1", "namespaces", name=doomed)
    wait_until(lambda: world.api.get(path) is None, "the namespace is gone")
    # A later namespace of that name has jobs as any other.
    world.api.create(
        path_of("v1", "namespaces"), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": doomed}}
    )
    try:
        account = path_of("v1", "serviceaccounts", doomed, "default")
        wait_until(lambda: world.api.get(account), "the namespace has the service account that pods run under")
        inside.kubelet.playbook.set(names[0], "train", SUCCEEDS)
        inside.apply(names[0])
        inside.wait_phase(names[0], "Succeeded")
    finally:
        world.api.delete(path)
