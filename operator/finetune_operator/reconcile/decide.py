"""One decision: from the state of the job, its children and its pods to the next actions.

`decide` is level-based: it looks at the whole world each time and remembers nothing; everything that has to survive is
in the status. One reconcile deletes, creates, writes the status and records events, in this order; so the status may
lag behind the world, and never the reverse. Read `decide` for the order of the phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_contract.choices import Stage
from finetune_operator.api.quantities import human_bytes
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import Condition, ConditionType, FineTuneJobStatus, StageStatus
from finetune_operator.launchers.launcher_registry import stage
from finetune_operator.planning.plan_types import PlanRefused
from finetune_operator.reconcile.attempt_outcomes import delay_seconds, give_up, refused
from finetune_operator.reconcile.attempts import gone_after, settle
from finetune_operator.reconcile.endpoint_phase import (
    SERVE,
    reopened,
    serve,
    suspended,
    with_serve_stage,
    withdraw,
    without_servers,
)
from finetune_operator.reconcile.planned import (
    context,
    plan_now,
    plan_sentence,
    plan_status,
    problems_text,
    with_nodes,
)
from finetune_operator.reconcile.reconcile_state import Course, Stalled, reference
from finetune_operator.reconcile.reconcile_types import (
    ChildView,
    Decision,
    EventNote,
    JobView,
    ObjectRef,
    Observed,
    PodView,
    Refusal,
)
from finetune_operator.reconcile.remedies import Cause, OperatorCause
from finetune_operator.reconcile.results import CHECKPOINT_BYTES, with_report
from finetune_operator.reconcile.spot import WAITING, bound_reached, clock_started, clock_stopped, next_capacity, words
from finetune_operator.reconcile.status import complete, condition, ended
from finetune_operator.reconcile.status_times import moment, stamp
from finetune_operator.reconcile.usage import attempt_over
from finetune_operator.rendering.manifests import shared
from finetune_operator.rendering.render_types import Attempt, Manifest, ProgressEndpoint

MANAGER = "finetune.dev/operator"
"""Value of `runPolicy.managedBy` in jobs that are ours; without it, they are ours too."""

MOST_FIGURES = 4
"""Metrics in the event of a success; the status has all."""
_HOUR = timedelta(hours=1)
LEAST_REFUSED_SECONDS = 1.0
"""Least delay before a refused object is tried again, also where restarts have none: a refusal comes back at once."""


def decide(
    job: JobView, observed: Observed, now: datetime, settings: Settings, progress: ProgressEndpoint | None = None
) -> Decision:
    """Decide about `job` now. Equal values give an equal decision; once it is carried out, the next changes nothing."""
    if job.deleting or job.managed_by not in (None, "", MANAGER):
        return Decision(status=job.status)
    course = reopened(Course(job, observed, now, settings, progress, job.status, end=ended(job.status)))
    if course.end is not None:
        return after_the_end(course).decision()
    for phase in (
        accept,
        plan_ahead,
        settle,
        meet_refusals,
        keep_deadline,
        keep_spot_bounds,
        keep_cost,
        hold,
        withdraw,
        finish,
        proceed,
    ):
        course = phase(course)
        if course.over or course.end is not None:
            break
    return conclude(course).decision()


# ------------------------------------------------------------------------------------------------------------ the end


def after_the_end(course: Course) -> Course:
    """Delete all of an ended job that still runs; finished children stay for their logs. It never creates anything."""
    left = [child for child in course.observed.children if child.state not in ("Succeeded", "Failed")]
    course = withdraw(course.deleting(*left))
    if course.status.observed_generation != course.job.generation:
        seen = course.job.generation
        conditions = tuple(one.model_copy(update={"observed_generation": seen}) for one in course.status.conditions)
        course = course.with_status(observed_generation=seen, conditions=conditions)
    finished, job = moment(course.status.completion_time), course.job.job
    if finished is None or job is None:
        return course
    own = job.spec.run_policy.ttl_seconds_after_finished
    seconds = course.settings.defaults.ttl_seconds_after_finished if own is None else own
    if seconds is None:
        return course
    until = finished + timedelta(seconds=seconds)
    return replace(course, delete_job=True) if until <= course.now else course.wake(until)


def conclude(course: Course) -> Course:
    """Complete the status, and add events for changed conditions of the spec and the plan."""
    after = complete(course)
    accepted, refusal = _turned(course, after, "Accepted"), _turned(course, after, "Planned")
    if accepted is not None and accepted.status == "False":
        course = course.tell("InvalidSpec", accepted.message, warning=True)
    elif accepted is not None:
        course = replace(course, events=(EventNote("Normal", "JobAccepted", accepted.message), *course.events))
    if refusal is not None and refusal.status == "False":
        course = course.tell("PlanRefused", refusal.message, warning=True)
    runs, ran = condition(after, "Running"), condition(course.job.status, "Running")
    if runs is not None and runs.reason == WAITING and (ran is None or ran.reason != WAITING):
        course = course.tell(WAITING, runs.message)
    return replace(course, status=after)


def _turned(course: Course, after: FineTuneJobStatus, kind: ConditionType) -> Condition | None:
    """Return the condition if its status or message has changed."""
    was, now = condition(course.job.status, kind), condition(after, kind)
    if was is not None and now is not None and (was.status, was.message) == (now.status, now.message):
        return None
    return now


# -------------------------------------------------------------------------------------------------------- before stages


def accept(course: Course) -> Course:
    """Stop at a spec that cannot be run. A running attempt is left alone: settings may have become stricter."""
    if course.job.job is not None:
        return course
    if not course.started:
        course = course.with_status(plan=None, stages=())
    return replace(course, over=True, suspended=course.started and course.job.status.phase == "Suspended")


def plan_ahead(course: Course) -> Course:
    """Plan a job of which nothing has started, again in each reconcile: the spec or the cluster may have changed."""
    if course.started and course.status.plan is not None:
        # Stages run in this order, whatever order is stored.
        order = [stage.value for stage in Stage]
        stages = tuple(sorted(course.status.stages, key=lambda one: order.index(one.name)))
        return without_servers(course.with_status(stages=with_serve_stage(course, stages)))
    if not course.started:
        course = with_nodes(course)
    try:
        made = plan_now(course)
    except PlanRefused as problems:
        # Not kept: the plan of an earlier spec is not this one's.
        plan = course.status.plan if course.started else None
        return replace(course.with_status(plan=plan), refused=problems.problems, over=True)
    after = plan_status(made)
    if after != course.status.plan:
        course = course.tell("Planned", f"Planned {plan_sentence(made)}")
    stages = tuple(_found(course, name, made.stages[place:]) for place, name in enumerate(made.stages, start=1))
    return course.with_status(plan=after, stages=stages)


def _found(course: Course, name: Stage, later: Sequence[Stage]) -> StageStatus:
    """Return the stored stage, which may hold a refusal of the API server, or one before its first attempt.

    If the status was lost, a child of a later stage proves that this one succeeded, whose own child may be cleaned up.
    """
    stored = course.stored(name.value)
    if stored is not None:
        return stored
    if not course.children(name.value) and any(course.children(after.value) for after in later):
        return StageStatus(name=name.value, state="Succeeded", attempt=1)
    return StageStatus(name=name.value, state="Pending", attempt=0)


def meet_refusals(course: Course) -> Course:
    """Handle the API server's refusal of the next attempt: it is final, or tried again."""
    current = course.current
    if current is None or current.state == "Running" or not course.observed.refusals or current.name == SERVE:
        return course
    refusal = course.observed.refusals[0]
    what = f"{refusal.ref.kind} {refusal.ref.name}"
    cause: Cause | None = None
    if refusal.code == 409:
        cause = refused(OperatorCause.NAME_TAKEN, what, refusal.message)
    elif refusal.code in (400, 405, 406, 413, 415, 422):
        cause = refused(OperatorCause.REFUSED, what, refusal.message)
    if cause is not None:
        return give_up(course, current, cause.told(Stage(current.name), current.attempt + 1))
    return _tried_again(course, current, refusal, what)


