"""Decisions about a job, situation by situation, in a world that carries them out."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from finetune_contract.facts import DeviceFacts
from finetune_contract.layout import FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import Communication, MeasuredFacts
from finetune_operator.cli.cluster.jobview import communication_text, device_text
from finetune_operator.jobs.state.decision_types import Decision, EventNote, Findings, ObjectRef
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import (
    ChildReference,
    CommunicationStatus,
    CostStatus,
    FailureStatus,
    ProgressStatus,
    StageStatus,
)
from reconcile_world import BERT, GRACE, NOON, SPEC, World, limits, report

TWO_NODES = {**SPEC, "resources": {"nodes": 2}}
AT = "2026-01-01T12:00:00Z"


def training(**changes: object) -> World:
    """Return a job whose train stage runs its first attempt."""
    world = World(**changes)  # type: ignore[arg-type]
    world.settle()
    world.succeed()
    world.settle()
    world.start()
    world.settle()
    assert world.stage("train") == ("Running", 1)
    return world


# ------------------------------------------------------------------------------------------------------- the good way


def test_the_first_pass_plans_and_creates_the_first_stage():
    world = World()
    decision = world.decide()
    assert [(one["kind"], one["metadata"]["name"]) for one in decision.create] == [  # type: ignore[index, call-overload]
        ("NetworkPolicy", "reviews-network"),
        ("PersistentVolumeClaim", "reviews-workspace"),
        ("ConfigMap", "reviews-prepare-1"),
        ("Job", "reviews-prepare-1"),
    ]
    assert decision.events == (
        EventNote("Normal", "JobAccepted", "The spec is valid."),
        EventNote(
            "Normal",
            "Planned",
            "Planned prepare -> train -> evaluate -> predict: trains with single by job on 1 node x 1 process; "
            "batch 32 = 4 micro x 8 accumulation x 1 rank.",
        ),
        EventNote("Normal", "StageStarted", "Stage prepare runs as Job reviews-prepare-1, attempt 1."),
    )
    status = decision.status
    assert (status.phase, status.stage, status.start_time, status.observed_generation) == (
        "Preparing",
        "prepare",
        NOON,
        1,
    )
    assert status.stages == (
        StageStatus(
            name="prepare",
            state="Running",
            attempt=1,
            start_time=NOON,
            child=ChildReference(api_version="batch/v1", kind="Job", name="reviews-prepare-1"),
        ),
        *(StageStatus(name=name, state="Pending", attempt=0) for name in ("train", "evaluate", "predict")),
    )
    assert (decision.delete, decision.delete_job) == ((), False)


def test_job_runs_its_stages_and_records_events():
    world = World()
    world.settle()
    for _ in range(4):
        world.start()
        world.wait(90)
        world.succeed()
        world.settle()
    assert world.event_reasons() == [
        "JobAccepted",
        "Planned",
        "StageStarted",
        "StageSucceeded",
        "Planned",
        "StageStarted",
        "StageSucceeded",
        "StageStarted",
        "StageSucceeded",
        "StageStarted",
        "StageSucceeded",
        "Succeeded",
    ]
    messages = [note.message for note in world.events if note.reason in ("StageSucceeded", "Succeeded")]
    assert messages == [
        "Stage prepare succeeded in 2 min.",
        "Stage train succeeded in 2 min: train_loss 0.5.",
        "Stage evaluate succeeded in 2 min: accuracy 0.875.",
        "Stage predict succeeded in 2 min.",
        "All stages have succeeded: model at pvc://reviews-workspace/reviews/model; accuracy 0.875.",
    ]
    status = world.job().status
    assert status.completion_time == NOON + timedelta(minutes=6)
    assert status.artifacts is not None
    assert status.artifacts.model_dump(exclude_none=True) == {
        "model": "pvc://reviews-workspace/reviews/model",
        "report": "pvc://reviews-workspace/reviews/report.html",
        "predictions": "pvc://reviews-workspace/reviews/predictions.jsonl",
        "metrics": {"train_loss": 0.5, "accuracy": 0.875},
        "result": "accuracy 0.875",
        "dataset_fingerprint": "f00d",
    }
    assert list(world.children) == ["reviews-prepare-1", "reviews-train-1", "reviews-evaluate-1", "reviews-predict-1"]


@pytest.mark.parametrize(("reported", "kept"), [("bf16", "bf16"), (None, None), ("x" * 100, None)])
def test_optimization_of_the_gate_is_in_the_status(reported: str | None, kept: str | None):
    world = World()
    world.settle()
    section = {"accuracy": 0.9} | ({} if reported is None else {"optimization": reported})
    for evaluates in (False, False, True):
        world.succeed(**({"metrics": {"evaluate": section}} if evaluates else {}))
        world.settle()

    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert (artifacts.metrics["accuracy"], artifacts.judged_optimization) == (0.9, kept)


def test_kept_checkpoints_are_reported_with_size_and_place():
    world = World()
    world.settle()
    for trains in (False, True, False, False):
        kept = {"metrics": {"train": {"loss": 0.5, "checkpoint_bytes": 1288490189}}} if trains else {}
        if trains:
            kept["artifacts"] = {"model": "model", "checkpoints": "checkpoints"}
        world.succeed(**kept)
        world.settle()
    assert world.event_reasons()[-2:] == ["CheckpointsKept", "Succeeded"]
    place = "pvc://reviews-workspace/reviews/checkpoints"
    (message,) = [note.message for note in world.events if note.reason == "CheckpointsKept"]
    assert message == (
        f"Checkpoints take 1.2 GiB at {place}. They are no longer needed, and the operator does not delete them."
    )
    status = world.job().status
    assert status.artifacts is not None
    assert status.artifacts.checkpoints == place


def test_deleted_checkpoints_are_reported_with_their_size():
    world = World()
    world.settle()
    trained = {"model": "model", "checkpoints": "checkpoints"}
    metrics = {"train": {"loss": 0.5, "checkpoint_bytes": 1288490189}}
    ends = ({}, {"metrics": metrics, "artifacts": trained}, {}, {"artifacts": {"checkpoints_deleted": "checkpoints"}})
    for end in ends:
        world.succeed(**end)
        world.settle()
    (message,) = [note.message for note in world.events if note.reason.startswith("Checkpoints")]
    assert message.startswith("1.2 GiB of checkpoints were deleted because all stages have succeeded; ")
    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert artifacts.checkpoints is None


def test_later_stages_take_the_commit_at_which_prepare_found_the_model():
    """A branch may move while a job runs."""
    world, commit = World(), "c0ffee" * 6 + "c0de"
    world.settle()
    prepare = world.newest()
    world.start()
    for pod in world.pods_of(prepare):
        world.end_pod(pod, 0, report("prepare", model_revision=commit))
    world.end_child(prepare, succeeded=True)
    world.settle()
    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert artifacts.model_revision == commit
    revisions = [json.loads(world.configuration(one))["model"]["revision"] for one in (prepare, "reviews-train-1")]
    assert revisions == ["main", commit]


def test_measurements_of_prepare_are_kept_and_used_for_planning():
    world = training()
    status = world.job().status
    assert status.measured is not None
    assert status.measured.data is not None
    assert status.plan is not None
    assert status.measured.data["fingerprint"] == "f00d"
    assert status.plan.micro_batch_size == 32
    planned = [note.message for note in world.events if note.reason == "Planned"]
    assert [one.partition("batch ")[2] for one in planned] == [
        "32 = 4 micro x 8 accumulation x 1 rank.",
        "32 = 32 micro x 1 accumulation x 1 rank.",
    ]
    ran = json.loads(world.configuration("reviews-train-1"))
    assert ran["training"]["batch"]["microBatchSize"] == 32


def test_no_decision_changes_while_a_stage_runs():
    world = training()
    writes, events = world.writes, len(world.events)
    for _ in range(5):
        world.wait(60)
    assert (world.writes, len(world.events)) == (writes, events)


def test_running_job_keeps_its_launcher_when_served_kinds_change():
    world = training(served=("job", "pytorchjob"))
    assert world.children["reviews-train-1"]["kind"] == "PyTorchJob"
    world.served = ("job", "mpijob")
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(10)
    assert world.children["reviews-train-2"]["kind"] == "PyTorchJob"


GRANTED = Settings.model_validate({"spark": {"image": "spark:1", "serviceAccountName": "spark-driver"}})


def prepared_by_spark() -> World:
    """Return a job that Spark prepares, after settings and cluster have stopped granting Spark."""
    world = World(settings=GRANTED, served=("job", "sparkapplication"))
    world.spec["preparation"] = {"engine": "spark", "workers": 2}
    world.settle()
    assert world.children[world.start()]["kind"] == "SparkApplication"
    world.settle()
    world.settings, world.served = Settings(), ("job",)
    world.settle()
    return world


def test_job_prepared_by_spark_continues_after_its_settings_are_removed():
    world = prepared_by_spark()
    assert world.stage("prepare") == ("Running", 1)
    world.succeed()
    world.settle()
    assert (world.stage("prepare"), world.stage("train")) == (("Succeeded", 1), ("Running", 1))
    plan = world.job().status.plan
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(10)
    for _ in range(3):
        world.succeed()
        world.settle()
    assert world.created == [
        "reviews-prepare-1", "reviews-train-1", "reviews-train-2", "reviews-evaluate-1", "reviews-predict-1",
    ]  # fmt: skip
    status = world.job().status
    assert (status.phase, status.failure, status.plan) == ("Succeeded", None, plan)


def test_second_spark_attempt_names_the_settings_that_it_needs():
    world = prepared_by_spark()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(10)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.attempt) == ("Failed", "PlanRefused", 2)
    assert failure.message == (
        'Attempt 2 cannot be planned: spec.preparation.engine (value "spark"): '
        "the operator's settings have to name an image with Spark, and an account for its driver; "
        "have an administrator set spark.image and spark.serviceAccountName (docs/data.md), or set it to job or auto."
    )


def test_a_job_that_has_failed_has_no_time_left():
    world = training()
    progress = ProgressStatus(step=5, total_steps=20, percent=25, loss=0.7, remaining_seconds=30)
    world.progress = progress
    world.settle()
    in_text = {"complete": "25%", "remaining": "30s"}
    assert world.job().status.progress == progress.model_copy(update=in_text)
    world.fail(FailureClass.DATA)
    world.settle()
    assert world.phase == "Failed"
    assert world.job().status.progress == progress.model_copy(update={"remaining_seconds": None, "complete": "25%"})


def test_progress_is_shown_while_a_stage_runs_and_whole_at_its_end():
    world = training()
    world.progress = ProgressStatus(step=5, total_steps=20, percent=25, loss=0.7, remaining_seconds=30)
    world.settle()
    in_text = {"complete": "25%", "remaining": "30s"}
    assert world.job().status.progress == world.progress.model_copy(update=in_text)
    world.succeed()
    world.progress = None
    world.step()
    world.start()
    assert world.job().status.progress is None  # the next stage has reported nothing yet
    world.progress = ProgressStatus(step=1, total_steps=9, percent=11)
    world.settle()
    world.succeed("reviews-evaluate-1")
    world.edit(suspend=True)  # nothing follows
    world.progress = None
    world.settle()
    assert world.job().status.progress == ProgressStatus(step=9, total_steps=9, percent=100, complete="100%")


def test_suspended_job_has_no_time_left():
    world = training()
    world.progress = ProgressStatus(step=5, total_steps=20, percent=25, loss=0.7, remaining_seconds=30)
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    left = {"remaining_seconds": None, "complete": "25%"}
    assert world.job().status.progress == world.progress.model_copy(update=left)


def test_job_that_has_succeeded_has_no_time_left():
    world = training()
    for _ in ("train", "evaluate", "predict"):
        world.succeed()
        world.settle()
    assert world.phase == "Succeeded"
    ended = world.job().status.progress
    assert ended is not None
    assert (ended.percent, ended.remaining_seconds) == (100, None)


def test_costs_are_counted_at_the_end_of_each_attempt():
    world = World(settings=Settings.model_validate({"prices": ({"product": "cpu", "gpus": 0, "perHour": 2.0},)}))
    world.spec["resources"] = {"nodes": 2}
    world.spec["preparation"] = {"engine": "job", "workers": 3}
    world.spec.pop("predict")
    for _ in range(3):
        world.settle()
        world.start()
        world.wait(360)
        world.succeed()
    world.settle()
    # 360 s of three pods to prepare, of two nodes to train and of one to evaluate
    used = 360.0 * (3 + 2 + 1)
    assert world.job().status.cost == CostStatus(
        node_seconds=used, billable_seconds=used, currency="USD", amount=used / 3600 * 2.0
    )


def test_preparation_succeeds_with_its_first_pod_in_spite_of_the_others():
    world = World()
    world.spec["preparation"] = {"engine": "job", "workers": 4}
    world.settle()
    child = world.start()
    first, stopped, lost, unplaced = world.pods_of(child)
    world.pods[unplaced]["status"] = {"phase": "Pending"}
    world.settle()
    world.end_pod(first, 0, report("prepare"))
    # The Job is not Complete before all others have ended, and the node of one of them does not answer.
    world.children[child]["status"]["conditions"] = [world.condition("SuccessCriteriaMet", "SuccessPolicy")]
    for pod in (stopped, lost, unplaced):
        world.pods[pod]["metadata"]["deletionTimestamp"] = stamp(world.now + GRACE)
    world.pods[lost]["stuck"] = True
    world.end_pod(stopped, 143, report("prepare", (FailureClass.PREEMPTED, 10.0), rank=1))
    world.settle()
    world.wait(600)
    assert (world.stage("prepare"), world.stage("train")) == (("Succeeded", 1), ("Running", 1))
    assert world.created == ["reviews-prepare-1", "reviews-train-1"]
    assert "StageFailed" not in world.event_reasons()


def test_preparation_reports_progress_while_later_pods_are_unschedulable():
    world = World()
    world.settings = limits(unschedulableSeconds=60)
    world.spec["preparation"] = {"engine": "job", "workers": 2}
    world.settle()
    child = world.start()
    first, unplaced = world.pods_of(child)
    world.pods[unplaced]["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}],
    }
    world.settle()
    world.progress = ProgressStatus(step=7)
    world.wait(600)
    assert (world.phase, world.job_condition("Running")[2]) == ("Preparing", f"Waiting for 1 pod of {child}: 0/3 nodes")
    assert world.job().status.progress == ProgressStatus(step=7)
    world.pods[first]["status"] = {"phase": "Pending", "conditions": world.pods[unplaced]["status"]["conditions"]}
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.pod) == ("Failed", "Unschedulable", first)


# ------------------------------------------------------------------------------------------- pods that are replaced


def predicting_by_three() -> tuple[World, str, list[str]]:
    """Return a job whose three pods predict: the world, the Job and the pods."""
    world = World()
    world.spec["predict"] = {"workers": 3}
    world.settle()
    for _ in ("prepare", "train", "evaluate"):
        world.succeed()
        world.settle()
    child = world.start()
    world.settle()
    return world, child, world.pods_of(child)


def replaced(world: World, pod: str, lost_before: int = 1) -> str:
    """Let the Job create another pod in the place of `pod`, which stays as it ended; return its name."""
    raw = json.loads(json.dumps(world.pods[pod]))
    name = f"{pod}-again-{lost_before}"
    raw["metadata"] |= {"name": name, "uid": f"uid-{name}", "creationTimestamp": stamp(world.now)}
    raw["metadata"]["annotations"] = {"batch.kubernetes.io/job-index-failure-count": str(lost_before)}
    raw["metadata"].pop("deletionTimestamp", None)
    raw["status"] = {"phase": "Running"}
    world.pods[name] = raw
    return name


@pytest.mark.parametrize(
    ("code", "reason", "reported"),
    [(143, "Error", "told to stop"), (137, "OOMKilled", "memory ran out"), (137, "Error", "(exit code 137)")],
)
def test_lost_pod_is_replaced_and_costs_no_attempt(code: int, reason: str, reported: str) -> None:
    world, child, (_, lost, _) = predicting_by_three()
    message = report("predict", (FailureClass.PREEMPTED, 10.0), rank=1) if code == 143 else ""
    world.end_pod(lost, code, message, reason)
    world.settle()
    world.wait(160)  # the Job waits before it replaces a pod
    assert world.stage("predict") == ("Running", 1)
    world.now += timedelta(seconds=1)
    other = replaced(world, lost)
    world.settle()
    world.wait(600)
    assert (world.stage("predict"), world.job().status.stages[-1].replaced_pods) == (("Running", 1), 1)
    (event,) = [note for note in world.events if note.reason == "PodReplaced"]
    assert lost in event.message
    assert f"{child} has created pod {other} in its place; finished work is kept." in event.message
    assert "StageFailed" not in world.event_reasons()
    for rank, pod in enumerate([name for name in world.pods_of(child) if name != lost]):
        world.end_pod(pod, 0, report("predict", rank=rank))
    world.end_child(child, succeeded=True)
    world.settle()
    assert (world.phase, world.job().status.restarts) == ("Succeeded", 0)


def test_pod_deleted_unseen_is_reported_by_its_index() -> None:
    world, child, (_, seen, unseen) = predicting_by_three()
    world.end_pod(seen, 137, reason="OOMKilled")
    world.now += timedelta(seconds=11)
    first = replaced(world, seen)
    world.settle()
    world.now += timedelta(seconds=1)
    second = replaced(world, unseen)
    del world.pods[unseen]
    world.settle()
    about_seen, about_unseen = (note.message for note in world.events if note.reason == "PodReplaced")
    assert f"pod {seen}: " in about_seen
    assert f"{child} has created pod {first} in its place" in about_seen
    assert "The pod of index 2 was deleted." in about_unseen
    assert f"{child} has created pod {second} in its place" in about_unseen


def predicting_by_spark() -> World:
    """Return a job whose prediction runs in Spark's driver and two executors."""
    world = World(settings=GRANTED, served=("job", "sparkapplication"))
    world.spec["predict"] = {"workers": 3, "engine": "spark"}
    world.settle()
    for _ in ("prepare", "train", "evaluate"):
        world.succeed()
        world.settle()
    assert world.children[world.start()]["kind"] == "SparkApplication"
    world.settle()
    return world


