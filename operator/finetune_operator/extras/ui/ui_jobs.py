"""A cluster's jobs as values, requested in the background: a page never waits long for an absent API server.

The last answer is shown, with later errors. The API server is requested only while somebody looks, and once for all
open pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from threading import Condition, Lock, Thread
from typing import Generic, TypeVar

from finetune_contract.choices import Stage
from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob, Connection, JobEvent, connect
from finetune_operator.cli.cluster.log_following import LogSelection, NoLogError, read_logs
from finetune_operator.cli.cluster.watching import events_of

Value = TypeVar("Value")
REFRESH_SECONDS = 4.0
"""Age in seconds above which an answer is requested again."""
ANSWER_SECONDS = 30.0
"""Timeout in seconds of one answer of the API server."""
FIRST_ANSWER_SECONDS = 2.0
"""Seconds that the first page waits for a first answer."""
LOG_LINES = 200
"""Number of last lines of each pod."""
MOST_JOBS = 32
"""Maximum pages of single jobs whose last answers are kept."""
MOST_POINTS = 5000
"""Maximum points of one job's progress that are kept for its curve."""


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """Last answer of the cluster."""

    value: Value | None = None
    error: str | None = None
    """Reason why there is no newer value."""

    @property
    def waiting(self) -> bool:
        """True until there is a value or an error."""
        return self.value is None and self.error is None


@dataclass(frozen=True)
class JobDetails:
    """A job with its related objects."""

    job: ClusterJob
    events: tuple[JobEvent, ...] | None
    """Events of the job; None: they may not be read."""
    log: tuple[tuple[str, str], ...]
    """Label of the pod, line."""
    notes: tuple[str, ...]


class CachedRequest(Generic[Value]):
    """Request that runs in a thread of its own, at most once at a time."""

    def __init__(self, request: Callable[[], Value]) -> None:
        self._request = request
        self._changed = Condition()
        self._answer: Answer[Value] = Answer()
        self._answered_at: float | None = None
        self._running = False

    def answer(self, timeout: float = FIRST_ANSWER_SECONDS) -> Answer[Value]:
        """Return the last answer; request a new one if it is old, and wait only for the first one."""
        with self._changed:
            old = self._answered_at is None or time.monotonic() - self._answered_at > REFRESH_SECONDS
            if old and not self._running:
                self._running = True
                Thread(target=self._run_request, daemon=True, name="finetune-ui-cluster").start()
            self._changed.wait_for(lambda: not self._answer.waiting, timeout)
            return self._answer

    def _run_request(self) -> None:
        answer: Answer[Value]
        try:
            answer = Answer(self._request())
        except ClusterError as error:
            answer = replace(self._answer, error=f"{str(error).removesuffix('.')}.")
        except TimeoutError:
            answer = replace(self._answer, error=f"The API server did not answer within {ANSWER_SECONDS:g} s.")
        except Exception as error:  # a bug of ours: the page reports it, instead of waiting for ever
            answer = replace(self._answer, error=f"{type(error).__name__}: {error}")
        with self._changed:
            self._answer, self._answered_at, self._running = answer, time.monotonic(), False
            self._changed.notify_all()


class ClusterJobs:
    """Jobs of one namespace, or of all."""

    def __init__(self, connection: Connection, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self.where = "any namespace" if everywhere else "this namespace"
        """Description of the listed namespaces."""
        self._connection = connection
        self._all = CachedRequest(self._request_all)
        self._details: OrderedDict[tuple[str, str], CachedRequest[JobDetails]] = OrderedDict()
        self._curves: OrderedDict[str, dict[int, float]] = OrderedDict()
        self._lock = Lock()

    def all(self) -> Answer[tuple[ClusterJob, ...]]:
        """Return all jobs, the newest first."""
        return self._all.answer()

    def details(self, namespace: str, name: str) -> Answer[JobDetails] | None:
        """Return one of the jobs; None if it does not exist. Names are looked up, never forwarded as they came."""
        listed = self.all()
        if listed.value is not None:
            there = any((job.metadata.namespace, job.name) == (namespace, name) for job in listed.value)
            if not there:
                return None
        elif listed.waiting:
            return Answer()
        else:
            return Answer(error=listed.error)
        with self._lock:
            key = (namespace, name)
            request = self._details.setdefault(key, CachedRequest(lambda: self._request_one(namespace, name)))
            while len(self._details) > MOST_JOBS:
                self._details.popitem(last=False)
        return request.answer()

    def curve(self, job: ClusterJob) -> list[dict[str, float]]:
        """Return the loss by step, collected since this page's first request: a cluster keeps the newest only."""
        with self._lock:
            points = sorted(self._curves.get(job.metadata.uid, {}).items())
        return [{"step": step, "loss": loss} for step, loss in points]

    def _request_all(self) -> tuple[ClusterJob, ...]:
        async def listed(cluster: Cluster) -> tuple[ClusterJob, ...]:
            if not self.everywhere:
                self.where = f"namespace {cluster.namespace}"
            return await cluster.jobs(self.everywhere)

        jobs = self._in_cluster(self._connection, listed)
        for job in jobs:
            self._remember(job)
        return tuple(sorted(jobs, key=lambda job: job.metadata.creation_timestamp, reverse=True))

    def _request_one(self, namespace: str, name: str) -> JobDetails:
        async def all_of_it(cluster: Cluster) -> JobDetails:
            job = await cluster.job(name)
            events = await events_of(cluster, job)
            try:
                log = await read_logs(cluster, job, LogSelection(tail=LOG_LINES))
            except NoLogError as none:
                return JobDetails(job, events, (), (str(none),))
            except ClusterError as error:
                return JobDetails(job, events, (), (f"The log cannot be read: {error}",))
            return JobDetails(job, events, log.lines[-LOG_LINES:], log.notes)

        details = self._in_cluster(replace(self._connection, namespace=namespace), all_of_it)
        self._remember(details.job)
        return details

    def _in_cluster(self, connection: Connection, work: Callable[[Cluster], Awaitable[Value]]) -> Value:
        async def connected() -> Value:
            async with asyncio.timeout(ANSWER_SECONDS), connect(connection) as cluster:
                return await work(cluster)

        return asyncio.run(connected())

    def _remember(self, job: ClusterJob) -> None:
        progress = job.status.progress
        if job.status.stage is not Stage.TRAIN or progress is None or progress.step is None or progress.loss is None:
            return
        with self._lock:
            points = self._curves.setdefault(job.metadata.uid, {})
            points[progress.step] = progress.loss
            if len(points) > MOST_POINTS:
                del points[min(points)]
            while len(self._curves) > 4 * MOST_JOBS:
                self._curves.popitem(last=False)