def _tried_again(course: Course, current: StageStatus, refusal: Refusal, what: str) -> Course:
    """Retry with growing delay: others can fix a quota, rights, or a kind that is not served."""
    in_row = current.failures_in_row + 1
    seconds = max(LEAST_REFUSED_SECONDS, delay_seconds(course.settings.limits, in_row))
    held = current.model_copy(
        update={
            "next_attempt_time": stamp(course.now + timedelta(seconds=seconds)),
            "failures_in_row": in_row,
        }
    )
    message = f"The API server refuses {what} for now: {refusal.message}"
    course = replace(course.with_stage(held), stalled=Stalled("Refused", message))
    before = condition(course.job.status, "Stalled")
    if before is None or before.reason != "Refused":
        course = course.tell("Refused", f"{message} It is tried again.", warning=True)
    return replace(course, delete=(*course.delete, *_made_before(course, current, refusal.ref)))


def _made_before(course: Course, current: StageStatus, ref: ObjectRef) -> tuple[ObjectRef, ...]:
    """Return the objects of the refused attempt that were created: they are recreated, as the spec may change."""
    try:
        manifests = stage(plan_now(course), context(course), _next_attempt(course, current))
    except PlanRefused:
        return ()
    refs = [_ref(manifest) for manifest in manifests]
    names = [(one.kind, one.name) for one in refs]
    return tuple(refs[: names.index((ref.kind, ref.name))]) if (ref.kind, ref.name) in names else ()