def test_replaced_executors_are_reported_and_cost_no_attempt() -> None:
    world = predicting_by_spark()
    for count in (1, 1, 3):
        world.progress = ProgressStatus(step=5, total_steps=20, percent=25, samples_per_second=7.5, replaced_pods=count)
        world.settle()
    assert (world.stage("predict"), world.job().status.stages[-1].replaced_pods) == (("Running", 1), 3)
    assert [note.message for note in world.events if note.reason == "PodReplaced"] == [
        f"Stage predict, attempt 1: the driver of SparkApplication reviews-predict-1 has replaced {lost}; "
        "finished work is kept."
        for lost in ("1 lost executor", "2 lost executors")
    ]
    world.succeed()
    world.settle()
    assert (world.phase, world.job().status.restarts) == ("Succeeded", 0)


def test_prediction_by_spark_goes_on_when_its_settings_are_taken_away() -> None:
    world = predicting_by_spark()
    world.settings, world.served = Settings(), ("job",)
    world.settle()
    world.succeed()
    world.settle()
    assert (world.phase, world.job().status.restarts) == ("Succeeded", 0)


def test_cause_of_a_failed_attempt_is_no_pod_that_was_replaced() -> None:
    world, child, (first, lost, _) = predicting_by_three()
    world.end_pod(lost, 137, reason="OOMKilled")
    world.now += timedelta(seconds=11)
    replaced(world, lost)
    world.settle()
    world.end_pod(first, 10, report("predict", (FailureClass.DATA, 30.0)))
    world.end_child(child, succeeded=False, reason="PodFailurePolicy")
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.pod) == ("Failed", "DataError", first)


