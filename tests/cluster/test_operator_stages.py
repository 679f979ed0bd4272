"""A job that goes well, on a real API server: its stages, what kubectl tells of it, and what it leaves alone."""

from __future__ import annotations

import json
import re

import pytest

from cluster_support.access import path_of, wait_until
from cluster_support.operator_process import USER
from cluster_support.plays import RUNS, SUCCEEDS, Play
from cluster_support.world import BASE, World, condition, conditions, stage_of, states
from finetune_operator.api.types import API_VERSION, KIND, PLURAL

ONE_EACH = dict.fromkeys(("prepare", "train", "evaluate", "predict"), ("Succeeded", 1))


def test_a_job_goes_through_its_stages_and_kubectl_tells_of_it(world: World) -> None:
    history = world.record("whole")
    world.kubelet.playbook.set("whole", "evaluate", Play(metrics={"accuracy": 0.91}))
    world.apply("whole")
    world.cluster.must("wait", "ftj/whole", "--for=condition=Succeeded", "--timeout=20s", "-n", world.namespace)
    status = world.status("whole")
    assert states(status) == ONE_EACH
    assert [phase for phase in history.phases() if phase != "Pending"] == [
        "Preparing", "Training", "Evaluating", "Predicting", "Succeeded",
    ]  # fmt: skip
    assert {"Accepted": "True", "Planned": "True", "Ready": "True", "Succeeded": "True"}.items() <= conditions(
        status
    ).items()
    assert conditions(status).get("Failed") == "False"
    assert conditions(status).get("Stalled") in (None, "False")
    assert status["observedGeneration"] == world.job("whole")["metadata"]["generation"]
    assert (status["restarts"], status.get("failure")) == (0, None)
    assert status["artifacts"]["metrics"]["accuracy"] == 0.91
    assert status["startTime"] <= status["completionTime"]
    assert world.children("whole") == ["whole-prepare-1", "whole-train-1", "whole-evaluate-1", "whole-predict-1"]


def test_the_plan_is_in_the_status_and_rests_on_what_prepare_measured(world: World) -> None:
    history = world.record("planned")
    world.apply("planned")
    status = world.wait_phase("planned", "Succeeded")
    plan = status["plan"]
    assert plan["launcher"] == "job"
    assert plan["microBatchSize"] * plan["gradientAccumulation"] * plan["worldSize"] == 32
    assert plan["reasons"]
    assert "auto" not in json.dumps({key: value for key, value in plan.items() if key != "reasons"})
    assert status["measured"]["data"]["splits"]["train"]["rows"] == 8192
    before = [seen for seen in history.statuses() if seen.get("plan") and not seen.get("measured")]
    assert before, "the plan is there before prepare has run"
    # 8192 rows in batches of 32, as measured: nobody knew before.
    assert world.order("planned-train-1")["training"]["maxSteps"] == 256


def test_columns_and_events_can_be_read(world: World) -> None:
    world.apply("told")
    world.wait_phase("told", "Succeeded")
    header, row = world.cluster.must("get", "ftj", "-n", world.namespace).splitlines()
    cells = dict(zip(re.split(r"\s{2,}", header.strip()), re.split(r"\s{2,}", row.strip()), strict=False))
    assert (cells["NAME"], cells["PHASE"]) == ("told", "Succeeded")
    described = world.cluster.must("describe", "ftj", "told", "-n", world.namespace)
    assert "Events:" in described
    events = wait_until(lambda: world.events("told"), "there are events")
    assert {kind for kind, _, _ in events} == {"Normal"}
    assert [message for _, _, message in events if not re.fullmatch(r"[A-Z].*\.", message, re.DOTALL)] == []
    assert [reason for _, reason, _ in events if not re.fullmatch(r"[A-Z][A-Za-z]+", reason)] == []


def test_every_child_belongs_to_its_job_and_the_claim_to_nobody(world: World) -> None:
    made = world.apply("owner")
    world.wait_phase("owner", "Succeeded")
    uid = made["metadata"]["uid"]
    for version, plural in (("batch/v1", "jobs"), ("v1", "configmaps")):
        for item in world.of_job("owner", version, plural):
            (reference,) = item["metadata"]["ownerReferences"]
            assert reference == {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": "owner",
                "uid": uid,
                "controller": True,
            }
            assert item["metadata"]["labels"]["finetune.dev/job-uid"] == uid
    (claim,) = world.of_job("owner", "v1", "persistentvolumeclaims")
    assert claim["metadata"]["name"] == "owner-workspace"
    assert "ownerReferences" not in claim["metadata"]
    assert all(item.get("immutable") is True for item in world.of_job("owner", "v1", "configmaps"))


def test_the_users_object_gets_a_status_and_nothing_else(world: World) -> None:
    before = world.apply("mine")
    world.wait_phase("mine", "Succeeded")
    after = world.job("mine")
    assert after["spec"] == before["spec"]
    kept = {key: value for key, value in after["metadata"].items() if key not in ("managedFields", "resourceVersion")}
    assert kept == {
        key: value for key, value in before["metadata"].items() if key not in ("managedFields", "resourceVersion")
    }
    ours = [entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "finetune-operator"]
    assert [(entry["operation"], entry.get("subresource")) for entry in ours] == [("Apply", "status")]


