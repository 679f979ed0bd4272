"""Raw objects of the API server, parsed into the values that decisions rest on, trap by trap."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_operator.jobs.observed import (
    MAX_PROBLEMS,
    job_view,
    pod_view,
    pods_being_deleted,
    redacted_log,
    wanted_logs,
)
from finetune_operator.jobs.state.children import child_view
from finetune_operator.jobs.state.decision_types import ChildView, Ended, JobView, ObjectRef, Observed, PodView, Waiting
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJobStatus, StageStatus
from reconcile_world import SPEC, World, report

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
AT = "2026-01-01T12:00:00Z"
LATER = "2026-01-01T12:05:00Z"
LABELS = {
    "finetune.dev/job": "reviews",
    "finetune.dev/job-uid": "u",
    "finetune.dev/stage": "train",
    "finetune.dev/attempt": "2",
}


def condition_of(type_: str, status: str = "True", reason: str = "R", message: str = "m.") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": LATER}


def child(api_version: str, kind: str, status: Any, spec: Any = None, **metadata: Any) -> dict[str, Any]:
    meta = {"name": "reviews-train-2", "uid": "u2", "labels": LABELS, "creationTimestamp": AT, **metadata}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, "spec": spec or {}, "status": status}


def job(status: Any, **more: Any) -> dict[str, Any]:
    return child("batch/v1", "Job", status, **more)


def pytorch(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return child("kubeflow.org/v1", "PyTorchJob", {"conditions": list(conditions), **status})


def mpi(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return child("kubeflow.org/v2beta1", "MPIJob", {"conditions": list(conditions), **status})


def spark(state: str = "", **status: Any) -> dict[str, Any]:
    """Return an application with a status as the Spark Operator's; it has no conditions."""
    fields = {"applicationState": {"state": state, "errorMessage": "m."}} if state else {}
    return child("sparkoperator.k8s.io/v1beta2", "SparkApplication", {**fields, **status})


SUSPENDED = {"runPolicy": {"suspend": True}}
END = NOON + timedelta(minutes=5)

