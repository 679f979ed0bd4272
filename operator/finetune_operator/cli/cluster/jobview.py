"""A cluster's job as text for people: the page of `finetune status`, the table of several jobs, one line of `finetune
watch`. Values in, rows out; facts that the job's status lacks have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.metrics import headline_first
from finetune_contract.report import Communication
from finetune_operator.cli.cluster.cluster_jobs import ClusterJob, JobEvent
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.cli.terminal.display import duration
from finetune_operator.cli.terminal.progress_text import figures_with_age
from finetune_operator.jobs.outcomes.spot import words
from finetune_operator.jobs.state.plan_checks import plan_check_of
from finetune_operator.jobs.state.results import CHECKPOINT_BYTES
from finetune_operator.plan.summary import processes_text
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.types import (
    Condition,
    CostStatus,
    EndpointStatus,
    FailureStatus,
    FineTuneJobStatus,
    PlanStatus,
    ProgressStatus,
    StageStatus,
)

EVENTS = 5
LOG_LINES = 12
BAR_WIDTH = 24
PHASE_STYLES = {"Succeeded": "bold green", "Failed": "bold red", "Suspended": "yellow", "Queued": "yellow"}
STATE_STYLES = {"Succeeded": "green", "Failed": "red", "Running": "bold", "Serving": "bold", "Suspended": "yellow"}


def ago(then: datetime, now: datetime) -> str:
    """Return the time since `then`, as text."""
    return human_seconds(max(0.0, (now - then).total_seconds()))


def phase_of(job: ClusterJob) -> str:
    """Return the phase, or the state before the operator has seen the job and after its deletion has begun."""
    if job.metadata.deletion_timestamp is not None:
        return "Deleting"
    return job.status.phase or "New"


# ------------------------------------------------------------------------------------------------------------- one page


@dataclass(frozen=True)
class Page:
    """Page of `finetune status` for one job."""

    job: ClusterJob
    now: datetime
    events: tuple[JobEvent, ...] | None = ()
    """Events of the job; None: they may not be read."""
    commands: tuple[str, ...] = ()

    def parts(self) -> list[RenderableType]:
        """Return the parts from the headline to the next commands."""
        status = self.job.status
        parts: list[RenderableType] = [self._headline()]
        facts = _table()
        if status.progress is not None and self.job.outcome is None:
            facts.add_row("progress", _bar(status.progress).append(f"  {progress_text(status, self.now)}", style=""))
        _lines(facts, "plan", () if status.plan is None else plan_lines(status.plan))
        for label, text in result_rows(self.job):
            facts.add_row(label, Text(text))
        if facts.row_count:
            parts.append(Padding(facts, (0, 0, 0, 2)))
        if status.stages:
            parts.append(self._titled("Stages", self._stages()))
        if status.endpoint is not None and len(status.endpoint.revisions) > 1:
            parts.append(self._titled("Revisions of the endpoint", self._revisions(status.endpoint)))
        conditions = notable(status.conditions, failure_is_shown=status.failure is not None)
        if conditions:
            parts.append(self._titled("Conditions", self._conditions(conditions)))
        if status.failure is not None:
            failed = self.job.outcome == "Failed"
            parts.append(self._titled("Failure" if failed else "Last failure", _failure(status.failure)))
        if self.events is None:
            parts.append(Text("No permission to read events in this namespace.", style="dim"))
        elif self.events:
            parts.append(self._titled("Events", self._events(self.events[-EVENTS:])))
        if self.commands:
            parts.append(self._titled("Next", Group(*(Text(command) for command in self.commands))))
        return parts

    def _headline(self) -> Text:
        job, phase = self.job, phase_of(self.job)
        line = Text.assemble((job.name, "bold"), "  ", (phase, PHASE_STYLES.get(phase, "bold cyan")))
        line.append(f"  {headline_text(job, self.now)}")
        if (job.status.observed_generation or 0) < job.metadata.generation:
            line.append(f"  ({NOT_SEEN})", style="yellow")
        return line

    def _stages(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for stage in self.job.status.stages:
            child = "" if stage.child is None else f"{stage.child.kind} {stage.child.name}"
            table.add_row(
                stage.name,
                Text(stage.state, style=STATE_STYLES.get(stage.state, "dim")),
                f"{_attempt(stage)}{words(stage.capacity)}" if stage.attempt else "",
                stage_time(stage, self.now),
                Text(child, style="dim"),
            )
        return table

    def _revisions(self, endpoint: EndpointStatus) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for one in endpoint.revisions:
            started = one.start_time
            table.add_row(
                str(one.number),
                Text(one.state, style=STATE_STYLES.get(one.state, "dim")),
                "" if started is None else f"{ago(started, self.now)} ago",
                Text(": ".join(text for text in (one.reason, one.message) if text), style="dim"),
            )
        if endpoint.rollback is not None:
            table.add_row("", "", "", Text(endpoint.rollback, style="yellow"))
        return table

    def _conditions(self, conditions: Sequence[Condition]) -> Table:
        table = _table()
        for condition in conditions:
            message = condition.message or condition.reason
            table.add_row(f"{condition.type}={condition.status}", Text(f"{condition.reason}: {message}"))
        return table

    def _events(self, events: Sequence[JobEvent]) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for event in events:
            times = f" (x{event.count})" if event.count > 1 else ""
            style = "yellow" if event.type == "Warning" else ""
            table.add_row(f"{ago(event.time, self.now)} ago", Text(event.reason, style), f"{event.message}{times}")
        return table

    @staticmethod
    def _titled(title: str, body: RenderableType) -> Group:
        return Group(Text(title, style="bold cyan"), Padding(body, (0, 0, 0, 2)))


NOT_SEEN = "the operator has not seen the newest spec yet"


def headline_text(job: ClusterJob, now: datetime) -> str:
    """Return namespace, age, duration, restarts and preemptions of the job."""
    text = f"namespace {job.metadata.namespace}, created {ago(job.metadata.creation_timestamp, now)} ago"
    started, ended = job.status.start_time, job.status.completion_time
    if started is not None and ended is not None:
        text += f", ran {human_seconds((ended - started).total_seconds())}"
    if job.status.restarts:
        text += f", {_counted(job.status.restarts, 'restart')}"
    if job.status.spot is not None and job.status.spot.preemptions:
        text += f", {_counted(job.status.spot.preemptions, 'preemption')}"
    return text


def device_text(status: FineTuneJobStatus) -> str | None:
    """Return the GPUs of the training: as its processes measured them, or until then the one of the plan; None if
    neither is in the status.
    """
    measured = None if status.measured is None else status.measured.device
    try:
        return MeasuredDevices.model_validate(measured).text
    except ValidationError:  # nothing was measured, or a later operator has another form
        return None if status.plan is None else status.plan.device


def communication_text(status: FineTuneJobStatus) -> str | None:
    """Return the transports between the processes of the training; None if they are not in the status."""
    if status.communication is None:
        return None
    try:
        return Communication.model_validate(status.communication.model_dump()).words or None
    except ValidationError:  # a later operator knows further ones
        return None


def result_rows(job: ClusterJob) -> list[tuple[str, str]]:
    """Return GPUs, transports, note, artefacts, metrics, cost and the comparison with the plan, as label and value."""
    artifacts, cost = job.status.artifacts, job.status.cost
    device = device_text(job.status)
    rows = [] if device is None else [("device", device)]
    transports = communication_text(job.status)
    if transports is not None:
        rows.append(("transports", transports))
    if job.status.note is not None:
        rows.append(("note", job.status.note))
    if artifacts is not None:
        if artifacts.metrics:
            ordered = headline_first(artifacts.metrics, job.spec.task)
            rows.append(("metrics", "  ".join(f"{name} {value:.4g}" for name, value in ordered.items())))
        named = {"model": artifacts.model, "predictions": artifacts.predictions, "report": artifacts.report}
        rows.extend((name, uri) for name, uri in named.items() if uri is not None)
        if artifacts.checkpoints is not None:
            size = human_bytes(artifacts.metrics.get(CHECKPOINT_BYTES, 0))
            rows.append(("checkpoints", f"{artifacts.checkpoints} ({size})"))
        if artifacts.endpoint_url is not None:
            rows.append(("endpoint", artifacts.endpoint_url))
    if cost is not None and cost.amount is not None:
        rows.append(("cost", f"{cost.amount:,.2f} {cost.currency or ''}".rstrip() + _saved(cost)))
    if job.status.plan_check is not None:
        rows.append(("plan check", " ".join(plan_check_of(job.status.plan_check).sentences())))
    return rows


def _attempt(stage: StageStatus) -> str:
    return f"{'revision' if stage.name == 'serve' else 'attempt'} {stage.attempt}"


def stage_time(stage: StageStatus, now: datetime) -> str:
    """Return the duration of the stage so far, or the time until its next attempt."""
    started, ended = stage.start_time, stage.completion_time
    following = stage.next_attempt_time
    if following is not None and following > now and ended is None:
        return f"next attempt in {human_seconds((following - now).total_seconds())}"
    if started is None or (ended is None and stage.state != "Running"):
        return ""
    return duration(max(0.0, ((ended or now) - started).total_seconds()))


def _saved(cost: CostStatus) -> str:
    """Return the amount saved by spot nodes, also as a fraction of the cost without them."""
    if not cost.saved or cost.amount is None:
        return ""
    return f", {cost.saved:,.2f} ({cost.saved / (cost.saved + cost.amount):.0%}) saved by spot nodes"


def print_page(console: Console, page: Page) -> None:
    """Print the page."""
    print_trimmed(console, Group(*page.parts()))


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _lines(table: Table, label: str, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        table.add_row("" if number else label, Text(line))


def _bar(progress: ProgressStatus) -> Text:
    """Return a bar of characters, so that it also works in a file."""
    done = round((progress.percent or 0) * BAR_WIDTH / 100)
    return Text.assemble(("━" * done, "green"), ("─" * (BAR_WIDTH - done), "dim"))


def progress_text(status: FineTuneJobStatus, now: datetime) -> str:
    """Return the progress of the running stage, with its age if it is high; empty if there is none."""
    progress = status.progress
    if progress is None:
        return ""
    reported = progress.last_update_time
    age = None if reported is None else (now - reported).total_seconds()
    return figures_with_age(progress, status.stage, age)


def plan_lines(plan: PlanStatus) -> tuple[str, ...]:
    """Return the plan in two lines, and one for each stage that evaluates or predicts on several GPUs."""
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    first = f"{plan.strategy} by {plan.launcher}, {processes}{words(plan.capacity)}"
    if plan.micro_batch_size is not None and plan.gradient_accumulation is not None:
        replicas = plan.data_parallel or plan.world_size
        rows = plan.micro_batch_size * plan.gradient_accumulation * replicas
        first += f", batch {rows} = {plan.micro_batch_size} x {plan.gradient_accumulation} x {replicas}"
    known = []
    if "total" in plan.memory_per_device:
        known.append(f"{human_bytes(plan.memory_per_device['total'])} a process")
    if plan.estimated.duration_seconds is not None:
        known.append(f"training expected to take {human_seconds(plan.estimated.duration_seconds)}")
    if plan.estimated.cost is not None:
        known.append(f"{plan.estimated.cost:,.2f} {plan.estimated.currency or ''}".rstrip())
    spread = []
    for inference in plan.inference:
        pods = plan.predict_workers or 1 if inference.stage == Stage.PREDICT else 1
        shared = f"{pods} pods, each " if pods > 1 else ""
        text = processes_text(inference.processes, inference.gpus_per_process, inference.processes_per_model or 1)
        spread.append(f"{inference.stage}: {shared}{text}")
    return first, ", ".join(known) or "memory and time are not known yet", *spread


def notable(conditions: Sequence[Condition], failure_is_shown: bool) -> tuple[Condition, ...]:
    """Return the conditions worth showing: obstacles, and events being waited for; each message once.

    Of a refusal the condition that holds the problems is enough, without those that only point to it.
    """
    ended = any(one.type in ("Succeeded", "Failed") and one.status == "True" for one in conditions)
    refused = [one for one in conditions if one.type in ("Accepted", "Planned", "Admitted") and one.status == "False"]
    if refused or ended:
        ends = [one for one in conditions if one.type == "Failed" and one.status == "True" and not failure_is_shown]
        return (*refused, *ends)
    waits = [
        one
        for one in conditions
        if (one.type, one.status) in (("Stalled", "True"), ("Running", "False")) and one.message
    ]
    # Stalled repeats the message of Running and adds to it.
    longest = sorted(waits, key=lambda one: -len(one.message))
    repeats = [
        one
        for number, one in enumerate(longest)
        if any(other.message.startswith(one.message.rstrip(".")) for other in longest[:number])
    ]
    return tuple(one for one in waits if one not in repeats)


def failure_headline(failure: FailureStatus) -> str:
    """Return class, reason and location of a failure."""
    places = [failure.stage or "the job"]
    for label, value in (("attempt", failure.attempt), ("pod", failure.pod), ("node", failure.node)):
        places += [] if value is None else [f"{label} {value}"]
    places += [] if failure.rank is None else [f"rank {failure.rank}"]
    places += [] if failure.exit_code is None else [f"exit code {failure.exit_code}"]
    return f"{failure.failure_class} ({failure.reason}) in {', '.join(places)}"


def _failure(failure: FailureStatus) -> Group:
    lines = [Text(failure_headline(failure), style="bold red"), Text(failure.message)]
    if failure.hint:
        lines.append(Text(failure.hint, style="yellow"))
    tail = (failure.log_tail or "").splitlines()
    lines += [Text(f"  {line}", style="dim") for line in tail[-LOG_LINES:]]
    return Group(*lines)


def next_commands(job: ClusterJob, program: str, flags: str) -> tuple[str, ...]:
    """Return the commands that one would type next, each of which works in the job's state."""
    name, phase, namespace, status = job.name, job.status.phase, job.metadata.namespace, job.status
    kubectl, watch, logs = f"kubectl -n {namespace}", f"{program} watch {name}{flags}", f"{program} logs {name}{flags}"
    if job.metadata.deletion_timestamp is not None:
        return (f"{program} wait {name}{flags} --for deleted",)
    if job.outcome == "Failed":
        results = "artefacts are kept" if job.keeps_results else "artefacts are deleted too (storage.retain)"
        delete = f"{kubectl} delete ftj {name}   # then fix the file and apply it again; {results}"
        # A failure without a pod and a log came before pods ran, or those are deleted.
        printed = status.failure is not None and (status.failure.pod or status.failure.log_tail)
        return (logs, delete) if printed else (delete,)
    if job.outcome == "Succeeded":
        return (f"{logs} --stage {status.stages[-1].name}",) if status.stages else ()
    if phase == "Suspended" or job.spec.run_policy.suspend:
        resume = """-p '{"spec":{"runPolicy":{"suspend":false}}}'"""
        return (f"{kubectl} patch ftj {name} --type merge {resume}",)
    holds = {one.type for one in status.conditions if one.status == "True"}
    started = any(stage.attempt for stage in status.stages)
    if "Stalled" in holds and (not started or status.stage == Stage.SERVE):  # later, the spec cannot be edited
        return (f"{kubectl} edit ftj {name}   # or fix the file and apply it again",)
    if phase is None:
        return (watch, f"{program} doctor{flags}   # is the operator running?")
    pods_run = "Running" in holds or any(stage.nodes_since for stage in status.stages if stage.state == "Running")
    return (watch, f"{logs} -f") if pods_run else (watch,)


