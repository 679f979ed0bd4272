"""Diagnose why no server of an endpoint answers, or one of several does not start: by its pods, then by their owner."""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_operator.jobs.render.claims import storage
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import EndpointView, PodView
from finetune_operator.plan.types.names import JobNames

SERVE = Stage.SERVE
WAITING = "WaitingForPods"
"""Reason while nothing is wrong, and a server is not ready yet."""
MESSAGE_LIMIT = 1024
"""Characters of a server's termination message."""
ATTACH = timedelta(seconds=60)
"""Longest wait of a pod on its node for volumes that is not reported: attaching a disk takes some 10 to 40 s."""


def view_of(state: ReconcileState, revision: int | None) -> EndpointView | None:
    """Return the object that runs the servers of a revision, unless it is being deleted."""
    return next((one for one in state.observed.endpoints if one.revision == revision and not one.deleting), None)


def not_ready_reason(state: ReconcileState) -> tuple[str, str]:
    """Return why no server of the wanted revision answers: by the pods, the newest first, else by their owner."""
    status = state.status.endpoint
    revision = 1 if status is None or status.target is None else status.target
    for pod in _pods(state, revision):
        if (problem := _pod_problem(state, pod)) is not None:
            return problem
    servers, name = view_of(state, revision), JobNames.of(state.job.name).servers(revision)
    if servers is None:
        return WAITING, f"Waiting for the servers of {name} to be created."
    kind = servers.ref.kind
    if servers.stuck is not None:
        return "ProgressDeadlineExceeded", servers.stuck
    if servers.problem is not None:
        reason, detail = servers.problem
        return reason, f"KServe reports for {kind} {name}: {detail}"
    if not servers.has_deployment:
        return "WaitingForKServe", (
            f"KServe has not created the servers of {kind} {name} yet. If this persists, check that its controller "
            "runs (kubectl get pods -A -l control-plane=kserve-controller-manager)."
        )
    return WAITING, f"Waiting for a server of {kind} {name} to be ready."


def start_problem(state: ReconcileState, revision: int) -> str | None:
    """Return why the newest pod of a revision that cannot start does not, while others may answer."""
    for pod in _pods(state, revision):
        if pod.unschedulable is not None or pod.waiting is not None or _waits_for_volume(state, pod):
            problem = _pod_problem(state, pod)
            return None if problem is None else problem[1]
    return None


def volume_deadline(state: ReconcileState) -> datetime | None:
    """Return when the first pod that waits on its node for volumes has waited for too long."""
    waiting = [pod for pod in state.observed.pods if pod.stage is Stage.SERVE and _mounts(pod)]
    return min((at for pod in waiting if (at := _deadline(pod)) is not None and at > state.now), default=None)


def _pods(state: ReconcileState, revision: int) -> list[PodView]:
    """Return the pods of a revision that are to stay, the newest first."""
    pods = sorted(state.pods(SERVE, revision), key=lambda pod: (pod.created, pod.name), reverse=True)
    return [pod for pod in pods if not pod.deleted and pod.deleting_until is None]


def _pod_problem(state: ReconcileState, pod: PodView) -> tuple[str, str] | None:
    if pod.unschedulable is not None:
        return "Unschedulable", f"Pod {pod.name} is unschedulable: {pod.unschedulable}"
    ended = pod.ended
    if ended is not None:
        message = ended.report.failure.message if ended.report and ended.report.failure else ended.message.strip()
        last = message[-MESSAGE_LIMIT:] or ended.reason
        reason = pod.waiting.reason if pod.waiting is not None else "ServerEnded"
        return reason, f"The server in pod {pod.name} exited with code {ended.exit_code}: {last}"
    if pod.waiting is not None:
        return pod.waiting.reason, f"Pod {pod.name} cannot start: {pod.waiting.reason}: {pod.waiting.message}"
    if _waits_for_volume(state, pod):
        return "VolumeInUse", _volume_message(state, pod)
    return None


def _mounts(pod: PodView) -> bool:
    """Return whether a pod has its node and is starting without a reported problem."""
    return pod.phase == "Pending" and pod.scheduled is not None and pod.started_at is None and pod.waiting is None


def _deadline(pod: PodView) -> datetime | None:
    return None if pod.scheduled is None else pod.scheduled + ATTACH


def _server_on_other_node(state: ReconcileState, pod: PodView) -> PodView | None:
    """Return a server, of any revision, that runs on another node than `pod`."""
    others = (one for one in state.observed.pods if one.stage is Stage.SERVE and not one.over and one.started_at)
    return next((one for one in others if one.node is not None and one.node != pod.node), None)


def _waits_for_volume(state: ReconcileState, pod: PodView) -> bool:
    """Return whether a pod waits for a claim that the node of another server holds. The kubelet reports it only by an
    event of the pod, FailedAttachVolume (Multi-Attach error).
    """
    at = _deadline(pod) if _mounts(pod) else None
    if at is None or at > state.now or not _claims(state):
        return False
    return _server_on_other_node(state, pod) is not None


def _claims(state: ReconcileState) -> list[str]:
    """Return the claims that servers mount."""
    volumes = storage(state.spec, JobNames.of(state.job.name), Stage.SERVE).volumes
    return [name for one in volumes if (name := one.claim) is not None]


def _volume_message(state: ReconcileState, pod: PodView) -> str:
    claims = _claims(state)
    other = _server_on_other_node(state, pod)
    held = "" if other is None else f", while pod {other.name} runs on node {other.node}"
    return (
        f"Pod {pod.name} has waited for its volumes on node {pod.node} for over {ATTACH.total_seconds():.0f} s"
        f"{held}. A ReadWriteOnce claim serves one node (kubectl get pvc {' '.join(claims)}): keep "
        "the servers on one node by spec.template.nodeSelector, or use a ReadWriteMany claim."
    )