def test_replaced_pod_is_the_cause_when_others_only_report_its_loss() -> None:
    world, child, (first, short, third) = predicting_by_three()
    world.end_pod(short, 137, report("predict", (FailureClass.OUT_OF_MEMORY, 10.0), rank=1))
    world.now += timedelta(seconds=11)
    other = replaced(world, short)
    world.settle()
    for rank, pod in ((0, first), (1, other), (2, third)):
        world.end_pod(pod, 150, report("predict", (FailureClass.COLLECTIVE, 30.0), rank=rank))
    world.end_child(child, succeeded=False, reason="PodFailurePolicy")
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.pod) == ("OutOfMemory", short)


def test_pod_lost_too_often_fails_the_attempt() -> None:
    world, child, (_, pod, _) = predicting_by_three()
    for lost in range(1, 4):
        world.end_pod(pod, 137, reason="OOMKilled")
        world.now += timedelta(seconds=60)
        pod = replaced(world, pod, lost)
        world.settle()
    assert (world.stage("predict"), world.event_reasons().count("PodReplaced")) == (("Running", 1), 3)
    world.end_pod(pod, 137, reason="OOMKilled")
    world.end_child(child, succeeded=False, reason="MaxFailedIndexesExceeded")
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.pod, failure.rank) == ("OutOfMemory", pod, 1)
    assert world.stage("predict") == ("Failed", 1)
    world.wait(600)
    assert (world.stage("predict"), world.job().status.stages[-1].replaced_pods) == (("Running", 2), 0)


def test_pods_that_predict_cost_as_many_nodes() -> None:
    prices = Settings.model_validate({"prices": ({"product": "cpu", "gpus": 0, "perHour": 2.0},)})
    world = World(settings=prices)
    world.spec["predict"] = {"workers": 3}
    for _ in range(4):
        world.settle()
        world.start()
        world.wait(360)
        world.succeed()
    world.settle()
    cost = world.job().status.cost
    assert cost is not None
    assert cost.billable_seconds == 360.0 * (1 + 1 + 1 + 3)


# -------------------------------------------------------------------------------------------- jobs that are not begun


def test_refused_spec_lists_all_problems_and_can_be_edited():
    world = World()
    world.spec["task"] = "poetry"
    world.spec["training"]["epochs"] = -1
    world.settle()
    assert world.phase == "Pending"
    state, reason, message = world.job_condition("Accepted")
    assert (state, reason) == ("False", "InvalidSpec")
    assert "spec.task" in message
    assert "spec.training.epochs" in message
    assert world.job_condition("Stalled")[:2] == ("True", "InvalidSpec")
    assert world.job_condition("Ready")[0] == "False"
    assert world.job_condition("Failed")[0] == "False"
    assert (world.created, world.event_reasons(), world.job().status.failure) == ([], ["InvalidSpec"], None)
    world.spec |= {"task": "text-classification", "training": {}}
    world.generation += 1
    world.settle()
    assert (world.phase, world.job_condition("Accepted")[0], world.job_condition("Stalled")[0]) == (
        "Preparing",
        "True",
        "False",
    )


