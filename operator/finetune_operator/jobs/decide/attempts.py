"""Follow the attempts of each stage: read the newest child and update the status.

A child whose attempt is higher than the status has was created before the status could be written: it is adopted, so
that nothing is created twice. A child that the status names and that does not exist was deleted by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.causes import ECHOES
from finetune_contract.choices import Stage
from finetune_contract.layout import CLASS_OF_EXIT_CODE
from finetune_operator.jobs.outcomes.attempt_outcomes import attempt_failed, stage_succeeded
from finetune_operator.jobs.outcomes.failure_diagnosis import (
    first_cause,
    on_node_lost,
    reported_success,
    without_report,
)
from finetune_operator.jobs.outcomes.gang_placement import follow_gang
from finetune_operator.jobs.outcomes.hang_detection import hang_cause, pods_to_read_logs_from, progress_gap
from finetune_operator.jobs.outcomes.pod_replacement import current_pods, pods_with_cause, report_replaced_pods
from finetune_operator.jobs.outcomes.remedies import Cause, OperatorCause
from finetune_operator.jobs.outcomes.spot import follow_spot_wait, start_spot_clock, words
from finetune_operator.jobs.outcomes.stalls import follow_wait
from finetune_operator.jobs.outcomes.status import NO_PROGRESS, condition
from finetune_operator.jobs.outcomes.waiting_reasons import pod_wait
from finetune_operator.jobs.render.render_types import Attempt
from finetune_operator.jobs.state.decision_state import ReconcileState, reference
from finetune_operator.jobs.state.decision_types import ChildView, PodView
from finetune_operator.jobs.state.planned import configuration, with_findings
from finetune_operator.jobs.state.results import nodes
from finetune_operator.jobs.state.usage import with_pod_times
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.status_times import earliest, stamp
from finetune_operator.spec.types import StageStatus

NODE_LOST_SECONDS = 30
"""A pod that still exists this long after the grace period of its deletion has a node that does not answer."""
UNNOTICED_SECONDS = 300
"""Time for a child's controller to notice that its pods have succeeded, e.g. while it is being updated."""
REPORT_DELAY_SECONDS = 30
"""Maximum lag of a pod's update behind that of its child."""
BETTER_CAUSE_SECONDS = 10
"""Same limit when a cause is known already and a better one may follow."""
READ_SECONDS = 1
"""Delay before logs that were not read yet are requested again."""
FAILED_POD_SECONDS = 60
"""Maximum run time of a child after one of its pods has failed: its own controller usually ends it at once."""
ECHO_SECONDS = 90
"""Same for a pod that reports the loss of others: pods of a silent node are marked after 50 s, seen after 60 s."""


def settle(state: ReconcileState) -> ReconcileState:
    """Process the current stage, and the next ones as stages succeed."""
    while state.end is None and (current := state.current) is not None and current.name is not Stage.SERVE:
        state = _process_stage(state, current)
        after = state.current
        if after is not None and after.name == current.name:
            break
    return state


def _process_stage(state: ReconcileState, stage: StageStatus) -> ReconcileState:
    newest = next(iter(state.children(stage.name)[-1:]), None)
    if newest is not None and newest.attempt > stage.attempt:
        state, stage = _adopted(state, stage, newest)
        if _superseded(state, stage, newest):
            return _stop_outdated(state, stage, newest)
    if stage.state != "Running":
        return state
    state = _with_reports(state, stage)
    if newest is None or newest.attempt < stage.attempt:
        return state if state.spec.run_policy.suspend else attempt_failed(state, stage, _deleted(stage))
    every = state.pods(stage.name, stage.attempt)
    pods = current_pods(newest, every)
    match newest.state:
        case "Succeeded":
            return _succeeded(state, stage, newest, pods)
        case "Failed":
            return _failed(state, stage, newest, pods_with_cause(newest, every))
        case "Pending" | "Running" | "Suspended":
            state, stage = report_replaced_pods(state, stage, newest, every)
            return _underway(state, stage, newest, pods)


def _with_reports(state: ReconcileState, stage: StageStatus) -> ReconcileState:
    """Add the reports of the attempt: stored progress is older, and the next attempt depends on the last step."""
    progress, stored = state.observed.progress, state.stored(stage.name)
    recorded = stored is not None and (stored.state, stored.attempt) == ("Running", stage.attempt)
    if progress is None or not recorded:
        return state
    return with_findings(state.with_status(progress=progress), state.observed.findings)


def _adopted(state: ReconcileState, stage: StageStatus, child: ChildView) -> tuple[ReconcileState, StageStatus]:
    started = child.started or child.created
    current = stage.model_copy(
        update={
            "state": "Running",
            "attempt": child.attempt,
            "start_time": started,
            "completion_time": None,
            "next_attempt_time": None,
            "blocked_since": None,
            "capacity": child.capacity,
            "nodes_since": None,
            "running_since": None,
            "replaced_pods": 0,
            "child": reference(child.ref),
        }
    )
    first = state.status.start_time or started
    return (
        start_spot_clock(state, child.capacity, started)
        .with_stage(current)
        .with_status(start_time=first, progress=None)
        .with_event(
            "StageStarted",
            f"Stage {stage.name} runs as {child.ref.kind} {child.ref.name}, attempt {child.attempt}"
            f"{words(child.capacity)}.",
        )
    ), current


