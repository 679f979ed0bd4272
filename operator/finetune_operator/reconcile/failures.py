"""Why an attempt failed, and what is to be done about it: the first cause over all its pods, never its echoes.

When one process breaks, the others lose their connection, the launcher reports a lost worker, and the Job says that its
backoff limit is reached. All of that is true and none of it helps. So the witnesses are heard in order of trust: what
the trainer itself reported, what the kubelet and the scheduler did to a pod, the exit code by the contract's table, and
last the child's own word. What a cause leads to is in one table, `REMEDIES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, EXIT_OK, FailureClass
from finetune_contract.report import FailureReport
from finetune_operator.api.types import FailureStatus
from finetune_operator.reconcile.types import ChildView, PodView

MESSAGE_LIMIT = 4096
LOG_LIMIT = 4096
"""Characters of a log's end that the status holds."""


class Remedy(StrEnum):
    """What a failure leads to."""

    FAIL = "fail"
    """The same again would fail the same way: the job has failed."""
    FREE = "free"
    """The infrastructure's doing: a new attempt, which counts against nothing."""
    ADAPT = "adapt"
    """Memory ran out: a new attempt with a plan that needs less of it."""
    COUNTED = "counted"
    """It may go well another time: a new attempt, which counts against `runPolicy.maxRestarts`."""


class OperatorCause(StrEnum):
    """Classes of failures that no trainer can report; they stand beside the contract's `FailureClass`."""

    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    POD_REJECTED = "PodRejected"
    IMAGE_PULL = "ImagePull"
    CONTAINER_CONFIG = "ContainerConfig"
    UNSCHEDULABLE = "Unschedulable"
    KILLED = "Killed"
    CHILD_DELETED = "ChildDeleted"
    CHILD_FAILED = "ChildFailed"
    NAME_TAKEN = "NameTaken"
    REFUSED = "Refused"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NO_REPORT = "NoReport"
    PLAN_REFUSED = "PlanRefused"


CauseClass = FailureClass | OperatorCause

REMEDIES: dict[CauseClass, Remedy] = {
    FailureClass.DATA: Remedy.FAIL,
    FailureClass.CONFIG: Remedy.FAIL,
    FailureClass.MODEL: Remedy.FAIL,
    FailureClass.STRATEGY_NOT_IN_EFFECT: Remedy.FAIL,
    FailureClass.WORLD_SIZE: Remedy.FAIL,
    FailureClass.GATE_NOT_MET: Remedy.FAIL,
    FailureClass.STORAGE_FULL: Remedy.FAIL,
    FailureClass.LOSS_NOT_FINITE: Remedy.FAIL,
    FailureClass.CHECKPOINT: Remedy.FAIL,
    FailureClass.PROGRAM: Remedy.FAIL,
    FailureClass.OUT_OF_MEMORY: Remedy.ADAPT,
    FailureClass.PREEMPTED: Remedy.FREE,
    FailureClass.COLLECTIVE: Remedy.FREE,
    # Storage and Hub may be away for good, or wrong in the job: tried again, but not for ever.
    FailureClass.STORAGE_LOST: Remedy.COUNTED,
    FailureClass.HUB_UNAVAILABLE: Remedy.COUNTED,
    OperatorCause.NODE_LOST: Remedy.FREE,
    OperatorCause.EVICTED: Remedy.FREE,
    OperatorCause.POD_REJECTED: Remedy.FREE,
    OperatorCause.IMAGE_PULL: Remedy.FAIL,
    OperatorCause.CONTAINER_CONFIG: Remedy.FAIL,
    OperatorCause.UNSCHEDULABLE: Remedy.FAIL,
    OperatorCause.KILLED: Remedy.COUNTED,
    OperatorCause.CHILD_DELETED: Remedy.COUNTED,
    OperatorCause.CHILD_FAILED: Remedy.COUNTED,
    OperatorCause.NAME_TAKEN: Remedy.FAIL,
    OperatorCause.REFUSED: Remedy.FAIL,
    OperatorCause.DEADLINE_EXCEEDED: Remedy.FAIL,
    OperatorCause.NO_REPORT: Remedy.COUNTED,
    OperatorCause.PLAN_REFUSED: Remedy.FAIL,
}