def test_spec_edited_to_an_invalid_one_before_the_start_loses_its_plan():
    world = World()
    world.edit(suspend=True)
    world.settle()
    assert world.job().status.plan is not None
    world.spec["task"] = "poetry"
    world.generation += 1
    world.settle()
    status = world.job().status
    assert (world.phase, status.plan, status.stages, world.job_condition("Planned")[0]) == (
        "Pending",
        None,
        (),
        "Unknown",
    )


def test_a_refused_plan_is_tried_again_when_the_cluster_serves_more():
    world = World()
    world.spec["launcher"] = "mpijob"
    world.settle()
    state, reason, message = world.job_condition("Planned")
    assert (state, reason, world.phase, world.created) == ("False", "PlanRefused", "Pending", [])
    assert message.startswith('spec.launcher (value "mpijob")')
    assert world.job_condition("Stalled")[:2] == ("True", "PlanRefused")
    assert world.event_reasons() == ["JobAccepted", "PlanRefused"]
    world.served = ("job", "mpijob")
    world.settle()
    assert (world.phase, world.job_condition("Planned")[0]) == ("Preparing", "True")


def test_a_job_of_another_manager_is_left_alone():
    for manager in ("kueue.x-k8s.io/multikueue", "someone"):
        world = World()
        world.edit(managedBy=manager)
        assert world.decide() == Decision(status=world.job().status)


def test_a_job_that_names_this_operator_is_ours():
    world = World()
    world.edit(managedBy="finetune.dev/operator")
    world.settle()
    assert world.phase == "Preparing"


def test_a_job_that_is_being_deleted_is_left_alone():
    world = training()
    world.deleting = True
    world.fail(FailureClass.DATA)
    assert world.decide() == Decision(status=world.job().status)


# ---------------------------------------------------------------------------------------------------------- suspension


def test_a_job_suspended_from_the_start_creates_nothing():
    world = World()
    world.edit(suspend=True)
    world.settle()
    assert (world.phase, world.created, world.others, world.event_reasons()) == (
        "Suspended",
        [],
        {},
        ["JobAccepted", "Planned", "Suspended"],
    )
    assert world.job_condition("Running")[:2] == ("False", "Suspended")
    world.edit(suspend=False)
    world.settle()
    assert (world.phase, world.event_reasons()[3:]) == ("Preparing", ["Resumed", "StageStarted"])


def test_suspended_stage_is_deleted_and_resumes_without_counted_restart():
    world = training()
    world.edit(suspend=True)
    world.settle()
    assert (world.phase, world.stage("train"), list(world.children)) == (
        "Suspended",
        ("Suspended", 1),
        ["reviews-prepare-1"],
    )
    assert world.job().status.start_time is None
    world.edit(suspend=False)
    world.settle()
    # the pod still saves its checkpoint
    assert (world.stage("train"), world.job_condition("Running")[2]) == (
        ("Suspended", 1),
        "Waiting for attempt 1 to end: reviews-train-1-0 still runs. "
        f"The wait ends at {stamp(NOON + timedelta(seconds=90))} at the latest.",
    )
    world.wait(61)
    status = world.job().status
    assert (world.stage("train"), status.restarts, status.counted_restarts) == (("Running", 2), 0, 0)
    assert status.start_time == NOON + timedelta(seconds=61)
    assert world.event_reasons()[-4:] == ["StageStarted", "Suspended", "Resumed", "StageStarted"]


def test_stage_that_ended_during_suspension_has_succeeded():
    world = training()
    world.succeed("reviews-train-1")
    world.edit(suspend=True)
    world.settle()
    assert (world.phase, world.stage("train"), world.stage("evaluate")) == (
        "Suspended",
        ("Succeeded", 1),
        ("Pending", 0),
    )


def test_operator_restarted_during_suspension_recognizes_its_deletion():
    world = training()
    world.edit(suspend=True)
    world.step()
    world.step(crash_after=1)  # the Job is deleted, and nothing is written after that
    assert (world.stage("train"), "reviews-train-1" in world.children) == (("Suspended", 1), False)
    world.settle()
    assert (world.phase, world.stage("train"), world.job().status.failure) == ("Suspended", ("Suspended", 1), None)


# ---------------------------------------------------------------------------------------------------- the end of a job


def test_a_job_is_deleted_when_its_time_to_live_is_over():
    world = training()
    world.edit(ttlSecondsAfterFinished=60)
    world.fail(FailureClass.DATA)
    world.settle()
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)
    assert not world.deleted
    world.wait(60)
    assert world.deleted


def test_the_settings_time_to_live_counts_for_jobs_without_their_own():
    world = training(settings=Settings.model_validate({"defaults": {"ttlSecondsAfterFinished": 0}}))
    world.fail(FailureClass.DATA)
    world.settle()
    assert world.deleted


def test_a_job_past_its_deadline_fails_and_its_running_child_goes():
    world = training()
    world.edit(activeDeadlineSeconds=100)
    world.settle()
    assert world.decide().requeue_at == NOON + timedelta(seconds=100)
    world.now += timedelta(seconds=100)
    world.step()
    assert (world.phase, list(world.children)) == ("Failed", ["reviews-prepare-1", "reviews-train-1"])
    cost = world.job().status.cost
    assert cost is not None
    assert cost.node_seconds == 100
    world.settle()
    assert list(world.children) == ["reviews-prepare-1"]
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.stage, failure.attempt) == ("DeadlineExceeded", "train", 1)


PRICED = {"prices": ({"product": "cpu", "gpus": 0, "perHour": 36.0},)}


def test_job_at_its_cost_limit_ends_and_its_child_is_deleted():
    """At 36 an hour, a hundred seconds cost 1; the estimate is below the bound."""
    world = training(settings=Settings.model_validate({**PRICED, "allow": {"maxCost": 100.0}}))
    world.settle()
    due = world.decide().requeue_at
    assert due is not None
    assert abs(due - (world.now + timedelta(seconds=10_000))) < timedelta(seconds=1)
    # The cost of earlier attempts counts.
    world.wait(6000)
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    assert world.phase == "Training"
    world.wait(2000)
    world.start()
    world.settle()
    assert world.phase == "Training"
    world.wait(3000)
    assert world.phase == "Training"
    world.wait(1000)
    world.settle()
    failure, cost = world.job().status.failure, world.job().status.cost
    assert (world.phase, list(world.children)) == ("Failed", ["reviews-prepare-1"])
    assert failure is not None
    assert (failure.failure_class, failure.stage) == ("CostExceeded", "train")
    assert "allow.maxCost in the settings is 100" in failure.message
    assert cost is not None
    assert cost.amount is not None
    assert cost.amount >= 100.0


@pytest.mark.parametrize(
    ("allow", "spec", "path", "message"),
    [
        ({"maxCost": 1e-9}, {}, "spec", "by the estimate"),
        ({"maxCost": 1e9}, {"resources": {"gpusPerNode": 1}}, "spec.resources", "without a price"),
        ({"maxCost": 1e9}, {"spot": {"enabled": True}}, "spec.spot.enabled", "without a price (nodes without GPUs)"),
    ],
    ids=["dear", "unknown nodes", "unknown spot nodes"],
)
def test_a_job_that_would_cost_more_than_it_may_is_not_begun(allow: object, spec: dict, path: str, message: str):
    settings = Settings.model_validate({**PRICED, "allow": allow})
    world = World(spec={**SPEC, **spec}, settings=settings)
    world.settle()
    (planned,) = [one for one in world.job().status.conditions if one.type == "Planned"]
    assert (planned.status, list(world.children)) == ("False", [])
    assert message in planned.message
    assert path in planned.message