CHILDREN: dict[str, tuple[dict[str, Any], tuple[str, str, datetime | None]]] = {
    "a Job in its first moment": (job({}), ("Pending", "", None)),
    "a Job whose pods only wait counts them as active and is not running": (job({"active": 2}), ("Pending", "", None)),
    "a Job with a ready pod": (job({"active": 2, "ready": 1, "startTime": AT}), ("Running", "", None)),
    "a Job that is done": (
        job({"conditions": [condition_of("Complete")], "completionTime": LATER}),
        ("Succeeded", "R", END),
    ),
    "a Job that has succeeded and still ends the pods that it does not need": (
        job({"conditions": [condition_of("SuccessCriteriaMet", reason="SuccessPolicy")], "ready": 1}),
        ("Succeeded", "SuccessPolicy", END),
    ),
    "a Job that has succeeded and ended its pods": (
        job({"conditions": [condition_of("SuccessCriteriaMet", reason="SuccessPolicy"), condition_of("Complete")]}),
        ("Succeeded", "R", END),
    ),
    "a Job that is about to fail still ends its pods": (
        job({"conditions": [condition_of("FailureTarget", reason="PodFailurePolicy")]}),
        ("Pending", "PodFailurePolicy", None),
    ),
    "a Job that failed has no completion time": (
        job({"conditions": [condition_of("FailureTarget"), condition_of("Failed", reason="BackoffLimitExceeded")]}),
        ("Failed", "BackoffLimitExceeded", END),
    ),
    "a Job that does not fail any more": (
        job({"conditions": [condition_of("Failed", "False")]}),
        ("Pending", "", None),
    ),
    "a suspended Job": (
        job({"conditions": [condition_of("Suspended", reason="JobSuspended")]}, spec={"suspend": True}),
        ("Suspended", "JobSuspended", None),
    ),
    "a Job that was suspended once": (job({"conditions": [condition_of("Suspended", "False")]}), ("Pending", "", None)),
    "a Job whose conditions are null": (job({"conditions": None}), ("Pending", "", None)),
    "a PyTorchJob that is only created": (pytorch(condition_of("Created")), ("Pending", "", None)),
    "a PyTorchJob that runs": (pytorch(condition_of("Created"), condition_of("Running")), ("Running", "R", None)),
    "a PyTorchJob that starts again": (
        pytorch(condition_of("Running", "False"), condition_of("Restarting")),
        ("Pending", "", None),
    ),
    "a PyTorchJob that succeeded": (
        pytorch(condition_of("Running", "False"), condition_of("Succeeded"), completionTime=LATER),
        ("Succeeded", "R", END),
    ),
    "a PyTorchJob's failure is sticky and counts whatever is said beside it": (
        pytorch(condition_of("Failed", reason="PyTorchJobFailed"), condition_of("Running")),
        ("Failed", "PyTorchJobFailed", END),
    ),
    "a suspended PyTorchJob": (
        child("kubeflow.org/v1", "PyTorchJob", {"conditions": [condition_of("Suspended")]}, SUSPENDED),
        ("Suspended", "R", None),
    ),
    "an MPIJob that failed by an eviction is not over without a completion time": (
        mpi(condition_of("Running"), condition_of("Failed", reason="MPIJobEvicted")),
        ("Running", "R", None),
    ),
    "an MPIJob that failed": (mpi(condition_of("Failed"), completionTime=LATER), ("Failed", "R", END)),
    "an MPIJob that succeeded": (mpi(condition_of("Succeeded"), completionTime=LATER), ("Succeeded", "R", END)),
    "an MPIJob that says so before it is over": (mpi(condition_of("Succeeded")), ("Pending", "", None)),
    "a SparkApplication in its first moment": (spark(), ("Pending", "", None)),
    "a SparkApplication that is submitted": (spark("SUBMITTED"), ("Pending", "SUBMITTED", None)),
    "a SparkApplication that could not be submitted and may be again": (
        spark("SUBMISSION_FAILED"),
        ("Pending", "SUBMISSION_FAILED", None),
    ),
    "a SparkApplication whose driver runs": (spark("RUNNING", terminationTime=None), ("Running", "RUNNING", None)),
    "a SparkApplication that is about to be done": (spark("SUCCEEDING"), ("Running", "SUCCEEDING", None)),
    "a SparkApplication that is about to fail": (
        spark("FAILING", terminationTime=LATER),
        ("Running", "FAILING", None),
    ),
    "a SparkApplication that is done": (spark("COMPLETED", terminationTime=LATER), ("Succeeded", "COMPLETED", END)),
    "a SparkApplication that failed": (spark("FAILED", terminationTime=LATER), ("Failed", "FAILED", END)),
    "a SparkApplication that never ran": (spark("FAILED", terminationTime=None), ("Failed", "FAILED", None)),
    "a SparkApplication whose driver nobody knows of": (spark("UNKNOWN"), ("Pending", "UNKNOWN", None)),
    "a suspended SparkApplication": (spark("SUSPENDED"), ("Suspended", "SUSPENDED", None)),
    "a suspended MPIJob": (
        child("kubeflow.org/v2beta1", "MPIJob", {"conditions": [condition_of("Suspended")]}, SUSPENDED),
        ("Suspended", "R", None),
    ),
}


@pytest.mark.parametrize(("raw", "expected"), CHILDREN.values(), ids=CHILDREN.keys())
def test_how_far_a_child_is(raw: dict[str, Any], expected: tuple[str, str, datetime | None]):
    view = child_view(raw)
    assert view is not None
    assert (view.state, view.reason, view.finished) == expected


def test_a_child_is_seen_whole():
    raw = job({"conditions": [condition_of("Failed")], "startTime": AT}, deletionTimestamp=LATER)
    assert child_view(raw) == ChildView(
        ref=ObjectRef("batch/v1", "Job", "reviews-train-2", "u2"),
        stage=Stage.TRAIN,
        attempt=2,
        created=NOON,
        state="Failed",
        reason="R",
        message="m.",
        started=NOON,
        finished=END,
        deleting=True,
    )


def test_configuration_of_a_spark_driver_is_read_from_its_template():
    spec = {"driver": {"template": {"metadata": {"annotations": {"finetune.dev/config-sha256": "abc"}}}}}
    status = {"applicationState": {"state": "RUNNING"}, "lastSubmissionAttemptTime": AT, "driverInfo": {}}
    view = child_view(child("sparkoperator.k8s.io/v1beta2", "SparkApplication", status, spec))
    assert view is not None
    assert (view.configuration, view.started) == ("abc", NOON)


