"""Usage by attempts: since when their pods have nodes, since when they run, and the totals counted at their end.

A pod without a node costs nothing and trains nothing, and on spot capacity it may be without one for hours. The times
are stored in the status as soon as they are known, as the pods may be deleted when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import PodView
from finetune_operator.jobs.state.results import cost_after
from finetune_operator.spec.status_times import earliest, seconds_since
from finetune_operator.spec.types import StageStatus


def with_pod_times(stage: StageStatus, pods: Sequence[PodView]) -> StageStatus:
    """Return the stage with the times that its attempt's pods report; times that are known already stay."""
    placed = earliest(*(_scheduled_at(pod) for pod in pods))
    began = [_started_at(pod) for pod in pods]
    all_running = None if None in began else max((one for one in began if one is not None), default=None)
    return stage.model_copy(
        update={
            "nodes_since": stage.nodes_since or placed,
            "running_since": stage.running_since or all_running,
        }
    )


def _scheduled_at(pod: PodView) -> datetime | None:
    return None if pod.node is None else pod.scheduled or pod.created


def _started_at(pod: PodView) -> datetime | None:
    """Return when its container started; one that the runtime could not start reports the year 1970."""
    if pod.started_at is not None and pod.started_at >= pod.created:
        return pod.started_at
    return _scheduled_at(pod) if pod.phase == "Running" or pod.ended is not None else None


def count_usage(state: ReconcileState, stage: StageStatus, at: datetime) -> ReconcileState:
    """Count the usage of the attempt in `stage`, which has ended or is about to be stopped.

    It is counted at ends of attempts only: a figure that grows with the clock would be written for ever.
    """
    stage = with_pod_times(stage, state.pods(stage.name, stage.attempt))
    state = state.with_status(cost=cost_after(state.status, state.spec, state.settings, stage, at))
    spot = state.status.spot
    if spot is None or stage.capacity is None:
        return state
    ran = spot.ran_seconds + seconds_since(stage.running_since, at)
    return state.with_status(spot=spot.model_copy(update={"ran_seconds": ran}))


def stop_attempt(state: ReconcileState, stage: StageStatus, **changes: object) -> ReconcileState:
    """End an attempt that has not failed, so that another one follows; `changes`: further fields of the stage."""
    state = count_usage(state, stage, state.now)
    update = {"state": "Failed", "completion_time": state.now, "next_attempt_time": None, **changes}
    return state.with_stage(stage.model_copy(update=update))
