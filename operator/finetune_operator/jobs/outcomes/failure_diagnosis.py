"""Diagnose a failed attempt: find the first cause over all its pods, never its echoes.

When one process breaks, the others lose their connection, the launcher reports a lost worker, and the Job reports that
its backoff limit is reached. All of that is true and none of it helps. So evidence is read in order of trust: the
trainer's own report, the actions of the kubelet, the scheduler and the node lifecycle controller on a pod, the exit
code by the contract's table, and last the child's own status.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from pydantic import ValidationError

from finetune_contract.causes import ECHOES, of_exit
from finetune_contract.choices import Stage
from finetune_contract.layout import CLASS_OF_EXIT_CODE, EXIT_CODES, EXIT_OK, FailureClass, retryable
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.jobs.outcomes.remedies import MOST_LOGS, Cause, CauseClass, OperatorCause
from finetune_operator.jobs.state.decision_types import ChildView, PodView
from finetune_operator.spec.status_times import stamp

_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
"""Exit code in the message of a Job's pod failure policy (kubernetes `pkg/controller/job/pod_failure_policy.go`)."""
_POD_NAME = re.compile(r"\b[Pp]od [^\s/]+/(\S+)")
"""Name of the pod in the same message."""
_KILLED_BY_SIGNAL = "KilledBySignal"
_KILLED = ("Killed", _KILLED_BY_SIGNAL)
_UNSPECIFIC_REASONS = frozenset({"UnexpectedError", "NoReport", *_KILLED})
"""Reasons of reports that only state how a process ended: by an error that the trainer has no class for, or, as its
launcher infers (`finetune_contract.causes.of_exit`), without a report. Any of these may follow from the loss of others.
"""


def first_cause(stage: Stage, child: ChildView, pods: Sequence[PodView]) -> Cause:
    """Return the first cause of the failure of `child`, an attempt at `stage`; `pods` are the attempt's."""
    cause = _first(stage, child, pods)
    if cause.pod is None:
        return cause
    # Its log may be deleted with it, or be empty: then only those of the others can be read.
    # Deleted pods come last: their logs were read when their deletion began.
    others = sorted(
        (pod for pod in pods if (pod.phase == "Failed" or pod.deleted) and pod is not cause.pod),
        key=lambda pod: (pod.deleted, _end(pod)),
    )
    return replace(cause, pods_to_read_logs_from=tuple(others[:MOST_LOGS]))


def _first(stage: Stage, child: ChildView, pods: Sequence[PodView]) -> Cause:
    failed = sorted((pod for pod in pods if _has_failed(pod)), key=_end)
    reports = sorted(_reported(stage, failed), key=lambda one: one[1].known_time)
    original = [one for one in reports if one[1].failure_class not in ECHOES]
    silent_nodes = sorted((pod for pod in pods if _is_on_silent_node(pod)), key=_silent_since)
    ended_by_cluster = (infrastructure_cause(pod) for pod in (*failed, *silent_nodes))
    by_infrastructure = [cause for cause in ended_by_cluster if cause is not None]
    for pod, report in original:
        if not (by_infrastructure and report.reason in _UNSPECIFIC_REASONS):
            return _from_report(pod, report)
    if by_infrastructure:
        return min(by_infrastructure, key=lambda one: _weight(one))
    reporting_pods = {pod.name for pod, _ in reports}
    silent = [pod for pod in failed if pod.ended is not None and pod.name not in reporting_pods]
    by_code = [_from_exit_code(pod) for pod in silent]
    own_failures = [one for one in by_code if one.cause not in ECHOES]
    if own_failures:
        return own_failures[0]
    if (deleted := _deleted(pods, failed, reports)) is not None:
        return deleted
    if reports:
        return _from_report(*reports[0])
    if by_code:
        return by_code[0]
    return _from_child(child, pods)