NOT_OURS: dict[str, dict[str, Any]] = {
    "another kind": child("kubeflow.org/v1", "TFJob", {}),
    "another version of a kind": child("kubeflow.org/v1", "MPIJob", {}),
    "without labels": job({}, labels={}),
    "without an attempt": job({}, labels={"finetune.dev/stage": "train"}),
    "an attempt that is no number": job({}, labels={**LABELS, "finetune.dev/attempt": "two"}),
    "an attempt in digits of another script": job({}, labels={**LABELS, "finetune.dev/attempt": "٢"}),
    "a stage that there is not": job({}, labels={**LABELS, "finetune.dev/stage": "rest"}),
    "no metadata": {"apiVersion": "batch/v1", "kind": "Job"},
}


@pytest.mark.parametrize("raw", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_foreign_objects_are_no_attempts(raw: dict[str, Any]):
    assert child_view(raw) is None


def pod(status: Any = None, spec: Any = None, labels: Any = None, **metadata: Any) -> dict[str, Any]:
    meta = {"name": "p", "uid": "up", "labels": {**LABELS, **(labels or {})}, "creationTimestamp": AT, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec or {}, "status": status or {}}


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


PLAIN = PodView("p", "up", Stage.TRAIN, 2, NOON, "Pending")
BACK_OFF = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
TERMINATED = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": LATER}

PODS: dict[str, tuple[dict[str, Any], PodView]] = {
    "a pod in its first moment": (pod(), PLAIN),
    "a pod without a node": (
        pod({"conditions": [condition_of("PodScheduled", "False", "Unschedulable", "0/1 nodes")]}),
        replace(PLAIN, unschedulable="0/1 nodes", changed=END),
    ),
    "a pod that waits at a gate is not without a node": (
        pod({"conditions": [condition_of("PodScheduled", "False", "SchedulingGated")]}),
        replace(PLAIN, changed=END),
    ),
    "a pod with a node": (
        pod({"conditions": [condition_of("PodScheduled")]}, {"nodeName": "n1"}),
        replace(PLAIN, node="n1", scheduled=END, changed=END),
    ),
    "an image that cannot be pulled": (
        pod({"containerStatuses": [container("pytorch", waiting=BACK_OFF)]}),
        replace(PLAIN, waiting=Waiting("ImagePullBackOff", "Back-off pulling image")),
    ),
    "an image of an init container that cannot be pulled": (
        pod(
            {
                "initContainerStatuses": [container("setup", waiting=BACK_OFF)],
                "containerStatuses": [container("pytorch", waiting={"reason": "PodInitializing"})],
            }
        ),
        replace(PLAIN, waiting=Waiting("ImagePullBackOff", "Back-off pulling image")),
    ),
    "a container that is being made does not wait": (
        pod({"containerStatuses": [container("pytorch", waiting={"reason": "ContainerCreating"})]}),
        PLAIN,
    ),
    "a container that was killed": (
        pod({"phase": "Failed", "containerStatuses": [container("pytorch", terminated=TERMINATED)]}),
        replace(PLAIN, phase="Failed", ended=Ended(137, "OOMKilled", END, None)),
    ),
    "the end of another container is not the trainer's": (
        pod({"phase": "Running", "containerStatuses": [container("proxy", terminated=TERMINATED)]}),
        replace(PLAIN, phase="Running"),
    ),
    "a disruption": (
        pod({"conditions": [condition_of("DisruptionTarget", reason="PreemptionByScheduler")]}),
        replace(PLAIN, disruption="PreemptionByScheduler", changed=END),
    ),
    "a disruption that did not come": (
        pod({"conditions": [condition_of("DisruptionTarget", "False")]}),
        replace(PLAIN, changed=END),
    ),
    "a pod of a node that does not respond": (
        pod({"phase": "Running", "conditions": [condition_of("Ready", "False"), condition_of("ContainersReady")]}),
        replace(PLAIN, phase="Running", node_silent_since=END, changed=END),
    ),
    "a pod that its kubelet reports as not ready": (
        pod({"phase": "Running", "conditions": [condition_of(x, "False") for x in ("Ready", "ContainersReady")]}),
        replace(PLAIN, phase="Running", changed=END),
    ),
    "a pod that waits for a readiness gate": (
        pod(
            {
                "phase": "Running",
                "conditions": [
                    condition_of("Ready", "False", "ReadinessGatesNotReady"),
                    condition_of("ContainersReady"),
                ],
            }
        ),
        replace(PLAIN, phase="Running", changed=END),
    ),
    "an eviction": (
        pod({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}),
        replace(PLAIN, phase="Failed", status_reason="Evicted", status_message="low on memory"),
    ),
    "a pod that is to go": (
        pod(deletionTimestamp=LATER, deletionGracePeriodSeconds=30),
        replace(PLAIN, deleting_until=END, deleting_since=END - timedelta(seconds=30)),
    ),
    "a pod of an Indexed Job": (
        pod(labels={"batch.kubernetes.io/job-completion-index": "3"}),
        replace(PLAIN, index=3),
    ),
    "a worker of a PyTorchJob": (pod(labels={"training.kubeflow.org/replica-index": "1"}), replace(PLAIN, index=1)),
    "the launcher of an MPIJob is no node": (
        pod(labels={"training.kubeflow.org/replica-index": "0", "training.kubeflow.org/job-role": "launcher"}),
        PLAIN,
    ),
    "a worker of an MPIJob": (
        pod(labels={"training.kubeflow.org/replica-index": "2", "training.kubeflow.org/job-role": "worker"}),
        replace(PLAIN, index=2),
    ),
    "lists that Go wrote as null": (pod({"conditions": None, "containerStatuses": None}), PLAIN),
}


@pytest.mark.parametrize(("raw", "expected"), PODS.values(), ids=PODS.keys())
def test_how_a_pod_is_seen(raw: dict[str, Any], expected: PodView):
    assert pod_view(raw) == expected


def test_a_report_is_read_from_the_termination_message():
    message = report("train", metrics={"train_loss": 0.25})
    ended = {"exitCode": 0, "reason": "Completed", "message": message}
    view = pod_view(pod({"phase": "Succeeded", "containerStatuses": [container("pytorch", terminated=ended)]}))
    assert view is not None
    assert view.ended is not None
    assert view.ended.report is not None
    assert (view.ended.report.stage, view.ended.report.metrics) == (Stage.TRAIN, {"train_loss": 0.25})


@pytest.mark.parametrize("message", ["", "killed", "{}", '{"job": 1}', "[]", "null", '{"job": "reviews"'])
def test_a_termination_message_of_others_is_no_report(message: str):
    ended = {"exitCode": 1, "reason": "Error", "message": message}
    view = pod_view(pod({"containerStatuses": [container("pytorch", terminated=ended)]}))
    assert view is not None
    assert view.ended == Ended(1, "Error", None, None, message)


def test_any_grace_period_of_a_deletion_can_be_read():
    for grace, since in ((30, NOON - timedelta(seconds=30)), (10**12, NOON), (2**63 - 1, NOON)):
        view = pod_view(pod(deletionTimestamp=AT, deletionGracePeriodSeconds=grace))
        assert view is not None
        assert (view.deleting_until, view.deleting_since) == (NOON, since)


def test_a_pod_without_our_labels_is_not_seen():
    assert pod_view({"metadata": {"name": "p"}}) is None
    assert pod_view({}) is None


# --------------------------------------------------------------------------------------------------------------- jobs


def document(**changes: Any) -> dict[str, Any]:
    metadata = {
        "name": "reviews",
        "namespace": "team",
        "uid": "u",
        "generation": 3,
        "creationTimestamp": AT,
        "resourceVersion": "17",
        "managedFields": [{"manager": "kubectl"}],
        **changes.pop("metadata", {}),
    }
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata, "spec": SPEC, **changes}