# --------------------------------------------------------------------------------------------------------- between them


def keep_deadline(course: Course) -> Course:
    """End a job that has run longer than it may, counted as batch/v1 Job does: anew after each suspension.

    An endpoint has no deadline.
    """
    seconds, began = course.spec.run_policy.active_deadline_seconds, moment(course.status.start_time)
    current = course.current
    if seconds is None or began is None or current is None or current.name == SERVE:
        return course
    until = began + timedelta(seconds=seconds)
    if course.now < until:
        return course.wake(until)
    cause = Cause(
        OperatorCause.DEADLINE_EXCEEDED,
        "DeadlineExceeded",
        f"The job has run for {seconds} s, which is all that runPolicy.activeDeadlineSeconds allows.",
        "Create a new job with a longer deadline; results in the workspace are kept.",
    )
    return _stopped_for_good(course, current, cause)


def keep_spot_bounds(course: Course) -> Course:
    """End a training that has run, or waited for spot nodes, for as long as it may."""
    course, cause = bound_reached(course)
    current = course.current
    return course if cause is None or current is None else _stopped_for_good(course, current, cause)


def keep_cost(course: Course) -> Course:
    """End a job that has cost as much as the settings allow, including the use of the running attempt so far."""
    most, current = course.settings.allow.max_cost, course.current
    if most is None or current is None or current.name == SERVE:
        return course
    spent, later = (
        _amount(attempt_over(course, current, at) if current.state == "Running" else course)
        for at in (course.now, course.now + _HOUR)
    )
    if spent >= most:
        cause = Cause(
            OperatorCause.COST_EXCEEDED,
            "CostExceeded",
            f"The job has cost {spent:.2f} {course.settings.currency}, and the settings allow {most:g}.",
            "Ask the administrator for a higher allow.maxCost; checkpoints and results in the workspace are kept.",
        )
        return _stopped_for_good(course, current, cause)
    return course.wake(course.now + _HOUR * ((most - spent) / (later - spent))) if later > spent else course


def _amount(course: Course) -> float:
    """Return the job's cost; 0 if its nodes have no price, as when prices were removed from the settings."""
    cost = course.status.cost
    return 0.0 if cost is None or cost.amount is None else cost.amount