ECHOES = frozenset({FailureClass.COLLECTIVE, FailureClass.PREEMPTED})
"""What the other pods report once one is gone: their connection broke, or they were told to end."""

_CLASS_OF_EXIT_CODE = {code: cause for cause, code in EXIT_CODES.items()}


@dataclass(frozen=True)
class Cause:
    """One failure, told."""

    cause: CauseClass
    reason: str
    message: str
    hint: str = ""
    pod: PodView | None = None
    """The pod that failed first."""
    rank: int | None = None
    exit_code: int | None = None
    node_at_fault: bool = False
    """Whether another attempt should keep away from the pod's node."""

    @property
    def remedy(self) -> Remedy:
        return REMEDIES[self.cause]

    @property
    def bad_node(self) -> str | None:
        """The node to keep away from."""
        return self.pod.node if self.pod is not None and self.node_at_fault else None

    def told(self, stage: Stage | None, attempt: int | None, logs: Sequence[tuple[str, str]] = ()) -> FailureStatus:
        """As the status has it."""
        pod = self.pod
        ended = None if pod is None else pod.ended
        tail = next((text for name, text in logs if pod is not None and name == pod.name), "")
        return FailureStatus(
            failure_class=self.cause.value,
            reason=self.reason,
            message=_shortened(self.message, MESSAGE_LIMIT),
            hint=self.hint or None,
            stage=None if stage is None else stage.value,
            attempt=attempt,
            pod=None if pod is None else pod.name,
            node=None if pod is None else pod.node,
            rank=self.rank,
            exit_code=ended.exit_code if ended is not None and self.exit_code is None else self.exit_code,
            log_tail=tail.rstrip()[-LOG_LIMIT:] or None,
        )


def _shortened(text: str, limit: int) -> str:
    half = limit // 2 - 3
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def first_cause(stage: Stage, child: ChildView, pods: Sequence[PodView]) -> Cause:
    """The first cause of the failure of `child`, an attempt at `stage`; `pods` are the attempt's."""
    failed = sorted((pod for pod in pods if _broke(pod)), key=_end)
    reports = sorted(_reported(stage, failed), key=lambda one: _when(one[1]))
    own = [one for one in reports if one[1].failure_class not in ECHOES]
    done_to_pods = [found for found in map(_done_to, failed) if found is not None]
    for pod, report in own:
        # An error that the trainer has no word for may well be the shock of losing the others.
        if not (done_to_pods and report.reason == "UnexpectedError"):
            return _from_report(pod, report)
    if done_to_pods:
        return min(done_to_pods, key=lambda one: _weight(one))
    heard = {pod.name for pod, _ in reports}
    silent = [pod for pod in failed if pod.ended is not None and pod.name not in heard]
    by_code = [_from_exit_code(pod) for pod in silent]
    telling = [one for one in by_code if one.cause not in ECHOES]
    if telling:
        return telling[0]
    if reports:
        return _from_report(*reports[0])
    if by_code:
        return by_code[0]
    return _from_child(child)


def _weight(cause: Cause) -> int:
    """Memory that ran out explains more than the eviction of the pods that were left."""
    return 0 if cause.cause is FailureClass.OUT_OF_MEMORY else 1


def _broke(pod: PodView) -> bool:
    return pod.phase == "Failed" or pod.disruption is not None or (pod.ended is not None and pod.ended.exit_code != 0)


def _end(pod: PodView) -> tuple[float, str]:
    return _seconds(pod.ended.finished if pod.ended else None), pod.name


def _seconds(time: datetime | None) -> float:
    """For sorting: what has no time comes last."""
    return math.inf if time is None else time.timestamp()


def _when(report: FailureReport) -> float:
    return report.time or math.inf


def _reported(stage: Stage, pods: Sequence[PodView]) -> Iterator[tuple[PodView, FailureReport]]:
    for pod in pods:
        report = pod.ended.report if pod.ended else None
        if report is not None and report.stage is stage and report.failure is not None:
            yield pod, report.failure


