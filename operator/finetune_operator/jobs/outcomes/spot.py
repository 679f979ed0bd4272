"""Training on spot nodes: which nodes an attempt gets, how long it may wait for them, and how long it may run.

The status holds all that has to survive: the capacity of the attempt, the seconds that earlier attempts ran, and since
when the time counts. A fallback is no failure: nothing ran, so it is no restart, and the next attempt starts at once.
From then on the training stays on any nodes until it is suspended, as going back would cost a restart each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from finetune_contract.layout import FailureClass
from finetune_operator.jobs.outcomes.remedies import Cause, OperatorCause
from finetune_operator.jobs.render.spot_affinity import first_capacity
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import PodView
from finetune_operator.jobs.state.usage import stop_attempt
from finetune_operator.plan.hardware.capacity import patience
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.status_times import earliest, seconds_since, stamp
from finetune_operator.spec.types import Capacity, SpotStatus, StageStatus

WAITING = "WaitingForSpot"
"""Reason of condition Running, and of the event that reports it once."""
_PREEMPTION_CAUSES = frozenset({FailureClass.PREEMPTED, OperatorCause.NODE_LOST})


def next_capacity(state: ReconcileState, stage: StageStatus) -> Capacity | None:
    """Return the next attempt's capacity: spot, unless the training has fallen back and was not suspended since."""
    wanted, spot = first_capacity(state.spec, stage.name), state.status.spot
    # The clock stands still from a suspension to the start of the next attempt.
    fallen_back = stage.capacity == "onDemand" and spot is not None and spot.since is not None
    return "onDemand" if wanted == "spot" and fallen_back else wanted


def words(capacity: Capacity | None) -> str:
    """Return ` on spot nodes`, to end a sentence with; an empty text for jobs that do not ask for any."""
    match capacity:
        case "spot":
            return " on spot nodes"
        case "onDemand":
            return " on any nodes"
        case _:
            return ""


# ----------------------------------------------------------------------------------------------------------- the clock


def start_spot_clock(state: ReconcileState, capacity: Capacity | None, at: datetime) -> ReconcileState:
    """Start the clock with the first attempt that asks for spot nodes; it also runs between attempts."""
    spot = state.status.spot or SpotStatus()
    if capacity is None or spot.since is not None:
        return state
    return state.with_status(spot=spot.model_copy(update={"since": at}))


def stop_spot_clock(state: ReconcileState) -> ReconcileState:
    """Stop the clock of a job that is suspended, and keep the time until now."""
    spot = state.status.spot
    if spot is None or spot.since is None:
        return state
    return state.with_status(spot=SpotStatus.model_copy(spot, update={"since": None, "waited_seconds": _waited(state)}))


def _waited(state: ReconcileState) -> float:
    spot = state.status.spot or SpotStatus()
    return spot.waited_seconds + seconds_since(spot.since, state.now)


def _ran(state: ReconcileState, stage: StageStatus) -> float:
    """Return the seconds of training up to now, including the running attempt."""
    before = 0.0 if state.status.spot is None else state.status.spot.ran_seconds
    return before + (seconds_since(stage.running_since, state.now) if stage.state == "Running" else 0.0)


def with_preemption(state: ReconcileState, stage: StageStatus, cause: Cause) -> ReconcileState:
    """Count a preemption if the attempt ended because its spot node was taken away."""
    spot = state.status.spot
    if spot is None or stage.capacity != "spot" or cause.cause not in _PREEMPTION_CAUSES:
        return state
    return state.with_status(spot=spot.model_copy(update={"preemptions": spot.preemptions + 1}))


# ----------------------------------------------------------------------------------------------------------- its bounds


def exceeded_limit(state: ReconcileState) -> tuple[ReconcileState, Cause | None]:
    """Return the cause if spec.spot.maxRunSeconds or maxWaitSeconds is over; else wake the job when it will be."""
    stage, spot = state.current, state.status.spot
    if stage is None or spot is None or stage.capacity is None or stage.state == "Suspended":
        return state, None
    most, ran = state.spec.spot.max_run_seconds, _ran(state, stage)
    if most is not None and ran >= most:
        return state, _limit_exceeded("MaxRunExceeded", f"The training has run for {most} s", "maxRunSeconds")
    if most is not None and stage.state == "Running" and stage.running_since is not None:
        state = state.requeue(state.now + timedelta(seconds=most - ran))
    longest, waited = state.spec.spot.max_wait_seconds, _waited(state)
    if longest is None or spot.since is None:
        return state, None
    if waited < longest:
        return state.requeue(state.now + timedelta(seconds=longest - waited)), None
    pod = _longest_waiting(stage, state.pods(stage.name, stage.attempt))
    if pod is not None and stage.state == "Running":
        return state, _unavailable(state, pod, longest)
    elapsed = f"{longest} s have passed since the training began ({ran:.0f} s of them in training)"
    return state, _limit_exceeded("MaxWaitExceeded", elapsed, "maxWaitSeconds")


