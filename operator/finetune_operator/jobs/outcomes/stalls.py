"""Stalled waits: those that a person has to end, and others that have lasted for too long."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import get_args

from finetune_operator.jobs.outcomes.start_events import QUIET_SECONDS, wanted_events
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.outcomes.wait_ends import WaitEnd
from finetune_operator.jobs.outcomes.waiting_reasons import PodWait
from finetune_operator.jobs.state.decision_state import ReconcileState, Stalled
from finetune_operator.spec.settings.settings import Limits
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import StageStatus, WaitingFor

REFUSED = "Refused"
"""Reason while the API server refuses an object for another cause than a quota."""
PERSON_SECONDS = 60
"""Wait for a person before the job is Stalled: what a mount or an image needs is often created just after the job."""
CONTROLLER_SECONDS = 600
"""The same for a component of the cluster. A volume is detached from a lost node after 6 minutes (kubernetes
`pkg/controller/volume/attachdetach`, maxWaitForUnmountDuration).
"""
_SAME = frozenset({(one, one) for one in get_args(WaitingFor)} | {("Controller", "Person")})
_TEXTS: Mapping[WaitingFor, str] = {
    "Person": "It does not go on until somebody acts.",
    "Capacity": "It has waited for capacity since {since}.",
    "Controller": "It has waited for a component of the cluster since {since}.",
}


def follow_wait(state: ReconcileState, stage: StageStatus, wait: PodWait | None) -> tuple[ReconcileState, StageStatus]:
    """Record who ends the wait of a running attempt, and report the job as Stalled once it has lasted for too long."""
    if wait is None or not wait.idle or wait.end is None:
        # A gang that was stopped to release its nodes goes on waiting for the same capacity.
        if wait is not None and wait.idle and stage.waiting_for == "Capacity":
            return still_stalled(state, stage), stage
        return state, stage.model_copy(update={"waiting_for": None, "waiting_since": None})
    reading = state.now + timedelta(seconds=QUIET_SECONDS)
    if wanted_events(state.job, state.observed.children, state.observed.pods, reading):
        state = state.requeue(reading)
    state, stage = waiting(state, stage, wait.end, wait.message, wait.since)
    return state.with_findings(waiting_reason=wait.end.reason), stage


def waiting(
    state: ReconcileState,
    stage: StageStatus,
    end: WaitEnd,
    message: str,
    first_seen: datetime | None = None,
    *,
    refused: bool = False,
) -> tuple[ReconcileState, StageStatus]:
    """Record a wait, and report the job as Stalled once it has lasted for too long. `first_seen`: start of the wait, if
    it is the first of the stage. `refused`: the API server has answered, so a wait for a person is Stalled at once.
    """
    # Events show that a component cannot do its work without a person; full nodes that become unfit are another wait.
    same = (stage.waiting_for, end.waits_for) in _SAME
    since = stage.waiting_since if same else None
    if since is None:
        since = first_seen if first_seen is not None and stage.waiting_for is None else state.now
    stage = stage.model_copy(update={"waiting_for": end.waits_for, "waiting_since": since})
    limit = 0 if refused and end.waits_for == "Person" else _patience(end.waits_for, state.settings.limits)
    if limit is None:
        return state, stage
    until = since + timedelta(seconds=limit)
    if state.now < until:
        return state.requeue(until), stage
    text = _TEXTS[end.waits_for].format(since=stamp(since))
    stalled = Stalled(end.reason, f"{message.rstrip('.')}. {text} {end.hint}" if end.hint else message)
    state = state.with_findings(stalled=stalled)
    before = condition(state.job.status, "Stalled")
    if before is None or (before.status, before.reason) != ("True", end.reason):
        state = state.with_event(end.reason, stalled.message, warning=True)
    return state, stage


def _patience(waits_for: WaitingFor, limits: Limits) -> int | None:
    match waits_for:
        case "Person":
            return PERSON_SECONDS
        case "Controller":
            return CONTROLLER_SECONDS
        case "Capacity":
            return limits.capacity_seconds or None


def still_stalled(state: ReconcileState, stage: StageStatus) -> ReconcileState:
    """Return the state, Stalled if it was so before, while a stage pauses that waits."""
    before = condition(state.job.status, "Stalled")
    if state.findings.stalled is not None or stage.waiting_for is None or before is None or before.status != "True":
        return state
    return state.with_findings(stalled=Stalled(before.reason, before.message))
