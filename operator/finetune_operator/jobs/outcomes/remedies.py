"""A failure with a known cause: its class, its message, and its remedy.

The classes of the contract are those that a trainer can report; the operator has its own for failures around it. Every
class has one remedy, which only `REMEDIES` defines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import TrainerReport, shortened
from finetune_operator.jobs.state.decision_types import PodView
from finetune_operator.spec.printable import printable
from finetune_operator.spec.redaction import Redactor
from finetune_operator.spec.types import FailureStatus

MESSAGE_LIMIT = 4096
LOG_LIMIT = 4096
"""Characters of a log tail in the status."""
MOST_LOGS = 3
"""Pods whose logs are read for one failure."""


class Remedy(StrEnum):
    """Consequence of a failure."""

    FAIL = "fail"
    """Fail the job: another attempt would fail the same way."""
    FREE = "free"
    """Start a new attempt, which counts against nothing: the infrastructure caused the failure."""
    ADAPT = "adapt"
    """Start a new attempt with a plan that needs less memory."""
    REPLAN = "replan"
    """Start a new attempt with a plan for the measured GPUs, which counts against nothing, once for a kind of GPU."""
    COUNTED = "counted"
    """Start a new attempt, which counts against `runPolicy.maxRestarts`: it may succeed another time."""


class OperatorCause(StrEnum):
    """Classes of failures that no trainer can report, beside the contract's `FailureClass`."""

    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    POD_REJECTED = "PodRejected"
    IMAGE_PULL = "ImagePull"
    CONTAINER_CONFIG = "ContainerConfig"
    CONTAINER_CREATING = "ContainerCreating"
    UNSCHEDULABLE = "Unschedulable"
    SPOT_UNAVAILABLE = "SpotUnavailable"
    PODS_GONE = "PodsGone"
    CHILD_DELETED = "ChildDeleted"
    CHILD_FAILED = "ChildFailed"
    NAME_TAKEN = "NameTaken"
    REFUSED = "Refused"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    COST_EXCEEDED = "CostExceeded"
    NO_REPORT = "NoReport"
    PLAN_REFUSED = "PlanRefused"
    NO_PROGRESS = "NoProgress"
    INTERNAL_ERROR = "InternalError"


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
    FailureClass.KILLED: Remedy.COUNTED,
    FailureClass.PREEMPTED: Remedy.FREE,
    FailureClass.COLLECTIVE: Remedy.FREE,
    FailureClass.REPLANNED: Remedy.REPLAN,
    # Storage, Hub and git host may be lost for good, or wrong in the job: retried, but not for ever.
    FailureClass.STORAGE_LOST: Remedy.COUNTED,
    FailureClass.HUB_UNAVAILABLE: Remedy.COUNTED,
    FailureClass.CODE_UNAVAILABLE: Remedy.COUNTED,
    OperatorCause.NODE_LOST: Remedy.FREE,
    OperatorCause.EVICTED: Remedy.FREE,
    OperatorCause.POD_REJECTED: Remedy.FREE,
    OperatorCause.PODS_GONE: Remedy.FREE,
    OperatorCause.IMAGE_PULL: Remedy.FAIL,
    OperatorCause.CONTAINER_CONFIG: Remedy.FAIL,
    OperatorCause.CONTAINER_CREATING: Remedy.FAIL,
    OperatorCause.UNSCHEDULABLE: Remedy.FAIL,
    OperatorCause.SPOT_UNAVAILABLE: Remedy.FAIL,
    OperatorCause.CHILD_DELETED: Remedy.COUNTED,
    OperatorCause.CHILD_FAILED: Remedy.COUNTED,
    OperatorCause.NAME_TAKEN: Remedy.FAIL,
    OperatorCause.REFUSED: Remedy.FAIL,
    OperatorCause.DEADLINE_EXCEEDED: Remedy.FAIL,
    OperatorCause.COST_EXCEEDED: Remedy.FAIL,
    OperatorCause.NO_REPORT: Remedy.COUNTED,
    OperatorCause.PLAN_REFUSED: Remedy.FAIL,
    OperatorCause.NO_PROGRESS: Remedy.COUNTED,
    OperatorCause.INTERNAL_ERROR: Remedy.FAIL,
}

