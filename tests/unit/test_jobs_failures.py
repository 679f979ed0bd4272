"""The first cause among all pods of an attempt, its remedy, and its message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from each_case import each_case
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, FailureClass, retryable
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.jobs.outcomes.failure_diagnosis import first_cause, on_node_lost, without_report
from finetune_operator.jobs.outcomes.remedies import REMEDIES, OperatorCause, Remedy
from finetune_operator.jobs.state.decision_types import ChildView, Ended, ObjectRef, PodView
from finetune_operator.spec.types import FailureStatus
from reconcile_world import World, through

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CHILD = ChildView(
    ObjectRef("batch/v1", "Job", "reviews-train-1"),
    Stage.TRAIN,
    1,
    NOON,
    "Failed",
    reason="BackoffLimitExceeded",
    message="Job has reached the specified backoff limit",
)


def pod(index: int, **fields: object) -> PodView:
    plain = PodView(f"pod-{index}", f"uid-{index}", Stage.TRAIN, 1, NOON, "Failed", index=index, node=f"node-{index}")
    return replace(plain, **fields)  # type: ignore[arg-type]


def ended(
    code: int,
    second: int = 0,
    reason: str = "Error",
    reported: FailureClass | None = None,
    case: str = "Told",
    at: float = 0,
) -> Ended:
    """Return an ended container; `reported` is the failure class in its report, `at` the report's time."""
    report = None
    if reported is not None:
        failure = FailureReport(failure_class=reported, reason=case, message="m.", hint="h.", time=at)
        report = TrainerReport(job="reviews", stage=Stage.TRAIN, rank=second, outcome="failed", failure=failure)
    return Ended(code, reason, NOON + timedelta(seconds=second), report)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


@dataclass(frozen=True)
class Case:
    pods: tuple[PodView, ...]
    expected: tuple[str, str, Remedy, str | None]
    """Class, reason, remedy, pod."""
    node_to_avoid: str | None = None
    child: ChildView = CHILD


T0 = NOON.timestamp()
PREEMPTED_BY_SCHEDULER = "PreemptionByScheduler"
LOW_ON_DISK = "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 0."
LOW_ON_MEMORY = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi. Container pytorch was using "
    "31Gi, request is 8Gi, has larger consumption of memory."
)
OVER_ITS_LIMIT = 'Usage of EmptyDir volume "shm" exceeds the limit "1Gi".'