def _deleted(
    pods: Sequence[PodView], failed: Sequence[PodView], reports: Sequence[tuple[PodView, FailureReport]]
) -> Cause | None:
    """Return the cause if somebody deleted a pod and everything else that is known may be an echo of that.

    Controllers delete the other pods of a gang once one has failed, so the deletion has to precede the first failure.
    Times of deletions are whole seconds; a first report of class PREEMPTED proves the order without them. Of several
    deleted in one second, the cause is one that is gone without an end, else the first to report or to end: it is why
    the others had to.
    """
    reported = {one.name: failure.known_time for one, failure in reports}
    deletions = [
        (since, _order_of_deletions(pod, reported.get(pod.name)), pod)
        for pod in pods
        if pod.phase != "Succeeded" and (since := _deletion(pod)) is not None
    ]
    if not deletions:
        return None
    since, _, pod = min(deletions, key=lambda one: one[:2])
    preemption_reported = bool(reports) and reports[0][1].failure_class is FailureClass.PREEMPTED
    first_failure = min(
        (one.known_time for _, one in reports), default=min((_end(one)[0] for one in failed), default=math.inf)
    )
    if not preemption_reported and since + 1 > first_failure:
        return None
    detail = next((f" {failure.message}" for reporting_pod, failure in reports if reporting_pod is pod), "")
    return _pod_deleted(pod, detail)


def _deletion(pod: PodView) -> float | None:
    """Return when the pod's deletion was requested; infinity: at an unknown time, as it is gone; None: it was not."""
    if pod.deleting_since is not None:
        return pod.deleting_since.timestamp()
    return math.inf if pod.deleted and pod.ended is None else None


def _order_of_deletions(pod: PodView, reported: float | None) -> tuple[float, str]:
    """Return the sort key among pods deleted in one second; `reported`: time of the pod's report."""
    if pod.deleted and pod.ended is None:
        return -math.inf, pod.name
    end, name = _end(pod)
    return end if reported is None else reported, name


def _pod_deleted(pod: PodView, detail: str) -> Cause:
    return Cause(
        FailureClass.PREEMPTED,
        "PodDeleted",
        f"Pod {pod.name} was deleted, and not by the operator.{detail}",
        f"{_HINTS[FailureClass.PREEMPTED]} To pause a job, set runPolicy.suspend.",
        pod,
    )


def _weight(cause: Cause) -> int:
    """Return the sort key: memory that ran out explains more than the eviction of the remaining pods."""
    return 0 if cause.cause is FailureClass.OUT_OF_MEMORY else 1


def _has_failed(pod: PodView) -> bool:
    return pod.phase == "Failed" or pod.disruption is not None or (pod.ended is not None and pod.ended.exit_code != 0)


def _is_on_silent_node(pod: PodView) -> bool:
    """Return whether the pod may be the loss that the others report, which nobody can report from its node."""
    return pod.node_silent_since is not None and not _has_failed(pod)


def _silent_since(pod: PodView) -> tuple[float, str]:
    return _seconds(pod.node_silent_since), pod.name


def _end(pod: PodView) -> tuple[float, str]:
    return _seconds(pod.ended.finished if pod.ended else None), pod.name


def _seconds(time: datetime | None) -> float:
    """Return the sort key; None comes last."""
    return math.inf if time is None else time.timestamp()


def _reported(stage: Stage, pods: Sequence[PodView]) -> Iterator[tuple[PodView, FailureReport]]:
    for pod in pods:
        report = pod.ended.report if pod.ended else None
        if report is not None and report.stage is stage and report.failure is not None:
            yield pod, report.failure


def _from_report(pod: PodView, failure: FailureReport) -> Cause:
    report = pod.ended.report if pod.ended else None
    crashed = failure.failure_class is FailureClass.PROGRAM and failure.reason == _KILLED_BY_SIGNAL
    return Cause(
        # 128 + the signal is worth another try by the contract's table.
        cause=FailureClass.KILLED if crashed else failure.failure_class,
        reason=failure.reason,
        message=failure.message,
        hint=_hint(failure),
        pod=pod,
        rank=None if report is None else report.rank,
    )


# ---------------------------------------------------------------------------------------- pods ended by the cluster

