"""Gangs of which a part has nodes: the processes of a training wait for each other, and keep nodes from other jobs.

Two trainings that hold half of a cluster each would wait for ever. Such an attempt is stopped after a limit, and starts
again after a delay that differs from job to job. It is no failure: nothing ran, so it is no restart.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import PodView
from finetune_operator.jobs.state.usage import stop_attempt
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import StageStatus

INCOMPLETE = "GangIncomplete"
"""Reason of condition Running, and of the event when the attempt is stopped."""


@dataclass(frozen=True)
class IncompleteGang:
    """A gang some of whose pods hold nodes while others find none."""

    pod: PodView
    """The one that has waited longest."""
    placed: int
    pods: int
    since: datetime
    """Time when the first node was held in vain."""
    blocked: bool
    """True if a container of the gang cannot start, which has a message of its own."""

    @property
    def message(self) -> str:
        """State of the gang."""
        holds = "holds a node and waits" if self.placed == 1 else "hold nodes and wait"
        return f"{self.placed} of {self.pods} pods {holds} for the others."

    @property
    def detail(self) -> str:
        """The scheduler's message."""
        return f"Pod {self.pod.name} is unschedulable: {self.pod.unschedulable}"


def incomplete_gang(stage: StageStatus, pods: Sequence[PodView]) -> IncompleteGang | None:
    """Return how far the gang of a training is placed; None for one that is placed, or that holds nothing."""
    if stage.name is not Stage.TRAIN:
        return None
    living = [pod for pod in pods if not pod.over and pod.deleting_until is None]
    waiting = [pod for pod in living if pod.phase == "Pending" and pod.unschedulable is not None]
    # The launcher pod of an MPIJob, which has no index, holds next to nothing.
    ranks = [pod for pod in living if pod.index is not None]
    placed = [pod for pod in ranks if pod.node is not None]
    if not waiting or not placed:
        return None
    first = min(pod.scheduled or pod.created for pod in placed)
    longest = min(waiting, key=lambda pod: (pod.created, pod.name))
    blocked = any(pod.waiting is not None for pod in living)
    return IncompleteGang(longest, len(placed), len(ranks), max(first, longest.created), blocked)


def follow_gang(state: ReconcileState, stage: StageStatus, pods: Sequence[PodView]) -> tuple[ReconcileState, bool]:
    """Follow an attempt that is half placed: it waits and reports it, or is stopped. True: it was stopped, and nothing
    else is to be reported of it.
    """
    gang, limit = incomplete_gang(stage, pods), state.settings.limits.gang_seconds
    # A fallback to any nodes ends the wait in a better way, and counts it from the creation of the attempt's pods.
    falls_back = stage.capacity == "spot" and state.spec.spot.fallback_to_on_demand
    if gang is None or falls_back:
        return state, False
    until = gang.since + timedelta(seconds=limit) if limit else None
    if until is not None and until <= state.now and not state.spec.run_policy.suspend:
        return _stopped(state, stage, gang), True
    state = state.requeue(until)
    if gang.blocked:
        return state, False
    outcome = (
        "" if until is None else f" At {stamp(until)} the attempt is stopped to release its nodes, and restarted later."
    )
    waiting = f"{gang.message}{outcome} {gang.detail}"
    return state.with_findings(waiting=waiting, waiting_reason=INCOMPLETE), False


def _stopped(state: ReconcileState, stage: StageStatus, gang: IncompleteGang) -> ReconcileState:
    """Stop the attempt; the next one starts after a delay, in which another job may get all its nodes."""
    seconds = _delay(state, stage)
    held = human_seconds((state.now - gang.since).total_seconds())
    following = state.now + timedelta(seconds=seconds)
    return stop_attempt(state, stage, next_attempt_time=following).with_event(
        INCOMPLETE,
        f"{gang.message} After {held} (limits.gangSeconds) attempt {stage.attempt} is stopped to release its nodes; "
        f"attempt {stage.attempt + 1} starts in {human_seconds(seconds)}, not counted as a restart. {gang.detail}",
        warning=True,
    )


def _delay(state: ReconcileState, stage: StageStatus) -> float:
    """Return the seconds until the next attempt: between the longest delay of a restart and twice that, by job and
    attempt, so that gangs that blocked each other do not come back together.
    """
    longest = state.settings.limits.restart_delay_most_seconds
    drawn = zlib.crc32(f"{state.job.uid}/{stage.attempt}".encode()) / 2**32
    return float(round(longest * (1 + drawn)))