def test_deadline_restarts_after_a_suspension():
    world = training()
    world.edit(activeDeadlineSeconds=100, suspend=True)
    world.settle()
    world.wait(1000)
    world.edit(suspend=False)
    world.wait(61)
    world.start()
    world.wait(99)
    assert world.phase == "Training"
    world.wait(2)
    assert world.phase == "Failed"


def test_failed_job_keeps_finished_children_and_creates_no_other():
    world = training()
    world.fail(FailureClass.DATA)
    world.settle()
    assert list(world.children) == ["reviews-prepare-1", "reviews-train-1"]
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.wait(10_000)
    assert (world.phase, world.created, world.job().status.observed_generation) == (
        "Failed",
        ["reviews-prepare-1", "reviews-train-1"],
        3,
    )


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_user_error_fails_the_job_at_once_with_everything_that_is_known():
    world = training()
    world.logs["reviews-train-1-0"] = "line 1\nKeyError: 'text'\n"
    world.fail(FailureClass.DATA)
    world.settle()
    failure = FailureStatus(
        failure_class="DataError",
        reason="Told",
        message="Told by the trainer.",
        hint="Do so.",
        stage="train",
        attempt=1,
        pod="reviews-train-1-0",
        node="node-0",
        rank=0,
        exit_code=10,
        log_tail="line 1\nKeyError: 'text'",
    )
    assert (world.phase, world.job().status.failure) == ("Failed", failure)
    assert world.job_condition("Failed") == ("True", "DataError", "Stage train, attempt 1: Told by the trainer. Do so.")
    assert world.job_condition("Stalled")[:2] == ("True", "Failed")
    assert world.job_condition("Succeeded")[0] == "False"
    assert [(note.type, note.reason, note.message) for note in world.events[-2:]] == [
        (
            "Warning",
            "StageFailed",
            "Stage train, attempt 1, failed (pod reviews-train-1-0 on node-0): Told by the trainer.",
        ),
        ("Warning", "Failed", "The job has failed (DataError): Told by the trainer. Do so."),
    ]


def test_failure_is_recorded_before_the_attempt_is_deleted():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    decision = world.step()
    assert (decision.delete, decision.create, world.stage("train")) == ((), (), ("Failed", 1))
    assert decision.requeue_at == NOON + timedelta(seconds=10)
    deleted = world.step()
    assert deleted.delete == (ObjectRef("batch/v1", "Job", "reviews-train-1", "uid-reviews-train-1"),)
    assert deleted.create == ()
    world.wait(9)
    assert world.stage("train") == ("Failed", 1)
    assert world.job_condition("Running")[2] == (
        "Attempt 2 of stage train starts at 2026-01-01T12:00:10Z, after CollectiveFailed: Told by the trainer."
    )
    world.wait(1)
    assert world.stage("train") == ("Running", 2)
    assert (world.job().status.restarts, world.job().status.counted_restarts) == (1, 1)


def test_restart_delay_doubles_to_its_maximum_and_resets_after_a_long_run():
    world = training(settings=limits(restartDelaySeconds=10, restartDelayMostSeconds=60))
    delays = []
    for ran in (0, 0, 0, 0, 0, 700, 0):
        world.wait(ran)
        world.fail(FailureClass.PREEMPTED)
        world.step()
        wake = world.decide().requeue_at
        assert wake is not None
        delays.append((wake - world.now).total_seconds())
        world.wait(delays[-1])
        world.start()
        world.settle()
    assert delays == [10, 20, 40, 60, 60, 10, 20]
    assert world.job().status.restarts == 7


def test_counted_restarts_end_with_the_job_and_free_ones_do_not():
    world = training()
    world.edit(maxRestarts=1)
    for failure in (FailureClass.PREEMPTED, FailureClass.HUB_UNAVAILABLE, FailureClass.PREEMPTED):
        world.fail(failure)
        world.settle()
        world.wait(300)
        world.start()
    world.fail(FailureClass.HUB_UNAVAILABLE)
    world.settle()
    status = world.job().status
    assert (world.phase, status.restarts, status.counted_restarts) == ("Failed", 3, 1)
    assert status.failure is not None
    assert status.failure.hint == "The limit runPolicy.maxRestarts (1) is reached. Do so."


def restarts(world: World) -> tuple[int, int]:
    """Return the restarts of the job, and the counted ones among them."""
    world.settle()
    status = world.job().status
    world.wait(300)
    world.start()
    world.settle()
    return status.restarts, status.counted_restarts


def at_step(world: World, step: int) -> None:
    """Report this step from the running attempt, and wait until it is in the status."""
    world.progress = ProgressStatus(step=step, total_steps=100)
    world.settle()
    assert world.job().status.progress == world.progress


def test_repeated_failures_before_the_first_step_are_counted():
    world = training()
    for attempt in (1, 2, 3):
        world.fail(FailureClass.COLLECTIVE)
        assert restarts(world) == (attempt, attempt)
    assert "no sign of an infrastructure failure" in world.events[-2].message
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    assert world.phase == "Failed"
    hint = world.job().status.failure.hint  # type: ignore[union-attr]
    assert hint is not None
    assert "maxRestarts (3) is reached: no sign of an infrastructure failure" in hint


def test_restart_after_new_progress_is_free_and_others_count():
    world = training()
    found = []
    for step in (5, 5, 6, 0, 7):
        if step:
            at_step(world, step)
        world.fail(FailureClass.COLLECTIVE)
        found.append(restarts(world))
    assert found == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert next(one for one in world.job().status.stages if one.name == "train").furthest_step == 7


def test_failed_attempt_counts_steps_that_no_status_shows_yet():
    world = training()
    world.progress = ProgressStatus(step=7, total_steps=100)
    world.fail(FailureClass.COLLECTIVE)
    assert restarts(world) == (1, 0)
    assert next(one for one in world.job().status.stages if one.name == "train").furthest_step == 7


def test_progress_counts_after_any_failure_of_the_attempt():
    world = training()
    at_step(world, 50)
    world.fail(FailureClass.HUB_UNAVAILABLE)
    assert restarts(world) == (1, 1)
    at_step(world, 20)
    world.fail(FailureClass.COLLECTIVE)
    assert restarts(world) == (2, 2)


@pytest.mark.parametrize("step", [0, 5])
def test_restart_caused_by_kubernetes_is_free_with_and_without_progress(step: int):
    world = training()
    for attempt in (1, 2, 3, 4, 5):
        if step:
            at_step(world, step)
        world.fail(FailureClass.PREEMPTED)
        assert restarts(world) == (attempt, 0)


def test_free_restarts_are_bounded_in_a_window_of_time():
    world = training(settings=limits(freeRestarts=2, freeRestartsSeconds=3600))
    found = []
    for _ in range(3):
        world.fail(FailureClass.PREEMPTED)
        found.append(restarts(world))
    world.wait(3600)
    world.fail(FailureClass.PREEMPTED)
    found.append(restarts(world))
    assert found == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_failure_is_forgotten_when_its_stage_has_succeeded():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(10)
    assert world.job().status.failure is not None
    world.succeed()
    world.settle()
    assert (world.job().status.failure, world.stage("train")) == (None, ("Succeeded", 2))


def test_status_has_the_transports_of_a_training_that_succeeded():
    world = training()
    found = Communication(inside="nvlink", between="efa", gpudirect=True, library="2.30.7")
    world.succeed("reviews-train-1", communication=found)
    world.settle()
    assert world.stage("train") == ("Succeeded", 1)
    assert world.job().status.communication == CommunicationStatus(inside="nvlink", between="efa", gpudirect=True)