_MEMORY_HINT = (
    "Raise resources.memory, lower training.microBatchSize or preparation.maxLength, or shard or offload more under "
    "parallelism. For a script, change its own settings."
)
_NODE_REASONS = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated"})
"""`status.reason` of pods whose node was lost or shut down (kubelet, node lifecycle controller)."""
_ROOM_REASONS = frozenset({"Preempting", "Preempted"})
"""The kubelet's preemption for a critical pod has the disruption reason TerminationByKubelet, as a shutdown has."""
_REJECTED_REASONS = frozenset({"UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity"})
"""Refusals of the kubelet that another node may not have; `OutOf...` is one more."""
_NODE_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC", "TerminationByKubelet"})
_OWN_LIMIT = re.compile(r"exceeds? the (total )?limit|exceeded its local ephemeral storage", re.IGNORECASE)
_LOW_ON_MEMORY = re.compile(r"low on resource: memory", re.IGNORECASE)
_OVER_REQUEST = re.compile(r"was using \S+, request is \S+|consumption of memory", re.IGNORECASE)


def infrastructure_cause(pod: PodView) -> Cause | None:
    """Return the cause if the kubelet, the scheduler or a controller ended the pod; None: none of them did."""
    if pod.ended is not None and pod.ended.reason == "OOMKilled":
        return _out_of_memory(
            pod,
            "OOMKilled",
            f"Container memory ran out in pod {pod.name}: the kernel killed the process (exit code 137).",
        )
    if pod.status_reason == "Evicted":
        return _evicted(pod)
    detail = f": {pod.status_message}" if pod.status_message else "."
    preempted = pod.status_reason in _ROOM_REASONS
    if not preempted and (pod.status_reason in _NODE_REASONS or pod.disruption in _NODE_DISRUPTIONS):
        return Cause(
            OperatorCause.NODE_LOST,
            pod.disruption or pod.status_reason or "NodeLost",
            f"Node {pod.node or 'unknown'} was lost or shut down with pod {pod.name} on it{detail}",
            "No action is needed: the stage resumes from its last checkpoint, on other nodes if there are any.",
            pod,
            node_at_fault=True,
        )
    if pod.status_reason in _REJECTED_REASONS or (pod.status_reason or "").startswith("OutOf"):
        return Cause(
            OperatorCause.POD_REJECTED,
            pod.status_reason or "Rejected",
            f"Node {pod.node or 'unknown'} rejected pod {pod.name}{detail}",
            "If it happens again, check the node's device plugin: a GPU may be broken or in use.",
            pod,
            node_at_fault=True,
        )
    if pod.disruption is not None or preempted:
        return Cause(
            FailureClass.PREEMPTED,
            (pod.status_reason if preempted else pod.disruption) or "Preempted",
            f"Pod {pod.name} was preempted or evicted{detail}",
            "No action is needed: the stage resumes from its last checkpoint. With a higher priority "
            "(runPolicy.priorityClassName) it is preempted less often.",
            pod,
        )
    if pod.ended is not None and pod.ended.reason == "ContainerStatusUnknown":
        return Cause(
            OperatorCause.NODE_LOST,
            "ContainerStatusUnknown",
            f"Node {pod.node or 'unknown'} lost track of the container of pod {pod.name}.",
            "No action is needed: the stage resumes from its last checkpoint.",
            pod,
            node_at_fault=True,
        )
    if pod.node_silent_since is not None:
        return Cause(
            OperatorCause.NODE_LOST,
            "NodeNotReady",
            f"Node {pod.node or 'unknown'} has not responded since {stamp(pod.node_silent_since)}, with pod {pod.name} "
            "on it.",
            "No action is needed: the stage resumes from its last checkpoint, on other nodes if there are any.",
            pod,
            node_at_fault=True,
        )
    return _start_failure(pod, detail)