def test_a_job_is_seen_whole():
    seen = job_view(document(status={"phase": "Training", "future": 1}), CLUSTER_SETTINGS)
    assert seen.job is not None
    assert replace(seen, job=None, marks="") == JobView(
        name="reviews",
        namespace="team",
        uid="u",
        generation=3,
        created=NOON,
        deleting=False,
        managed_by=None,
        job=None,
        problems=(),
        status=FineTuneJobStatus(phase="Training"),
    )
    assert (seen.job.metadata.uid, seen.job.spec.task) == ("u", "text-classification")


@pytest.mark.parametrize("spec", [SPEC, {"task": "poetry"}], ids=["valid", "invalid"])
def test_unchanged_spec_is_validated_once(spec: dict[str, object]):
    first = job_view(document(spec=spec), CLUSTER_SETTINGS)
    again = job_view(document(spec=spec, status={"phase": "Pending"}), CLUSTER_SETTINGS, first)
    assert (again.problems is first.problems, again.job is first.job) == (True, True)
    relabelled = job_view(document(spec=spec, metadata={"labels": {"a": "!"}}), CLUSTER_SETTINGS, again)
    assert relabelled.problems != first.problems


def test_of_a_job_nothing_long_is_kept():
    annotations = {"note": "x" * 200_000}
    seen = job_view(document(metadata={"annotations": annotations}), CLUSTER_SETTINGS)
    assert seen.job is not None
    assert "x" * 1_000 not in repr(seen)
    wrong = {f"{'x' * 1_000}{at}": 1 for at in range(50)}
    refused = job_view(document(spec={**SPEC, **wrong}), CLUSTER_SETTINGS)
    assert "x" * 1_000 not in repr(refused.problems)
    assert len(refused.problems) == MAX_PROBLEMS + 1
    assert refused.problems[-1].rule == f"has {50 - MAX_PROBLEMS} more problems"