def _superseded(state: ReconcileState, stage: StageStatus, child: ChildView) -> bool:
    """Return whether the job's first child was created from an earlier spec.

    Until the status records an attempt, the API server allows edits of the spec, so the child may be of an earlier one.
    Everything that follows would be planned from the new one.
    """
    first = stage.name == state.status.stages[0].name and child.attempt == 1
    if state.started_when_stored or not first or child.configuration is None or child.state in ("Succeeded", "Failed"):
        return False
    try:
        expected = configuration(state, Attempt(child.stage, child.attempt))
    except PlanRefused:
        return True
    return expected != child.configuration


def _stop_outdated(state: ReconcileState, stage: StageStatus, child: ChildView) -> ReconcileState:
    """Stop the outdated attempt: it is deleted once the status records this, and recreated; this is no failure."""
    stopped = stage.model_copy(update={"state": "Suspended", "completion_time": state.now})
    message = f"{child.ref.kind} {child.ref.name} was created from an older spec; recreating it."
    return state.with_stage(stopped).with_event("SpecEdited", message)


def _deleted(stage: StageStatus) -> Cause:
    child = "The object that ran the attempt" if stage.child is None else f"{stage.child.kind} {stage.child.name}"
    return Cause(
        OperatorCause.CHILD_DELETED,
        "ChildDeleted",
        f"{child} was deleted, and not by the operator.",
        "To pause a job, set runPolicy.suspend; to end it, delete the FineTuneJob.",
    )


def _end_reported_at(child: ChildView) -> datetime:
    """Return when the wait for the pods' reports began; a time that moves on would never be over."""
    return child.finished or child.started or child.created


