"""`finetune logs`: the lines of all pods of a stage's attempt; with --follow, of every later one until the job ends.

Pods are deleted with their attempt or their node, and their logs with them; then only the end of a failure's log in the
status remains, and a note says so.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from finetune_contract.choices import Stage
from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob, UnreachableError
from finetune_operator.cli.cluster.watching import versions
from finetune_operator.cli.terminal.console import note
from finetune_operator.jobs.state.decision_types import PodView

LOOK_SECONDS = 2.0
"""Seconds between searches for new pods while a job is followed."""
LAST_SECONDS = 10.0
"""Seconds that the logs get to end after the job: they end with their containers, which have exited by then."""
ORDER = {stage: number for number, stage in enumerate(Stage)}
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class NoLogError(ClusterError):
    """Error of missing logs; the text has the reason and an alternative."""


@dataclass(frozen=True)
class LogSelection:
    """Selection of lines."""

    stage: Stage | None = None
    pod: str | None = None
    """Name of a pod, or the part of its prefix after the slash."""
    rank: int | None = None
    tail: int | None = None
    previous: bool = False
    """True for the attempt before the newest one."""

    def selects(self, job: ClusterJob, pod: PodView) -> bool:
        """Return True if the pod's lines are selected, whatever its attempt."""
        if self.stage is not None and pod.stage is not self.stage:
            return False
        if self.pod is not None and self.pod not in (pod.name, place_of(pod)):
            return False
        return self.rank is None or pod.index == node_of(job, self.rank)


def place_of(pod: PodView) -> str:
    """Return the pod's index in its attempt: its node rank, or `launcher` for the one that starts the others."""
    return "launcher" if pod.index is None and pod.stage is Stage.TRAIN else str(pod.index or 0)


def label_of(pod: PodView) -> str:
    """Return the prefix of its lines, e.g. `train-1/0`."""
    return f"{pod.stage}-{pod.attempt}/{place_of(pod)}"


def node_of(job: ClusterJob, rank: int) -> int:
    """Return the node rank of the pod in which a process runs."""
    plan, nodes = job.status.plan, max(1, job.spec.resources.nodes)
    if plan is None:
        return rank
    return rank // max(1, plan.world_size // nodes)


_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d))(?: |$)")


def stamped_line(line: str) -> tuple[str, str]:
    """Return the kubelet's timestamp and the line; the timestamp is empty for lines that are not the container's."""
    match = _STAMP.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


@dataclass
class Printer:
    """Printer of lines with their pod's prefix, coloured on a terminal only."""

    console: Console

    def print(self, label: str, line: str) -> None:
        """Print one line, neither cut nor interpreted as markup."""
        prefix = Text(f"[{label}] ", style=COLOURS[zlib.crc32(label.encode()) % len(COLOURS)])
        self.console.print(
            Text.assemble(prefix, Text.from_ansi(line) if self.console.is_terminal else line), soft_wrap=True
        )


# -------------------------------------------------------------------------------------------------------- existing logs


@dataclass(frozen=True)
class FoundLog:
    """Lines of pods with their labels, and notes about them."""

    lines: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


async def read_logs(cluster: Cluster, job: ClusterJob, selection: LogSelection) -> FoundLog:
    """Return the present lines of all pods in the order of their times. Raise NoLogError if there are none."""
    stage, attempt = _attempt(job, selection)
    pods = [
        pod
        for pod in await cluster.pods(job)
        if (pod.stage, pod.attempt) == (stage, attempt) and selection.selects(job, pod) and pod.phase != "Pending"
    ]
    stamped: list[tuple[str, str, str]] = []
    unreadable = []
    for pod in pods:
        try:
            async for line in cluster.log(job, pod, tail=selection.tail):
                moment, text = stamped_line(line)
                # A line without a time is the node's message about the log; it keeps its place.
                last = moment or (stamped[-1][0] if stamped else "")
                stamped.append((last, label_of(pod), text))
        except ClusterError as error:
            if error.code in (None, 401, 403):
                raise
            unreadable.append(f"{pod.name}: {error}")
    if not stamped:
        kept = _tail_from_status(job, stage, attempt, selection, running=bool(pods) and not unreadable)
        return FoundLog(kept.lines, (*unreadable, *kept.notes))
    lines = tuple((label, text) for _, label, text in sorted(stamped, key=lambda entry: entry[0]))
    return FoundLog(lines, tuple(unreadable))


async def show_logs(cluster: Cluster, job: ClusterJob, selection: LogSelection, console: Console) -> None:
    """Print the result of `read_logs`."""
    log = await read_logs(cluster, job, selection)
    for text in log.notes:
        note(text)
    printer = Printer(console)
    for label, line in log.lines:
        printer.print(label, line)


def _attempt(job: ClusterJob, selection: LogSelection) -> tuple[Stage, int]:
    """Return the selected stage and attempt: the named one, else the one that runs or ran last."""
    started = {stage.name: stage.attempt for stage in job.status.stages if stage.attempt}
    if not started:
        reason = next((one.message for one in job.status.conditions if one.status == "False" and one.message), "")
        raise NoLogError(f"no stage of {job.name} has started" + (f": {reason}" if reason else ""))
    stage = selection.stage or job.status.stage or list(started)[-1]
    if stage not in started:
        raise NoLogError(f"--stage {stage}: has not started; started stages: {', '.join(started)}")
    attempt = started[stage] - (1 if selection.previous else 0)
    if attempt < 1:
        raise NoLogError(f"--previous: {stage} is in its first attempt")
    return stage, attempt