@pytest.mark.parametrize("error", [RecursionError(), ZeroDivisionError("by zero")])
def test_job_that_crashes_the_validation_is_refused_with_the_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("finetune_operator.jobs.observed.validate_job", fail)
    seen = job_view(document(), CLUSTER_SETTINGS)
    assert seen.job is None
    (problem,) = seen.problems
    assert type(error).__name__ in problem.rule


def test_of_a_log_the_end_is_kept_without_secrets():
    env = [{"name": "DB_PASSWORD", "value": "/correct horse"}]
    job = job_view(document(spec={**SPEC, "template": {"env": env}}), CLUSTER_SETTINGS)
    token = "hf_" + "A" * 30
    text = "x" * 5000 + f" cloning https://me:pa55word@git.example.com/a with {token} and /correct horse\nthe cause\n"
    kept = redacted_log(job, text)
    assert len(kept) == 4096
    assert kept.endswith("the cause\n")
    for secret in ("pa55word", token, "correct horse"):
        assert secret not in kept
    # A secret that the cut splits.
    assert "AAAA" not in redacted_log(job, f"{token} {'y' * 4080}")


def test_a_job_with_problems_cannot_be_run_and_still_names_its_manager():
    seen = job_view(document(spec={"task": "poetry", "runPolicy": {"managedBy": "others"}}), CLUSTER_SETTINGS)
    assert (seen.job, seen.managed_by) == (None, "others")
    assert {problem.path for problem in seen.problems} >= {"spec.task", "spec.model"}


@pytest.mark.parametrize("status", [{"phase": "Dancing"}, {"conditions": 1}, [], "x", None])
def test_a_status_that_cannot_be_read_counts_as_empty(status: Any):
    assert job_view(document(status=status), CLUSTER_SETTINGS).status == FineTuneJobStatus()


def test_kubectls_own_copy_of_the_object_is_not_looked_at():
    copy = '{"spec": {"secrets": {"hubToken": "hf_abcdefghijklmnopqrstuvwxyz"}}}'
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": copy}
    assert job_view(document(metadata={"annotations": annotations}), CLUSTER_SETTINGS).problems == ()


def test_a_job_that_is_to_go_is_seen_as_such():
    assert job_view(document(metadata={"deletionTimestamp": LATER}), CLUSTER_SETTINGS).deleting


# --------------------------------------------------------------------------------------------------------------- logs


def failed_pods(*seconds: int, attempt: int = 1) -> tuple[PodView, ...]:
    return tuple(
        replace(
            PLAIN,
            name=f"p{index}",
            phase="Failed",
            attempt=attempt,
            ended=Ended(1, "Error", NOON + timedelta(seconds=second), None),
        )
        for index, second in enumerate(seconds)
    )


