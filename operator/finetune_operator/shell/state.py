"""What the parts of one running operator share.

The store, the queue and the progress book hold everything that is known; `leading` says whether this process may act
on it. Whoever serves something beside the reconciler (progress, health, metrics) gets this state and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from finetune_contract.choices import Stage
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJobStatus, ProgressStatus
from finetune_operator.rendering.types import ProgressEndpoint
from finetune_operator.shell.kube import Kube
from finetune_operator.shell.queue import WorkQueue
from finetune_operator.shell.store import Store


@dataclass
class ProgressBook:
    """The newest progress of each job: of its latest attempt that told any. Lost with the process; pods tell again."""

    _newest: dict[str, tuple[Stage, int, ProgressStatus]] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)

    def note(self, job_uid: str, stage: Stage, attempt: int, progress: ProgressStatus) -> None:
        """Keep it in place of what was told before. A late word of an earlier attempt of the same stage is dropped."""
        known = self._newest.get(job_uid)
        if known is not None and known[0] is stage and known[1] > attempt:
            return
        self._newest[job_uid] = (stage, attempt, progress)
        self._heard[job_uid] = time.monotonic()

    def of(self, job_uid: str, stage: Stage, attempt: int) -> ProgressStatus | None:
        """The newest of this attempt."""
        known = self._newest.get(job_uid)
        return known[2] if known is not None and known[:2] == (stage, attempt) else None

    def heard_of(self, job_uid: str) -> float:
        """When the job told its progress last, on the monotonic clock; 0.0: never."""
        return self._heard.get(job_uid, 0.0)

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._newest.pop(job_uid, None)
        self._heard.pop(job_uid, None)


class Measurements(Protocol):
    """What is counted about the operator itself."""

    def pass_done(self, seconds: float, outcome: str) -> None:
        """One pass over a job; `outcome` is done, refused, conflict, gone or failed."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server; `code` is the HTTP status, 0 when there was no answer."""

    def status_written(self, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
        """A status took the place of another."""

    def resynced(self, reason: str) -> None:
        """Everything was listed again; `reason` is start, leadership, outage or relist."""


class NoMeasurements:
    """Counts nothing."""

    def pass_done(self, seconds: float, outcome: str) -> None:
        """Nothing."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Nothing."""

    def status_written(self, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
        """Nothing."""

    def resynced(self, reason: str) -> None:
        """Nothing."""


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


class Service(Protocol):
    """Something that is served beside the reconciler while the operator runs."""

    async def start(self, state: OperatorState) -> None:
        """Begin to serve. Raises what keeps it from serving."""

    async def stop(self) -> None:
        """End, also after a start that failed."""
