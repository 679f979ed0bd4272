"""A successful job, on a real API server: its stages, kubectl's output, and the objects that it leaves alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.kubelet import ON_STAND_IN
from cluster_support.operator_process import USER
from cluster_support.plays import KILLED_FOR_MEMORY, RUNS, SUCCEEDS, Play
from cluster_support.world import BASE, History, World, condition, conditions, merged, stage_of, states
from finetune_operator.spec.launcher_rows import TRAINING, LauncherName
from finetune_operator.spec.launcher_rows import launcher as row_of
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

ONE_EACH = dict.fromkeys(("prepare", "train", "evaluate", "predict"), ("Succeeded", 1))


@dataclass(frozen=True)
class Finished:
    """A successful job called `whole`, and its history."""

    world: World
    made: Object
    """The job as the API server stored it first."""
    history: History
    waited: int
    """Exit code of `kubectl wait --for=condition=Succeeded`."""


@pytest.fixture(scope="module")
def finished(new_world: Callable[[], AbstractContextManager[World]]) -> Iterator[Finished]:
    """Run a job once for several tests."""
    with new_world() as world:
        history = world.record("whole")
        world.kubelet.playbook.set("whole", "evaluate", Play(metrics={"accuracy": 0.91}))
        made = world.apply("whole")
        for_it = ("wait", "ftj/whole", "--for=condition=Succeeded", "--timeout=120s", "-n", world.namespace)
        waited = world.cluster.kubectl(*for_it).returncode
        yield Finished(world, made, history, waited)


def test_a_job_goes_through_its_stages_in_order(finished: Finished) -> None:
    assert finished.waited == 0, finished.world.describe("whole")
    status = finished.world.status("whole")
    assert states(status) == ONE_EACH
    assert [phase for phase in finished.history.phases() if phase != "Pending"] == [
        "Preparing", "Training", "Evaluating", "Predicting", "Succeeded",
    ]  # fmt: skip
    expected = {
        "Accepted": "True",
        "Planned": "True",
        "Ready": "True",
        "Succeeded": "True",
        "Failed": "False",
        "Stalled": "False",
    }
    assert expected.items() <= conditions(status).items()
    assert status["observedGeneration"] == finished.world.job("whole")["metadata"]["generation"]
    assert (status["restarts"], status.get("failure")) == (0, None)
    assert status["artifacts"]["metrics"]["accuracy"] == 0.91
    assert status["startTime"] <= status["completionTime"]
    names = ["whole-prepare-1", "whole-train-1", "whole-evaluate-1", "whole-predict-1"]
    assert finished.world.children("whole") == names


def test_plan_in_the_status_uses_the_measurements_of_prepare(finished: Finished) -> None:
    status = finished.world.status("whole")
    plan = status["plan"]
    assert plan["launcher"] == "job"
    assert plan["microBatchSize"] * plan["gradientAccumulation"] * plan["worldSize"] == 32
    assert plan["reasons"]
    assert "auto" not in json.dumps({key: value for key, value in plan.items() if key != "reasons"})
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    before = [seen for seen in finished.history.statuses() if seen.get("plan") and not seen.get("measured")]
    assert before, "the plan is there before prepare has run"
    # 8192 rows in batches of 32, as measured: unknown before.
    assert finished.world.order("whole-train-1")["training"]["maxSteps"] == 256


def test_columns_and_events_can_be_read(finished: Finished) -> None:
    world = finished.world
    header, row = world.cluster.must("get", "ftj", "-n", world.namespace).splitlines()
    cells = dict(zip(re.split(r"\s{2,}", header.strip()), re.split(r"\s{2,}", row.strip()), strict=False))
    assert (cells["NAME"], cells["PHASE"]) == ("whole", "Succeeded")
    assert "Events:" in world.cluster.must("describe", "ftj", "whole", "-n", world.namespace)
    events = wait_until(lambda: world.events("whole"), "there are events")
    assert {kind for kind, _, _ in events} == {"Normal"}
    assert [message for _, _, message in events if not re.fullmatch(r"[A-Z].*\.", message, re.DOTALL)] == []
    assert [reason for _, reason, _ in events if not re.fullmatch(r"[A-Z][A-Za-z]+", reason)] == []


def test_children_are_owned_by_their_job_but_the_claim_is_not(finished: Finished) -> None:
    world, uid = finished.world, finished.made["metadata"]["uid"]
    children = [item for kind in (("batch/v1", "jobs"), ("v1", "configmaps")) for item in world.of_job("whole", *kind)]
    assert len(children) == 8
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "whole", "uid": uid, "controller": True}
    assert [item["metadata"]["ownerReferences"] for item in children] == [[owner]] * 8
    assert {item["metadata"]["labels"]["finetune.dev/job-uid"] for item in children} == {uid}
    (claim,) = world.of_job("whole", "v1", "persistentvolumeclaims")
    assert claim["metadata"]["name"] == "whole-workspace"
    assert "ownerReferences" not in claim["metadata"]
    assert all(item.get("immutable") is True for item in world.of_job("whole", "v1", "configmaps"))


def test_the_users_object_gets_a_status_and_nothing_else(finished: Finished) -> None:
    before, after = finished.made, finished.world.job("whole")
    assert after["spec"] == before["spec"]
    changing = ("managedFields", "resourceVersion")
    kept, was = (
        {key: value for key, value in job["metadata"].items() if key not in changing} for job in (after, before)
    )
    assert kept == was
    ours = [entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "finetune-operator"]
    assert [(entry["operation"], entry.get("subresource")) for entry in ours] == [("Apply", "status")]


SPARK = ("sparkoperator.k8s.io/v1beta2", "sparkapplications")


@pytest.mark.parametrize("launcher", TRAINING)
def test_training_runs_under_the_requested_launcher(world: World, launcher: LauncherName) -> None:
    row, nodes = row_of(launcher), 2
    world.kubelet.playbook.set("gang", "train", Play(lasts=0.5))
    world.apply("gang", {"launcher": launcher, "resources": {"nodes": nodes}})
    status = world.wait_phase("gang", "Succeeded")
    assert states(status) == ONE_EACH
    assert status["plan"]["launcher"] == launcher
    names = [item["metadata"]["name"] for item in world.of_job("gang", row.api_version, row.plural)]
    assert "gang-train-1" in names
    assert stage_of(status, "train")["child"]["name"] == "gang-train-1"  # type: ignore[index]


def test_first_of_several_preparing_pods_reports_all_measurements(world: World) -> None:
    world.kubelet.playbook.set("many", "prepare", Play(lasts=0.5))
    world.kubelet.playbook.set("many", "prepare", RUNS, index=0)
    world.apply("many", {"preparation": {"engine": "job", "workers": 3}, "predict": None})
    # Pods that still run when the first one ends are removed.
    wait_until(lambda: world.phases("many", "prepare").count("Succeeded") == 2, "the others have ended")
    assert world.kubelet.switch_play("many", "prepare", SUCCEEDS) >= 1
    status = world.wait_phase("many", "Succeeded")
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    assert any(reason.startswith("preparation by 3 pods, as asked") for reason in status["plan"]["reasons"])
    (job,) = [each for each in world.of_job("many", "batch/v1", "jobs") if "prepare" in each["metadata"]["name"]]
    assert [job["spec"][name] for name in ("completionMode", "completions", "parallelism")] == ["Indexed", 3, 3]
    pods = world.pods("many", "prepare")
    assert len(pods) == 3
    assert {pod["metadata"]["labels"]["batch.kubernetes.io/controller-uid"] for pod in pods} == {job["metadata"]["uid"]}
    (attempt,) = {json.dumps(_variable(pod, "FINETUNE_ATTEMPT")) for pod in pods}
    assert "metadata.labels['batch.kubernetes.io/controller-uid']" in attempt
    (claim,) = world.of_job("many", "v1", "persistentvolumeclaims")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_lost_pods_that_predict_are_replaced_and_the_attempt_goes_on(world: World) -> None:
    world.kubelet.playbook.set("shared", "predict", RUNS)
    world.kubelet.playbook.set("shared", "predict", KILLED_FOR_MEMORY, index=2)
    world.apply("shared", {"predict": {"workers": 3}})
    wait_until(lambda: sorted(world.phases("shared", "predict")) == ["Failed", "Running", "Running"], "one is killed")
    world.kubelet.playbook.set("shared", "predict", RUNS, index=2)
    lost = {_index(pod): pod["metadata"]["name"] for pod in world.pods("shared", "predict")}
    world.api.delete(world.path("v1", "pods", lost["1"]))
    for index in "12":
        # A pod may be deleted before the operator has seen it: then the event has its index.
        world.wait_event("shared", f"pod {index} is replaced", lambda _, reason, message, pod=lost[index]: (
            reason == "PodReplaced" and f"has created pod {pod.rpartition('-')[0]}-" in message
            and (pod in message or "is gone" in message)
        ))  # type: ignore[misc]  # fmt: skip
    wait_until(lambda: world.phases("shared", "predict").count("Running") == 3, "three pods run")
    assert world.kubelet.switch_play("shared", "predict", SUCCEEDS) >= 3
    status = world.wait_phase("shared", "Succeeded")
    assert (states(status)["predict"], status["restarts"], status.get("failure")) == (("Succeeded", 1), 0, None)
    assert status["plan"]["predictWorkers"] == 3
    assert [stage.get("replacedPods") for stage in status["stages"] if stage["name"] == "predict"] == [2]


def test_unschedulable_pod_does_not_block_a_preparation_by_pods(world: World) -> None:
    # One node, which accepts no pods: only the first one runs there, as the test binds it in place of the scheduler.
    node = world.kubelet.nodes[0]
    template = merged(ON_STAND_IN, {"nodeSelector": {"kubernetes.io/hostname": node}})
    world.kubelet.playbook.set("crowded", "prepare", RUNS)
    with cordoned(world, node):
        preparation = {"engine": "job", "workers": 2}
        world.apply("crowded", {"preparation": preparation, "template": template, "predict": None})
        bind(world, wait_until(lambda: _first(world.pods("crowded", "prepare")), "the first pod is there"), node)
        world.wait_running("crowded", "prepare")
        waits = lambda found: "1 node(s) were unschedulable" in condition(found, "Running")["message"]  # noqa: E731
        world.wait("crowded", "a pod waits", waits)
        assert world.kubelet.switch_play("crowded", "prepare", SUCCEEDS) == 1
        status = world.wait("crowded", "it is prepared", lambda found: states(found)["prepare"][0] == "Succeeded")
        path = world.path("batch/v1", "jobs", "crowded-prepare-1")
        conditions_wanted = ("SuccessCriteriaMet", "SuccessPolicy"), ("Complete", "SuccessPolicy")
        wait_until(lambda: _holding(world.api.get(path)) >= set(conditions_wanted), "the Job is complete")
        assert [_index(pod) for pod in world.pods("crowded", "prepare")] == ["0"]
    assert (states(status)["prepare"], status["restarts"]) == (("Succeeded", 1), 0)
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    assert states(world.wait_phase("crowded", "Succeeded"))["train"] == ("Succeeded", 1)


def _first(pods: list[Object]) -> Object | None:
    """Return the pod of index 0."""
    return next((pod for pod in pods if _index(pod) == "0"), None)


def bind(world: World, pod: Object, node: str) -> None:
    """Bind a pod to a node as a scheduler does."""
    name = pod["metadata"]["name"]
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    world.api.create(world.path("v1", "pods", name, "binding"), {**body, "target": target})


@contextmanager
def cordoned(world: World, node: str) -> Iterator[None]:
    """Keep new pods off the node within the block."""
    path = path_of("v1", "nodes", None, node)
    world.api.patch(path, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        world.api.patch(path, {"spec": {"unschedulable": None}})


def _holding(job: Object | None) -> set[tuple[str, str]]:
    """Return type and reason of the conditions that are True."""
    found = [] if job is None else job["status"].get("conditions", [])
    return {(one["type"], one["reason"]) for one in found if one["status"] == "True"}


def _index(pod: Object) -> str:
    index: str = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
    return index


def test_spark_driver_reports_the_measurements_of_prepare(world: World) -> None:
    world.kubelet.playbook.set("by-spark", "prepare", Play(lasts=0.5))
    world.apply("by-spark", {"preparation": {"engine": "spark", "workers": 3}, "predict": None})
    status = world.wait_phase("by-spark", "Succeeded")
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    child = stage_of(status, "prepare")["child"]  # type: ignore[index]
    assert (child["kind"], child["name"]) == ("SparkApplication", "by-spark-prepare-1")
    (application,) = world.of_job("by-spark", *SPARK)
    assert (application["spec"]["executor"]["instances"], application["spec"]["image"]) == (
        3,
        "registry.example.com/trainer-spark:1",
    )
    (driver,) = world.pods("by-spark", "prepare")
    assert driver["spec"]["containers"][0]["image"] == "registry.example.com/trainer-spark:1"
    assert driver["spec"]["serviceAccountName"] == "default"
    (claim,) = world.of_job("by-spark", "v1", "persistentvolumeclaims")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def _variable(pod: Object, name: str) -> Object:
    (found,) = [each for each in pod["spec"]["containers"][0]["env"] if each["name"] == name]
    return found


def test_a_job_without_training_only_predicts(world: World) -> None:
    world.apply("only", {"training": None, "evaluation": None})
    status = world.wait_phase("only", "Succeeded")
    assert states(status) == {"prepare": ("Succeeded", 1), "predict": ("Succeeded", 1)}


def test_progress_posted_from_the_pod_is_shown_by_kubectl(world: World) -> None:
    world.kubelet.playbook.set("live", "train", RUNS)
    world.apply("live")
    world.wait_running("live", "train")
    (pod,) = world.pods("live", "train")
    answer = world.report("live", pod, {"step": 64, "total_steps": 256, "loss": 0.25, "epoch": 0.25}, remaining=90)
    assert answer.status_code == 200, answer.text
    status = world.wait("live", "progress", lambda found: (found.get("progress") or {}).get("step") == 64)
    assert (status["progress"]["percent"], status["progress"]["remainingSeconds"]) == (25, 90)
    shown = world.cluster.must("get", "ftj", "live", "-n", world.namespace, "--no-headers").split()
    assert shown[:5] == ["live", "Training", "train", "25", "0.25"]
    world.kubelet.switch_play("live", "train", SUCCEEDS)
    world.wait_phase("live", "Succeeded")


def test_progress_of_another_jobs_pod_is_refused(world: World) -> None:
    for name in ("mine", "yours"):
        world.kubelet.playbook.set(name, "prepare", RUNS)
        world.apply(name)
    for name in ("mine", "yours"):
        world.wait_running(name, "prepare")
    (mine,), (yours,) = world.pods("mine", "prepare"), world.pods("yours", "prepare")
    url = mine["spec"]["containers"][0]["env"]
    stolen = {**yours, "spec": {**yours["spec"], "containers": [{"env": url}]}}
    assert world.report("yours", stolen, {"step": 1}).status_code == 403
    assert world.report("mine", mine, {"step": 1}).status_code == 200
    world.wait("mine", "progress", lambda found: (found.get("progress") or {}).get("step") == 1)
    assert not world.status("yours").get("progress")
    for name in ("mine", "yours"):
        world.delete(name)


def test_spec_refused_by_the_operator_lists_all_problems_and_is_editable(world: World) -> None:
    world.apply("wrong", {"model": {"trustRemoteCode": True}, "training": {"arguments": {"learning_rat": 1}}})
    status = world.wait("wrong", "refused", lambda found: condition(found, "Accepted").get("status") == "False")
    accepted = condition(status, "Accepted")
    assert accepted["reason"] == "InvalidSpec"
    assert "spec.model.trustRemoteCode" in accepted["message"]
    assert "spec.training.arguments" in accepted["message"]
    assert (status["phase"], conditions(status)["Stalled"], conditions(status)["Ready"]) == ("Pending", "True", "False")
    assert status.get("failure") is None
    assert world.everything("wrong") == []
    world.change("wrong", {"model": {"trustRemoteCode": False}, "training": {"arguments": None}})
    assert states(world.wait_phase("wrong", "Succeeded")) == ONE_EACH


def test_a_host_that_the_administrator_does_not_allow_is_refused_at_once(world: World) -> None:
    script = {"git": {"url": "https://elsewhere.example.com/programs"}}
    world.apply("elsewhere", {"training": {"epochs": None, "globalBatchSize": None, "script": script}})
    status = world.wait("elsewhere", "refused", lambda found: condition(found, "Accepted").get("status") == "False")
    accepted = condition(status, "Accepted")
    assert accepted["reason"] == "InvalidSpec"
    assert "spec.training.script.git.url" in accepted["message"]
    assert "is on a host that is not allowed" in accepted["message"]
    assert world.everything("elsewhere") == []


def test_refusal_is_the_first_status_of_a_spec(world: World) -> None:
    history = world.record("quick")
    world.apply("quick", {"model": {"trustRemoteCode": True}})
    world.wait("quick", "refused", lambda found: condition(found, "Accepted").get("status") == "False")
    assert condition(history.statuses()[0], "Accepted").get("status") == "False"


def test_job_managed_by_another_controller_is_left_untouched(world: World) -> None:
    world.apply("theirs", {"runPolicy": {"managedBy": "example.com/other"}})
    world.catch_up()
    assert world.everything("theirs") == []
    assert world.job("theirs").get("status", {}).get("phase") in (None, "Pending")


def test_nothing_is_written_while_nothing_changes(world: World) -> None:
    world.kubelet.playbook.set("calm", "train", RUNS)
    world.apply("calm")
    world.wait_running("calm", "train")
    # Events follow the status, in the order of all changes.
    world.wait_event(world.catch_up(), "refused", lambda _, reason, __: reason == "InvalidSpec")
    settled = _settled(world, "calm")
    mark = world.cluster.audit_mark()
    (pod,) = world.pods("calm", "train")
    for number in range(5):
        patch = {"metadata": {"annotations": {"example.com/touched": str(number)}}}
        world.api.patch(path_of("v1", "pods", world.namespace, pod["metadata"]["name"]), patch)
    world.catch_up()
    assert world.job("calm")["metadata"]["resourceVersion"] == settled
    requests = [
        (entry["verb"], entry["objectRef"]["resource"], entry["objectRef"].get("name"))
        for entry in world.cluster.audit(mark, USER)
        if entry.get("objectRef") and entry["objectRef"]["resource"] != "leases" and entry["verb"] != "watch"
        # Jobs of earlier tests, in their own namespaces, may still be reconciled.
        if entry["objectRef"].get("namespace") in (None, world.namespace)
    ]
    assert [call for call in requests if not str(call[2]).startswith("barrier-")] == []
    world.kubelet.switch_play("calm", "train", SUCCEEDS)
    world.wait_phase("calm", "Succeeded")


def _settled(world: World, name: str) -> str:
    """Return the resourceVersion once it has stayed the same over ten looks."""
    seen: list[str] = []

    def same() -> str | None:
        seen.append(world.job(name)["metadata"]["resourceVersion"])
        return seen[-1] if seen[-10:] == [seen[-1]] * 10 else None

    return wait_until(same, f"job {name} has settled")


def test_a_job_with_the_longest_name_runs(world: World) -> None:
    name = "1" + "a" * 62
    world.apply(name)
    assert states(world.wait_phase(name, "Succeeded")) == ONE_EACH


def test_kubectl_apply_of_the_same_file_changes_nothing(world: World) -> None:
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "again"}, "spec": BASE}
    for _ in range(2):
        text = json.dumps(document)
        world.cluster.must("apply", "--server-side", "-n", world.namespace, "-f", "-", stdin=text)
        assert states(world.wait_phase("again", "Succeeded")) == ONE_EACH
    assert len(world.children("again")) == 4
    assert world.api.get(world.path(API_VERSION, PLURAL, "again")) is not None