def _succeeded(state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> ReconcileState:
    ended = child.finished or state.now
    report = reported_success(pods)
    if report is not None:
        return stage_succeeded(state, stage, report, ended)
    deadline = _end_reported_at(child) + timedelta(seconds=REPORT_DELAY_SECONDS)
    if state.now < deadline and not (pods and all(pod.over for pod in pods)):
        return state.requeue(deadline).with_findings(
            waiting=f"{child.ref.name} has succeeded; waiting for the report of its pods."
        )
    return attempt_failed(state, stage, without_report(pods), ended)


def _failed(state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> ReconcileState:
    ended = child.finished or state.now
    cause = first_cause(child.stage, child, pods)
    deadline = _end_reported_at(child) + timedelta(seconds=BETTER_CAUSE_SECONDS)
    vague = cause.pod is None or cause.from_child_status or cause.cause in ECHOES
    if vague and (terminating := _terminating(pods)):
        if (lost := _lost(state, pods)) is not None:
            return attempt_failed(state, stage, on_node_lost(lost), ended)
        return state.requeue(_next_loss_at(terminating, state.now)).with_findings(waiting=_pods_to_end(child))
    # For a deleted pod the logs of the others are shown, once they have ended.
    unread = cause.pod is not None and cause.pod.deleted
    if (vague or unread) and state.now < deadline and not (pods and all(pod.over for pod in pods)):
        return state.requeue(deadline).with_findings(waiting=_pods_to_end(child))
    return attempt_failed(state, stage, cause, ended)


def _pods_to_end(child: ChildView) -> str:
    return f"{child.ref.name} has failed; waiting for its pods to end."


def _underway(state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> ReconcileState:
    if (broken := _broken(state, child, pods)) is not None:
        return attempt_failed(state, stage, broken)
    state = state.requeue(_next_loss_at(pods, state.now))
    if child.deleting:
        return state.with_findings(waiting=f"{child.ref.kind} {child.ref.name} is being deleted.")
    placed = stage.nodes_since is not None
    events = state.observed.start_events
    wait = pod_wait(child, pods, state.now, state.settings.limits, stage.blocked_since, placed=placed, events=events)
    blocked = None if wait is None else wait.blocked_since
    stage = with_pod_times(stage.model_copy(update={"blocked_since": blocked}), pods)
    state, stage = follow_wait(state, stage, wait)
    state = state.with_stage(stage)
    if wait is not None:
        for follow in (follow_gang, follow_spot_wait):
            state, stopped = follow(state, stage, pods)
            if stopped:
                return state
    if wait is not None and wait.cause is not None:
        return attempt_failed(state, stage, wait.cause)
    if wait is not None:
        state = state.requeue(wait.until).with_findings(waiting=state.findings.waiting or wait.message)
        if wait.idle:
            return state
    if child.state == "Suspended":
        detail = f" {child.message}" if child.message else ""
        return state.with_findings(waiting=f"{child.ref.kind} {child.ref.name} is suspended.{detail}")
    if (over := _over_since(child, pods)) is not None:
        return _unnoticed(state, stage, child, pods, over)
    return _watch_progress(state, stage, child, pods)


def _over_since(child: ChildView, pods: Sequence[PodView]) -> datetime | None:
    """Return when the pods of a child that is not over succeeded; None: they have not, or others may follow."""
    launchers = [pod for pod in pods if pod.index is None]
    ends = [pod.ended.finished for pod in launchers or pods if pod.phase == "Succeeded" and pod.ended is not None]
    if child.replaces_pods or reported_success(pods) is None or len(ends) < len(launchers or pods):
        return None
    return max((end for end in ends if end is not None), default=None)


def _unnoticed(
    state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView], over: datetime
) -> ReconcileState:
    """Wait for the child's own controller to report the end of its pods; without it, their reports count at last."""
    report_at, until = (over + timedelta(seconds=seconds) for seconds in (REPORT_DELAY_SECONDS, UNNOTICED_SECONDS))
    if until <= state.now:
        return _succeeded(state, stage, replace(child, finished=over), pods)
    if state.now < report_at:
        return _watch_progress(state.requeue(report_at), stage, child, pods)
    return state.requeue(until).with_findings(
        waiting=f"All pods of {child.ref.kind} {child.ref.name} have succeeded; waiting for its controller to end it. "
        f"At {stamp(until)} the stage goes on without that."
    )


def _watch_progress(
    state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView]
) -> ReconcileState:
    """Warn of a running attempt that reports nothing new, and end it at last."""
    gap = progress_gap(state.job, state.observed, state.settings, stage.name, stage.attempt)
    # Once a pod has failed or is being deleted, the attempt is ending: silence is an echo, and ends have own limits.
    ending = any(pod.phase == "Failed" for pod in pods) or _terminating(pods)
    if gap is None or ending or state.spec.run_policy.suspend:
        return state
    read_logs = dict(state.observed.logs)
    unread = [pod for pod in pods_to_read_logs_from(pods) if pod.name not in read_logs]
    if gap.until <= state.now and not unread:
        return attempt_failed(state, stage, hang_cause(gap, child.stage, pods, _processes(state, child.stage)))
    if state.now < gap.warn_at:
        return state.requeue(gap.warn_at)
    before = condition(state.job.status, "Running")
    if before is None or before.reason != NO_PROGRESS:
        state = state.with_event("ProgressStopped", f"Stage {stage.name}, attempt {stage.attempt}: {gap.message}", True)
    # Log tails are read when the time is over, and a reconcile may fall into that very moment.
    soonest = state.now + timedelta(seconds=READ_SECONDS)
    return state.requeue(max(gap.until, soonest)).with_findings(no_progress_message=gap.message)


def _processes(state: ReconcileState, stage: Stage) -> int:
    plan = state.status.plan
    return plan.world_size if stage is Stage.TRAIN and plan is not None else nodes(state.spec, plan, stage)


def _broken(state: ReconcileState, child: ChildView, pods: Sequence[PodView]) -> Cause | None:
    """Return the cause if a pod is lost for good and its child does not know it: it would wait for ever."""
    if (lost := _lost(state, pods)) is not None:
        return on_node_lost(lost)
    # A controller that replaces pods waits before it does so, and reports by itself when it gives up.
    if child.replaces_pods or not any(_passed(_counts_as_failed_at(pod), state.now) for pod in pods):
        return None
    cause = first_cause(child.stage, child, pods)
    return None if cause.cause in ECHOES and _terminating(pods) else cause


def _lost(state: ReconcileState, pods: Sequence[PodView]) -> PodView | None:
    return next((pod for pod in pods if not pod.over and _passed(counts_as_deleted_at(pod), state.now)), None)


def _terminating(pods: Sequence[PodView]) -> Sequence[PodView]:
    """Return the pods that are being deleted and still run. One whose node is lost never ends, and failures that others
    report are echoes of that; another attempt has to wait for it in any case.
    """
    return [pod for pod in pods if not pod.over and pod.deleting_until is not None]


def _next_loss_at(pods: Sequence[PodView], now: datetime) -> datetime | None:
    """Return when the next pod will count as lost."""
    times = (_counts_as_failed_at(pod) if pod.over else counts_as_deleted_at(pod) for pod in pods)
    return earliest(*(time for time in times if time is not None and time > now))


def _passed(time: datetime | None, now: datetime) -> bool:
    return time is not None and time <= now


def counts_as_deleted_at(pod: PodView) -> datetime | None:
    """Return when a pod that is being deleted counts as gone, whatever its node reports; None: it is to stay."""
    return None if pod.deleting_until is None else pod.deleting_until + timedelta(seconds=NODE_LOST_SECONDS)


def _counts_as_failed_at(pod: PodView) -> datetime | None:
    """Return when a failed pod counts as a failure of the attempt, whatever its child reports.

    A pod that was evicted or rejected by its node may list no container, and so no time of its own.
    """
    if pod.phase != "Failed" or pod.deleted:
        return None
    ended = None if pod.ended is None else pod.ended.finished
    is_echo = pod.ended is not None and CLASS_OF_EXIT_CODE.get(pod.ended.exit_code) in ECHOES
    seconds = ECHO_SECONDS if is_echo else FAILED_POD_SECONDS
    return (ended or pod.changed or pod.scheduled or pod.created) + timedelta(seconds=seconds)