_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of the kubelet for a container that its runtime could not start, with exit code 128."""


def _start_failure(pod: PodView, detail: str) -> Cause | None:
    """Return the cause for a container that never ran for a reason in no list above, with the kubelet's message."""
    if pod.ended is not None and pod.ended.reason in _NOT_STARTED:
        message = pod.ended.message or "the runtime gives no reason"
        return Cause(
            OperatorCause.CHILD_FAILED,
            pod.ended.reason,
            f"The container of pod {pod.name} could not be started: {message}",
            "Check that the image is a trainer image and, on GPU nodes, that the container runtime works.",
            pod,
        )
    if pod.ended is None and pod.phase == "Failed" and pod.status_reason:
        return Cause(
            OperatorCause.CHILD_FAILED,
            condition_reason(pod.status_reason),
            f"Pod {pod.name} failed before its container ran ({pod.status_reason}){detail}",
            "Correct this in a new job; the cause is often a field under template.",
            pod,
        )
    return None


def _evicted(pod: PodView) -> Cause:
    detail = pod.status_message or "the kubelet gave no reason"
    if _OWN_LIMIT.search(detail):
        return Cause(
            FailureClass.STORAGE_FULL,
            "Evicted",
            f"Pod {pod.name} was evicted for exceeding its local storage limit: {detail}",
            "Keep data in the workspace, or raise the limit under template or resources.sharedMemory.",
            pod,
        )
    if _LOW_ON_MEMORY.search(detail) and _OVER_REQUEST.search(detail):
        return _out_of_memory(pod, "EvictedForMemory", f"Pod {pod.name} was evicted for its memory use: {detail}")
    return Cause(
        OperatorCause.EVICTED,
        "Evicted",
        f"Pod {pod.name} was evicted from node {pod.node or 'unknown'}: {detail}",
        "No action is needed: the stage resumes from its last checkpoint, on other nodes if there are any.",
        pod,
        node_at_fault=True,
    )


def _out_of_memory(pod: PodView | None, reason: str, message: str) -> Cause:
    return Cause(FailureClass.OUT_OF_MEMORY, reason, message, _MEMORY_HINT, pod)


# ------------------------------------------------------------------------------------------------- exit code, child

_SEE_LOG = "See the end of the log in logTail."
_HINTS: Mapping[CauseClass, str] = {
    FailureClass.OUT_OF_MEMORY: _MEMORY_HINT,
    FailureClass.PREEMPTED: "No action is needed: the stage resumes from its last checkpoint.",
}
"""Hints for a cluster, where the operator retries by itself."""


def _from_exit_code(pod: PodView) -> Cause:
    """Return the cause by the contract's exit codes, for a process that could not report it."""
    assert pod.ended is not None
    if pod.ended.exit_code == EXIT_OK:
        return _no_report(pod)
    if pod.deleting_until is not None and pod.ended.exit_code == EXIT_CODES[FailureClass.KILLED]:
        return Cause(
            FailureClass.PREEMPTED,
            "Terminated",
            f"Pod {pod.name} was terminated and then killed at the end of its grace period (exit code 137).",
            _HINTS[FailureClass.PREEMPTED],
            pod,
        )
    return _by_code(pod.ended.exit_code, f"in pod {pod.name}", pod)


def _hint(failure: FailureReport) -> str:
    """Return the report's own hint, unless it is for somebody at a terminal who has to restart the process."""
    if failure.failure_class is FailureClass.PREEMPTED:
        return _HINTS[FailureClass.PREEMPTED]
    return _SEE_LOG if failure.reason == "UnexpectedError" else failure.hint


def _by_code(code: int, where: str, pod: PodView | None) -> Cause:
    exit = of_exit(code, subject=f"The process {where}")
    cause = CLASS_OF_EXIT_CODE.get(code) or (FailureClass.KILLED if retryable(code) else FailureClass.PROGRAM)
    hint = exit.hint if exit.reason in _KILLED else _HINTS.get(cause, _SEE_LOG)
    return Cause(cause, exit.reason, exit.message + _on_unreadable_report(pod), hint, pod)


def _on_unreadable_report(pod: PodView | None) -> str:
    """Return a sentence about a termination message that is a report but for a value; an empty text for any other."""
    if pod is None or pod.ended is None or not pod.ended.message:
        return ""
    try:
        TrainerReport.model_validate_json(pod.ended.message)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        if any(one["type"] in ("json_invalid", "model_type", "missing") for one in problems):
            return ""
        place = ".".join(str(part) for part in problems[0]["loc"])
        return f" Its report was ignored: {place}: {problems[0]['msg']}."
    return ""