def _tail_from_status(
    job: ClusterJob, stage: Stage, attempt: int, selection: LogSelection, *, running: bool
) -> FoundLog:
    """Return the end of the log in the status, with a note about it. Raise NoLogError if there is none."""
    failure = job.status.failure
    fits = failure is not None and (failure.stage, failure.attempt) == (stage, attempt)
    if failure is not None and fits and failure.log_tail:
        lines = failure.log_tail.splitlines()
        kept = lines if selection.tail is None else lines[max(0, len(lines) - selection.tail) :]
        label = failure.pod or f"{stage}-{attempt}"
        notice = f"the pods of {stage}-{attempt} are deleted; this is the end of the log in the job's status."
        return FoundLog(tuple((label, line) for line in kept), (notice,))
    if running and selection.pod is None and selection.rank is None:
        raise NoLogError(f"the pods of {stage}-{attempt} have no output yet")
    if selection.pod is not None or selection.rank is not None:
        option = f"--pod {selection.pod}" if selection.pod is not None else f"--rank {selection.rank}"
        raise NoLogError(f"{option}: {stage}-{attempt} has no such pod, or it was deleted or has not started")
    state = next((record.state for record in job.status.stages if record.name is stage), None)
    if state in ("Pending", "Running") and not selection.previous:
        raise NoLogError(f"no pod of {stage}-{attempt} has started yet")
    raise NoLogError(f"the pods of {stage}-{attempt} and their logs are deleted")


# ------------------------------------------------------------------------------------------------------------ following


@dataclass
class _Follower:
    """State of one `finetune logs -f`."""

    cluster: Cluster
    selection: LogSelection
    printer: Printer
    job: ClusterJob
    first: tuple[int, int]
    """Order of the first stage and number of the first attempt to show; earlier ones are history."""
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> ClusterJob:
        """Follow every selected pod, present and future, until the job and their logs have ended."""
        await self._find_pods(tail=self.selection.tail)
        if not self.tasks:
            note(f"no selected pod of {self.job.name} has started yet; waiting for one.")
        finding = asyncio.create_task(self._find_pods_repeatedly())
        try:
            async for job in versions(self.cluster, self.job.name):
                self.job = job
                if finding.done():
                    finding.result()
                if job.outcome is not None or self._selected_stage_has_succeeded():
                    break
        finally:
            finding.cancel()
            with suppress(asyncio.CancelledError):
                await finding
        await self._find_pods()
        if self.tasks:
            _, late = await asyncio.wait(self.tasks.values(), timeout=LAST_SECONDS)
            for task in late:
                task.cancel()
        return self.job

    def _selected_stage_has_succeeded(self) -> bool:
        states = {stage.name: stage.state for stage in self.job.status.stages}
        return self.selection.stage is not None and states.get(self.selection.stage) == "Succeeded"

    async def _find_pods_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(UnreachableError):
                await self._find_pods()

    async def _find_pods(self, tail: int | None = None) -> None:
        """Follow the pods that have started since the last call."""
        for pod in await self.cluster.pods(self.job):
            later = (ORDER[pod.stage], pod.attempt) >= self.first
            if later and pod.uid not in self.tasks and pod.phase != "Pending" and self.selection.selects(self.job, pod):
                self.tasks[pod.uid] = asyncio.create_task(self._follow(pod, tail))

    async def _follow(self, pod: PodView, tail: int | None) -> None:
        """Print the pod's lines to the last. A connection that ends before the pod is resumed after the last line."""
        label, last = label_of(pod), ""
        while True:
            over = pod.over
            try:
                async for line in self.cluster.log(self.job, pod, follow=True, tail=tail, since=last or None):
                    moment, text = stamped_line(line)
                    if not moment or moment > last:
                        self.printer.print(label, text)
                        last, tail = moment or last, None
                if over:
                    return
                there = [current for current in await self.cluster.pods(self.job) if current.uid == pod.uid]
                if not there:
                    return
                pod = there[0]
            except UnreachableError:
                await asyncio.sleep(LOOK_SECONDS)
            except ClusterError as error:
                note(f"the log of {pod.name} has ended: {error}")
                return
            if not pod.over:
                await asyncio.sleep(LOOK_SECONDS)


async def follow_logs(cluster: Cluster, job: ClusterJob, selection: LogSelection, console: Console) -> None:
    """Show lines as they come, from pod to pod and stage to stage, until the job has ended. If there was no pod in all
    that time, show the end of the log in the status, or raise NoLogError.
    """
    try:
        stage, attempt = _attempt(job, selection)
    except NoLogError:
        stage, attempt = selection.stage or Stage.PREPARE, 1
    follower = _Follower(cluster, selection, Printer(console), job, (ORDER[stage], attempt))
    ended = await follower.run()
    if not follower.tasks:
        await show_logs(cluster, ended, selection, console)