_EVIDENT = frozenset(
    {OperatorCause.NODE_LOST, OperatorCause.EVICTED, OperatorCause.POD_REJECTED, OperatorCause.PODS_GONE}
)
"""Causes that only Kubernetes itself reports: the infrastructure, or somebody with access to it, ended the pods."""


@dataclass(frozen=True)
class Cause:
    """Cause of one failure, with its message and hint."""

    cause: CauseClass
    reason: str
    message: str
    hint: str = ""
    pod: PodView | None = None
    """Pod that failed first."""
    rank: int | None = None
    exit_code: int | None = None
    node_at_fault: bool = False
    """True if another attempt should avoid the pod's node."""
    pods_to_read_logs_from: tuple[PodView, ...] = ()
    """Pods whose logs are shown if it is not known which one failed, or if that one has no log."""
    from_child_status: bool = False
    """True if the cause comes from the child's status; the pod's own report may still follow."""

    @property
    def report(self) -> TrainerReport | None:
        """Report of the pod that failed first."""
        return None if self.pod is None or self.pod.ended is None else self.pod.ended.report

    @property
    def remedy(self) -> Remedy:
        return REMEDIES[self.cause]

    @property
    def evident(self) -> bool:
        """True if Kubernetes itself reports that the infrastructure, or somebody with access to it, ended the pod. A
        process's report on its peers, and its exit code, may have any cause.
        """
        if self.cause in _EVIDENT:
            return True
        pod = self.pod
        if self.from_child_status or pod is None:
            # Only of a deleted pod nothing but the child's status is left.
            return self.cause is FailureClass.PREEMPTED
        ended = None if pod.ended is None else pod.ended.finished
        deleted_before_end = pod.deleting_since is not None and (ended is None or pod.deleting_since <= ended)
        return pod.disruption is not None or pod.deleted or deleted_before_end

    @property
    def node_to_avoid(self) -> str | None:
        """Node to avoid."""
        return self.pod.node if self.pod is not None and self.node_at_fault else None

    def to_failure_status(
        self, stage: Stage | None, attempt: int | None, logs: Sequence[tuple[str, str]] = ()
    ) -> FailureStatus:
        """Return the failure as the status holds it."""
        pod = self.pod
        ended = None if pod is None else pod.ended
        return FailureStatus(
            failure_class=self.cause.value,
            reason=self.reason,
            # A program's error may quote values that it was given.
            message=shortened(printable(Redactor().text(self.message)), MESSAGE_LIMIT),
            hint=printable(self.hint) or None,
            stage=stage,
            attempt=attempt,
            pod=None if pod is None else pod.name,
            node=None if pod is None else pod.node,
            rank=self.rank,
            exit_code=ended.exit_code if ended is not None and self.exit_code is None else self.exit_code,
            log_tail=self._tail(dict(logs)),
        )

    def _tail(self, logs: Mapping[str, str]) -> str | None:
        """Return the tail of the pod's log, or those of the witnesses if there is no such pod, or its log is empty."""
        printed = {name: printable(text) for name, text in logs.items()}
        tail = "" if self.pod is None else printed.get(self.pod.name, "").rstrip()
        return tail[-LOG_LIMIT:] or _joined_tails(self.pods_to_read_logs_from, printed)


def _joined_tails(pods: Sequence[PodView], logs: Mapping[str, str]) -> str | None:
    """Return a share of each pod's log below a line with its name."""
    tails = [(pod.name, text) for pod in pods if (text := logs.get(pod.name, "").rstrip())]
    share = LOG_LIMIT // max(1, len(tails))
    parts = [f"==> {name} <==\n{text[len(name) + len('==>  <==') + 2 - share :]}" for name, text in tails]
    return "\n".join(parts) or None