def _limit_exceeded(reason: str, elapsed: str, field: str) -> Cause:
    return Cause(
        OperatorCause.DEADLINE_EXCEEDED,
        reason,
        f"{elapsed}, the limit of spot.{field}.",
        f"Create a new job with a longer spot.{field}; the last checkpoint stays in the workspace.",
    )


def _unavailable(state: ReconcileState, pod: PodView, longest: int) -> Cause:
    fallback = "" if state.spec.spot.fallback_to_on_demand else "set spot.fallbackToOnDemand or "
    return Cause(
        OperatorCause.SPOT_UNAVAILABLE,
        "MaxWaitExceeded",
        f"Pod {pod.name} has found no spot node since {stamp(pod.created)}, and the {longest} s of spot.maxWaitSeconds "
        f"are over: {pod.unschedulable}",
        f"In a new job, {fallback}raise spot.maxWaitSeconds; check that spot.nodes in the operator's settings are the "
        "labels of this cluster's spot nodes.",
        pod,
    )


# ------------------------------------------------------------------------------------------------------ without a node


def _longest_waiting(stage: StageStatus, pods: Sequence[PodView]) -> PodView | None:
    """Return the pod of a spot attempt that has waited longest for a node."""
    if stage.capacity != "spot":
        return None
    waiting = (pod for pod in pods if pod.phase == "Pending" and pod.unschedulable is not None)
    return min(waiting, key=lambda pod: (pod.created, pod.name), default=None)


def follow_spot_wait(state: ReconcileState, stage: StageStatus, pods: Sequence[PodView]) -> tuple[ReconcileState, bool]:
    """Follow a spot attempt whose pods find no node: report the wait, or fall back. True: it has fallen back, and there
    is nothing else to report.
    """
    pod = _longest_waiting(stage, pods)
    if pod is None:
        return state, False
    until = _fallback_time(state, pod)
    if until is not None and until <= state.now and not state.spec.run_policy.suspend:
        return _fallen_back(state, stage, pod), True
    message = f"Pod {pod.name} finds no spot node: {_wait_end(state, until)} Scheduler: {pod.unschedulable}"
    return state.requeue(until).with_findings(waiting=message, waiting_reason=WAITING), False


def _fallback_time(state: ReconcileState, pod: PodView) -> datetime | None:
    """Return when the training falls back; None: never.

    The settings' limit for pods without a node ends jobs; with a fallback, it leads to that instead.
    """
    spot, limit = state.spec.spot, state.settings.limits.unschedulable_seconds
    if not spot.fallback_to_on_demand:
        return None
    status = state.status.spot or SpotStatus()
    at_creation = max(0.0, _waited(state) - (state.now - pod.created).total_seconds())
    patient = patience(spot, state.settings, status.ran_seconds, at_creation)
    return earliest(
        pod.created + timedelta(seconds=patient),
        None if limit is None else pod.created + timedelta(seconds=limit),
    )


def _wait_end(state: ReconcileState, fallback: datetime | None) -> str:
    """Return the sentence on the wait and its end."""
    if fallback is not None:
        return f"at {stamp(fallback)} the training falls back to any nodes."
    longest, since = state.spec.spot.max_wait_seconds, (state.status.spot or SpotStatus()).since
    if longest is None or since is None:
        return "it waits without a limit, as spot.maxWaitSeconds is not set."
    before = (state.status.spot or SpotStatus()).waited_seconds
    end = since + timedelta(seconds=longest - before)
    return f"it waits until {stamp(end)}, the limit of spot.maxWaitSeconds."


def _fallen_back(state: ReconcileState, stage: StageStatus, pod: PodView) -> ReconcileState:
    """Stop the attempt; the next one, on any nodes, starts once nothing of it is left."""
    waited = human_seconds((state.now - pod.created).total_seconds())
    return stop_attempt(state, stage, capacity="onDemand").with_event(
        "SpotUnavailable",
        f"Pod {pod.name} found no spot node for {waited}: attempt {stage.attempt + 1} of {stage.name} runs on any "
        f"nodes (spot.fallbackToOnDemand). Scheduler: {pod.unschedulable}",
        warning=True,
    )
