"""Training on spot nodes: which nodes an attempt gets, how long it may wait for them, and how long it may run.

The status holds all that has to survive: the capacity of the attempt, the seconds that earlier attempts ran, and since
when the time counts. A fallback is no failure: nothing ran, so it is no restart, and the next attempt starts at once.
From then on the training stays on any nodes until it is suspended, as going back would cost a restart each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_operator.api.quantities import human_seconds
from finetune_operator.api.types import Capacity, SpotStatus, StageStatus
from finetune_operator.planning.capacity import patience
from finetune_operator.reconcile.reconcile_state import Course
from finetune_operator.reconcile.reconcile_types import PodView
from finetune_operator.reconcile.remedies import Cause, OperatorCause
from finetune_operator.reconcile.status_times import earliest, moment, seconds_since, stamp
from finetune_operator.reconcile.usage import attempt_stopped
from finetune_operator.rendering.spot_affinity import first_capacity

WAITING = "WaitingForSpot"
"""Reason of condition Running, and of the event that reports it once."""
_TAKEN_AWAY = frozenset({FailureClass.PREEMPTED, OperatorCause.NODE_LOST})


def next_capacity(course: Course, stage: StageStatus) -> Capacity | None:
    """Return the next attempt's capacity: spot, unless the training has fallen back and was not suspended since."""
    wanted, spot = first_capacity(course.spec, Stage(stage.name)), course.status.spot
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


def clock_started(course: Course, capacity: Capacity | None, at: datetime) -> Course:
    """Start the clock with the first attempt that asks for spot nodes; it also runs between attempts."""
    spot = course.status.spot or SpotStatus()
    if capacity is None or spot.since is not None:
        return course
    return course.with_status(spot=spot.model_copy(update={"since": stamp(at)}))


def clock_stopped(course: Course) -> Course:
    """Stop the clock of a job that is suspended, and keep the time until now."""
    spot = course.status.spot
    if spot is None or spot.since is None:
        return course
    return course.with_status(
        spot=SpotStatus.model_copy(spot, update={"since": None, "waited_seconds": _waited(course)})
    )


def _waited(course: Course) -> float:
    spot = course.status.spot or SpotStatus()
    return spot.waited_seconds + seconds_since(spot.since, course.now)


def _ran(course: Course, stage: StageStatus) -> float:
    """Return the seconds of training up to now, including the running attempt."""
    before = 0.0 if course.status.spot is None else course.status.spot.ran_seconds
    return before + (seconds_since(stage.running_since, course.now) if stage.state == "Running" else 0.0)


def taken_away(course: Course, stage: StageStatus, cause: Cause) -> Course:
    """Count a preemption if the attempt ended because its spot node was taken away."""
    spot = course.status.spot
    if spot is None or stage.capacity != "spot" or cause.cause not in _TAKEN_AWAY:
        return course
    return course.with_status(spot=spot.model_copy(update={"preemptions": spot.preemptions + 1}))


# ----------------------------------------------------------------------------------------------------------- its bounds


def bound_reached(course: Course) -> tuple[Course, Cause | None]:
    """Return the cause if spec.spot.maxRunSeconds or maxWaitSeconds is over; else wake the job when it will be."""
    stage, spot = course.current, course.status.spot
    if stage is None or spot is None or stage.capacity is None or stage.state == "Suspended":
        return course, None
    most, ran = course.spec.spot.max_run_seconds, _ran(course, stage)
    if most is not None and ran >= most:
        return course, _over("MaxRunExceeded", f"The training has run for {most} s", "maxRunSeconds")
    if most is not None and stage.state == "Running" and stage.running_since is not None:
        course = course.wake(course.now + timedelta(seconds=most - ran))
    longest, waited = course.spec.spot.max_wait_seconds, _waited(course)
    if longest is None or spot.since is None:
        return course, None
    if waited < longest:
        return course.wake(course.now + timedelta(seconds=longest - waited)), None
    pod = _longest_waiting(stage, course.pods(stage.name, stage.attempt))
    if pod is not None and stage.state == "Running":
        return course, _unavailable(course, pod, longest)
    said = f"{longest} s have passed since the training began, {ran:.0f} s of them in training"
    return course, _over("MaxWaitExceeded", said, "maxWaitSeconds")


