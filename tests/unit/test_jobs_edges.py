"""Decisions about a job at an unlucky moment, in an unlucky cluster, or after an unlucky last status."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_contract.causes import of_exit
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.report import TrainerReport
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import FailureStatus, ProgressStatus
from reconcile_world import NOON, SPEC, World, report

TWO_NODES = {**SPEC, "resources": {"nodes": 2}}


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


def failure_of(world: World) -> FailureStatus:
    found = world.job().status.failure
    assert found is not None
    return found


def ran_with(world: World, attempt: str) -> tuple[int, int]:
    """Return micro-batch and accumulation in the job.json of an attempt."""
    batch = json.loads(world.configuration(attempt))["training"]["batch"]
    return batch["microBatchSize"], batch["gradientAccumulation"]


def test_a_job_waits_for_the_pods_of_a_deleted_one_of_its_name():
    world, before = World(), training()
    running = before.observed().pods
    first = decide(world.job(), replace(world.observed(), pods_before=running), NOON, world.settings)
    assert first.create == ()
    (condition,) = [one for one in first.status.conditions if one.type == "Running"]
    assert "Waiting for pods of a deleted job of this name to end: reviews-train-1-0." in condition.message
    ended = tuple(replace(pod, phase="Failed") for pod in running)
    lost = tuple(replace(pod, deleting_until=NOON - timedelta(minutes=1)) for pod in running)
    for over in (ended, lost):
        after = decide(world.job(), replace(world.observed(), pods_before=over), NOON, world.settings)
        assert [each["kind"] for each in after.create] == ["NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Job"]


# ---------------------------------------------------------------------------------------------- words of user programs


def test_metrics_are_those_of_the_sections_that_the_trainer_writes():
    world = training()
    metrics_by_stage = {
        "train": {"loss_last": 0.46, "eval_accuracy": 0.88, "strategy": "ddp"},
        "evaluate": {"accuracy": 0.9, "rows": 160, "split": "test"},
    }
    for stage in ("train", "evaluate"):
        if stage == "evaluate":
            world.start()
            world.settle()
        metrics = {stage: metrics_by_stage[stage], "majority": {"accuracy": 0.5}}
        world.end_pod(f"reviews-{stage}-1-0", 0, report(stage, metrics=metrics))
        world.end_child(f"reviews-{stage}-1", succeeded=True)
        world.settle()
    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert artifacts.metrics == {"train_loss_last": 0.46, "eval_accuracy": 0.88, "accuracy": 0.9, "rows": 160.0}
    assert any(note.message.endswith(": accuracy 0.9.") for note in world.events if note.reason == "StageSucceeded")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "9" * 400], ids=["nan", "inf", "1e999", "400 digits"])
def test_a_metric_that_no_status_can_hold_is_left_out(value: str):
    world = training()
    message = f'{{"job":"reviews","stage":"train","outcome":"succeeded","metrics":{{"loss":{value},"f1":0.5}}}}'
    world.end_pod("reviews-train-1-0", 0, message)
    world.end_child("reviews-train-1", succeeded=True)
    world.settle()
    artifacts = world.job().status.artifacts
    assert artifacts is not None
    assert (world.stage("train"), artifacts.metrics) == (("Succeeded", 1), {"f1": 0.5})


def test_report_with_a_rank_that_no_status_can_hold_is_ignored():
    world = training()
    message = report("train", (FailureClass.DATA, 1.0)).replace('"rank":0', f'"rank":{10**30}')
    world.end_pod("reviews-train-1-0", 10, message)
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert (failure_of(world).failure_class, failure_of(world).reason) == ("DataError", "NoReport")
    assert "Its report was ignored: rank: Input should be less than or equal to" in failure_of(world).message


def test_report_of_another_job_is_ignored():
    world = training()
    message = report("train", (FailureClass.HUB_UNAVAILABLE, 1.0)).replace('"reviews"', '"others"')
    world.end_pod("reviews-train-1-0", 10, message)
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert (failure_of(world).failure_class, failure_of(world).reason) == ("DataError", "NoReport")


# -------------------------------------------------------------------------------------------------------- first causes


def silent(code: int) -> str:
    """Return the report of a launcher whose process ended with that code and reported nothing."""
    failure = of_exit(code, 5.0)
    return TrainerReport(job="reviews", stage=Stage.TRAIN, outcome="failed", failure=failure).to_termination_message()


@pytest.mark.parametrize("code", [1, -9, -11, 0])
def test_infrastructure_cause_precedes_a_cause_inferred_from_an_exit_code(code: int):
    world = training(spec=TWO_NODES, served=("mpijob",))
    world.end_pod("reviews-train-1-launcher", 1, silent(code))
    world.end_pod("reviews-train-1-worker-1", 143)
    preempted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    world.pods["reviews-train-1-worker-1"]["status"]["conditions"] = [preempted]
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    world.wait(10)  # the other worker may still report
    assert (failure_of(world).failure_class, failure_of(world).pod) == ("Preempted", "reviews-train-1-worker-1")


def test_crash_in_a_native_library_is_retried():
    world = training()
    world.end_pod("reviews-train-1-0", 1, silent(-11))
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    status = world.job().status
    assert (failure_of(world).failure_class, status.counted_restarts, world.phase) == ("Killed", 1, "Training")


@pytest.mark.parametrize("reported", [True, False], ids=["by its launcher", "by its exit code"])
def test_killed_rank_restarts_with_the_same_micro_batch(reported: bool):
    world = training()
    world.end_pod("reviews-train-1-0", 137, silent(-9) if reported else "")
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    failure, status = failure_of(world), world.job().status
    assert (failure.failure_class, failure.reason, status.counted_restarts) == ("Killed", "Killed", 1)
    assert (status.adaptation, world.phase) == (None, "Training")
    assert "Look for who killed it" in (failure.hint or "")


def test_pod_killed_at_the_end_of_its_grace_period_is_preempted():
    world = training()
    world.end_pod("reviews-train-1-0", 137)
    world.pods["reviews-train-1-0"]["metadata"]["deletionTimestamp"] = world.after(0)
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert (failure_of(world).failure_class, world.job().status.adaptation) == ("Preempted", None)


def test_container_start_failure_has_the_runtimes_message():
    world = training()
    message = 'exec: "python": executable file not found in $PATH'
    world.end_pod("reviews-train-1-0", 128, message, reason="StartError")
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    failure = failure_of(world)
    assert (failure.failure_class, failure.reason, failure.message) == (
        "ChildFailed",
        "StartError",
        f"The container of pod reviews-train-1-0 could not be started: {message}",
    )
    assert world.job().status.counted_restarts == 1


@pytest.mark.parametrize(
    ("reason", "expected", "counted", "avoided"),
    [
        ("TopologyAffinityError", "PodRejected", 0, ("node-0",)),
        ("NodeAffinity", "PodRejected", 0, ("node-0",)),
        ("SysctlForbidden", "ChildFailed", 1, ()),
    ],
)
def test_pod_that_failed_before_its_container_has_the_kubelets_message(
    reason: str, expected: str, counted: int, avoided: tuple[str, ...]
):
    world = training()
    world.pods["reviews-train-1-0"]["status"] = {"phase": "Failed", "reason": reason, "message": "said the kubelet"}
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    status = world.job().status
    assert (failure_of(world).failure_class, failure_of(world).reason, status.counted_restarts) == (
        expected,
        reason,
        counted,
    )
    assert "said the kubelet" in failure_of(world).message
    assert next(one for one in status.stages if one.name == "train").avoided_nodes == avoided


def test_a_pod_that_made_room_for_a_critical_one_did_not_lose_its_node():
    world = training()
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    world.pods["reviews-train-1-0"]["status"] = {
        "phase": "Failed",
        "reason": "Preempting",
        "message": "Preempted in order to admit critical pod",
        "conditions": [disrupted],
    }
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert (failure_of(world).failure_class, failure_of(world).reason) == ("Preempted", "Preempting")


def test_evicted_worker_that_its_controller_ignores_ends_the_attempt():
    world = training(served=("mpijob",))
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "lastTransitionTime": world.after(0),
    }
    world.pods["reviews-train-1-worker-0"]["status"] = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on resource: ephemeral-storage.",
        "conditions": [disrupted],
    }
    world.settle()
    assert world.stage("train") == ("Running", 1)
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)
    world.wait(60)
    assert (world.stage("train"), failure_of(world).failure_class) == (("Failed", 1), "Evicted")


def test_wait_for_a_child_without_an_end_time_is_bounded():
    world = training()
    world.end_child("reviews-train-1", succeeded=False)
    for one in world.children["reviews-train-1"]["status"]["conditions"]:
        one.pop("lastTransitionTime")
    world.pods.clear()
    for _ in range(3):
        world.wait(31)
    assert failure_of(world).failure_class == "ChildFailed"


# ---------------------------------------------------------------------------------------------------------------- logs


def test_log_tail_is_of_the_pod_with_the_first_cause():
    world = training(spec={**SPEC, "resources": {"nodes": 6}, "training": {"globalBatchSize": 48}})
    for rank in range(6):
        world.logs[f"reviews-train-1-{rank}"] = f"log of {rank}"
    for rank in range(5):
        world.end_pod(f"reviews-train-1-{rank}", 150, report("train", (FailureClass.COLLECTIVE, 1.0), rank=rank))
    world.now += timedelta(seconds=3)
    world.end_pod("reviews-train-1-5", 10, report("train", (FailureClass.DATA, 2.0), rank=5))
    world.end_child("reviews-train-1", succeeded=False)
    world.settle()
    assert (failure_of(world).pod, failure_of(world).log_tail) == ("reviews-train-1-5", "log of 5")


def test_log_of_a_process_that_ended_without_a_report_is_kept():
    world = training()
    world.logs["reviews-train-1-0"] = "the only trace"
    world.end_pod("reviews-train-1-0", 0)
    world.end_child("reviews-train-1", succeeded=True)
    world.settle()
    assert (failure_of(world).failure_class, failure_of(world).log_tail) == ("NoReport", "the only trace")


# --------------------------------------------------------------------------------------------------- plan and progress


def test_the_plan_in_the_status_is_the_one_that_the_next_attempt_gets():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.status["plan"]["microBatchSize"] = 7  # as left by an operator that plans differently
    world.wait(10)
    plan = world.job().status.plan
    assert plan is not None
    assert (plan.micro_batch_size, plan.gradient_accumulation) == ran_with(world, "reviews-train-2") == (32, 1)
    assert world.event_reasons()[-2:] == ["Planned", "StageStarted"]


def test_adopted_attempt_has_no_progress_of_an_earlier_one():
    world = training()
    world.progress = ProgressStatus(step=5, total_steps=20, percent=25)
    world.settle()
    world.fail(FailureClass.COLLECTIVE)
    world.progress = None
    world.settle()
    world.now += timedelta(seconds=10)
    world.step(crash_after=2)  # created, and the status is not written
    world.settle()
    assert (world.stage("train"), world.job().status.progress) == (("Running", 2), None)


def test_delays_after_a_quota_are_no_failures_of_the_delayed_attempt():
    world = World()
    world.refuse["Job"] = (403, "exceeded quota: team")
    world.settle()
    for _ in range(6):
        world.wait(300)
    world.refuse.clear()
    world.wait(300)
    world.fail(FailureClass.COLLECTIVE)
    world.step()
    assert world.decide().requeue_at == world.now + timedelta(seconds=10)


# ---------------------------------------------------------------------------------------------------------- suspension


def test_stop_of_a_stage_is_recorded_before_it_happens():
    world = training()
    world.edit(suspend=True)
    decision = world.step()
    assert (decision.delete, world.stage("train")) == ((), ("Suspended", 1))
    world.edit(suspend=False)  # in the very moment between
    world.settle()
    world.wait(61)
    status = world.job().status
    assert (world.stage("train"), status.restarts, status.counted_restarts) == (("Running", 2), 0, 0)


@pytest.mark.parametrize("passes", range(4))
def test_resuming_at_any_moment_of_a_suspension_costs_no_restart(passes: int):
    world = training()
    world.edit(suspend=True)
    for _ in range(passes):
        world.step(crash_after=1)
        world.step()
    world.edit(suspend=False)
    world.settle()
    world.wait(61)
    status = world.job().status
    assert (world.phase, status.counted_restarts, status.failure) == ("Training", 0, None)


def test_suspension_during_the_restart_delay_holds_the_next_attempt():
    world = training()
    world.fail(FailureClass.COLLECTIVE)
    world.settle()
    world.edit(suspend=True)
    world.wait(1000)
    assert (world.phase, world.stage("train"), world.decide().requeue_at) == ("Suspended", ("Failed", 1), None)
    world.edit(suspend=False)
    world.settle()
    assert world.stage("train") == ("Running", 2)


def test_memory_that_was_adapted_stays_so_over_a_suspension():
    world = training()
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    world.edit(suspend=True)
    world.wait(100)
    world.edit(suspend=False)
    world.settle()
    assert ran_with(world, "reviews-train-2") == (16, 2)


# ------------------------------------------------------------------------------------------------------ pods that wait


def test_job_without_pods_names_the_command_for_its_events():
    world = World()
    world.settle()
    assert world.decide().requeue_at == NOON + timedelta(seconds=60)
    world.wait(60)
    assert world.job_condition("Running") == (
        "False",
        "PodsNotCreated",
        "No pod of Job reviews-prepare-1 has been created in 60 s: its controller may not run, or a policy may prevent "
        "it. See kubectl describe job reviews-prepare-1.",
    )
    assert world.decide().requeue_at == NOON + timedelta(seconds=120)  # its events are read again
    world.make_pods("reviews-prepare-1")
    world.settle()
    assert world.job_condition("Running")[2] == "Waiting for 1 pod of reviews-prepare-1 to start."


def without_pods(stage: str) -> World:
    """A world whose pods of the stage ran and then disappeared, while their Job is not over."""
    world = training() if stage == "train" else World()
    world.settle()
    world.start()
    world.settle()
    for pod in world.pods_of(world.newest()):
        del world.pods[pod]
    world.settle()
    return world


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_attempt_without_its_pods_restarts_free_of_charge(stage: str):
    world = without_pods(stage)
    name, gone = world.newest(), f"All pods of Job {world.newest()} are gone, and its controller"
    message = f"{gone} has neither created others nor ended it."
    assert world.job_condition("Running") == ("False", "WaitingForPods", message)
    world.wait(299)
    assert world.stage(stage) == ("Running", 1)
    world.wait(1)
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.message) == (
        "PodsGone",
        f"{gone} neither created others nor ended it for 300 s.",
    )
    world.wait(60)
    assert world.stage(stage) == ("Running", 2)
    assert name not in world.children, "pods of two attempts could write to one folder"
    status = world.job().status
    assert (status.restarts, status.counted_restarts) == (1, 0)


def test_pods_that_come_back_have_all_the_time_again():
    world = without_pods("train")
    world.wait(299)
    world.start()
    world.settle()
    assert world.job_condition("Running")[0] == "True"
    world.wait(10)
    for pod in world.pods_of(world.newest()):
        del world.pods[pod]
    world.wait(299)
    assert world.stage("train") == ("Running", 1)


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "mpijob"])
def test_stage_goes_on_if_no_controller_ends_it(launcher: LauncherName):
    world = World(served=(launcher,))
    world.settle()
    world.succeed()
    world.settle()
    world.start()
    name = world.newest()
    unended = deepcopy(world.children[name]["status"])
    world.succeed()
    if launcher == "mpijob":
        # Its controller ends the workers, which wait for connections.
        for pod in world.pods_of(name)[:-1]:
            world.pods[pod]["status"] = {"phase": "Running"}
        world.end_pod(world.pods_of(name)[-1], 0, report("train"))
    world.children[name]["status"] = unended
    world.wait(30)
    until = stamp(world.now + timedelta(seconds=270))
    kind = world.children[name]["kind"]
    assert world.job_condition("Running")[2] == (
        f"All pods of {kind} {name} have succeeded; waiting for its controller to end it. At {until} the stage goes on "
        "without that."
    )
    world.wait(269)
    assert world.stage("train") == ("Running", 1)
    world.wait(1)
    assert world.stage("train") == ("Succeeded", 1)


def pulling(world: World, pod: str, reason: str | None) -> None:
    waiting = {"waiting": {"reason": reason, "message": "try again"}} if reason else {"running": {}}
    world.pods[pod]["status"]["containerStatuses"] = [{"name": "pytorch", "state": waiting}]


@pytest.mark.parametrize(("reason", "seconds"), [("ErrImagePull", 600), ("CreateContainerConfigError", 120)])
def test_a_long_pull_before_an_error_is_not_the_errors(reason: str, seconds: int):
    world = World()
    world.settle()
    (pod,) = world.make_pods("reviews-prepare-1")
    pulling(world, pod, "ContainerCreating")
    world.wait(3600)
    pulling(world, pod, reason)
    world.settle()
    assert (world.phase, world.decide().requeue_at) == ("Preparing", world.now + timedelta(seconds=60))
    world.wait(seconds - 1)
    assert world.phase == "Preparing"
    world.wait(1)
    assert world.phase == "Failed"


def test_an_image_that_could_be_pulled_after_all_has_all_the_time_again():
    world = World()
    world.settle()
    (pod,) = world.make_pods("reviews-prepare-1")
    pulling(world, pod, "ImagePullBackOff")
    world.wait(500)
    pulling(world, pod, "ContainerCreating")
    world.settle()
    assert world.job().status.stages[0].blocked_since is None
    world.wait(500)
    pulling(world, pod, "ErrImagePull")
    world.wait(599)
    assert world.phase == "Preparing"


# ------------------------------------------------------------------------------------------------------ stored statuses


def test_unreadable_field_keeps_the_rest_of_the_status():
    world = training()
    world.fail(FailureClass.DATA)
    world.settle()
    assert world.phase == "Failed"
    world.children.clear()
    world.status["conditions"].append({"type": "Served", "status": "True", "reason": "x", "message": "y"})
    world.status["progress"] = {"percent": 1000}
    created = list(world.created)
    world.step()
    assert (world.phase, failure_of(world).failure_class, world.created) == ("Failed", "DataError", created)


def test_stages_in_no_order_of_ours_are_put_in_order():
    world = training()
    world.status["stages"].reverse()
    world.settle()
    assert [one.name for one in world.job().status.stages] == ["prepare", "train", "evaluate", "predict"]
    assert (world.phase, world.created) == ("Training", ["reviews-prepare-1", "reviews-train-1"])


def test_stages_that_an_old_status_does_not_have_are_not_skipped():
    world = training()
    world.status = {
        "phase": "Training",
        "stages": [
            {"name": "prepare", "state": "Succeeded", "attempt": 1},
            {"name": "train", "state": "Running", "attempt": 1},
        ],
    }
    world.settle()
    assert [(one.name, one.state) for one in world.job().status.stages] == [
        ("prepare", "Succeeded"),
        ("train", "Running"),
        ("evaluate", "Pending"),
        ("predict", "Pending"),
    ]


def test_running_stage_survives_the_loss_of_status_and_earlier_children():
    world = training()
    world.status = {}
    del world.children["reviews-prepare-1"]
    world.settle()
    assert (world.phase, world.stage("prepare"), world.stage("train")) == (
        "Training",
        ("Succeeded", 1),
        ("Running", 1),
    )
    assert list(world.children) == ["reviews-train-1"]


def test_a_stage_that_runs_its_attempt_0_is_begun():
    world = World()
    world.edit(suspend=True)
    world.settle()
    world.status["stages"][0]["state"] = "Running"
    world.edit(suspend=False)
    world.settle()
    world.wait(10)
    assert (world.stage("prepare"), world.phase) == (("Running", 1), "Preparing")


def test_a_child_made_from_a_spec_that_was_edited_since_is_replaced():
    world = World()
    world.step(crash_after=4)  # created, and the status is not written: the API server lets the spec be edited
    assert list(world.children) == ["reviews-prepare-1"]
    world.spec["dataset"] = {"uri": "hf://org/other"}
    world.generation += 1
    world.settle()
    assert (world.stage("prepare"), list(world.children)) == (("Running", 2), ["reviews-prepare-2"])
    assert json.loads(world.configuration("reviews-prepare-2"))["dataset"]["uri"] == "hf://org/other"
    assert world.job().status.counted_restarts == 0


def test_job_past_its_deadline_without_time_to_live_is_deleted():
    world = training(settings=Settings.model_validate({"defaults": {"ttlSecondsAfterFinished": 0}}))
    world.edit(activeDeadlineSeconds=10)
    world.wait(10)
    assert (world.phase, world.deleted, list(world.children)) == ("Failed", True, ["reviews-prepare-1"])


# --------------------------------------------------------------------------------------------------------- every moment


MOMENTS: dict[str, Callable[[World], object]] = {
    "before anything": lambda _: None,
    "while prepare waits": lambda w: w.settle(),
    "while train runs": lambda w: to_train(w),
    "after a failure, in the delay": lambda w: (to_train(w), w.fail(FailureClass.COLLECTIVE), w.settle()),
    "while a failed attempt is deleted": lambda w: (to_train(w), w.fail(FailureClass.COLLECTIVE), w.step()),
    "when memory has run out": lambda w: (to_train(w), w.fail(FailureClass.OUT_OF_MEMORY), w.settle()),
    "when the child is gone": lambda w: (to_train(w), w.delete_child("reviews-train-1"), w.settle()),
    "when a quota refuses": lambda w: (w.refuse.update(Job=(403, "exceeded quota")), w.settle(), w.refuse.clear()),
}


def to_train(world: World) -> None:
    world.settle()
    world.succeed()
    world.settle()
    world.start()
    world.settle()


def to_the_end(world: World) -> None:
    for _ in range(8):
        world.wait(400)
        if any(world.unfinished(name) for name in world.children):
            world.succeed()
    world.settle()


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_a_job_suspended_and_resumed_at_any_moment_comes_to_its_good_end(moment: Callable[[World], object]):
    world = World()
    moment(world)
    before = world.job().status.counted_restarts
    world.edit(suspend=True)
    world.wait(400)
    assert (world.phase, [name for name in world.children if world.unfinished(name)]) == ("Suspended", [])
    world.edit(suspend=False)
    to_the_end(world)
    assert (world.phase, world.job().status.failure) == ("Succeeded", None)
    assert world.job().status.counted_restarts <= before + 1


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_every_reconcile_converges_and_sets_every_condition(moment: Callable[[World], object]):
    world = World()
    moment(world)
    world.settle()
    writes, events = world.writes, len(world.events)
    world.now += timedelta(seconds=1)
    for _ in range(3):
        world.step()
    assert (world.writes, len(world.events)) == (writes, events)
    conditions = {one.type: one for one in world.job().status.conditions}
    assert set(conditions) == {"Accepted", "Planned", "Running", "Ready", "Stalled", "Succeeded", "Failed"}
    assert {one.observed_generation for one in conditions.values()} == {world.generation}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_a_job_deleted_at_any_moment_is_left_to_the_garbage_collector(moment: Callable[[World], object]):
    world = World()
    moment(world)
    world.deleting = True
    decision = world.decide()
    assert (decision.status, decision.create, decision.delete, decision.events, decision.requeue_at) == (
        world.job().status,
        (),
        (),
        (),
        None,
    )


def test_exhausted_restarts_are_reported_with_the_failure():
    world = training()
    world.edit(maxRestarts=0)
    world.fail(FailureClass.HUB_UNAVAILABLE)
    world.settle()
    assert (world.phase, world.job().status.restarts, failure_of(world).failure_class) == (
        "Failed",
        0,
        "HubUnavailable",
    )
    assert failure_of(world).hint == "The limit runPolicy.maxRestarts (0) is reached. Do so."


def test_a_micro_batch_that_the_user_fixed_is_halved_too():
    world = training(spec={**SPEC, "training": {"epochs": 1, "globalBatchSize": 32, "microBatchSize": 8}})
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    world.wait(10)
    assert ran_with(world, "reviews-train-2") == (4, 8)


def test_failed_event_keeps_its_hint_if_the_message_is_long() -> None:
    world = World()
    world.settle()
    child = world.start()
    (pod,) = world.pods_of(child)
    failed = json.loads(report("prepare", (FailureClass.DATA, 10.0)))
    failed["failure"]["message"] = "m" * 3000
    world.end_pod(pod, EXIT_CODES[FailureClass.DATA], json.dumps(failed))
    world.end_child(child, succeeded=False)
    world.settle()
    (event,) = [note for note in world.events if note.reason == "Failed"]
    assert event.message.endswith("m Do so.")
    assert len(event.message.encode()) < 1024
