"""The value that walks through the phases of one decision.

Each phase takes a course and returns a richer one: the status as it will be, what to delete and to create, what to
tell, and when to look again. A phase never looks at a clock or at the network: all it knows is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, Self, TypeAlias

from finetune_operator.api.problems import Problem
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import (
    ChildReference,
    FineTuneJob,
    FineTuneJobSpec,
    FineTuneJobStatus,
    StageStatus,
)
from finetune_operator.reconcile.reconcile_types import (
    ChildView,
    Decision,
    EventNote,
    JobView,
    ObjectRef,
    Observed,
    PodView,
)
from finetune_operator.reconcile.status_times import earliest
from finetune_operator.rendering.render_types import Manifest, ProgressEndpoint


def has_started(status: FineTuneJobStatus) -> bool:
    """Return whether any stage has begun."""
    return any(stage.attempt > 0 for stage in status.stages)


@dataclass(frozen=True)
class Stalled:
    """Nothing moves until somebody changes something outside of the job."""

    reason: str
    message: str


@dataclass(frozen=True)
class Serves:
    """Whether the endpoint answers, and why not."""

    ready: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Course:
    """A job on its way to a decision."""

    job: JobView
    observed: Observed
    now: datetime
    settings: Settings
    endpoint: ProgressEndpoint | None
    status: FineTuneJobStatus
    refused: tuple[Problem, ...] = ()
    """Why there is no plan."""
    end: Literal["Succeeded", "Failed"] | None = None
    """How the job has ended, in this pass or long ago."""
    suspended: bool = False
    waiting: str = ""
    """What the current attempt, or the next one, waits for."""
    waiting_reason: str = "WaitingForPods"
    """The same in a word, while an attempt runs."""
    quiet: str = ""
    """What to say about an attempt that runs and tells nothing new."""
    stalled: Stalled | None = None
    serves: Serves | None = None
    """How the endpoint is, in the stage that serves."""
    over: bool = False
    """Whether the later phases have nothing to do."""
    delete: tuple[ObjectRef, ...] = ()
    create: tuple[Manifest, ...] = ()
    remove: tuple[ObjectRef, ...] = ()
    apply: tuple[Manifest, ...] = ()
    events: tuple[EventNote, ...] = ()
    wake_at: datetime | None = None
    delete_job: bool = field(default=False)

    @property
    def accepted(self) -> FineTuneJob:
        """The job; only phases after its acceptance ask for it."""
        assert self.job.job is not None, "a phase ran before the job was accepted"
        return self.job.job

    @property
    def spec(self) -> FineTuneJobSpec:
        return self.accepted.spec

    @property
    def started(self) -> bool:
        """Whether any stage has begun; from then on the API server keeps the spec as it is."""
        return has_started(self.status)

    @property
    def begun(self) -> bool:
        """The same of the stored status, by which the API server goes."""
        return has_started(self.job.status)

    @property
    def current(self) -> StageStatus | None:
        """The first stage that is not done; None when all are."""
        return next((stage for stage in self.status.stages if stage.state != "Succeeded"), None)

    def stored(self, name: str) -> StageStatus | None:
        """The stage as the stored status has it."""
        return next((stage for stage in self.job.status.stages if stage.name == name), None)

    def children(self, stage: str) -> tuple[ChildView, ...]:
        """All children of a stage, the newest attempt last."""
        own = (child for child in self.observed.children if child.stage.value == stage)
        return tuple(sorted(own, key=lambda child: child.attempt))

    def pods(self, stage: str, attempt: int) -> tuple[PodView, ...]:
        """The pods of one attempt; a report of another job or stage is no word of theirs."""
        own = (pod for pod in self.observed.pods if pod.stage.value == stage and pod.attempt == attempt)
        return tuple(heard_by(pod, self.job.name) for pod in own)

    def with_status(self, **changes: object) -> Self:
        """Fields of the status, by their Python names."""
        return replace(self, status=self.status.model_copy(update=changes))

    def with_stage(self, stage: StageStatus) -> Self:
        """This stage in the place of the one of its name."""
        stages = tuple(stage if one.name == stage.name else one for one in self.status.stages)
        return self.with_status(stages=stages)

    def tell(self, reason: str, message: str, warning: bool = False) -> Self:
        """One event more."""
        note = EventNote("Warning" if warning else "Normal", reason, message)
        return replace(self, events=(*self.events, note))

    def wake(self, at: datetime | None) -> Self:
        """Look again at that time, or sooner."""
        return replace(self, wake_at=earliest(self.wake_at, at))

    def deleting(self, *children: ChildView) -> Self:
        """Delete those that are not being deleted already."""
        refs = tuple(child.ref for child in children if not child.deleting and child.ref not in self.delete)
        return replace(self, delete=(*self.delete, *refs))

    def decision(self) -> Decision:
        """What came out of it."""
        return Decision(
            status=self.status,
            delete=self.delete,
            create=self.create,
            remove=self.remove,
            apply=self.apply,
            events=self.events,
            wake_at=self.wake_at,
            delete_job=self.delete_job,
        )


def heard_by(pod: PodView, job: str) -> PodView:
    """The pod with its report only when that speaks of this job and of the pod's stage."""
    ended = pod.ended
    if ended is None or ended.report is None or (ended.report.job, ended.report.stage) == (job, pod.stage):
        return pod
    return replace(pod, ended=replace(ended, report=None))


Phase: TypeAlias = Callable[[Course], Course]


def reference(ref: ObjectRef) -> ChildReference:
    """As the status names a child."""
    return ChildReference(api_version=ref.api_version, kind=ref.kind, name=ref.name)