def _stopped_for_good(course: Course, current: StageStatus, cause: Cause) -> Course:
    """Fail the job while an attempt may run: its use counts, and deleting it lets it save a checkpoint."""
    if current.state == "Running":
        course = attempt_over(course, current, course.now)
    return give_up(course, current, cause.told(Stage(current.name), current.attempt))


def hold(course: Course) -> Course:
    """Stop for as long as `runPolicy.suspend` holds; the running attempt saves a checkpoint when it is deleted.

    It is deleted in the next reconcile, when the stored status records it: else a job that is resumed in the same
    moment would find its child deleted without a record of it.
    """
    was = course.job.status.phase == "Suspended"
    current = course.current
    if not course.spec.run_policy.suspend:
        return course.tell("Resumed", "The job goes on.") if was else course
    if current is None:
        return course
    course = replace(clock_stopped(course).with_status(start_time=None), suspended=True)
    if current.name == SERVE:
        course, message = suspended(course, current), "Nothing is served: runPolicy.suspend is true."
    elif current.state == "Running":
        course = attempt_over(course, current, course.now)
        stopped = current.model_copy(update={"state": "Suspended", "completion_time": stamp(course.now)})
        course = course.with_stage(stopped)
        message = f"Stage {current.name}, attempt {current.attempt}, is stopped: runPolicy.suspend is true."
    else:
        message = "Nothing is started: runPolicy.suspend is true."
    return course if was else course.tell("Suspended", message)


def finish(course: Course) -> Course:
    """Record the success of the job once all stages have succeeded."""
    if course.current is not None:
        return course
    made = with_report(course.status.artifacts, course.spec, course.job.name)
    figures = ", ".join(f"{name} {value:.4g}" for name, value in list(made.metrics.items())[:MOST_FIGURES])
    parts = [f"model at {made.model}"] if made.model is not None else []
    parts += [figures] if figures else []
    course = course.with_status(completion_time=stamp(course.now), failure=None, artifacts=made)
    size = made.metrics.get(CHECKPOINT_BYTES)
    if made.checkpoints is not None and size:
        course = course.tell(
            "CheckpointsKept",
            f"Checkpoints take {human_bytes(size)} at {made.checkpoints}; nothing needs them any more, and nobody else "
            "deletes them.",
        )
    return replace(
        course.tell("Succeeded", f"All stages have succeeded{': ' if parts else ''}{'; '.join(parts)}."),
        end="Succeeded",
    )


# ------------------------------------------------------------------------------------------------------------- attempts


def proceed(course: Course) -> Course:
    """Start the next attempt, once nothing of the previous one runs any more and its delay is over."""
    current = course.current
    assert current is not None, "finish comes first"
    course = course.deleting(*_leftovers(course, current))
    if current.name == SERVE:
        return serve(course)
    if current.state == "Running":
        return course
    course = _deleting_told(course, current)
    if course.suspended:
        return course
    waiting = _predecessor(course) or _still_running(course, current)
    if waiting is not None:
        return replace(waiting, stalled=course.stalled)
    at = moment(current.next_attempt_time)
    if at is not None and course.now < at:
        return _delayed(course, current, at)
    return _started(course, current)


def _leftovers(course: Course, current: StageStatus) -> Sequence[ChildView]:
    """Return the children that should not run: of other stages, or older than the current attempt."""
    return [
        child
        for child in course.observed.children
        if child.state not in ("Succeeded", "Failed")
        and (child.stage.value != current.name or child.attempt < current.attempt)
    ]


def _deleting_told(course: Course, current: StageStatus) -> Course:
    """Delete the children of an attempt whose end the stored status records; until then their pods are needed."""
    stored = course.stored(current.name)
    if stored is None or (stored.state, stored.attempt) != (current.state, current.attempt):
        return course
    return course.deleting(*(child for child in course.children(current.name) if child.attempt <= current.attempt))


def _predecessor(course: Course) -> Course | None:
    """Wait for the end of a deleted job of this name, which writes to the same place; None if nothing of it runs."""
    left = [pod for pod in course.observed.pods_before if not pod.over and not _gone(course, pod)]
    if not left:
        return None
    for pod in left:
        course = course.wake(gone_after(pod))
    names = ", ".join(pod.name for pod in left[:3])
    return replace(course, waiting=f"Waiting for the end of an earlier job of this name, now deleted: {names}.")


