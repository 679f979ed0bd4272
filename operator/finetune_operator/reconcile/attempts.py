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
from finetune_operator.api.types import StageStatus
from finetune_operator.planning.plan_types import PlanRefused
from finetune_operator.reconcile.attempt_outcomes import attempt_failed, stage_succeeded
from finetune_operator.reconcile.failure_diagnosis import first_cause, on_node_lost, reported_success, without_report
from finetune_operator.reconcile.gang_placement import look_for_rest
from finetune_operator.reconcile.hang_detection import no_progress, silence, witnesses
from finetune_operator.reconcile.planned import configuration
from finetune_operator.reconcile.pod_replacement import standing, tell_replaced, telling
from finetune_operator.reconcile.reconcile_state import Course, reference
from finetune_operator.reconcile.reconcile_types import ChildView, PodView
from finetune_operator.reconcile.remedies import Cause, OperatorCause
from finetune_operator.reconcile.results import nodes
from finetune_operator.reconcile.spot import clock_started, look_for_nodes, words
from finetune_operator.reconcile.status import NO_PROGRESS, condition
from finetune_operator.reconcile.status_times import earliest, moment, stamp
from finetune_operator.reconcile.usage import seen
from finetune_operator.reconcile.waiting_reasons import waits
from finetune_operator.rendering.render_types import Attempt

GONE_SECONDS = 30
"""A pod that still exists this long after the grace period of its deletion has a node that does not answer."""
LAST_WORD_SECONDS = 30
"""Maximum lag of a pod's update behind that of its child."""
CAUSE_SECONDS = 10
"""Same limit when a cause is known already and a better one may follow."""
READ_SECONDS = 1
"""Delay before logs that were not read yet are requested again."""
HALF_DEAD_SECONDS = 60
"""Maximum run time of a child after one of its pods has failed: its own controller usually ends it at once."""


def settle(course: Course) -> Course:
    """Process the current stage, and the next ones as stages succeed."""
    while course.end is None and (current := course.current) is not None and current.name != Stage.SERVE.value:
        course = _look(course, current)
        after = course.current
        if after is not None and after.name == current.name:
            break
    return course


def _look(course: Course, stage: StageStatus) -> Course:
    newest = next(iter(course.children(stage.name)[-1:]), None)
    if newest is not None and newest.attempt > stage.attempt:
        course, stage = _taken_up(course, stage, newest)
        if _superseded(course, stage, newest):
            return _replaced(course, stage, newest)
    if stage.state != "Running":
        return course
    if newest is None or newest.attempt < stage.attempt:
        return course if course.spec.run_policy.suspend else attempt_failed(course, stage, _deleted(stage))
    every = course.pods(stage.name, stage.attempt)
    pods = standing(newest, every)
    match newest.state:
        case "Succeeded":
            return _succeeded(course, stage, newest, pods)
        case "Failed":
            return _failed(course, stage, newest, telling(newest, every))
        case "Pending" | "Running" | "Suspended":
            course, stage = tell_replaced(course, stage, newest, every)
            return _underway(course, stage, newest, pods)