# ------------------------------------------------------------------------------------------------------- several, lines


def print_table(console: Console, jobs: Sequence[ClusterJob], now: datetime, with_namespace: bool) -> None:
    """Print one row per job, with the columns of `kubectl get ftj`."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    columns = ["NAME", "PHASE", "STAGE", "REASON", "PROGRESS", "LOSS", "ETA", "ROWS/S", "RESULT", "RESTARTS", "AGE"]
    for column in ["NAMESPACE", *columns] if with_namespace else columns:
        table.add_column(column, no_wrap=True)
    for job in jobs:
        status, progress, phase = job.status, job.status.progress or ProgressStatus(), phase_of(job)
        running = job.outcome is None
        row = [
            Text(job.name),
            Text(phase, style=PHASE_STYLES.get(phase, "")),
            status.stage.value if status.stage else "",
            next((one.reason for one in status.conditions if one.type == "Ready"), ""),
            f"{progress.percent} %" if progress.percent is not None and running else "",
            f"{progress.loss:.3f}" if progress.loss is not None else "",
            human_seconds(progress.remaining_seconds) if progress.remaining_seconds is not None and running else "",
            f"{progress.samples_per_second:.4g}" if progress.samples_per_second is not None and running else "",
            (status.artifacts.result if status.artifacts is not None else None) or "",
            str(status.restarts),
            ago(job.metadata.creation_timestamp, now),
        ]
        table.add_row(*([job.metadata.namespace, *row] if with_namespace else row))
    print_trimmed(console, table)


def one_line(job: ClusterJob, now: datetime) -> str:
    """Return the job's state, in one line."""
    status = job.status
    parts = [phase_of(job)]
    running = next((stage for stage in status.stages if stage.state in ("Running", "Failed")), None)
    if running is not None:
        parts.append(f"{running.name} {running.state.lower()}, {_attempt(running)}{words(running.capacity)}")
    if status.progress is not None and running is not None and running.state == "Running" and job.outcome is None:
        parts.append(progress_text(status, now))
    conditions = notable(status.conditions, failure_is_shown=status.failure is not None)
    parts += [f"{one.reason}: {one.message}" if one.message else one.reason for one in conditions]
    if status.failure is not None:
        hint = f" {status.failure.hint}" if status.failure.hint else ""
        parts.append(f"{status.failure.failure_class} ({status.failure.reason}): {status.failure.message}{hint}")
    return "  ".join(part for part in parts if part)


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
