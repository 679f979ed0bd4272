"""State of a job that passes through the phases of one decision.

Each phase takes a state and returns a richer one: the new status, the objects to delete and to create, the events, and
the time of the next reconcile. A phase reads neither clock nor network: everything it knows is in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Self

from finetune_contract.choices import Stage
from finetune_operator.jobs.render.render_types import ProgressEndpoint
from finetune_operator.jobs.state.decision_types import (
    ChildView,
    Decision,
    EventNote,
    JobView,
    ObjectRef,
    Observed,
    PodView,
)
from finetune_operator.jobs.state.plan_table import FindPlan
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.redaction import Redactor
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.status_times import earliest
from finetune_operator.spec.types import (
    ChildReference,
    FineTuneJob,
    FineTuneJobSpec,
    FineTuneJobStatus,
    StageStatus,
)


def has_started(status: FineTuneJobStatus) -> bool:
    """Return whether any stage has begun."""
    return any(stage.attempt > 0 for stage in status.stages)


@dataclass(frozen=True)
class Stalled:
    """Reason that nothing moves until somebody changes something outside of the job."""

    reason: str
    message: str


@dataclass(frozen=True)
class Readiness:
    """Readiness of the endpoint, with its reason."""

    ready: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Inputs:
    """Values that the decision follows from; phases read them."""

    job: JobView
    observed: Observed
    now: datetime
    settings: Settings
    endpoint: ProgressEndpoint | None
    """Address for progress reports of pods; None: it is not served."""
    find_plan: FindPlan = field(repr=False, compare=False)
    """Lookup of the plan in force."""


@dataclass(frozen=True)
class Findings:
    """Findings of the phases, for the conditions of the status."""

    plan_problems: tuple[Problem, ...] = ()
    """Reasons that there is no plan."""
    waiting: str = ""
    """Message on the wait of the current attempt, or of the next one."""
    waiting_reason: str = ""
    """Reason of that wait; empty: the usual one."""
    no_progress_message: str = ""
    """Message on a running attempt that reports nothing new."""
    stalled: Stalled | None = None
    readiness: Readiness | None = None
    """Readiness of the endpoint, in the stage that serves."""


@dataclass(frozen=True)
class ReconcileState:
    """State of a job on its way to a decision."""

    inputs: Inputs
    decision: Decision
    """Decision so far."""
    findings: Findings = Findings()
    end: Literal["Succeeded", "Failed"] | None = None
    """Outcome of a job that has ended, in this reconcile or long ago."""
    suspended: bool = False
    done: bool = False
    """True if the later phases have nothing to do."""

    @property
    def job(self) -> JobView:
        return self.inputs.job

    @property
    def observed(self) -> Observed:
        return self.inputs.observed

    @property
    def now(self) -> datetime:
        return self.inputs.now

    @property
    def settings(self) -> Settings:
        return self.inputs.settings

    @property
    def status(self) -> FineTuneJobStatus:
        """Status so far."""
        return self.decision.status

    @property
    def accepted(self) -> FineTuneJob:
        """Job; only phases after its acceptance read it."""
        assert self.job.job is not None, "a phase ran before the job was accepted"
        return self.job.job

    @property
    def spec(self) -> FineTuneJobSpec:
        return self.accepted.spec

    @property
    def started(self) -> bool:
        """True once any stage has begun; from then on the API server keeps the spec as it is."""
        return has_started(self.status)

    @property
    def started_when_stored(self) -> bool:
        """True if any stage has begun in the stored status, which the API server goes by."""
        return has_started(self.job.status)

    @property
    def current(self) -> StageStatus | None:
        """First stage that is not done; None when all are."""
        return next((stage for stage in self.status.stages if stage.state != "Succeeded"), None)

    def stored(self, name: Stage) -> StageStatus | None:
        """Return the stage from the stored status."""
        return next((stage for stage in self.job.status.stages if stage.name is name), None)

    def children(self, stage: Stage) -> tuple[ChildView, ...]:
        """Return all children of a stage, the newest attempt last."""
        children = (child for child in self.observed.children if child.stage is stage)
        return tuple(sorted(children, key=lambda child: child.attempt))

    def pods(self, stage: Stage, attempt: int) -> tuple[PodView, ...]:
        """Return the pods of one attempt, without reports that are of another job or stage."""
        pods = (pod for pod in self.observed.pods if pod.stage is stage and pod.attempt == attempt)
        return tuple(with_own_report(pod, self.job.name) for pod in pods)

    def with_status(self, **changes: object) -> Self:
        """Return a copy with these fields of the status changed, by their Python names."""
        return self.with_actions(status=self.status.model_copy(update=changes))

    def with_findings(self, **changes: Any) -> Self:
        """Return a copy with these fields of the findings changed."""
        return replace(self, findings=replace(self.findings, **changes))

    def with_actions(self, **changes: Any) -> Self:
        """Return a copy with these fields of the decision changed."""
        return replace(self, decision=replace(self.decision, **changes))

    def with_stage(self, stage: StageStatus) -> Self:
        """Return a copy with this stage in place of the one of its name."""
        stages = tuple(stage if one.name is stage.name else one for one in self.status.stages)
        return self.with_status(stages=stages)

    def with_event(self, reason: str, message: str, warning: bool = False) -> Self:
        """Return a copy with one more event."""
        note = EventNote("Warning" if warning else "Normal", reason, message)
        return self.with_actions(events=(*self.decision.events, note))

    def requeue(self, at: datetime | None) -> Self:
        """Return a copy that is reconciled again at that time, or sooner."""
        return self.with_actions(requeue_at=earliest(self.decision.requeue_at, at))

    def with_deletions(self, *children: ChildView) -> Self:
        """Return a copy that deletes those of the children that are not being deleted already."""
        known = self.decision.delete
        refs = tuple(child.ref for child in children if not child.deleting and child.ref not in known)
        return self.with_actions(delete=(*known, *refs))


def with_own_report(pod: PodView, job: str) -> PodView:
    """Return the pod, with its report only if that is of this job and of the pod's stage."""
    ended = pod.ended
    if ended is None or ended.report is None or (ended.report.job, ended.report.stage) == (job, pod.stage):
        return pod
    return replace(pod, ended=replace(ended, report=None))


def job_redactor(job: JobView) -> Redactor:
    """Return what hides secrets in texts about the job, including those that it names in plain."""
    redactor = Redactor()
    redactor.learn(None if job.job is None else job.job.spec.model_dump(mode="json", by_alias=True))
    return redactor


def reference(ref: ObjectRef) -> ChildReference:
    """Return the reference to a child as the status holds it."""
    return ChildReference(api_version=ref.api_version, kind=ref.kind, name=ref.name)