GPUS = MeasuredDevices(device=DeviceFacts(product="NVIDIA L40S", memory_bytes=48 << 30), processes=8, per_node=8)
SENT = Communication(inside="p2p", between="socket", adapters=("eth0",))


def test_status_has_the_gpus_and_transports_of_a_running_attempt():
    world = training()
    world.progress = ProgressStatus(step=5, total_steps=20, percent=25)
    world.settle()
    assert world.job().status.communication is None
    world.findings = Findings(GPUS, SENT)
    world.settle()
    status = world.job().status
    assert world.stage("train") == ("Running", 1)
    assert status.communication == CommunicationStatus(inside="p2p", between="socket", adapters=("eth0",))
    assert device_text(status) == "NVIDIA L40S 48.0 GiB x 8"
    assert communication_text(status) == "p2p in a node, socket between nodes"


def test_status_has_the_note_of_the_last_training_attempt():
    world = training()
    world.progress, world.findings = ProgressStatus(step=5, total_steps=20), Findings(note="mlflow does not answer.")
    world.settle()
    assert world.job().status.note == "mlflow does not answer."
    world.findings = Findings(note="\x1b[2J http://me:hunter2@mlflow.example fails.")
    world.settle()
    assert world.job().status.note == "\ufffd[2J http://(hidden)@mlflow.example fails."
    world.fail(FailureClass.STORAGE_LOST, note="wandb does not answer.")
    world.findings = Findings()
    world.settle()
    assert world.job().status.note == "wandb does not answer."
    world.wait(3600)
    assert world.stage("train") == ("Running", 2)
    assert world.job().status.note is None


def test_failed_attempt_leaves_its_gpus_and_transports():
    world = training()
    world.fail(FailureClass.COLLECTIVE, devices=GPUS, communication=SENT)
    world.settle()
    assert device_text(world.job().status) == "NVIDIA L40S 48.0 GiB x 8"
    assert communication_text(world.job().status) == "p2p in a node, socket between nodes"


def test_next_attempt_waits_for_all_pods_of_the_previous_one():
    world = training(spec=TWO_NODES)
    pod = world.pods["reviews-train-1-1"]
    pod["stuck"] = True
    pod["metadata"]["deletionTimestamp"] = world.after(60)
    world.end_pod("reviews-train-1-0", 151, report("train", (FailureClass.STORAGE_LOST, 1.0)))
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert world.stage("train") == ("Failed", 1)
    world.wait(89)
    assert world.stage("train") == ("Failed", 1)
    world.wait(1)  # 30 s after its grace period its node counts as gone
    assert world.stage("train") == ("Running", 2)


@pytest.mark.parametrize("child_failed", [True, False], ids=["the child has failed", "the child waits for its pods"])
def test_lost_connection_to_a_stuck_pod_is_a_node_failure(child_failed: bool):
    world = training(spec=TWO_NODES)
    pod = world.pods["reviews-train-1-1"]
    pod["stuck"] = True
    pod["metadata"]["deletionTimestamp"] = world.after(60)
    world.end_pod("reviews-train-1-0", 150, report("train", (FailureClass.COLLECTIVE, 1.0)))
    if child_failed:
        world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    world.wait(89)
    assert world.stage("train") == ("Running", 1)
    world.wait(1)
    assert world.stage("train") == ("Failed", 1)
    status = world.job().status
    assert status.failure is not None
    assert (status.failure.failure_class, status.failure.pod) == ("NodeLost", "reviews-train-1-1")
    assert next(one for one in status.stages if one.name == "train").avoided_nodes == (status.failure.node,)
    assert (status.restarts, status.counted_restarts) == (1, 0)
    world.wait(10)
    assert world.stage("train") == ("Running", 2)


def test_unreachable_node_ends_the_attempt_and_is_avoided_by_the_next():
    world = training()
    pod = world.pods["reviews-train-1-0"]
    pod["stuck"] = True
    pod["metadata"]["deletionTimestamp"] = world.after(60)
    world.settle()
    assert world.decide().requeue_at == NOON + timedelta(seconds=90)
    world.wait(90)
    status = world.job().status
    assert status.failure is not None
    assert (status.failure.failure_class, status.failure.reason) == ("NodeLost", "PodDoesNotEnd")
    assert next(one for one in status.stages if one.name == "train").avoided_nodes == ("node-0",)
    world.wait(10)
    affinity = json.dumps(world.children["reviews-train-2"]["spec"]["template"]["spec"]["affinity"])
    assert "node-0" in affinity
    assert world.events[-2].message.endswith(
        "which does not count towards runPolicy.maxRestarts. It avoids node node-0."
    )


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("served", ["job", "pytorchjob"])
@pytest.mark.parametrize("child_failed", [True, False], ids=["the child has failed", "its controller is lost as well"])
def test_silent_node_outranks_the_lost_connection_of_a_survivor(lost: int, served: str, child_failed: bool):
    world = training(spec=TWO_NODES, served=(served,))
    child = world.newest()
    pods = world.pods_of(child)
    silent, survivor = pods[lost], pods[1 - lost]
    if child_failed:
        world.now += timedelta(seconds=50)
    else:
        # A survivor reports at once what Kubernetes notices a minute later.
        world.end_pod(survivor, 150, report("train", (FailureClass.COLLECTIVE, 1.0), rank=1 - lost))
        world.wait(85)
    since = world.after(0)
    # As the node lifecycle controller leaves it: the kubelet's other conditions stay.
    world.pods[silent] |= {"stuck": True}
    world.pods[silent]["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": since},
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": stamp(NOON)},
    ]
    world.settle()
    assert world.stage("train") == ("Running", 1)
    if child_failed:
        world.end_pod(survivor, 150, report("train", (FailureClass.COLLECTIVE, 1.0), rank=1 - lost))
        world.end_child(child, succeeded=False)
    world.settle()
    world.wait(0 if child_failed else 5)
    status = world.job().status
    assert status.failure is not None
    assert (status.failure.failure_class, status.failure.reason) == ("NodeLost", "NodeNotReady")
    assert (status.failure.pod, status.failure.node) == (silent, f"node-{lost}")
    assert f"Node node-{lost} has not responded since {since}" in status.failure.message
    assert next(one for one in status.stages if one.name == "train").avoided_nodes == (f"node-{lost}",)
    assert (status.restarts, status.counted_restarts) == (1, 0)
    world.pods[silent]["metadata"]["deletionTimestamp"] = ends = world.after(60)
    world.wait(20)
    goes_on = stamp(datetime.fromisoformat(ends) + timedelta(seconds=30))
    assert world.job_condition("Running")[2] == (
        f"Waiting for attempt 1 to end: {silent} still runs. Node node-{lost} has not responded since {since}. "
        f"The wait ends at {goes_on} at the latest."
    )
    world.wait(70)
    assert world.stage("train") == ("Running", 2)


def test_failed_pod_ends_an_attempt_that_its_controller_ignores():
    world = training(served=("mpijob",))
    world.end_pod("reviews-train-1-worker-0", 137, reason="OOMKilled")
    world.settle()
    assert world.stage("train") == ("Running", 1)
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)
    world.wait(60)
    assert world.stage("train") == ("Failed", 1)


def test_a_child_deleted_by_hand_counts_against_the_restarts():
    world = training()
    world.delete_child("reviews-train-1")
    world.settle()
    status = world.job().status
    assert status.failure is not None
    assert (status.failure.failure_class, status.failure.message, status.counted_restarts) == (
        "ChildDeleted",
        "Job reviews-train-1 was deleted, and not by the operator.",
        1,
    )
    world.wait(61)
    assert world.stage("train") == ("Running", 2)