LAUNCHERS = {
    "a PyTorchJob over two nodes": ("pytorchjob", 2, "kubeflow.org/v1", "pytorchjobs"),
    "an MPIJob over two nodes": ("mpijob", 2, "kubeflow.org/v2beta1", "mpijobs"),
    "an Indexed Job over two nodes": ("job", 2, "batch/v1", "jobs"),
}


@pytest.mark.parametrize("case", LAUNCHERS)
def test_training_runs_under_the_launcher_that_was_asked_for(world: World, case: str) -> None:
    launcher, nodes, version, plural = LAUNCHERS[case]
    world.kubelet.playbook.set("gang", "train", Play(lasts=0.5))
    world.apply("gang", {"launcher": launcher, "resources": {"nodes": nodes}})
    status = world.wait_phase("gang", "Succeeded", 60)
    assert states(status) == ONE_EACH
    assert status["plan"]["launcher"] == launcher
    names = [item["metadata"]["name"] for item in world.of_job("gang", version, plural)]
    assert "gang-train-1" in names
    assert stage_of(status, "train")["child"]["name"] == "gang-train-1"  # type: ignore[index]


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
    world.kubelet.tell("live", "train", SUCCEEDS)
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


def test_a_spec_that_only_the_operator_can_refuse_is_told_with_all_problems_and_may_be_mended(world: World) -> None:
    world.apply("wrong", {"model": {"trustRemoteCode": True}, "training": {"arguments": {"learning_rat": 1}}})
    status = world.wait("wrong", "refused", lambda found: condition(found, "Accepted").get("status") == "False", 10)
    accepted = condition(status, "Accepted")
    assert accepted["reason"] == "InvalidSpec"
    assert "spec.model.trustRemoteCode" in accepted["message"]
    assert "spec.training.arguments" in accepted["message"]
    assert (status["phase"], conditions(status)["Stalled"], conditions(status)["Ready"]) == ("Pending", "True", "False")
    assert status.get("failure") is None
    assert world.everything("wrong") == []
    world.change("wrong", {"model": {"trustRemoteCode": False}, "training": {"arguments": None}})
    assert states(world.wait_phase("wrong", "Succeeded")) == ONE_EACH


def test_a_spec_is_refused_within_a_second(world: World) -> None:
    history = world.record("quick")
    made = world.apply("quick", {"model": {"trustRemoteCode": True}})
    world.wait("quick", "refused", lambda found: condition(found, "Accepted").get("status") == "False", 10)
    told = next(job for job in history.jobs if condition(job.get("status", {}), "Accepted").get("status") == "False")
    at = [entry["time"] for entry in told["metadata"]["managedFields"] if entry["manager"] == "finetune-operator"]
    # Stamps are whole seconds: one second apart is less than two.
    assert _seconds(at[0]) - _seconds(made["metadata"]["creationTimestamp"]) <= 1


def _seconds(stamp: str) -> float:
    import datetime

    return datetime.datetime.fromisoformat(stamp).timestamp()


def test_kubectl_sees_a_job_that_somebody_else_manages_untouched(world: World) -> None:
    world.apply("theirs", {"runPolicy": {"managedBy": "example.com/other"}})
    world.apply("ours")
    world.wait_phase("ours", "Succeeded")
    assert world.everything("theirs") == []
    assert world.job("theirs").get("status", {}).get("phase") in (None, "Pending")


def test_nothing_is_written_while_nothing_changes(world: World) -> None:
    world.kubelet.playbook.set("calm", "train", RUNS)
    world.apply("calm")
    world.wait_running("calm", "train")
    settled = _settled(world, "calm")
    mark = world.cluster.audit_mark()
    (pod,) = world.pods("calm", "train")
    for number in range(5):
        patch = {"metadata": {"annotations": {"example.com/touched": str(number)}}}
        world.api.patch(path_of("v1", "pods", world.namespace, pod["metadata"]["name"]), patch)
    # The operator has seen all of that once it has seen, and answered, something later.
    world.apply("later", {"model": {"trustRemoteCode": True}})
    world.wait("later", "refused", lambda found: condition(found, "Accepted").get("status") == "False")
    assert world.job("calm")["metadata"]["resourceVersion"] == settled
    asked = [
        (entry["verb"], entry["objectRef"]["resource"], entry["objectRef"].get("name"))
        for entry in world.cluster.audit(mark, USER)
        if entry.get("objectRef") and entry["objectRef"]["resource"] != "leases" and entry["verb"] != "watch"
    ]
    assert [call for call in asked if call[2] not in ("later", None) and not str(call[2]).startswith("later.")] == []
    world.kubelet.tell("calm", "train", SUCCEEDS)
    world.wait_phase("calm", "Succeeded")


def _settled(world: World, name: str) -> str:
    """resourceVersion once it has stayed the same over ten looks."""
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