def _from_report(pod: PodView, failure: FailureReport) -> Cause:
    report = pod.ended.report if pod.ended else None
    return Cause(
        cause=failure.failure_class,
        reason=failure.reason,
        message=failure.message,
        hint=failure.hint,
        pod=pod,
        rank=None if report is None else report.rank,
    )


# ------------------------------------------------------------------------------------------- what was done to a pod

_MEMORY_HINT = (
    "Set resources.memory higher, or training.microBatchSize or preparation.maxLength lower, or shard or offload more "
    "under parallelism."
)
_NODE_REASONS = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity"})
"""`status.reason` of pods whose node went away or was told to shut down (kubelet, node lifecycle controller)."""
_NODE_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC", "TerminationByKubelet"})
_OWN_LIMIT = re.compile(r"exceeds? the (total )?limit|exceeded its local ephemeral storage", re.IGNORECASE)
_LOW_ON_MEMORY = re.compile(r"low on resource: memory", re.IGNORECASE)
_OVER_REQUEST = re.compile(r"was using \S+, request is \S+|consumption of memory", re.IGNORECASE)


def _done_to(pod: PodView) -> Cause | None:
    """What the kubelet, the scheduler or a controller did to the pod, in their words; None: nothing."""
    if pod.ended is not None and pod.ended.reason == "OOMKilled":
        return _out_of_memory(
            pod,
            "OOMKilled",
            f"Container memory ran out in pod {pod.name}: the kernel killed the process (exit code 137).",
        )
    if pod.status_reason == "Evicted":
        return _evicted(pod)
    said = f": {pod.status_message}" if pod.status_message else ""
    if pod.status_reason in _NODE_REASONS or pod.disruption in _NODE_DISRUPTIONS:
        return Cause(
            OperatorCause.NODE_LOST,
            pod.disruption or pod.status_reason or "NodeLost",
            f"Node {pod.node or 'unknown'} went away under pod {pod.name}{said}",
            "Nothing needs to be done: the stage goes on from its last checkpoint, on other nodes where there are any.",
            pod,
            node_at_fault=True,
        )
    if pod.status_reason == "UnexpectedAdmissionError" or (pod.status_reason or "").startswith("OutOf"):
        return Cause(
            OperatorCause.POD_REJECTED,
            pod.status_reason or "Rejected",
            f"Node {pod.node or 'unknown'} did not take pod {pod.name}{said}",
            "If it happens again, look at the node's device plugin: a GPU may be broken or taken.",
            pod,
            node_at_fault=True,
        )
    if pod.disruption is not None or pod.status_reason in ("Preempting", "Preempted"):
        return Cause(
            FailureClass.PREEMPTED,
            pod.disruption or pod.status_reason or "Preempted",
            f"Pod {pod.name} had to make room{said or '.'}",
            "Nothing needs to be done: the stage goes on from its last checkpoint. A higher "
            "runPolicy.priorityClassName is preempted less often.",
            pod,
        )
    if pod.ended is not None and pod.ended.reason == "ContainerStatusUnknown":
        return Cause(
            OperatorCause.NODE_LOST,
            "ContainerStatusUnknown",
            f"Node {pod.node or 'unknown'} lost sight of the container of pod {pod.name}.",
            "Nothing needs to be done: the stage goes on from its last checkpoint.",
            pod,
            node_at_fault=True,
        )
    return None


def _evicted(pod: PodView) -> Cause:
    said = pod.status_message or "the kubelet gave no reason"
    if _OWN_LIMIT.search(said):
        return Cause(
            FailureClass.STORAGE_FULL,
            "Evicted",
            f"Pod {pod.name} was evicted as it used more local storage than it may: {said}",
            "Keep data in the workspace, or raise the limit under template or resources.sharedMemory.",
            pod,
        )
    if _LOW_ON_MEMORY.search(said) and _OVER_REQUEST.search(said):
        return _out_of_memory(pod, "EvictedForMemory", f"Pod {pod.name} was evicted for its use of memory: {said}")
    return Cause(
        OperatorCause.EVICTED,
        "Evicted",
        f"Pod {pod.name} was evicted from node {pod.node or 'unknown'}: {said}",
        "Nothing needs to be done: the stage goes on from its last checkpoint, on other nodes where there are any.",
        pod,
        node_at_fault=True,
    )