def _deleted_before_its_end(pod: PodView) -> bool:
    """Return True if somebody deleted a running pod: its last state, with the report, can be lost with it."""
    if pod.ended is None:
        return pod.deleted or pod.deleting_since is not None
    return pod.deleting_since is not None and pod.deleting_since.timestamp() <= _end(pod)[0]


def _no_report(pod: PodView | None) -> Cause:
    if pod is not None and _deleted_before_its_end(pod):
        return _pod_deleted(pod, " Its report was lost with it.")
    exit = of_exit(EXIT_OK, subject="The process" if pod is None else f"The process in pod {pod.name}")
    return Cause(
        OperatorCause.NO_REPORT,
        exit.reason,
        exit.message + _on_unreadable_report(pod),
        "The process may have exited early, e.g. by os._exit in a library; see the log.",
        pod,
    )


def reported_success(pods: Sequence[PodView]) -> TrainerReport | None:
    """Return the report of rank 0 that the stage succeeded; None if there is none."""
    reports = (pod.ended.report for pod in pods if pod.ended is not None)
    return next((one for one in reports if one is not None and one.outcome == "succeeded" and one.rank == 0), None)


def without_report(pods: Sequence[PodView]) -> Cause:
    """Return the cause when the child has succeeded, and no report of rank 0 confirms it."""
    return _no_report(next((pod for pod in pods if pod.index in (None, 0)), None))


def _from_child(child: ChildView, pods: Sequence[PodView]) -> Cause:
    """Return the child's own reason, if no pod has a better one; a Job's pod failure policy repeats that of a pod."""
    object_name = f"{child.ref.kind} {child.ref.name}"
    if child.reason == "PodFailurePolicy":
        name = match[1] if (match := _POD_NAME.search(child.message)) else None
        # Its last known state may be from before its end: its report was deleted with it, or is on its way.
        pod = next((pod for pod in pods if pod.name == name), None)
        if "DisruptionTarget" in child.message:
            return Cause(
                FailureClass.PREEMPTED,
                "DisruptionTarget",
                f"A pod of {object_name} was disrupted: {child.message}",
                "No action is needed: the stage resumes from its last checkpoint.",
                pod,
                from_child_status=True,
            )
        if code := _EXIT_CODE.search(child.message):
            cause = _by_code(int(code[1]), f"of {object_name}" if pod is None else f"in pod {pod.name}", pod)
            return replace(cause, exit_code=int(code[1]), from_child_status=True)
    if child.reason == "DeadlineExceeded":
        return Cause(
            OperatorCause.DEADLINE_EXCEEDED,
            "DeadlineExceeded",
            f"{object_name} exceeded its deadline: {child.message}",
            "Raise runPolicy.activeDeadlineSeconds.",
        )  # fmt: skip
    return Cause(
        OperatorCause.CHILD_FAILED,
        condition_reason(child.reason) or "ChildFailed",
        f"{object_name} failed, and no pod reports a cause. Its status: {child.message or child.reason or 'no reason'}",
        "The pods may have been deleted by another client; see kubectl get events.",
    )


def condition_reason(reason: str) -> str:
    """Return a reason without characters that Kubernetes does not allow in one (`BackoffLimitExceeded/Evicted`)."""
    return re.sub(r"[^A-Za-z0-9_]", "", reason)


def on_node_lost(pod: PodView) -> Cause:
    """Return the cause for a pod that should have ended long ago: its node does not answer."""
    cause = infrastructure_cause(pod)
    if cause is not None:
        return replace(cause, node_at_fault=True)
    return Cause(
        OperatorCause.NODE_LOST,
        "PodDoesNotEnd",
        f"Pod {pod.name} does not terminate: node {pod.node or 'unknown'} does not respond.",
        "No action is needed: the stage resumes from its last checkpoint, on other nodes if there are any.",
        pod,
        node_at_fault=True,
    )
