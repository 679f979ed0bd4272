"""State that the parts of one running operator share.

The store, the queue and the progress book hold everything that is known; `leading` is set while this process may act on
it. Services beside the reconciler (progress, health, metrics) get this state and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from finetune_contract.choices import Stage
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.reconcile.job_validation import JobValidator
from finetune_operator.controller.store.queue import JobKey, WorkQueue
from finetune_operator.controller.store.store import Entry, Store, key_of
from finetune_operator.jobs.render.render_types import Manifest, ProgressEndpoint
from finetune_operator.jobs.state.decision_types import NO_FINDINGS, Findings, JobView
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobStatus, ProgressStatus

log = logging.getLogger(__name__)

LISTEN_SECONDS = 1.0
BREAK_SECONDS = 10.0
"""Longest interval between two checks whether reports can be received; after a longer one, some may be missing."""


@dataclass(frozen=True)
class LatestReport:
    """The newest report of one attempt."""

    stage: Stage
    attempt: int
    progress: ProgressStatus
    mark: str
    """Result of `progress_protocol.mark_of`."""
    last_progress_at: datetime
    """Time when the mark changed last."""
    findings: Findings = NO_FINDINGS


@dataclass
class ProgressBook:
    """Newest progress of each job, of its latest attempt with any. Lost with the process; pods report again."""

    _newest: dict[str, LatestReport] = field(default_factory=dict)
    _reported_at: dict[str, float] = field(default_factory=dict)

    def note(
        self,
        job_uid: str,
        stage: Stage,
        attempt: int,
        progress: ProgressStatus,
        mark: str,
        now: datetime,
        findings: Findings = NO_FINDINGS,
    ) -> None:
        """Store a report in place of the one before. A late one of an earlier attempt of the same stage is dropped."""
        known = self._newest.get(job_uid)
        if known is not None and known.stage is stage and known.attempt > attempt:
            return
        same = known is not None and (known.stage, known.attempt, known.mark) == (stage, attempt, mark)
        last_progress_at = known.last_progress_at if known is not None and same else now
        self._newest[job_uid] = LatestReport(stage, attempt, progress, mark, last_progress_at, findings)
        self._reported_at[job_uid] = time.monotonic()

    def of(self, job_uid: str, stage: Stage, attempt: int) -> ProgressStatus | None:
        """Return the newest progress of this attempt."""
        known = self._of(job_uid, stage, attempt)
        return None if known is None else known.progress

    def findings_of(self, job_uid: str, stage: Stage, attempt: int) -> Findings:
        """Return the measurements that this attempt has reported."""
        known = self._of(job_uid, stage, attempt)
        return NO_FINDINGS if known is None else known.findings

    def last_progress_at(self, job_uid: str, stage: Stage, attempt: int) -> datetime | None:
        """Return when this attempt last reported anything new."""
        known = self._of(job_uid, stage, attempt)
        return None if known is None else known.last_progress_at

    def _of(self, job_uid: str, stage: Stage, attempt: int) -> LatestReport | None:
        known = self._newest.get(job_uid)
        return known if known is not None and (known.stage, known.attempt) == (stage, attempt) else None

    def last_report_at(self, job_uid: str) -> float:
        """Return when the job's last report came, on the monotonic clock; 0.0: never."""
        return self._reported_at.get(job_uid, 0.0)

    def reporting(self, since: float) -> int:
        """Return how many jobs have reported since then, on the monotonic clock."""
        return sum(at > since for at in self._reported_at.values())

    def forget(self, job_uid: str) -> None:
        """Forget a deleted job."""
        self._newest.pop(job_uid, None)
        self._reported_at.pop(job_uid, None)


@dataclass
class ReportWindow:
    """Time since which no report can have been missed. It is asked often, and a long interval between two calls is a
    break: the process stood still, or its clock was set, and reports in between may be missing.
    """

    _since: datetime | None = None
    _checked_at: datetime | None = None

    def report_lost(self) -> None:
        """Restart the time: a report may just have been rejected."""
        self._since = None

    def since(self, able: bool, now: datetime) -> datetime | None:
        """Return the time; None while reports cannot be received. `able`: True if they can be now."""
        passed = None if self._checked_at is None else now - self._checked_at
        unbroken = passed is not None and timedelta(0) <= passed <= timedelta(seconds=BREAK_SECONDS)
        self._checked_at = now
        if not able:
            self._since = None
        elif self._since is None or not unbroken:
            self._since = now
        return self._since


