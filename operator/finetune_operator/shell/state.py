"""What the parts of one running operator share.

The store, the queue and the progress book hold everything that is known; `leading` says whether this process may act
on it. Whoever serves something beside the reconciler (progress, health, metrics) gets this state and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from finetune_contract.choices import Stage
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJobStatus, ProgressStatus
from finetune_operator.launchers.launcher_rows import LauncherName
from finetune_operator.reconcile.reconcile_types import JobView
from finetune_operator.rendering.render_types import Manifest, ProgressEndpoint
from finetune_operator.shell.judging import Judge
from finetune_operator.shell.kube import Kube
from finetune_operator.shell.queue import JobKey, WorkQueue
from finetune_operator.shell.store import JOB_KIND, Entry, Store, key_of

LISTEN_SECONDS = 1.0
BREAK_SECONDS = 10.0
"""Between two looks at whether reports can be heard; after a longer time it is not known what was said in it."""


@dataclass(frozen=True)
class Heard:
    """The newest report of one attempt."""

    stage: Stage
    attempt: int
    progress: ProgressStatus
    mark: str
    """As `progress_protocol.mark_of` has it."""
    moved: datetime
    """When the mark changed last."""


@dataclass
class ProgressBook:
    """The newest progress of each job: of its latest attempt that told any. Lost with the process; pods tell again."""

    _newest: dict[str, Heard] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)

    def note(
        self, job_uid: str, stage: Stage, attempt: int, progress: ProgressStatus, mark: str, now: datetime
    ) -> None:  # fmt: skip
        """Keep it in place of what was told before. A late word of an earlier attempt of the same stage is dropped."""
        known = self._newest.get(job_uid)
        if known is not None and known.stage is stage and known.attempt > attempt:
            return
        same = known is not None and (known.stage, known.attempt, known.mark) == (stage, attempt, mark)
        moved = known.moved if known is not None and same else now
        self._newest[job_uid] = Heard(stage, attempt, progress, mark, moved)
        self._heard[job_uid] = time.monotonic()

    def of(self, job_uid: str, stage: Stage, attempt: int) -> ProgressStatus | None:
        """The newest of this attempt."""
        known = self._of(job_uid, stage, attempt)
        return None if known is None else known.progress

    def moved(self, job_uid: str, stage: Stage, attempt: int) -> datetime | None:
        """When this attempt told something new last."""
        known = self._of(job_uid, stage, attempt)
        return None if known is None else known.moved

    def _of(self, job_uid: str, stage: Stage, attempt: int) -> Heard | None:
        known = self._newest.get(job_uid)
        return known if known is not None and (known.stage, known.attempt) == (stage, attempt) else None

    def heard_of(self, job_uid: str) -> float:
        """When the job told its progress last, on the monotonic clock; 0.0: never."""
        return self._heard.get(job_uid, 0.0)

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._newest.pop(job_uid, None)
        self._heard.pop(job_uid, None)


@dataclass
class Hearing:
    """Since when no report can have been missed. It is asked often, and an answer that was long in coming is a break:
    the process stood still, or its clock was set, and nobody knows what was said meanwhile.
    """

    _since: datetime | None = None
    _asked: datetime | None = None

    def missed(self) -> None:
        """A report may just have been turned away: what was said before does not count any more."""
        self._since = None

    def since(self, able: bool, now: datetime) -> datetime | None:
        """None while reports cannot be heard; `able` says whether they can be now."""
        passed = None if self._asked is None else now - self._asked
        unbroken = passed is not None and timedelta(0) <= passed <= timedelta(seconds=BREAK_SECONDS)
        self._asked = now
        if not able:
            self._since = None
        elif self._since is None or not unbroken:
            self._since = now
        return self._since


class Measurements(Protocol):
    """What is counted about the operator itself."""

    def pass_done(self, seconds: float, outcome: str) -> None:
        """One pass over a job; `outcome` is done, refused, conflict, gone or failed."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server; `code` is the HTTP status, 0 when there was no answer."""

    def status_written(self, job: JobView, after: FineTuneJobStatus) -> None:
        """A status took the place of the one in `job`."""

    def resynced(self, reason: str) -> None:
        """Everything was listed again; `reason` is start, leadership, outage or relist."""


class NoMeasurements:
    """Counts nothing."""

    def pass_done(self, seconds: float, outcome: str) -> None:
        """Nothing."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Nothing."""

    def status_written(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Nothing."""

    def resynced(self, reason: str) -> None:
        """Nothing."""


async def nothing_known() -> Collection[LauncherName]:
    """Before anybody has asked."""
    return ()


@dataclass
class OperatorState:
    """One running operator."""

    settings: Settings
    namespace: str
    """The operator's own: of its Lease, its Service and its Secret."""
    kube: Kube
    store: Store
    queue: WorkQueue
    progress: ProgressBook
    leading: asyncio.Event
    """Set while this process holds the Lease (always, without leader election): only then does anything act."""
    synced: asyncio.Event
    """Set once the store has been filled."""
    leader_address: Callable[[], str | None]
    """IP address of the pod that leads, as its Lease tells; None while nobody does or it is not known."""
    measurements: Measurements = field(default_factory=NoMeasurements)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """What has to run as long as the operator does: workers, watches, the election. One that is done is a fault, which
    /healthz tells.
    """
    progress_endpoint: ProgressEndpoint | None = None
    """Where pods report progress, once that is served; new attempts are told."""
    hearing: Hearing = field(default_factory=Hearing)
    served: Callable[[], Awaitable[Collection[LauncherName]]] = nothing_known
    """Launchers that the cluster has; none: not known. ApiError."""

    def __post_init__(self) -> None:
        self.judge = Judge(self.settings)

    async def put(self, raw: Manifest) -> Entry | None:
        """Put an object into the store, as `Store.put` does; a job is judged away from the event loop before."""
        kind, namespace, name = key_of(raw)
        if kind != JOB_KIND:
            return self.store.put(raw)
        return self.store.put(raw, await self.judge.view(raw, self.store.job(JobKey(namespace, name))))

    def heard_since(self) -> datetime | None:
        """Since when no report of progress can have been missed; None: they cannot be heard now.

        A replica that does not lead takes none; without the API server tokens cannot be checked.
        """
        serving = self.progress_endpoint is not None and self.leading.is_set() and self.synced.is_set()
        return self.hearing.since(serving and not self.kube.outage.down, self.now())

    def now(self) -> datetime:
        """Return the time by which everything about jobs is judged: the API server's."""
        return self.kube.clock.now()

    async def listen(self) -> None:
        """Keep asking, for ever."""
        while True:
            self.heard_since()
            await asyncio.sleep(LISTEN_SECONDS)


class Service(Protocol):
    """Something that is served beside the reconciler while the operator runs."""

    async def start(self, state: OperatorState) -> None:
        """Begin to serve. Raises what keeps it from serving."""

    async def stop(self) -> None:
        """End, also after a start that failed."""
