"""Jobs in which something breaks, on a real API server: messages, retries, and ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.plays import KILLED_FOR_MEMORY, OUT_OF_MEMORY, PREEMPTED, RUNS, WRONG_COLUMN, Play, fails
from cluster_support.spark_stand_in import REFUSED
from cluster_support.world import CHILD_KINDS, World, condition, conditions, states
from finetune_contract.facts import DeviceFacts
from finetune_contract.layout import FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from suite_plugins.patience import patient

HUB_AWAY = fails(FailureClass.HUB_UNAVAILABLE, "HubTimeout", "huggingface.co did not answer within 60 s")


def short(world: World, name: str, spec: Object | None = None) -> None:
    """Create a job without a prediction, whose stage would show nothing new."""
    world.apply(name, {"predict": None, **(spec or {})})


def test_a_stage_that_fails_ends_the_job_with_the_whole_story(world: World) -> None:
    # Libraries write anything: gloo ends its errors with a beach.
    log = "GLHF! \N{BEACH WITH UMBRELLA}\ufe0f\nKeyError: 'text'"
    world.kubelet.playbook.set("wrong", "train", replace(WRONG_COLUMN, log=f"{log}\n"))
    short(world, "wrong")
    world.cluster.must("wait", "ftj/wrong", "--for=condition=Failed", "--timeout=120s", "-n", world.namespace)
    status = world.status("wrong")
    failure = status["failure"]
    (pod,) = world.pods("wrong", "train")
    found = {key: value for key, value in failure.items() if key != "logTail"}
    assert found == {
        "class": "DataError",
        "reason": "MissingColumn",
        "message": "dataset.columns.text: 'text' is not a column; there are sentence, label",
        "hint": "set dataset.columns.text",
        "stage": "train",
        "attempt": 1,
        "pod": pod["metadata"]["name"],
        "node": pod["spec"]["nodeName"],
        "rank": 0,
        "exitCode": 10,
    }
    if world.cluster.folder is not None:
        assert failure["logTail"] == log
    assert states(status) == {
        "prepare": ("Succeeded", 1),
        "train": ("Failed", 1),
        "evaluate": ("Pending", 0),
    }
    expected = {"Failed": "True", "Stalled": "True", "Ready": "False", "Succeeded": "False"}
    assert expected.items() <= conditions(status).items()
    assert (status["phase"], status["restarts"]) == ("Failed", 0)
    world.wait_event("wrong", "why", lambda kind, _, message: kind == "Warning" and "is not a column" in message)
    assert world.children("wrong") == ["wrong-prepare-1", "wrong-train-1"]


def test_unreachable_webhook_is_reported_and_the_job_resumes_without_it(world: World) -> None:
    """Admission of Jobs calls a program that is not there, as when a training operator is down."""
    name = f"away-{world.namespace}"
    hooks = path_of("admissionregistration.k8s.io/v1", "validatingwebhookconfigurations")
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    hook = {
        "name": "away.example.com", "rules": [rule], "namespaceSelector": here, "failurePolicy": "Fail",
        "clientConfig": {"url": "https://127.0.0.1:1/validate"}, "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "timeoutSeconds": 1,
    }  # fmt: skip
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    world.api.create(hooks, {**kind, "metadata": {"name": name}, "webhooks": [hook]})
    try:
        short(world, "held")
        stalled = world.wait(
            "held",
            "stalled",
            lambda status: "failed calling webhook" in condition(status, "Stalled").get("message", ""),
        )
        assert condition(stalled, "Stalled")["reason"] == "Refused"
        assert (stalled["phase"], stalled["restarts"]) == ("Pending", 0)
        world.wait_event("held", "why", lambda kind, _, message: kind == "Warning" and '"away.example.com"' in message)
    finally:
        world.api.delete(f"{hooks}/{name}")
    world.wait_phase("held", "Succeeded")


def test_first_cause_is_reported_instead_of_its_consequence(world: World) -> None:
    world.kubelet.playbook.set("two", "train", WRONG_COLUMN, index=1)
    echo = fails(FailureClass.COLLECTIVE, "ConnectionLost", "rank 1 has gone", lasts=None)
    world.kubelet.playbook.set("two", "train", echo, index=0)
    short(world, "two", {"resources": {"nodes": 2}})
    failure = world.wait_phase("two", "Failed")["failure"]
    assert (failure["class"], failure["rank"], failure["attempt"]) == ("DataError", 1, 1)
    assert failure["pod"].startswith("two-train-1-1")


def test_log_is_reported_after_every_pod_of_an_attempt_is_deleted(world: World) -> None:
    lingers = replace(RUNS, log="step 7 of 9\n", stops_after=patient(5))
    world.kubelet.playbook.set("wiped", "train", lingers)
    world.apply("wiped", {"predict": None})
    world.wait_running("wiped", "train")
    for pod in world.pods("wiped", "train"):
        world.api.delete(world.path("v1", "pods", pod["metadata"]["name"]))
    failure = world.wait("wiped", "the failure is told", lambda status: status.get("failure"))["failure"]
    assert (failure["class"], failure["logTail"]) == ("Preempted", "step 7 of 9")


def test_failed_preparing_pod_is_reported_with_its_rank(world: World) -> None:
    world.kubelet.playbook.set("third", "prepare", WRONG_COLUMN, index=2)
    echo = fails(FailureClass.COLLECTIVE, "PodFailed", "Pod 2 of 3 of stage prepare failed", lasts=None)
    world.kubelet.playbook.set("third", "prepare", echo, index=0)
    short(world, "third", {"preparation": {"engine": "job", "workers": 3}})
    failure = world.wait_phase("third", "Failed")["failure"]
    found = (failure["class"], failure["stage"], failure["rank"], failure["attempt"])
    assert found == ("DataError", "prepare", 2, 1)
    assert failure["pod"].startswith("third-prepare-1-2")
    assert world.children("third") == ["third-prepare-1"]


SPARK = {"preparation": {"engine": "spark", "workers": 2}}


def test_error_of_the_spark_driver_ends_the_job(world: World) -> None:
    world.kubelet.playbook.set("by-spark", "prepare", WRONG_COLUMN)
    short(world, "by-spark", SPARK)
    failure = world.wait_phase("by-spark", "Failed")["failure"]
    found = (failure["class"], failure["reason"], failure["stage"], failure["attempt"], failure["pod"])
    assert found == ("DataError", "MissingColumn", "prepare", 1, "by-spark-prepare-1-driver")
    assert failure["logTail"].endswith("KeyError: 'text'")


def test_a_preempted_driver_is_another_application(world: World) -> None:
    world.kubelet.playbook.set("lost-driver", "prepare", PREEMPTED, attempt=1)
    short(world, "lost-driver", SPARK)
    status = world.wait_phase("lost-driver", "Succeeded")
    assert (states(status)["prepare"], status["restarts"]) == (("Succeeded", 2), 1)
    assert "lost-driver-prepare-2" in world.children("lost-driver")


def test_failed_spark_submission_is_reported_with_its_message(world: World) -> None:
    refused = {REFUSED: "pods is forbidden: exceeded quota: few"}
    short(world, "unsubmitted", {**SPARK, "runPolicy": {"maxRestarts": 0}, "template": {"annotations": refused}})
    failure = world.wait_phase("unsubmitted", "Failed")["failure"]
    assert (failure["class"], failure["reason"]) == ("ChildFailed", "FAILED")
    assert "SparkApplication unsubmitted-prepare-1 failed" in failure["message"]
    assert "failed to run spark-submit: pods is forbidden: exceeded quota: few" in failure["message"]


def test_a_suspended_preparation_by_spark_stops_and_begins_again(world: World) -> None:
    world.kubelet.playbook.set("spark-pause", "prepare", RUNS, attempt=1)
    short(world, "spark-pause", SPARK)
    world.wait_running("spark-pause", "prepare")
    world.change("spark-pause", {"runPolicy": {"suspend": True}})
    world.wait_phase("spark-pause", "Suspended")
    wait_until(
        lambda: not world.pods("spark-pause"), "its driver is gone", detail=lambda: world.describe("spark-pause")
    )
    assert world.children("spark-pause") == []
    world.change("spark-pause", {"runPolicy": {"suspend": False}})
    assert states(world.wait_phase("spark-pause", "Succeeded"))["prepare"] == ("Succeeded", 2)


def test_temporary_failure_is_retried_with_back_off_up_to_the_limit(world: World) -> None:
    history = world.record("hub")
    world.kubelet.playbook.set("hub", "prepare", HUB_AWAY)
    short(world, "hub", {"runPolicy": {"maxRestarts": 2}})
    status = world.wait_phase("hub", "Failed")
    assert (status["failure"]["class"], status["failure"]["attempt"]) == ("HubUnavailable", 3)
    assert (status["restarts"], status["countedRestarts"]) == (2, 2)
    waits = {
        found["attempt"]: found["nextAttemptTime"]
        for seen in history.statuses()
        for found in seen.get("stages", [])
        if found["name"] == "prepare" and found.get("nextAttemptTime")
    }
    assert len(waits) == 2, waits
    made = _created(world, "hub")
    for number, at in enumerate(waits.values(), start=2):
        assert made.get(f"hub-prepare-{number}", "9") >= at


def _created(world: World, name: str) -> dict[str, str]:
    return {
        item["metadata"]["name"]: item["metadata"]["creationTimestamp"]
        for kind in CHILD_KINDS
        for item in world.of_job(name, *kind)
    }


FREE: dict[str, Play] = {
    "a pod that is preempted": PREEMPTED,
    "a pod that is evicted by its node": Play(exit_code=137, reason="Error", message="", pod_reason="Evicted"),
}


@pytest.mark.parametrize("case", FREE)
def test_failures_of_the_infrastructure_are_free_of_charge(world: World, case: str) -> None:
    world.kubelet.playbook.set("free", "train", FREE[case], attempt=1)
    short(world, "free", {"runPolicy": {"maxRestarts": 0}})
    status = world.wait_phase("free", "Succeeded")
    assert states(status)["train"] == ("Succeeded", 2)
    assert (status["restarts"], status.get("countedRestarts", 0), status.get("failure")) == (1, 0, None)


def test_ranks_that_never_find_each_other_are_not_tried_for_ever(world: World) -> None:
    never = fails(FailureClass.COLLECTIVE, "RendezvousTimeout", "7 of 8 processes came")
    world.kubelet.playbook.set("apart", "train", never)
    short(world, "apart", {"runPolicy": {"maxRestarts": 2}})
    status = world.wait_phase("apart", "Failed")
    assert (status["failure"]["class"], status["failure"]["attempt"]) == ("CollectiveFailed", 3)
    assert (status["restarts"], status["countedRestarts"]) == (2, 2)
    assert "no sign of an infrastructure failure" in status["failure"]["hint"]


MEMORY: dict[str, Play] = {
    "the device's, as the trainer reports it": OUT_OF_MEMORY,
    "the container's, as the kernel ends it": KILLED_FOR_MEMORY,
}


@pytest.mark.parametrize("case", MEMORY)
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_global_batch(world: World, case: str) -> None:
    world.kubelet.playbook.set("memory", "train", MEMORY[case], attempt=1)
    short(world, "memory", {"runPolicy": {"maxRestarts": 0}})
    status = world.wait_phase("memory", "Succeeded")
    assert states(status)["train"] == ("Succeeded", 2)
    before, after = (_batch(world, f"memory-train-{attempt}") for attempt in (1, 2))
    assert after["microBatchSize"] * 2 == before["microBatchSize"]
    assert after["gradientAccumulation"] == before["gradientAccumulation"] * 2
    assert after["globalBatchSize"] == before["globalBatchSize"] == 32
    assert status["plan"]["microBatchSize"] == after["microBatchSize"]
    assert status["adaptation"]["microBatchLimit"] == after["microBatchSize"]
    assert len(status["adaptation"]["reasons"]) == 1
    assert "ran out of memory" in status["adaptation"]["reasons"][0]


def _batch(world: World, attempt: str) -> Object:
    batch: Object = world.order(attempt)["training"]["batch"]
    return batch


def test_training_on_an_unknown_gpu_is_planned_again_for_the_measured_one(world: World) -> None:
    t4 = DeviceFacts(product="Tesla T4", memory_bytes=15_655_829_504, bf16=False, capability="7.5")
    measured = MeasuredDevices(device=t4, processes=1, per_node=1)
    differs = fails(FailureClass.REPLANNED, "DeviceDiffers", "Tesla T4 has no units for bf16", devices=measured)
    world.kubelet.playbook.set("unknown", "train", differs, attempt=1)
    world.kubelet.playbook.set("unknown", "train", Play(devices=measured), attempt=2)
    short(world, "unknown", {"resources": {"gpusPerNode": 1}, "runPolicy": {"maxRestarts": 0}})
    status = world.wait_phase("unknown", "Succeeded")
    assert states(status)["train"] == ("Succeeded", 2)
    assert (status["restarts"], status.get("countedRestarts", 0), status.get("failure")) == (1, 0, None)
    before, after = (world.order(f"unknown-train-{attempt}") for attempt in (1, 2))
    assert (before["training"]["precision"], before["device"]["source"]) == ("bf16", "assumed")
    assert (after["training"]["precision"], after["device"]["product"]) == ("fp16", "Tesla T4")
    assert status["plan"]["device"] == "Tesla T4 with 14.6 GiB, without bf16, measured"
    assert status["measured"]["device"]["processes"] == 1
    assert [one["product"] for one in status["measured"]["replannedFor"]] == ["Tesla T4"]
    world.wait_event(
        "unknown", "why", lambda _, reason, message: reason == "Replanned" and " -> single in fp16" in message
    )


def test_gpu_that_was_planned_for_is_not_replanned_free_of_charge_again(world: World) -> None:
    small = DeviceFacts(product="NVIDIA Small", memory_bytes=8 << 30, capability="8.0")
    measured = MeasuredDevices(device=small, processes=1, per_node=1)
    world.kubelet.playbook.set(
        "again", "train", fails(FailureClass.REPLANNED, "DeviceDiffers", "it has 8.0 GiB", devices=measured)
    )
    short(world, "again", {"resources": {"gpusPerNode": 1}, "runPolicy": {"maxRestarts": 1}})
    status = world.wait_phase("again", "Failed")
    failure = status["failure"]
    assert (failure["class"], failure["attempt"], status["countedRestarts"]) == ("Replanned", 3, 1)
    assert "resources.accelerator.product" in failure["hint"]


def test_out_of_memory_ends_the_job_under_the_policy_fail(world: World) -> None:
    world.kubelet.playbook.set("strict", "train", OUT_OF_MEMORY)
    short(world, "strict", {"runPolicy": {"onOutOfMemory": "fail"}})
    status = world.wait_phase("strict", "Failed")
    assert (status["failure"]["class"], states(status)["train"]) == ("OutOfMemory", ("Failed", 1))


def test_exit_code_zero_without_a_report_is_a_failure(world: World) -> None:
    world.kubelet.playbook.set("silent", "prepare", Play(message=""))
    short(world, "silent", {"runPolicy": {"maxRestarts": 0}})
    assert world.wait_phase("silent", "Failed")["failure"]["class"] == "NoReport"


def test_a_child_that_is_deleted_by_hand_is_made_again_as_a_new_attempt(world: World) -> None:
    world.kubelet.playbook.set("hand", "train", RUNS, attempt=1)
    short(world, "hand")
    world.wait_running("hand", "train")
    world.api.delete(world.path("batch/v1", "jobs", "hand-train-1"))
    status = world.wait_phase("hand", "Succeeded")
    assert states(status)["train"] == ("Succeeded", 2)
    assert status["restarts"] == 1


def test_a_child_that_is_deleted_too_often_fails_the_job(world: World) -> None:
    world.kubelet.playbook.set("often", "train", RUNS)
    short(world, "often", {"runPolicy": {"maxRestarts": 1}})
    for attempt in (1, 2):
        world.wait_running("often", "train", attempt)
        world.api.delete(world.path("batch/v1", "jobs", f"often-train-{attempt}"))
    failure = world.wait_phase("often", "Failed")["failure"]
    assert (failure["class"], failure["attempt"]) == ("ChildDeleted", 2)
    wait_until(lambda: not world.pods("often", "train"), "nothing runs any more")


FOREIGN: dict[str, tuple[str, str, Object]] = {
    "the object that runs the stage": (
        "batch/v1",
        "jobs",
        {
            "kind": "Job",
            "metadata": {"name": "taken-prepare-1"},
            "spec": {
                "suspend": True,
                "template": {"spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}},
            },
        },
    ),
    "the ConfigMap of the attempt": (
        "v1",
        "configmaps",
        {"kind": "ConfigMap", "metadata": {"name": "taken-prepare-1"}, "data": {"mine": "yes"}},
    ),
    "the claim": (
        "v1",
        "persistentvolumeclaims",
        {
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "taken-workspace"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        },
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_object_with_a_child_name_is_kept_and_fails_the_job(world: World, case: str) -> None:
    version, plural, body = FOREIGN[case]
    before: dict[str, Any] = world.api.create(world.path(version, plural), {"apiVersion": version, **body})
    short(world, "taken")
    failure = world.wait_phase("taken", "Failed")["failure"]
    name = body["metadata"]["name"]
    assert failure["class"] == "NameTaken"
    assert name in failure["message"]
    # A claim may hold data.
    assert ("storage.workspace: pvc://taken-workspace" in failure["hint"]) == (plural == "persistentvolumeclaims")
    assert ("Delete" in failure["hint"]) == (plural != "persistentvolumeclaims")
    after = world.api.get(world.path(version, plural, name))
    assert after is not None
    assert (after["metadata"]["uid"], after.get("data")) == (before["metadata"]["uid"], before.get("data"))
    assert "labels" not in after["metadata"] or "finetune.dev/job" not in after["metadata"]["labels"]


def test_deadline_stops_the_running_stage(world: World) -> None:
    # In the first stage, as the time until its end depends on the machine.
    world.kubelet.playbook.set("late", "prepare", RUNS)
    short(world, "late", {"runPolicy": {"activeDeadlineSeconds": math.ceil(patient(3))}})
    status = world.wait_phase("late", "Failed")
    assert (status["failure"]["class"], status["failure"]["stage"]) == ("DeadlineExceeded", "prepare")
    assert states(status)["prepare"] == ("Failed", 1)
    wait_until(lambda: not world.pods("late"), "nothing runs any more", detail=lambda: world.describe("late"))


def test_a_terminal_job_creates_nothing_ever(world: World) -> None:
    world.kubelet.playbook.set("over", "train", WRONG_COLUMN)
    short(world, "over")
    world.wait_phase("over", "Failed")
    world.api.delete(world.path("batch/v1", "jobs", "over-train-1"))
    world.operator.kill()
    world.operator.start()
    world.catch_up()
    assert world.children("over") == ["over-prepare-1"]
    assert world.status("over")["failure"]["class"] == "DataError"