def _gone(course: Course, pod: PodView) -> bool:
    after = gone_after(pod)
    return after is not None and after <= course.now


def _still_running(course: Course, current: StageStatus) -> Course | None:
    """Wait for the end of an earlier attempt, as two would write to one place; None if nothing of it runs."""
    pods = [
        pod
        for pod in course.observed.pods
        if pod.stage.value == current.name and not pod.over and not _gone(course, pod)
    ]
    children = [
        child
        for child in course.children(current.name)
        if child.state not in ("Succeeded", "Failed") and not child.deleting
    ]
    if not pods and not children:
        return None
    for pod in pods:
        course = course.wake(gone_after(pod))
    left = [pod.name for pod in pods[:3]] or [child.ref.name for child in children]
    names = f"{', '.join(left)} still {'runs' if len(left) == 1 else 'run'}"
    return replace(course, waiting=f"Waiting for the end of attempt {current.attempt}: {names}.")


def _delayed(course: Course, current: StageStatus, at: datetime) -> Course:
    number = current.attempt + 1
    words = f"Attempt {number} of stage {current.name} starts at {stamp(at)}"
    failure = course.status.failure
    because = f", after {failure.failure_class}: {failure.message}" if failure is not None else "."
    before = condition(course.job.status, "Stalled")
    if course.stalled is None and before is not None and before.reason == "Refused":
        course = replace(course, stalled=Stalled(before.reason, before.message))
    return replace(course.wake(at), waiting=f"{words}{because}")


def _next_attempt(course: Course, current: StageStatus) -> Attempt:
    return Attempt(Stage(current.name), current.attempt + 1, current.avoided_nodes, next_capacity(course, current))


def _ref(manifest: Manifest) -> ObjectRef:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict), "a manifest without metadata was rendered"
    return ObjectRef(str(manifest["apiVersion"]), str(manifest["kind"]), str(metadata["name"]))


def _started(course: Course, current: StageStatus) -> Course:
    """Create the next attempt. The claim is created once: it holds the results, and a new one would hide their loss."""
    attempt = _next_attempt(course, current)
    number, capacity = attempt.number, attempt.capacity
    try:
        made = plan_now(course)
        own = stage(made, context(course), attempt)
    except PlanRefused as problems:
        cause = Cause(
            OperatorCause.PLAN_REFUSED,
            "PlanRefused",
            f"Attempt {number} cannot be planned: {problems_text(problems.problems)}",
            "Create a new job with the change that the message names.",
        )
        return give_up(course, current, cause.told(Stage(current.name), number))
    child = _ref(own[-1])
    now = stamp(course.now)
    if (after := plan_status(made)) != course.status.plan:
        # Settings, prices or the operator may have changed since it was planned.
        course = course.with_status(plan=after).tell("Planned", f"Planned anew: {plan_sentence(made)}")
    running = current.model_copy(
        update={
            "state": "Running",
            "attempt": number,
            "start_time": now,
            "completion_time": None,
            "next_attempt_time": None,
            "blocked_since": None,
            "capacity": capacity,
            "nodes_since": None,
            "running_since": None,
            "replaced_pods": 0,
            # Before the first attempt these count refusals of the API server, which are over.
            "failures_in_row": current.failures_in_row if current.attempt else 0,
            "child": reference(child),
        }
    )
    first = () if course.started else shared(made, context(course))
    course = course.with_stage(running).with_status(start_time=course.status.start_time or now, progress=None)
    course = clock_started(course, capacity, course.now)
    return replace(
        course.tell(
            "StageStarted",
            f"Stage {current.name} runs as {child.kind} {child.name}, attempt {number}{words(capacity)}.",
        ),
        create=(*course.create, *first, *own),
        waiting=f"Waiting for the pods of {child.name} to be created.",
    )