class Measurements(Protocol):
    """Counts about the operator itself."""

    def reconcile_done(self, seconds: float, outcome: str) -> None:
        """Count one reconcile of a job; `outcome` is one of the reconciler's."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request to the API server; `code` is the HTTP status, 0 if there was no answer."""

    def status_written(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Count a status that replaced the one in `job`."""

    def relisted(self, reason: str) -> None:
        """Count a list of everything; `reason` is start, leadership, outage or relist."""

    def claims_left_over(self, sizes: Sequence[int]) -> None:
        """Set the number and the bytes of claims of deleted jobs."""


class NoMeasurements:
    """Counts nothing."""

    def reconcile_done(self, seconds: float, outcome: str) -> None:
        """Do nothing."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Do nothing."""

    def status_written(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Do nothing."""

    def relisted(self, reason: str) -> None:
        """Do nothing."""

    def claims_left_over(self, sizes: Sequence[int]) -> None:
        """Do nothing."""


async def no_launchers() -> Collection[LauncherName]:
    """Return no launchers, as before the first discovery."""
    return ()


@dataclass
class OperatorState:
    """State of one running operator."""

    settings: Settings
    namespace: str
    """Namespace of the operator, with its Lease, its Service and its Secret."""
    kube: Kube
    store: Store
    queue: WorkQueue
    progress: ProgressBook
    leading: asyncio.Event
    """Set while this process holds the Lease (always, without leader election): only then does anything act."""
    synced: asyncio.Event
    """Set once the store has been filled."""
    leader_address: Callable[[], str | None]
    """IP address of the pod that leads, from its Lease; None while there is none or it is not known."""
    measurements: Measurements = field(default_factory=NoMeasurements)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that have to run as long as the operator does: workers, lists, the election. One that is done is a bug,
    which /healthz reports.
    """
    progress_endpoint: ProgressEndpoint | None = None
    """Address for progress reports of pods, once it is served; new attempts get it."""
    report_window: ReportWindow = field(default_factory=ReportWindow)
    ending: set[str] = field(default_factory=set)
    """Uids of jobs whose namespace is being deleted, and they with it: nothing can be created there any more."""
    served: Callable[[], Awaitable[Collection[LauncherName]]] = no_launchers
    """Launchers that the cluster has; empty: not known. ApiError."""

    def __post_init__(self) -> None:
        self.validator = JobValidator(self.settings)

    def namespace_ends(self, namespace: str) -> None:
        """Note that a namespace is being deleted, which cannot be undone; a later one of its name has other jobs."""
        jobs = [self.store.job(key) for key in self.store.jobs() if key.namespace == namespace]
        ending = {job.uid for job in jobs if job is not None}
        if not ending <= self.ending:
            log.info("namespace %s is being deleted: its jobs are left as they are", namespace)
        self.ending |= ending

    async def put(self, raw: Manifest) -> Entry | None:
        """Put an object into the store, as `Store.put` does; a job is validated off the event loop before."""
        kind, namespace, name = key_of(raw)
        if kind != FINETUNE_JOB.group_kind:
            return self.store.put(raw)
        return self.store.put(raw, await self.validator.view(raw, self.store.job(JobKey(namespace, name))))

    def reports_complete_since(self) -> datetime | None:
        """Return the time since which no report of progress can have been missed; None: they cannot be received now.

        A replica that does not lead accepts none; without the API server tokens cannot be checked.
        """
        serving = self.progress_endpoint is not None and self.leading.is_set() and self.synced.is_set()
        return self.report_window.since(serving and not self.kube.outage.down, self.now())

    def now(self) -> datetime:
        """Return the time by which everything about jobs is judged: the API server's."""
        return self.kube.clock.now()

    async def check_reports(self) -> None:
        """Keep checking whether reports can be received, for ever."""
        while True:
            self.reports_complete_since()
            await asyncio.sleep(LISTEN_SECONDS)


def is_new(view: object) -> bool:
    """Return whether it is a job for which nothing was done yet: those come first."""
    return isinstance(view, JobView) and view.status.plan is None
