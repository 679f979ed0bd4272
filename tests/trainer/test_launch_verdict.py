"""The verdict on a pod's ranks: one report, with the first cause."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_trainer.launching.child_supervisor import End
from finetune_trainer.launching.verdict import verdict

WELL = "well"
UNREACHED = FailureReport(failure_class=FailureClass.COLLECTIVE, reason="WorkerUnreachable", message="no route")


@dataclass(frozen=True)
class Case:
    reports: dict[int, tuple[FailureClass, float] | str]
    """Rank -> class and time of its failure, or WELL."""
    code: int
    expected: tuple[str, str, int, int]
    """Class or `succeeded`, reason, rank, exit code."""
    ends: dict[int, int] = field(default_factory=dict)
    stop_requested_at: float | None = None
    trouble: FailureReport | None = None
    output: str = ""
    killed_for_memory: bool = False


CASES = {
    "all ranks went well": Case({2: WELL, 3: WELL}, 0, ("succeeded", "", 2, 0)),
    "all ranks went well, and then their agent missed the others": Case(
        {0: WELL, 1: WELL}, 1, ("succeeded", "", 0, 0), trouble=UNREACHED
    ),
    "one rank went well and the agent says that the other failed": Case(
        {0: WELL}, 1, ("Killed", "Killed", 1, 137), ends={1: -9}
    ),
    "the earliest cause wins over a later one": Case(
        {0: (FailureClass.MODEL, 2.0), 1: (FailureClass.DATA, 1.0)}, 1, ("DataError", "Told", 1, 10)
    ),
    "a lost peer is an echo, also when it came first": Case(
        {0: (FailureClass.COLLECTIVE, 1.0), 1: (FailureClass.LOSS_NOT_FINITE, 2.0)},
        1,
        ("LossNotFinite", "Told", 1, 17),
    ),
    "a rank that was killed is the cause of the other's lost peer": Case(
        {0: (FailureClass.COLLECTIVE, 1.0)}, 1, ("Killed", "Killed", 1, 137), ends={0: 150, 1: -9}
    ),
    "a rank that was killed while the kernel counted an end for memory": Case(
        {0: (FailureClass.COLLECTIVE, 1.0)},
        1,
        ("OutOfMemory", "OOMKilled", 1, 155),
        ends={0: 150, 1: -9},
        killed_for_memory=True,
    ),
    "a rank whose own process was killed for memory": Case(
        {0: (FailureClass.KILLED, 1.0)}, 137, ("OutOfMemory", "OOMKilled", 0, 155), killed_for_memory=True
    ),
    "another failure while the kernel counted an end for memory": Case(
        {0: (FailureClass.DATA, 1.0)}, 1, ("DataError", "Told", 0, 10), killed_for_memory=True
    ),
    "a rank that crashed in a library is named by its signal": Case(
        {0: (FailureClass.PREEMPTED, 1.0)}, 1, ("ProgramError", "KilledBySignal", 1, 1), ends={1: -11}
    ),
    "a rank that ended in silence is the cause of the other's lost peer": Case(
        {1: (FailureClass.COLLECTIVE, 1.0)}, 1, ("ProgramError", "NoReport", 0, 1), ends={1: 150, 0: 3}
    ),
    "a rank that the agent told to end is no cause": Case(
        {0: (FailureClass.DATA, 1.0)}, 1, ("DataError", "Told", 0, 10), ends={1: -15, 0: 10}
    ),
    "a rank whose report is lost is told of by its exit code": Case(
        {}, 1, ("StorageUnavailable", "NoReport", 1, 151), ends={1: 151}
    ),
    "only the peers of other pods are gone": Case(
        {2: (FailureClass.COLLECTIVE, 1.0), 3: (FailureClass.COLLECTIVE, 2.0)}, 1, ("CollectiveFailed", "Told", 2, 150)
    ),
    "a lost worker says more than that the peers are gone": Case(
        {0: (FailureClass.COLLECTIVE, 1.0)}, 1, ("CollectiveFailed", "WorkerUnreachable", 0, 150), trouble=UNREACHED
    ),
    "a cause wins over the launcher's trouble": Case(
        {0: (FailureClass.DATA, 1.0)}, 1, ("DataError", "Told", 0, 10), trouble=UNREACHED
    ),
    "the pod was told to stop and the ranks saved": Case(
        {0: (FailureClass.PREEMPTED, 2.0), 1: (FailureClass.PREEMPTED, 1.0)},
        143,
        ("Preempted", "Told", 1, 143),
        stop_requested_at=0.5,
    ),
    "the pod was told to stop and the ranks were killed when the time was over": Case(
        {0: (FailureClass.COLLECTIVE, 2.0)}, 1, ("Preempted", "Terminated", 0, 143), ends={1: -9}, stop_requested_at=0.5
    ),
    "the pod was told to stop before a rank could say anything": Case(
        {}, -15, ("Preempted", "Terminated", 0, 143), stop_requested_at=0.5
    ),
    "the pod was told to stop and the ranks of another one were killed before": Case(
        {0: (FailureClass.COLLECTIVE, 2.0)},
        1,
        ("Preempted", "Terminated", 0, 143),
        ends={0: 150},
        stop_requested_at=0.5,
    ),
    "the peers were gone before the pod was told to stop": Case(
        {0: (FailureClass.COLLECTIVE, 1.0)},
        1,
        ("CollectiveFailed", "Told", 0, 150),
        ends={0: 150},
        stop_requested_at=2.0,
    ),
    "a cause of its own stays one when the pod is told to stop": Case(
        {0: (FailureClass.DATA, 1.0)}, 1, ("DataError", "Told", 0, 10), stop_requested_at=2.0
    ),
    "the launcher itself was killed": Case({}, -9, ("Killed", "Killed", 0, 137)),
    "the launcher itself was killed for memory": Case(
        {}, -9, ("OutOfMemory", "OOMKilled", 0, 155), killed_for_memory=True
    ),
    "nothing is known": Case({}, 3, ("ProgramError", "NoReport", 0, 1), output="last words"),
    "an end without an error and without a report is none that can be trusted": Case(
        {}, 0, ("ProgramError", "NoReport", 0, 1), output="last words"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_pod_reports_one_cause(case: Case):
    reports = []
    for rank, report in case.reports.items():
        failure = None
        if not isinstance(report, str):
            failure = FailureReport(failure_class=report[0], reason="Told", message="as it was", time=report[1])
        outcome = "succeeded" if failure is None else "failed"
        reports.append(
            TrainerReport(job="j", stage=Stage.TRAIN, rank=rank, world_size=4, outcome=outcome, failure=failure)
        )
    found = verdict(
        "j",
        Stage.TRAIN,
        reports,
        end=End(case.code, case.stop_requested_at, case.output),
        ends=case.ends,
        trouble=case.trouble,
        expected=2,
        world_size=4,
        seconds=1.0,
        killed_for_memory=case.killed_for_memory,
    )
    failure = found.failure
    reported = (failure.failure_class.value, failure.reason) if failure else (found.outcome, "")
    assert (*reported, found.rank, failure.exit_code if failure else 0) == case.expected
    assert found.world_size == 4
    if case.output:
        assert failure is not None
        assert case.output in failure.message


@pytest.mark.parametrize(
    ("of_rank", "stop_requested_at", "expected"),
    [
        (FailureClass.PREEMPTED, 1.0, 1.0),
        (FailureClass.PREEMPTED, None, 3.0),
        (FailureClass.PREEMPTED, 4.0, 3.0),
        (FailureClass.DATA, 1.0, 3.0),
    ],
    ids=["requested here", "requested in another pod", "requested later here as well", "another failure"],
)
def test_a_stopped_pod_reports_the_time_of_the_request(
    of_rank: FailureClass, stop_requested_at: float | None, expected: float
):
    failure = FailureReport(failure_class=of_rank, reason="Told", message="as it was", time=3.0)
    reports = [TrainerReport(job="j", stage=Stage.TRAIN, rank=0, world_size=1, outcome="failed", failure=failure)]
    end = End(1, stop_requested_at, "")
    found = verdict(
        "j", Stage.TRAIN, reports, end=end, ends={}, trouble=None, expected=1, world_size=1, seconds=1.0
    ).failure
    assert found is not None
    assert (found.failure_class, found.time) == (of_rank, expected)