CASES = {
    "the earliest report of all pods is the cause": Case(
        (
            pod(0, ended=ended(12, 1, reported=FailureClass.MODEL, at=20.0)),
            pod(1, ended=ended(10, 2, reported=FailureClass.DATA, at=10.0)),
        ),
        ("DataError", "Told", Remedy.FAIL, "pod-1"),
    ),
    "a lost connection is an echo though it was reported first": Case(
        (
            pod(0, ended=ended(150, 1, reported=FailureClass.COLLECTIVE, at=10.0)),
            pod(1, ended=ended(17, 2, reported=FailureClass.LOSS_NOT_FINITE, at=20.0)),
        ),
        ("LossNotFinite", "Told", Remedy.FAIL, "pod-1"),
    ),
    "a report without a time comes after those with one": Case(
        (
            pod(0, ended=ended(10, 1, reported=FailureClass.DATA, at=0.0)),
            pod(1, ended=ended(12, 2, reported=FailureClass.MODEL, at=20.0)),
        ),
        ("ModelError", "Told", Remedy.FAIL, "pod-1"),
    ),
    "lost connections alone are the network's doing": Case(
        (
            pod(0, ended=ended(150, 1, reported=FailureClass.COLLECTIVE, at=10.0)),
            pod(1, ended=ended(150, 2, reported=FailureClass.COLLECTIVE, at=9.0)),
        ),
        ("CollectiveFailed", "Told", Remedy.FREE, "pod-1"),
    ),
    "memory that a report tells of is adapted": Case(
        (pod(0, ended=ended(137, reported=FailureClass.OUT_OF_MEMORY)),), ("OutOfMemory", "Told", Remedy.ADAPT, "pod-0")
    ),
    "a container that the kernel killed for memory is the cause of the other's lost connection": Case(
        (
            pod(0, ended=ended(150, 1, reported=FailureClass.COLLECTIVE, at=10.0)),
            pod(1, ended=ended(137, 2, "OOMKilled")),
        ),
        ("OutOfMemory", "OOMKilled", Remedy.ADAPT, "pod-1"),
    ),
    "memory goes before the eviction of what was left": Case(
        (
            pod(0, ended=ended(143, 1), disruption="EvictionByEvictionAPI"),
            pod(1, ended=ended(137, 2, "OOMKilled")),
        ),
        ("OutOfMemory", "OOMKilled", Remedy.ADAPT, "pod-1"),
    ),
    "a pod that made room for another job": Case(
        (pod(0, ended=ended(143, reported=FailureClass.PREEMPTED), disruption=PREEMPTED_BY_SCHEDULER),),
        ("Preempted", PREEMPTED_BY_SCHEDULER, Remedy.FREE, "pod-0"),
    ),
    "a pod that was told to end and nobody says why": Case(
        (pod(0, ended=ended(143)),), ("Preempted", "Terminated", Remedy.FREE, "pod-0")
    ),
    "an error without a word of its own is the shock of losing a preempted pod": Case(
        (
            pod(0, ended=ended(1, 1, reported=FailureClass.PROGRAM, case="UnexpectedError", at=10.0)),
            pod(1, ended=ended(143, 2), disruption=PREEMPTED_BY_SCHEDULER),
        ),
        ("Preempted", PREEMPTED_BY_SCHEDULER, Remedy.FREE, "pod-1"),
    ),
    "an error without a word of its own is the user's when nothing was done to a pod": Case(
        (
            pod(0, ended=ended(1, 1, reported=FailureClass.PROGRAM, case="UnexpectedError", at=10.0)),
            pod(1, ended=ended(150, 2, reported=FailureClass.COLLECTIVE, at=11.0)),
        ),
        ("ProgramError", "UnexpectedError", Remedy.FAIL, "pod-0"),
    ),
    "a data error is the user's though a pod was preempted too": Case(
        (
            pod(0, ended=ended(10, 1, reported=FailureClass.DATA, at=10.0)),
            pod(1, ended=ended(143, 2), disruption=PREEMPTED_BY_SCHEDULER),
        ),
        ("DataError", "Told", Remedy.FAIL, "pod-0"),
    ),
    "an eviction from a full disk of the node": Case(
        (pod(0, status_reason="Evicted", status_message=LOW_ON_DISK, disruption="TerminationByKubelet"),),
        ("Evicted", "Evicted", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "an eviction for the pod's own use of memory": Case(
        (pod(0, status_reason="Evicted", status_message=LOW_ON_MEMORY, disruption="TerminationByKubelet"),),
        ("OutOfMemory", "EvictedForMemory", Remedy.ADAPT, "pod-0"),
    ),
    "an eviction for more local storage than the pod may use": Case(
        (pod(0, status_reason="Evicted", status_message=OVER_ITS_LIMIT),),
        ("StorageFull", "Evicted", Remedy.FAIL, "pod-0"),
    ),
    "a node that was shut down": Case(
        (pod(0, status_reason="NodeShutdown", status_message="Pod was terminated in response to shutdown."),),
        ("NodeLost", "NodeShutdown", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "a node that does not respond, and a survivor that lost its peer": Case(
        (
            pod(0, phase="Running", node_silent_since=after(50)),
            pod(1, ended=ended(150, 60, reported=FailureClass.COLLECTIVE, case="RendezvousFailed", at=T0 + 60)),
        ),
        ("NodeLost", "NodeNotReady", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "a node that does not respond, and a survivor that its watchdog aborted": Case(
        (pod(0, phase="Running", node_silent_since=after(50)), pod(1, ended=ended(134, 60))),
        ("NodeLost", "NodeNotReady", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "the first of two nodes that do not respond": Case(
        (pod(0, phase="Running", node_silent_since=after(60)), pod(1, phase="Running", node_silent_since=after(50))),
        ("NodeLost", "NodeNotReady", Remedy.FREE, "pod-1"),
        node_to_avoid="node-1",
    ),
    "an error of the program beside a node that does not respond": Case(
        (
            pod(0, phase="Running", node_silent_since=after(50)),
            pod(1, ended=ended(10, 1, reported=FailureClass.DATA, at=T0 + 1)),
        ),
        ("DataError", "Told", Remedy.FAIL, "pod-1"),
    ),
    "a node that the taint manager emptied": Case(
        (pod(0, ended=ended(143), disruption="DeletionByTaintManager"),),
        ("NodeLost", "DeletionByTaintManager", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "a container of which the node knows nothing any more": Case(
        (pod(0, ended=ended(137, reason="ContainerStatusUnknown")),),
        ("NodeLost", "ContainerStatusUnknown", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "a node whose device plugin refused the pod": Case(
        (pod(0, status_reason="UnexpectedAdmissionError", status_message="no healthy devices present"),),
        ("PodRejected", "UnexpectedAdmissionError", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "a node without room for a pod that was bound to it": Case(
        (pod(0, status_reason="OutOfcpu"),),
        ("PodRejected", "OutOfcpu", Remedy.FREE, "pod-0"),
        node_to_avoid="node-0",
    ),
    "killed from outside without a word": Case(
        (pod(0, ended=ended(137)),), ("Killed", "Killed", Remedy.COUNTED, "pod-0")
    ),
    "a crash in a native library": Case(
        (pod(0, ended=ended(139)),), ("Killed", "KilledBySignal", Remedy.COUNTED, "pod-0")
    ),
    "the first silent pod with a code that says something": Case(
        (
            pod(0, ended=ended(143, 1)),
            pod(1, ended=ended(139, 2)),
        ),
        ("Killed", "KilledBySignal", Remedy.COUNTED, "pod-1"),
    ),
    "a code of the contract's table without a report": Case(
        (pod(0, ended=ended(16)),), ("StorageFull", "NoReport", Remedy.FAIL, "pod-0")
    ),
    "a code above all signals": Case((pod(0, ended=ended(255)),), ("Killed", "NoReport", Remedy.COUNTED, "pod-0")),
    "a code that is in no table": Case((pod(0, ended=ended(2)),), ("ProgramError", "NoReport", Remedy.FAIL, "pod-0")),
    "exit code 0 in a failed attempt": Case(
        (pod(0, ended=ended(0)),), ("NoReport", "NoReport", Remedy.COUNTED, "pod-0")
    ),
    "a report of another stage is no word of this one": Case(
        (
            pod(
                0,
                ended=Ended(
                    10,
                    "Error",
                    NOON,
                    TrainerReport(
                        job="reviews",
                        stage=Stage.PREPARE,
                        outcome="failed",
                        failure=FailureReport(failure_class=FailureClass.MODEL, reason="Told", message="m."),
                    ),
                ),
            ),
        ),
        ("DataError", "NoReport", Remedy.FAIL, "pod-0"),
    ),
    "a pod that somebody deleted is why all of them stop": Case(
        (
            pod(0, ended=ended(143, 11, reported=FailureClass.PREEMPTED, at=T0 + 10.2)),
            pod(1, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4), deleting_since=after(10)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "a pod that somebody deleted, and that could not say anything any more": Case(
        (
            pod(0, ended=ended(150, 46, reported=FailureClass.COLLECTIVE, at=T0 + 45)),
            pod(1, ended=ended(137, 44), deleting_since=after(10), deleting_until=after(40)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "a pod that somebody deleted, and others that their controller deleted in the same second": Case(
        (
            pod(0, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4), deleting_since=after(10)),
            pod(1, ended=ended(143, 10, reported=FailureClass.PREEMPTED, at=T0 + 10.1), deleting_since=after(10)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "pods deleted in one second that also end in one second": Case(
        (
            pod(0, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4), deleting_since=after(10)),
            pod(1, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.1), deleting_since=after(10)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "pods deleted in one second, one of which is gone without an end": Case(
        (
            pod(0, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4), deleting_since=after(10)),
            pod(1, phase="Running", deleted=True, deleting_since=after(10)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "a pod that is gone, and that no event showed as being deleted": Case(
        (
            pod(0, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4)),
            pod(1, phase="Running", deleted=True),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "a pod that is gone at an unknown time may have followed a failure": Case(
        (
            pod(0, ended=ended(150, 12, reported=FailureClass.COLLECTIVE, at=T0 + 10.4)),
            pod(1, phase="Running", deleted=True),
        ),
        ("CollectiveFailed", "Told", Remedy.FREE, "pod-0"),
    ),
    "a pod that was removed by force": Case(
        (
            pod(0, ended=ended(150, 13, reported=FailureClass.COLLECTIVE, at=T0 + 12)),
            pod(1, phase="Running", deleted=True, deleting_since=after(10)),
        ),
        ("Preempted", "PodDeleted", Remedy.FREE, "pod-1"),
    ),
    "a pod that its controller deleted, as another one had failed": Case(
        (
            pod(0, ended=ended(150, 11, reported=FailureClass.COLLECTIVE, at=T0 + 10.3)),
            pod(1, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 11.4), deleting_since=after(11)),
        ),
        ("CollectiveFailed", "Told", Remedy.FREE, "pod-0"),
    ),
    "a pod that its controller deleted after a failure without a report": Case(
        (
            pod(0, ended=ended(150, 10)),
            pod(1, ended=ended(143, 12), deleting_since=after(11)),
        ),
        ("CollectiveFailed", "NoReport", Remedy.FREE, "pod-0"),
    ),
    "a pod that somebody deleted has no say in an error of the program": Case(
        (
            pod(0, ended=ended(1, 12, reported=FailureClass.PROGRAM, case="UnexpectedError", at=T0 + 11)),
            pod(1, ended=ended(143, 12, reported=FailureClass.PREEMPTED, at=T0 + 10.4), deleting_since=after(10)),
        ),
        ("ProgramError", "UnexpectedError", Remedy.FAIL, "pod-0"),
    ),
    "a preempted pod that is gone by now": Case(
        (
            pod(0, ended=ended(143, 11, reported=FailureClass.PREEMPTED, at=T0 + 10.2)),
            pod(1, ended=ended(143, 12), deleted=True, deleting_since=after(10), disruption="DeletionByTaintManager"),
        ),
        ("NodeLost", "DeletionByTaintManager", Remedy.FREE, "pod-1"),
        node_to_avoid="node-1",
    ),
    "no pod is left": Case((), ("ChildFailed", "BackoffLimitExceeded", Remedy.COUNTED, None)),
    "a pod that still runs says nothing": Case(
        (pod(0, phase="Running"),), ("ChildFailed", "BackoffLimitExceeded", Remedy.COUNTED, None)
    ),
    "a reason of two parts, as the MPI operator gives": Case(
        (),
        ("ChildFailed", "BackoffLimitExceededEvicted", Remedy.COUNTED, None),
        child=replace(CHILD, reason="BackoffLimitExceeded/Evicted"),
    ),
    "a disruption of which only the Job's pod failure policy is left to tell": Case(
        (),
        ("Preempted", "DisruptionTarget", Remedy.FREE, None),
        child=replace(
            CHILD,
            reason="PodFailurePolicy",
            message="Pod team/reviews-train-1-0 has condition DisruptionTarget matching FailJob rule at index 0",
        ),
    ),
    "an exit code of which only the Job's pod failure policy is left to tell": Case(
        (),
        ("DataError", "NoReport", Remedy.FAIL, None),
        child=replace(
            CHILD,
            reason="PodFailurePolicy",
            message="Container pytorch for pod team/reviews-train-1-0 failed with exit code 10 matching FailJob rule "
            "at index 1",
        ),
    ),
    "an exit code that the pod failure policy tells of a pod whose end was not seen": Case(
        (pod(0, phase="Running"), pod(1, phase="Running")),
        ("Preempted", "Terminated", Remedy.FREE, "pod-1"),
        child=replace(
            CHILD,
            reason="PodFailurePolicy",
            message="Container pytorch for pod team/pod-1 failed with exit code 143 matching FailJob rule at index 1",
        ),
    ),
    "a disruption that the pod failure policy tells of a pod whose end was not seen": Case(
        (pod(0, phase="Running"), pod(1, phase="Running")),
        ("Preempted", "DisruptionTarget", Remedy.FREE, "pod-1"),
        child=replace(
            CHILD,
            reason="PodFailurePolicy",
            message="Pod team/pod-1 has condition DisruptionTarget matching FailJob rule at index 0",
        ),
    ),
    "a deadline that the child's own controller kept": Case(
        (), ("DeadlineExceeded", "DeadlineExceeded", Remedy.FAIL, None), child=replace(CHILD, reason="DeadlineExceeded")
    ),
}


@each_case("case", CASES.values(), ids=CASES.keys())
def test_the_first_cause(case: Case):
    found = first_cause(Stage.TRAIN, case.child, case.pods)
    seen = (found.cause.value, found.reason, found.remedy, None if found.pod is None else found.pod.name)
    assert (seen, found.node_to_avoid) == (case.expected, case.node_to_avoid)
    assert found.message
    assert found.hint


def test_the_order_of_the_pods_does_not_matter():
    for case in CASES.values():
        assert first_cause(Stage.TRAIN, case.child, case.pods) == first_cause(
            Stage.TRAIN, case.child, tuple(reversed(case.pods))
        )


def test_every_class_has_a_remedy_and_the_contracts_codes_agree_with_it():
    assert set(REMEDIES) == {*FailureClass, *OperatorCause}
    for cause, code in EXIT_CODES.items():
        assert (REMEDIES[cause] is not Remedy.FAIL) == retryable(code), cause


def test_failure_status_has_all_fields():
    broken = pod(3, ended=ended(137, 3, "OOMKilled"))
    found = first_cause(Stage.TRAIN, CHILD, (broken,))
    logs = (("pod-2", "not this one"), ("pod-3", "x" * 5000 + "the end\n"))
    assert found.to_failure_status(Stage.TRAIN, 4, logs) == FailureStatus(
        failure_class="OutOfMemory",
        reason="OOMKilled",
        message="Container memory ran out in pod pod-3: the kernel killed the process (exit code 137).",
        hint="Raise resources.memory, lower training.microBatchSize or preparation.maxLength, or shard or offload more "
        "under parallelism. For a script, change its own settings.",
        stage="train",
        attempt=4,
        pod="pod-3",
        node="node-3",
        rank=None,
        exit_code=137,
        log_tail="x" * (4096 - len("the end")) + "the end",
    )


def test_deleted_pod_leaves_the_named_logs_of_the_others():
    gone = pod(1, ended=ended(143, 12), deleted=True, deleting_since=after(10))
    left = pod(0, ended=ended(143, 11, reported=FailureClass.PREEMPTED, at=T0 + 10.2))
    found = first_cause(Stage.TRAIN, CHILD, (left, gone, pod(2, phase="Running")))
    failure = found.to_failure_status(Stage.TRAIN, 1, (("pod-0", "stopped after step 28\n"), ("pod-1", "")))
    assert (failure.pod, failure.node, failure.exit_code) == ("pod-1", "node-1", 143)
    assert failure.log_tail == "==> pod-0 <==\nstopped after step 28"


def test_failure_has_the_log_read_before_all_pods_were_deleted():
    first, second = (
        pod(index, phase="Running", deleted=True, deleting_since=after(10 + index), deleting_until=after(40))
        for index in (0, 1)
    )
    found = first_cause(Stage.TRAIN, CHILD, (second, first))
    assert (found.reason, found.pod) == ("PodDeleted", first)
    assert (
        found.to_failure_status(Stage.TRAIN, 1, (("pod-0", "step 28\n"), ("pod-1", "step 27\n"))).log_tail == "step 28"
    )
    assert found.to_failure_status(Stage.TRAIN, 1, (("pod-1", "step 27\n"),)).log_tail == "==> pod-1 <==\nstep 27"


@pytest.mark.parametrize(
    ("ended_pod", "cause"),
    [
        (pod(0, phase="Running", deleted=True, deleting_since=after(10)), FailureClass.PREEMPTED),
        (pod(0, phase="Succeeded", ended=ended(0, 12), deleting_since=after(10)), FailureClass.PREEMPTED),
        (pod(0, phase="Succeeded", ended=ended(0, 12), deleting_since=after(20)), OperatorCause.NO_REPORT),
        (pod(0, phase="Succeeded", ended=ended(0, 12)), OperatorCause.NO_REPORT),
        (pod(1, phase="Running", deleted=True, deleting_since=after(10)), OperatorCause.NO_REPORT),
    ],
    ids=["gone while it ran", "deleted before its end", "deleted after its end", "not deleted", "another rank's pod"],
)
def test_report_lost_with_a_deleted_pod_counts_no_restart(ended_pod: PodView, cause: FailureClass | OperatorCause):
    found = without_report((ended_pod,))
    assert found.cause is cause
    assert (REMEDIES[found.cause] is Remedy.FREE) == (cause is FailureClass.PREEMPTED)


def test_empty_log_is_replaced_by_the_named_logs_of_other_pods():
    killed = pod(1, ended=ended(137, 12, "OOMKilled"))
    left = pod(0, ended=ended(150, 13, reported=FailureClass.COLLECTIVE, at=T0 + 12))
    found = first_cause(Stage.TRAIN, CHILD, (left, killed))
    assert (
        found.to_failure_status(Stage.TRAIN, 1, (("pod-0", "step 28/300\n"), ("pod-1", ""))).log_tail
        == "==> pod-0 <==\nstep 28/300"
    )
    assert found.to_failure_status(Stage.TRAIN, 1, (("pod-0", "step 28/300\n"), ("pod-1", "mine\n"))).log_tail == "mine"


def test_the_traceback_of_a_program_is_not_above_but_in_the_status():
    raised = pod(0, ended=ended(1, reported=FailureClass.PROGRAM, case="UnexpectedError"))
    assert "logTail" in first_cause(Stage.TRAIN, CHILD, (raised,)).hint


def test_hint_in_a_cluster_requests_no_manual_restart():
    stopped = pod(0, ended=ended(143, reported=FailureClass.PREEMPTED))
    assert first_cause(Stage.TRAIN, CHILD, (stopped,)).hint.startswith("No action is needed")


def test_a_reported_failure_has_the_rank_of_its_process():
    broken = pod(0, ended=ended(10, 5, reported=FailureClass.DATA, at=1.0))
    failure = first_cause(Stage.TRAIN, CHILD, (broken,)).to_failure_status(Stage.TRAIN, 1)
    assert (failure.rank, failure.exit_code, failure.hint, failure.log_tail) == (5, 10, "h.", None)


def test_a_long_message_keeps_its_ends():
    report = ended(10, reported=FailureClass.DATA)
    assert report.report is not None
    assert report.report.failure is not None
    failure = report.report.failure.model_copy(update={"message": "begin" + "x" * 9000 + "end"})
    broken = pod(0, ended=replace(report, report=report.report.model_copy(update={"failure": failure})))
    message = first_cause(Stage.TRAIN, CHILD, (broken,)).to_failure_status(Stage.TRAIN, 1).message
    assert (len(message) <= 4096, message[:5], message[-3:]) == (True, "begin", "end")


def test_a_pod_that_does_not_end_is_its_nodes_fault():
    found = on_node_lost(pod(1, phase="Running"))
    assert (found.cause, found.reason, found.remedy, found.node_to_avoid) == (
        OperatorCause.NODE_LOST,
        "PodDoesNotEnd",
        Remedy.FREE,
        "node-1",
    )


def test_failed_gate_has_a_hint_to_evaluate_the_model_again():
    """Following the hint works: another job with the model, a lower gate and no training runs to its evaluation."""
    world = World()
    world.spec["evaluation"] = {"gate": {"metric": "accuracy", "minimum": 0.99}}
    through(world, 2)
    world.fail(FailureClass.GATE_NOT_MET)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    model = "pvc://reviews-workspace/reviews/model"
    assert f"spec.model {{uri: {model}}}, the new gate, and without spec.training" in (failure.hint or "")

    spec = {**world.spec, "model": {"uri": model}, "evaluation": {"gate": {"metric": "accuracy", "minimum": 0.5}}}
    del spec["training"]
    again = World(spec=spec)
    through(again, 1)
    assert again.phase == "Evaluating"
