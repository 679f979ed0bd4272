"""`finetune watch`: a job until it ends, as a page redrawn on a terminal, as lines elsewhere.

A broken watch restarts from the job's current state, so no lasting change is missed; an absent API server is reported
once, and retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live

from finetune_operator.cli.cluster.cluster_jobs import (
    Cluster,
    ClusterError,
    ClusterJob,
    JobEvent,
    UnreachableError,
    parse_job,
)
from finetune_operator.cli.cluster.jobview import Page, next_commands, one_line, utc_now
from finetune_operator.cli.terminal.console import note, sentence
from finetune_operator.cli.terminal.display import LINE_PERCENT, LINE_SECONDS

AGAIN_SECONDS = 1.0
AGAIN_MOST_SECONDS = 15.0
REDRAW_SECONDS = 1.0


class JobDeletedError(ClusterError):
    """Error of a job that was deleted while it was being followed."""


async def versions(cluster: Cluster, name: str) -> AsyncIterator[ClusterJob]:
    """Yield the job now and after each change. Raise JobDeletedError once deleted, ClusterError if there is none."""
    job = await cluster.job(name)
    uid, delay = job.metadata.uid, AGAIN_SECONDS
    yield job
    while True:
        try:
            async for kind, value in cluster.job_changes(job):
                if kind == "deleted":
                    raise JobDeletedError(f"FineTuneJob {name} was deleted")
                job, delay = parse_job(value), AGAIN_SECONDS
                yield job
            current = await cluster.job(name)
        except UnreachableError as error:
            if delay == AGAIN_SECONDS:
                note(f"{sentence(str(error))} Trying again.")
            await asyncio.sleep(delay)
            delay = min(delay * 2, AGAIN_MOST_SECONDS)
            with suppress(UnreachableError):
                current = await cluster.job(name)
                delay = AGAIN_SECONDS
            if delay != AGAIN_SECONDS:
                continue
        except ClusterError as error:
            if error.code == 404:
                raise JobDeletedError(f"FineTuneJob {name} was deleted") from error
            raise
        if current.metadata.uid != uid:
            raise JobDeletedError(f"FineTuneJob {name} was deleted, and another one has its name")
        if current.metadata.resource_version != job.metadata.resource_version:
            job = current
            yield job


class View(Protocol):
    """View that shows one version of the job after the other."""

    async def show(self, job: ClusterJob) -> None:
        """Show the job as it is now."""


class LineView:
    """View for a file or a pipe: a line for every relevant change, and for progress every 10 s or 10 percent."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: object = None
        self._percent = 0
        self._at = 0.0

    async def show(self, job: ClusterJob) -> None:
        """Print one line, if there is anything to report."""
        status = job.status
        moment = (status.phase, status.stages, status.restarts, status.failure, job.outcome, status.conditions)
        percent = (status.progress.percent if status.progress else None) or 0
        now = time.monotonic()
        further = percent != self._percent and (
            now - self._at >= LINE_SECONDS or abs(percent - self._percent) >= LINE_PERCENT
        )
        if moment == self._printed and not further:
            return
        self._printed, self._percent, self._at = moment, percent, now
        clock = utc_now().astimezone().strftime("%H:%M:%S")
        self._console.print(f"{clock}  {job.name}  {one_line(job, utc_now())}", soft_wrap=True)


class PageView:
    """View for a person: the page of `finetune status`, redrawn at each change and every second for its times."""

    def __init__(self, cluster: Cluster, live: Live, program: str, flags: str) -> None:
        self._cluster = cluster
        self._live = live
        self._next: Callable[[ClusterJob], tuple[str, ...]] = lambda job: next_commands(job, program, flags)
        self._job: ClusterJob | None = None
        self._events: tuple[JobEvent, ...] | None = ()

    async def show(self, job: ClusterJob) -> None:
        """Show the page; events are read again only here, as every event of ours comes with a change of the job."""
        self._job = job
        with suppress(UnreachableError):
            self._events = await events_of(self._cluster, job)
        self.draw()

    def draw(self) -> None:
        """Draw the page with the current times."""
        if self._job is not None:
            commands = self._next(self._job) if self._job.outcome else ()
            self._live.update(Group(*Page(self._job, utc_now(), self._events, commands).parts()), refresh=True)


async def events_of(cluster: Cluster, job: ClusterJob) -> tuple[JobEvent, ...] | None:
    """Return the job's events, or None if they may not be read."""
    try:
        return await cluster.events(job)
    except ClusterError as error:
        if error.code == 403:
            return None
        raise


async def watch_job(cluster: Cluster, name: str, console: Console, program: str, flags: str) -> ClusterJob:
    """Show the job until it has ended, and return its last version."""
    if not console.is_terminal:
        return await _shown(cluster, name, LineView(console))
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        view = PageView(cluster, live, program, flags)
        clock = asyncio.create_task(_redraw(view))
        try:
            return await _shown(cluster, name, view)
        finally:
            clock.cancel()


async def _redraw(view: PageView) -> None:
    while True:
        await asyncio.sleep(REDRAW_SECONDS)
        view.draw()


async def _shown(cluster: Cluster, name: str, view: View) -> ClusterJob:
    async for job in versions(cluster, name):
        await view.show(job)
        if job.outcome is not None:
            return job
    raise AssertionError("a job's versions end with an exception only")