def test_pod_status_may_arrive_after_that_of_the_child():
    world = training()
    world.end_child("reviews-train-1", succeeded=True)
    world.settle()
    assert world.stage("train") == ("Running", 1)
    assert world.decide().requeue_at == NOON + timedelta(seconds=30)
    world.end_pod("reviews-train-1-0", 0, report("train"))
    world.settle()
    assert world.stage("train") == ("Succeeded", 1)


def test_a_better_cause_may_come_after_an_echo():
    world = training(spec=TWO_NODES)
    world.end_pod("reviews-train-1-0", 150, report("train", (FailureClass.COLLECTIVE, 1.0)))
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert world.stage("train") == ("Running", 1)
    world.end_pod("reviews-train-1-1", 10, report("train", (FailureClass.DATA, 2.0), rank=1))
    world.settle()
    assert world.phase == "Failed"
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.rank, failure.pod) == ("DataError", 1, "reviews-train-1-1")


def test_report_of_the_named_pod_may_arrive_after_the_child_status():
    world = training(spec=TWO_NODES)
    world.end_child("reviews-train-1", succeeded=False)
    (condition,) = world.children["reviews-train-1"]["status"]["conditions"]
    condition["reason"] = "PodFailurePolicy"
    condition["message"] = (
        "Container pytorch for pod team/reviews-train-1-1 failed with exit code 143 matching FailJob rule at index 1"
    )
    world.settle()
    assert world.stage("train") == ("Running", 1)
    world.wait(10)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.pod, failure.exit_code) == ("Preempted", "reviews-train-1-1", 143)
    assert failure.node


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("", id="no report at all"),
        pytest.param(report("evaluate"), id="a report of another stage"),
        pytest.param(report("train", rank=1), id="a report of another rank"),
        pytest.param(report("train").replace("reviews", "others"), id="a report of another job"),
        pytest.param("{not json", id="a text that is no report"),
    ],
)
def test_end_without_a_report_of_rank_0_is_no_success(message: str):
    world = training()
    world.end_pod("reviews-train-1-0", 0, message)
    world.end_child("reviews-train-1", succeeded=True)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, world.stage("train"), world.job().status.counted_restarts) == (
        "NoReport",
        ("Failed", 1),
        1,
    )


# ------------------------------------------------------------------------------------------------------ out of memory


def test_out_of_memory_halves_the_micro_batch_at_the_same_global_batch():
    world = training()
    world.fail_silently(137, reason="OOMKilled")
    world.settle()
    status = world.job().status
    reason = (
        "Attempt 1 of train ran out of memory with single and a micro-batch of 32: the next one uses single, batch "
        "32 = 16 micro x 2 accumulation x 1 rank."
    )
    assert status.adaptation is not None
    assert status.plan is not None
    assert (status.adaptation.micro_batch_limit, status.adaptation.reasons) == (16, (reason,))
    assert (status.plan.micro_batch_size, status.plan.gradient_accumulation) == (16, 2)
    assert (status.restarts, status.counted_restarts) == (1, 0)
    assert EventNote("Normal", "MemoryAdapted", reason) in world.events
    world.wait(10)
    batch = json.loads(world.configuration("reviews-train-2"))["training"]["batch"]
    assert (batch["microBatchSize"], batch["gradientAccumulation"], batch["globalBatchSize"]) == (16, 2, 32)


def test_job_fails_once_no_plan_needs_less_memory():
    world = training()
    world.spec["parallelism"] = {"strategy": "single", "activationCheckpointing": "none"}
    for _ in range(12):
        world.fail(FailureClass.OUT_OF_MEMORY)
        world.settle()
        if world.phase == "Failed":
            break
        world.wait(300)
        world.start()
    status = world.job().status
    assert status.failure is not None
    assert status.adaptation is not None
    assert (world.phase, status.failure.failure_class, status.counted_restarts) == ("Failed", "OutOfMemory", 0)
    assert "No plan that needs less memory is left" in (status.failure.hint or "")
    assert len(status.adaptation.reasons) == status.restarts == 5  # 16, 8, 4, 2, 1


@pytest.mark.parametrize(
    ("checkpoints", "step", "minutes", "following", "form"),
    [
        pytest.param({"every": {"steps": 8}}, None, 30, "deepspeed-zero1", None, id="before the first step"),
        pytest.param({"every": {"steps": 8}}, 7, 30, "deepspeed-zero1", None, id="before the first checkpoint"),
        pytest.param({"every": {"steps": 8}}, 8, 1, "ddp+activation-checkpointing", "ddp", id="with a checkpoint"),
        pytest.param({"every": {"minutes": 5}}, 8, 4, "deepspeed-zero1", None, id="before its minutes are over"),
        pytest.param({"every": {"minutes": 5}}, 8, 5, "ddp+activation-checkpointing", "ddp", id="by the clock"),
        pytest.param(
            {"every": {"steps": 8}, "resume": "never"}, 8, 1, "deepspeed-zero1", None, id="that nothing goes on from"
        ),
    ],
)
def test_memory_adaptation_can_resume_from_the_checkpoints(checkpoints, step, minutes, following, form):
    spec = {**SPEC, "training": {"globalBatchSize": 32, "microBatchSize": 1}, "resources": {"nodes": 2}}
    world = training(spec={**spec, "checkpoints": checkpoints})
    world.progress = None if step is None else ProgressStatus(step=step, total_steps=20)
    world.wait(60 * minutes)
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    status = world.job().status
    assert status.adaptation is not None
    assert status.plan is not None
    assert (status.plan.strategy, status.adaptation.checkpoint_form) == (following, form)
    # The known form of checkpoints stays, though the next attempt has reported nothing.
    world.wait(300)
    world.start()
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    status = world.job().status
    assert status.adaptation is not None
    assert status.plan is not None
    assert (status.adaptation.checkpoint_form, len(status.adaptation.skipped_strategies)) == (form, 2)
    assert status.plan.strategy.startswith("ddp+pipeline2" if form else "deepspeed-zero2")


def test_memory_that_runs_out_fails_a_job_that_wants_no_adaptation():
    world = training()
    world.edit(onOutOfMemory="fail")
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    assert (world.phase, world.job().status.adaptation) == ("Failed", None)


def test_memory_that_runs_out_where_nothing_can_be_adapted_counts():
    world = World()
    world.settle()
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    assert (world.stage("prepare"), world.job().status.counted_restarts) == (("Failed", 1), 1)


# ------------------------------------------------------------------------------------------------------ pods that wait


def test_unschedulable_pods_are_reported_at_once():
    world = World()
    world.settle()
    assert world.job_condition("Running") == (
        "False",
        "WaitingForPods",
        "Waiting for the pods of reviews-prepare-1 to be created.",
    )
    (pod,) = world.make_pods("reviews-prepare-1")
    world.pods[pod]["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            "lastTransitionTime": AT,
        }
    ]
    world.settle()
    assert world.job_condition("Running") == (
        "False",
        "Unschedulable",
        "Waiting for 1 pod of reviews-prepare-1: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    )
    world.wait(100_000)
    assert world.phase == "Preparing"  # it waits for ever unless the settings say otherwise
    world.settings = limits(unschedulableSeconds=60)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.pod) == ("Failed", "Unschedulable", pod)