def attempt(number: int) -> ChildView:
    return ChildView(ObjectRef("batch/v1", "Job", f"c{number}"), Stage.TRAIN, number, NOON, "Failed")


def test_logs_are_wanted_of_the_first_three_pods_that_failed():
    seen = Observed(children=(attempt(1),), pods=failed_pods(50, 10, 40, 20))
    view = job_view(document(), CLUSTER_SETTINGS)
    assert wanted_logs(view, seen, NOON, CLUSTER_SETTINGS) == ("p1", "p3", "p2")
    assert wanted_logs(view, replace(seen, logs=(("p3", ""),)), NOON, CLUSTER_SETTINGS) == ("p1", "p2")


def test_logs_of_earlier_attempts_are_not_wanted():
    seen = Observed(children=(attempt(1), attempt(2)), pods=failed_pods(50, attempt=1))
    assert wanted_logs(job_view(document(), CLUSTER_SETTINGS), seen, NOON, CLUSTER_SETTINGS) == ()


def test_logs_are_not_fetched_once_the_status_has_the_failure():
    recorded = FineTuneJobStatus(stages=(StageStatus(name="train", state="Failed", attempt=1),))
    view = replace(job_view(document(), CLUSTER_SETTINGS), status=recorded)
    assert wanted_logs(view, Observed(children=(attempt(1),), pods=failed_pods(50)), NOON, CLUSTER_SETTINGS) == ()


def test_logs_are_not_wanted_without_a_child_or_a_failure():
    view = job_view(document(), CLUSTER_SETTINGS)
    assert wanted_logs(view, Observed(pods=failed_pods(1)), NOON, CLUSTER_SETTINGS) == ()
    world = World()
    world.settle()
    world.start()
    assert wanted_logs(world.job(), world.observed(), NOON, CLUSTER_SETTINGS) == ()


def terminating_pod(index: int, second: int, **more: Any) -> PodView:
    """Return a pod that runs and is being deleted."""
    since = NOON + timedelta(seconds=second)
    found = replace(
        PLAIN, attempt=1, name=f"p{index}", index=index, phase="Running", started_at=NOON, deleting_since=since
    )
    return replace(found, deleting_until=since + timedelta(seconds=30), **more)


def test_logs_of_running_pods_are_fetched_at_once_on_their_deletion():
    """A pod's log is deleted with it, and when all pods of an attempt are deleted there is no other."""
    view, child = job_view(document(), CLUSTER_SETTINGS), replace(attempt(1), state="Running")
    pods = tuple(terminating_pod(index, second) for index, second in enumerate((9, 3, 3, 8, 7)))
    seen = Observed(children=(child,), pods=(*pods, replace(PLAIN, name="stays", phase="Running")))
    assert pods_being_deleted(view, seen) == ("p1", "p2", "p4")
    assert pods_being_deleted(view, replace(seen, last_logs=(("p1", "a"), ("p2", "")))) == ("p4",)
    # Three are enough for one failure, whichever they are.
    assert pods_being_deleted(view, replace(seen, last_logs=(("p0", ""), ("p3", ""), ("p4", "")))) == ()


@pytest.mark.parametrize(
    "case",
    [terminating_pod(0, 1, started_at=None), terminating_pod(0, 1, phase="Failed"), terminating_pod(0, 1, deleted=True),
     terminating_pod(0, 1, attempt=2)],
    ids=["never ran", "has ended", "is gone", "of another attempt"],
)  # fmt: skip
def test_no_log_is_read_early_that_is_not_there_or_can_be_read_at_the_end(case: PodView):
    child = replace(attempt(1), state="Running")
    assert pods_being_deleted(job_view(document(), CLUSTER_SETTINGS), Observed(children=(child,), pods=(case,))) == ()


def test_end_of_a_log_replaces_its_earlier_part():
    seen = Observed(logs=(("a", "the end"), ("b", "")), last_logs=(("a", "before"), ("b", "before"), ("c", "before")))
    assert seen.log_tails == (("a", "the end"), ("b", "before"), ("c", "before"))