def _over(reason: str, said: str, field: str) -> Cause:
    return Cause(
        OperatorCause.DEADLINE_EXCEEDED,
        reason,
        f"{said}, which is all that spot.{field} allows.",
        f"Create a new job with a longer spot.{field}; the last checkpoint stays in the workspace.",
    )


def _unavailable(course: Course, pod: PodView, longest: int) -> Cause:
    ways = "allow more time, or look whether" if course.spec.spot.fallback_to_on_demand else (
        "set spot.fallbackToOnDemand, allow more time, or look whether"
    )  # fmt: skip
    return Cause(
        OperatorCause.SPOT_UNAVAILABLE,
        "MaxWaitExceeded",
        f"No spot node took pod {pod.name} since {stamp(pod.created)}, and the {longest} s of spot.maxWaitSeconds are "
        f"over: {pod.unschedulable}",
        f"In a new job, {ways} spot.nodes in the operator's settings are the labels of this cluster's spot nodes.",
        pod,
    )


# ------------------------------------------------------------------------------------------------------ without a node


def _longest_waiting(stage: StageStatus, pods: Sequence[PodView]) -> PodView | None:
    """Return the pod of a spot attempt that has waited longest for a node."""
    if stage.capacity != "spot":
        return None
    waiting = (pod for pod in pods if pod.phase == "Pending" and pod.unschedulable is not None)
    return min(waiting, key=lambda pod: (pod.created, pod.name), default=None)


def look_for_nodes(course: Course, stage: StageStatus, pods: Sequence[PodView]) -> tuple[Course, bool]:
    """Follow a spot attempt whose pods find no node: report the wait, or fall back. True: it has fallen back, and there
    is nothing else to report.
    """
    pod = _longest_waiting(stage, pods)
    if pod is None:
        return course, False
    until = _fallback_time(course, pod)
    if until is not None and until <= course.now and not course.spec.run_policy.suspend:
        return _fallen_back(course, stage, pod), True
    message = f"No spot node takes pod {pod.name}: {_prospect(course, until)} The scheduler says: {pod.unschedulable}"
    return replace(course.wake(until), waiting=message, waiting_reason=WAITING), False


def _fallback_time(course: Course, pod: PodView) -> datetime | None:
    """Return when the training falls back; None: never.

    The settings' limit for pods without a node ends jobs; with a fallback, it leads to that instead.
    """
    spot, limit = course.spec.spot, course.settings.limits.unschedulable_seconds
    if not spot.fallback_to_on_demand:
        return None
    status = course.status.spot or SpotStatus()
    at_creation = max(0.0, _waited(course) - (course.now - pod.created).total_seconds())
    patient = patience(spot, course.settings, status.ran_seconds, at_creation)
    return earliest(
        pod.created + timedelta(seconds=patient),
        None if limit is None else pod.created + timedelta(seconds=limit),
    )


def _prospect(course: Course, fallback: datetime | None) -> str:
    """Return the sentence on the wait and its end."""
    if fallback is not None:
        return f"at {stamp(fallback)} the training goes to any nodes."
    longest, since = course.spec.spot.max_wait_seconds, moment((course.status.spot or SpotStatus()).since)
    if longest is None or since is None:
        return "it waits for one without a bound, as spot.maxWaitSeconds is not set."
    before = (course.status.spot or SpotStatus()).waited_seconds
    end = since + timedelta(seconds=longest - before)
    return f"it waits for one until {stamp(end)}, when spot.maxWaitSeconds is over."


def _fallen_back(course: Course, stage: StageStatus, pod: PodView) -> Course:
    """Stop the attempt; the next one, on any nodes, starts once nothing of it is left."""
    waited = human_seconds((course.now - pod.created).total_seconds())
    return attempt_stopped(course, stage, capacity="onDemand").tell(
        "SpotUnavailable",
        f"No spot node took pod {pod.name} for {waited} ({pod.unschedulable}): attempt {stage.attempt + 1} of "
        f"{stage.name} trains on any nodes, as spot.fallbackToOnDemand allows.",
        warning=True,
    )