@pytest.mark.parametrize(
    ("reason", "seconds", "expected"),
    [("ErrImagePull", 600, "ImagePull"), ("CreateContainerConfigError", 120, "ContainerConfig")],
)
def test_a_container_that_cannot_start_fails_the_job_after_a_while(reason: str, seconds: int, expected: str):
    world = World()
    world.settle()
    (pod,) = world.make_pods("reviews-prepare-1")
    waiting = {"name": "pytorch", "state": {"waiting": {"reason": reason, "message": 'secret "hub" not found'}}}
    world.pods[pod]["status"]["containerStatuses"] = [waiting]
    world.settle()
    assert (
        world.job_condition("Running")[2] == f'Waiting for 1 pod of reviews-prepare-1: {reason}: secret "hub" not found'
    )
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)
    world.wait(seconds - 1)
    assert world.phase == "Preparing"
    assert world.job_condition("Stalled")[:2] == ("True", expected)
    world.wait(1)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.reason, list(world.children)) == (
        "Failed",
        expected,
        reason,
        [],
    )
    assert failure.message == f'Pod {pod} could not start for {seconds} s: {reason}: secret "hub" not found'


# ------------------------------------------------------------------------------------------------------------ refusals


def test_quota_refusal_is_reported_and_retried_with_back_off():
    world = World()
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.settle()
    assert world.job_condition("Stalled") == (
        "True",
        "Refused",
        "The API server refuses Job reviews-prepare-1, and the operator retries: exceeded quota: team",
    )
    assert (world.phase, world.stage("prepare"), list(world.others)) == (
        "Pending",
        ("Pending", 0),
        [("NetworkPolicy", "reviews-network"), ("PersistentVolumeClaim", "reviews-workspace")],
    )
    assert world.decide().requeue_at == NOON + timedelta(seconds=10)
    world.wait(10)
    assert world.decide().requeue_at == NOON + timedelta(seconds=30)
    assert (world.event_reasons().count("Refused"), world.job_condition("Stalled")[0]) == (1, "True")
    world.refuse.clear()
    world.wait(20)
    assert (world.phase, world.stage("prepare"), world.job_condition("Stalled")[0]) == (
        "Preparing",
        ("Running", 1),
        "False",
    )


def test_quota_reached_between_two_stages_delays_only_the_second():
    world = World()
    world.settle()
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.succeed()
    world.settle()
    assert (world.stage("prepare"), world.stage("train"), world.job_condition("Stalled")[1]) == (
        ("Succeeded", 1),
        ("Pending", 0),
        "Refused",
    )
    world.refuse.clear()
    world.wait(10)
    assert (world.stage("train"), world.event_reasons().count("StageSucceeded")) == (("Running", 1), 1)


def test_a_quota_that_is_met_by_a_restart_keeps_the_failure_that_led_to_it():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.wait(10)
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, world.stage("train"), world.phase) == ("CollectiveFailed", ("Failed", 1), "Training")
    world.refuse.clear()
    world.wait(20)
    assert (world.stage("train"), world.job().status.restarts) == (("Running", 2), 1)


def test_refused_creation_is_not_retried_within_a_second():
    world = World(settings=limits(restartDelaySeconds=0))
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.settle()
    assert world.decide().create == ()
    assert world.decide().requeue_at == NOON + timedelta(seconds=1)


def test_a_refused_attempt_is_made_from_the_spec_as_it_is_by_then():
    world = World()
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.settle()
    world.refuse.clear()
    world.spec["training"]["globalBatchSize"] = 64
    world.generation += 1
    world.wait(10)
    batch = json.loads(world.configuration("reviews-prepare-1"))["training"]["batch"]
    assert batch["globalBatchSize"] == 64


@pytest.mark.parametrize(
    ("code", "expected"),
    [(409, ("NameTaken", "NameTaken")), (422, ("Refused", "Refused")), (400, ("Refused", "Refused"))],
)
def test_an_object_that_will_never_be_taken_fails_the_job(code: int, expected: tuple[str, str]):
    world = World()
    world.refuse["Job"] = (code, "what the server says")
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, (failure.failure_class, failure.reason)) == ("Failed", expected)
    assert "what the server says" in failure.message
    assert (failure.stage, failure.attempt, world.created) == ("prepare", 1, [])


def test_foreign_objects_are_never_deleted():
    world = World()
    world.refuse["ConfigMap"] = (409, "is there already")
    world.settle()
    assert world.phase == "Failed"
    assert world.decide().delete == ()


HUGE = BERT.model_copy(update={"parameters": 10**12, "block_parameters": 10**11})


def test_measurements_that_cannot_be_planned_fail_the_job():
    world = World()
    world.settle()
    world.start()
    world.end_pod("reviews-prepare-1-0", 0, report("prepare", measured=MeasuredFacts(model=HUGE)))
    world.end_child("reviews-prepare-1", succeeded=True)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.reason) == ("Failed", "PlanRefused", "DoesNotFit")
    assert failure.message.startswith("Planning with the measurements of prepare failed: ")
    assert (world.stage("prepare"), world.stage("train")) == (("Succeeded", 1), ("Pending", 0))


def test_an_attempt_that_a_newer_operator_cannot_plan_fails_the_job():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.status["measured"]["model"]["parameters"] = 10**12
    world.status["measured"]["model"]["blockParameters"] = 10**11
    world.wait(10)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, failure.attempt) == ("Failed", "PlanRefused", 2)


# ----------------------------------------------------------------------------------------------------------- adoption


@pytest.mark.parametrize("writes", range(5))
def test_an_operator_that_dies_in_mid_pass_goes_on_where_it_was(writes: int):
    world = World()
    for _ in range(4):
        world.step(crash_after=writes)
        world.settle()
        world.succeed()
        world.step(crash_after=writes)
    world.settle()
    assert (world.phase, world.created) == (
        "Succeeded",
        ["reviews-prepare-1", "reviews-train-1", "reviews-evaluate-1", "reviews-predict-1"],
    )
    assert world.job().status.restarts == 0


def test_child_missing_in_the_status_becomes_the_current_attempt():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.now += timedelta(seconds=10)
    world.step(crash_after=2)  # ConfigMap and Job are made, the status is not written
    assert (world.stage("train"), "reviews-train-2" in world.children) == (("Failed", 1), True)
    world.settle()
    assert (world.stage("train"), world.created.count("reviews-train-2")) == (("Running", 2), 1)
    assert world.event_reasons()[-1] == "StageStarted"


def test_an_older_attempt_that_runs_beside_the_current_one_is_deleted():
    world = training()
    old = json.loads(json.dumps(world.children["reviews-train-1"]))
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(10)
    world.children["reviews-train-1"] = old  # as after restoring a backup of the cluster
    decision = world.decide()
    assert decision.delete == (ObjectRef("batch/v1", "Job", "reviews-train-1", "uid-reviews-train-1"),)
    assert world.stage("train") == ("Running", 2)


def test_a_status_that_cannot_be_read_is_found_again_from_the_children():
    world = training()
    world.status = {"phase": 7}
    world.settle()
    assert (world.phase, world.stage("prepare"), world.stage("train")) == ("Training", ("Succeeded", 1), ("Running", 1))
    assert world.created == ["reviews-prepare-1", "reviews-train-1"]


def test_stricter_settings_keep_a_running_attempt_and_start_no_other():
    world = training()
    world.settings = Settings(schemes=("s3",))
    world.settle()
    assert (world.phase, world.job_condition("Accepted")[0], "reviews-train-1" in world.children) == (
        "Training",
        "False",
        True,
    )
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.wait(1000)
    assert world.created == ["reviews-prepare-1", "reviews-train-1"]


def test_equal_worlds_give_equal_decisions():
    world = training()
    world.fail(FailureClass.OUT_OF_MEMORY)
    first, second = world.decide(), world.decide()
    assert first == second
    assert first != replace(first, events=())