def _out_of_memory(pod: PodView, reason: str, message: str) -> Cause:
    return Cause(FailureClass.OUT_OF_MEMORY, reason, message, _MEMORY_HINT, pod)


# ------------------------------------------------------------------------------------------------- exit code, child


def _from_exit_code(pod: PodView) -> Cause:
    """What the contract's table says about a process that could not say it itself."""
    assert pod.ended is not None
    code = pod.ended.exit_code
    if code == EXIT_OK:
        return _no_report(pod)
    cause = _CLASS_OF_EXIT_CODE.get(code)
    if cause is FailureClass.OUT_OF_MEMORY:
        return _out_of_memory(
            pod,
            "Killed",
            f"The process in pod {pod.name} was killed from outside (SIGKILL, exit code 137) and could not say why. "
            "Most often the kernel does this when memory runs out.",
        )
    if cause is FailureClass.PREEMPTED:
        return Cause(
            cause, "Terminated", f"The process in pod {pod.name} was told to end (SIGTERM) and did.",
            "Nothing needs to be done: the stage goes on from its last checkpoint.", pod,
        )  # fmt: skip
    if cause is None and code >= 128:
        return Cause(
            OperatorCause.KILLED,
            "KilledBySignal",
            f"The process in pod {pod.name} was ended by signal {code - 128} (exit code {code}) and could not say why.",
            "The log's last lines are in logTail; a crash in a native library leaves its trace there.",
            pod,
        )
    return Cause(
        FailureClass.PROGRAM if cause is None else cause,
        "NoReport",
        f"The process in pod {pod.name} ended with exit code {code} and left no report.",
        "The log's last lines are in logTail.",
        pod,
    )


def _no_report(pod: PodView | None) -> Cause:
    where = "" if pod is None else f" in pod {pod.name}"
    return Cause(
        OperatorCause.NO_REPORT,
        "NoReport",
        f"The process{where} ended with exit code 0 and left no report of success, so its results may not be whole.",
        "Something inside the process ended it early, e.g. os._exit in a library, or the pod was deleted before its "
        "last word could be read; see the log.",
        pod,
    )


def without_report(pods: Sequence[PodView]) -> Cause:
    """The child says that it succeeded, and no process of rank 0 does."""
    return _no_report(next((pod for pod in pods if pod.index in (None, 0)), None))


def _from_child(child: ChildView) -> Cause:
    """The child's own word, when no pod is left that says more."""
    what = f"{child.ref.kind} {child.ref.name}"
    if child.reason == "DeadlineExceeded":
        return Cause(
            OperatorCause.DEADLINE_EXCEEDED, "DeadlineExceeded", f"{what} ran longer than it may: {child.message}",
            "Raise runPolicy.activeDeadlineSeconds.",
        )  # fmt: skip
    return Cause(
        OperatorCause.CHILD_FAILED,
        camel(child.reason) or "ChildFailed",
        f"{what} failed, and no pod says why. It says itself: {child.message or child.reason or 'nothing'}",
        "The pods may have been deleted from outside; kubectl get events shows what happened to them.",
    )


def camel(reason: str) -> str:
    """A reason without what Kubernetes does not allow in one (`BackoffLimitExceeded/Evicted`)."""
    return re.sub(r"[^A-Za-z0-9_]", "", reason)


def on_node_lost(pod: PodView) -> Cause:
    """A pod that should be gone long since: its node does not answer."""
    known = _done_to(pod)
    if known is not None:
        return replace(known, node_at_fault=True)
    return Cause(
        OperatorCause.NODE_LOST,
        "PodDoesNotEnd",
        f"Pod {pod.name} was told to end and does not: node {pod.node or 'unknown'} does not answer.",
        "Nothing needs to be done: the stage goes on from its last checkpoint, on other nodes where there are any.",
        pod,
        node_at_fault=True,
    )