def _taken_up(course: Course, stage: StageStatus, child: ChildView) -> tuple[Course, StageStatus]:
    started = child.started or child.created
    current = stage.model_copy(
        update={
            "state": "Running",
            "attempt": child.attempt,
            "start_time": stamp(started),
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
    first = course.status.start_time or stamp(started)
    return (
        clock_started(course, child.capacity, started)
        .with_stage(current)
        .with_status(start_time=first, progress=None)
        .tell(
            "StageStarted",
            f"Stage {stage.name} runs as {child.ref.kind} {child.ref.name}, attempt {child.attempt}"
            f"{words(child.capacity)}.",
        )
    ), current


def _superseded(course: Course, stage: StageStatus, child: ChildView) -> bool:
    """Return whether the job's first child was created from an earlier spec.

    Until the status records an attempt, the API server allows edits of the spec, so the child may be of an earlier one.
    Everything that follows would be planned from the new one.
    """
    first = stage.name == course.status.stages[0].name and child.attempt == 1
    if course.begun or not first or child.configuration is None or child.state in ("Succeeded", "Failed"):
        return False
    try:
        wanted = configuration(course, Attempt(child.stage, child.attempt))
    except PlanRefused:
        return True
    return wanted != child.configuration


def _replaced(course: Course, stage: StageStatus, child: ChildView) -> Course:
    """Stop the outdated attempt: it is deleted once the status records this, and recreated; this is no failure."""
    stopped = stage.model_copy(update={"state": "Suspended", "completion_time": stamp(course.now)})
    message = f"{child.ref.kind} {child.ref.name} was made from a spec that was edited since: it is made anew."
    return course.with_stage(stopped).tell("SpecEdited", message)


def _deleted(stage: StageStatus) -> Cause:
    what = "The object that ran the attempt" if stage.child is None else f"{stage.child.kind} {stage.child.name}"
    return Cause(
        OperatorCause.CHILD_DELETED,
        "ChildDeleted",
        f"{what} is not there any more, and the operator did not delete it.",
        "To stop a job for a while set runPolicy.suspend; to end it delete the FineTuneJob.",
    )


def _end_told(child: ChildView) -> datetime:
    """Return when the wait for the pods' reports began; a time that moves on would never be over."""
    return child.finished or child.started or child.created


def _succeeded(course: Course, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> Course:
    ended = child.finished or course.now
    report = reported_success(pods)
    if report is not None:
        return stage_succeeded(course, stage, report, ended)
    patience = _end_told(child) + timedelta(seconds=LAST_WORD_SECONDS)
    if course.now < patience and not (pods and all(pod.over for pod in pods)):
        return replace(course.wake(patience), waiting=f"{child.ref.name} is done; its last word is on its way.")
    return attempt_failed(course, stage, without_report(pods), ended)


def _failed(course: Course, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> Course:
    ended = child.finished or course.now
    cause = first_cause(child.stage, child, pods)
    patience = _end_told(child) + timedelta(seconds=CAUSE_SECONDS)
    vague = cause.pod is None or cause.second_hand or cause.cause in ECHOES
    if vague and (held_up := _held_up(pods)):
        if (lost := _lost(course, pods)) is not None:
            return attempt_failed(course, stage, on_node_lost(lost), ended)
        return replace(
            course.wake(_next_look(held_up, course.now)), waiting=f"{child.ref.name} has failed; its pods still end."
        )
    # For a deleted pod the logs of the others are shown, once they have ended.
    unread = cause.pod is not None and cause.pod.gone
    if (vague or unread) and course.now < patience and not (pods and all(pod.over for pod in pods)):
        return replace(course.wake(patience), waiting=f"{child.ref.name} has failed; its pods are still ending.")
    return attempt_failed(course, stage, cause, ended)


def _underway(course: Course, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> Course:
    if (broken := _broken(course, child, pods)) is not None:
        return attempt_failed(course, stage, broken)
    course = course.wake(_next_look(pods, course.now))
    if child.deleting:
        return replace(course, waiting=f"{child.ref.kind} {child.ref.name} is being deleted.")
    held = waits(child, pods, course.now, course.settings.limits, moment(stage.blocked_since))
    blocked = None if held is None or held.blocked_since is None else stamp(held.blocked_since)
    stage = seen(stage.model_copy(update={"blocked_since": blocked}), pods)
    course = course.with_stage(stage)
    if held is not None:
        for look in (look_for_rest, look_for_nodes):
            course, stopped = look(course, stage, pods)
            if stopped:
                return course
    if held is not None and held.cause is not None:
        return attempt_failed(course, stage, held.cause)
    if held is not None:
        course = replace(course.wake(held.until), waiting=course.waiting or held.message)
        if held.idle:
            return course
    if child.state == "Suspended":
        said = f" {child.message}" if child.message else ""
        return replace(course, waiting=f"{child.ref.kind} {child.ref.name} is suspended.{said}")
    return _listened(course, stage, child, pods)


def _listened(course: Course, stage: StageStatus, child: ChildView, pods: Sequence[PodView]) -> Course:
    """Update a running attempt: its reported progress, and a warning or an end when it reports nothing new."""
    progress, stored = course.observed.progress, course.stored(stage.name)
    told = stored is not None and (stored.state, stored.attempt) == ("Running", stage.attempt)
    if progress is not None and told:
        course = course.with_status(progress=progress)
    quiet = silence(course.job, course.observed, course.settings, stage.name, stage.attempt)
    # Once a pod has failed or is being deleted, the attempt is ending: silence is an echo, and ends have own limits.
    ending = any(pod.phase == "Failed" for pod in pods) or _held_up(pods)
    if quiet is None or ending or course.spec.run_policy.suspend:
        return course
    heard = dict(course.observed.logs)
    unread = [pod for pod in witnesses(pods) if pod.name not in heard]
    if quiet.until <= course.now and not unread:
        return attempt_failed(course, stage, no_progress(quiet, child.stage, pods, _processes(course, child.stage)))
    if course.now < quiet.told_at:
        return course.wake(quiet.told_at)
    before = condition(course.job.status, "Running")
    if before is None or before.reason != NO_PROGRESS:
        course = course.tell("ProgressStopped", f"Stage {stage.name}, attempt {stage.attempt}: {quiet.words}", True)
    # Log tails are read when the time is over, and a reconcile may fall into that very moment.
    soonest = course.now + timedelta(seconds=READ_SECONDS)
    return replace(course.wake(max(quiet.until, soonest)), quiet=quiet.words)


def _processes(course: Course, stage: Stage) -> int:
    plan = course.status.plan
    return plan.world_size if stage is Stage.TRAIN and plan is not None else nodes(course.spec, plan, stage)


def _broken(course: Course, child: ChildView, pods: Sequence[PodView]) -> Cause | None:
    """Return the cause if a pod is lost for good and its child does not know it: it would wait for ever."""
    if (lost := _lost(course, pods)) is not None:
        return on_node_lost(lost)
    # A controller that replaces pods waits before it does so, and reports by itself when it gives up.
    if child.replaces_pods or not any(_passed(_dead_after(pod), course.now) for pod in pods):
        return None
    cause = first_cause(child.stage, child, pods)
    return None if cause.cause in ECHOES and _held_up(pods) else cause


def _lost(course: Course, pods: Sequence[PodView]) -> PodView | None:
    return next((pod for pod in pods if not pod.over and _passed(gone_after(pod), course.now)), None)


def _held_up(pods: Sequence[PodView]) -> Sequence[PodView]:
    """Return the pods that are being deleted and still run. One whose node is lost never ends, and failures that others
    report are echoes of that; another attempt has to wait for it in any case.
    """
    return [pod for pod in pods if not pod.over and pod.deleting_until is not None]


def _next_look(pods: Sequence[PodView], now: datetime) -> datetime | None:
    """Return when the next pod will count as lost."""
    times = (_dead_after(pod) if pod.over else gone_after(pod) for pod in pods)
    return earliest(*(time for time in times if time is not None and time > now))


def _passed(time: datetime | None, now: datetime) -> bool:
    return time is not None and time <= now


def gone_after(pod: PodView) -> datetime | None:
    """Return when a pod that is being deleted counts as gone, whatever its node reports; None: it is to stay."""
    return None if pod.deleting_until is None else pod.deleting_until + timedelta(seconds=GONE_SECONDS)


def _dead_after(pod: PodView) -> datetime | None:
    """Return when a failed pod counts as a failure of the attempt, whatever its child reports.

    A pod that was evicted or rejected by its node may list no container, and so no time of its own.
    """
    if pod.phase != "Failed" or pod.gone:
        return None
    ended = None if pod.ended is None else pod.ended.finished
    return (ended or pod.changed or pod.scheduled or pod.created) + timedelta(seconds=HALF_DEAD_SECONDS)
