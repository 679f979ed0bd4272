"""Pages as HTML, rendered from values. The template engine escapes all text, and everything that a page shows goes
through the redactor first: a log may hold secrets that a program has printed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import jinja2
from jinja2.runtime import Context

from finetune_contract.charts import training_charts
from finetune_contract.report import Progress
from finetune_operator.cli.cluster.cluster_jobs import ClusterJob
from finetune_operator.cli.cluster.jobview import (
    EVENTS,
    LOG_LINES,
    ago,
    failure_headline,
    headline_text,
    next_commands,
    notable,
    phase_of,
    plan_lines,
    progress_text,
    result_rows,
    stage_time,
    utc_now,
)
from finetune_operator.cli.terminal.display import duration
from finetune_operator.cli.terminal.progress_text import figures_with_age
from finetune_operator.extras.compare.comparing import MARK, Comparison, Figure, compare, curves, setting_text
from finetune_operator.extras.ui.reading import Content
from finetune_operator.extras.ui.run_reading import Run, readable_lines, shown_name
from finetune_operator.extras.ui.ui_jobs import ClusterJobs, JobDetails
from finetune_operator.extras.ui.ui_runs import LOG_LINES as RUN_LOG_LINES
from finetune_operator.extras.ui.ui_runs import Workspace
from finetune_operator.jobs.outcomes.spot import words
from finetune_operator.plan.summary import summarise
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.redaction import Redactor
from finetune_operator.spec.types import FailureStatus, ProgressStatus

LIST_METRICS = 3
"""Maximum metrics of a run in the list."""
MOST_COMPARED = 8
"""Maximum runs in a comparison; there are as many curve colours."""
LINE_CHARACTERS = 2000
"""Maximum characters of a log line on a page; the whole log has it in full."""
_REDACTOR = "redactor"


@dataclass(frozen=True)
class Page:
    """HTML of a page and its HTTP status."""

    html: str
    code: int = 200


@jinja2.pass_context
def _shown(context: Context, value: Any) -> Any:
    """Return the value that a `{{ }}` puts into a page; parts that are HTML have been through this."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        redactor: Redactor = context[_REDACTOR]
        return redactor.text(value)
    return value


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("finetune_operator.extras.ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


class Pages:
    """Renderer of the pages of one workspace and, if there is one, of a cluster."""

    def __init__(self, workspace: Workspace, jobs: ClusterJobs | None) -> None:
        self._workspace = workspace
        self._jobs = jobs
        self._templates = _environment()

    def index(self) -> Page:
        """Return the page of all runs, and the jobs of the cluster."""
        listing = self._workspace.runs()
        now = utc_now()
        return self._page(
            "index",
            title="Runs",
            runs=[_run_row(run, now) for run in listing.runs],
            more=listing.more,
            problem=listing.problem,
            cluster=self._cluster_list(now),
        )

    def run(self, name: str) -> Page | None:
        """Return the page of one run; None if it does not exist."""
        run = self._workspace.run(name)
        if run is None:
            return None
        job_file = self._workspace.job_file(name)
        redactor = Redactor()
        redactor.learn(job_file)
        plan = self._workspace.plan(name)
        history, cut = self._workspace.history(name)
        logs = [log for stage in run.stages if (log := self._workspace.log(name, stage.name)) is not None]
        newest = run.stage if run.stage in [log.stage for log in logs] else logs[-1].stage if logs else None
        return self._page(
            "run",
            redactor,
            title=f"{shown_name(name)}: {run.state}",
            name=shown_name(name),
            value=_quoted(name),
            link=_link(name),
            run=run,
            percent=run.progress.percent if run.progress else None,
            progress=_progress_text(run, utc_now()),
            failure=_failure(run.failure),
            metrics=[
                {"name": metric.name, "value": _figure(metric.value), "majority": _figure(metric.majority)}
                for metric in run.metrics
            ],
            with_majority=any(metric.majority is not None for metric in run.metrics),
            charts=training_charts({shown_name(name): history}),
            history_cut=cut,
            stages=[
                {"name": stage.name, "state": stage.state, "time": _duration(stage.seconds)} for stage in run.stages
            ],
            logs=[
                {
                    "stage": log.stage,
                    "lines": [line[:LINE_CHARACTERS] for line in log.lines],
                    "cut": log.cut or any(len(line) > LINE_CHARACTERS for line in log.lines),
                    "open": log.stage == newest,
                }
                for log in logs
            ],
            plan=_plan_sections(plan),
            plan_problem=plan if isinstance(plan, str) and not run.problems else None,
            job_file=None if job_file is None else json.dumps(redactor.value(job_file), indent=2, ensure_ascii=False),
        )

    def report(self, name: str) -> bytes | None:
        """Return a run's report.html unchanged; None if there is none."""
        return self._workspace.report(name)

    def compare(self, names: Sequence[str]) -> Page:
        """Return the page of runs over and beside each other."""
        chosen = list(dict.fromkeys(names))[:MOST_COMPARED]
        runs = [run for name in chosen if (run := self._workspace.run(name)) is not None]
        comparison = compare([self._workspace.compared(run) for run in runs])
        return self._page(
            "compare",
            title="Compare runs",
            choices=[
                {"name": shown_name(run.name), "chosen": run.name in chosen} for run in self._workspace.runs().runs
            ],
            most=MOST_COMPARED if len(set(names)) > MOST_COMPARED else None,
            runs=[{"name": shown_name(run.name), "link": _link(run.name), "state": run.state} for run in runs],
            notes=comparison.notes,
            tables=[
                ("Metrics", _figure_rows(comparison.metrics, comparison)),
                ("Time, throughput, memory, cost", _figure_rows(comparison.figures, comparison)),
            ],
            settings=[
                (setting.field, [setting_text(setting, run.name)[:LINE_CHARACTERS] for run in comparison.runs])
                for setting in comparison.settings
                if setting.differs
            ],
            charts=curves(comparison) if runs else [],
        )

    def log(self, name: str, stage: str) -> str | None:
        """Return a whole log as text; None if there is none."""
        text = self._workspace.whole_log(name, stage)
        if text is None:
            return None
        redactor = Redactor()
        redactor.learn(self._workspace.job_file(name))
        return redactor.text(text)

    def job(self, namespace: str, name: str) -> Page | None:
        """Return the page of one job of the cluster; None if it does not exist."""
        if self._jobs is None:
            return None
        answer = self._jobs.details(namespace, name)
        if answer is None:
            return None
        now = utc_now()
        redactor = Redactor()
        common: dict[str, Any] = {
            "name": name,
            "error": answer.error,
            "waiting": answer.waiting,
            **dict.fromkeys(("phase", "headline", "percent", "failure", "events_hidden", "details"), None),
            **dict.fromkeys(
                ("progress", "conditions", "facts", "charts", "stages", "events", "notes", "lines", "commands"), ()
            ),
        }
        if answer.value is not None:
            redactor.learn(answer.value.job.raw.get("spec"))
            common |= self._job_values(answer.value, now)
        return self._page(
            "job", redactor, title=name if answer.value is None else f"{name}: {common['phase']}", **common
        )

    def message(self, code: int, title: str, text: str) -> Page:
        """Return a page with only a message."""
        return Page(self._page("message", title=title, text=text).html, code)

    def _job_values(self, details: JobDetails, now: datetime) -> dict[str, Any]:
        assert self._jobs is not None
        job, status = details.job, details.job.status
        progress = status.progress if job.outcome is None else None
        plan = () if status.plan is None else plan_lines(status.plan)
        facts = [("" if number else "plan", line, "") for number, line in enumerate(plan)]
        lines = readable_lines(Content("\n".join(f"[{label}] {line}" for label, line in details.log).encode()))
        return {
            "phase": phase_of(job),
            "headline": headline_text(job, now),
            "percent": progress.percent if progress else None,
            "progress": progress_text(status, now) if progress else "",
            "conditions": [
                f"{one.reason}: {one.message or one.reason}"
                for one in notable(status.conditions, failure_is_shown=status.failure is not None)
            ],
            "failure": _failure(status.failure),
            "facts": [*facts, *((label, text, "") for label, text in result_rows(job))],
            "charts": training_charts({job.name: self._jobs.curve(job)}),
            "stages": [
                {
                    "name": stage.name,
                    "state": stage.state,
                    "attempt": f"{stage.attempt}{words(stage.capacity)}" if stage.attempt else "",
                    "time": stage_time(stage, now),
                    "child": "" if stage.child is None else f"{stage.child.kind} {stage.child.name}",
                }
                for stage in status.stages
            ],
            "events_hidden": details.events is None,
            "events": [
                {
                    "age": f"{ago(event.time, now)} ago",
                    "reason": event.reason,
                    "message": f"{event.message}{f' (x{event.count})' if event.count > 1 else ''}",
                }
                for event in (details.events or ())[-2 * EVENTS :]
            ],
            "details": True,
            "notes": details.notes,
            "lines": [line[:LINE_CHARACTERS] for line in lines[-RUN_LOG_LINES:]],
            "commands": next_commands(job, "finetune", ""),
        }

    def _cluster_list(self, now: datetime) -> dict[str, Any] | None:
        if self._jobs is None:
            return None
        answer = self._jobs.all()
        return {
            "error": answer.error,
            "waiting": answer.waiting,
            "rows": [_job_row(job, now) for job in answer.value or ()],
            "everywhere": self._jobs.everywhere,
            "where": self._jobs.where,
        }

    def _page(self, template: str, redactor: Redactor | None = None, **values: Any) -> Page:
        values[_REDACTOR] = redactor or Redactor()
        folder = str(self._workspace.folder)
        return Page(self._templates.get_template(f"{template}.html.jinja").render(folder=folder, **values))


# ----------------------------------------------------------------------------------------------------------- parts


def _quoted(name: str) -> str:
    return quote(os.fsencode(name), safe="")


def _link(name: str) -> str:
    return f"/run/{_quoted(name)}"


def _run_row(run: Run, now: datetime) -> dict[str, Any]:
    seconds = run.seconds
    if run.state == "running" and run.stage_started is not None:
        seconds = (run.seconds or 0.0) + max(0.0, (now - run.stage_started).total_seconds())
    return {
        "name": shown_name(run.name),
        "value": shown_name(run.name),
        "link": _link(run.name),
        "state": run.state,
        "stage": run.stage,
        "percent": run.progress.percent if run.progress else None,
        "progress": _progress_text(run, now),
        "metrics": [(metric.name, _figure(metric.value)) for metric in run.metrics if metric.name != "loss"][
            :LIST_METRICS
        ],
        "started": "" if run.started is None else f"{ago(run.started, now)} ago",
        "started_at": "" if run.started is None else run.started.astimezone().isoformat(" ", "seconds"),
        "time": _duration(seconds),
        "model": run.model,
        "strategy": run.strategy,
    }


def _job_row(job: ClusterJob, now: datetime) -> dict[str, Any]:
    """Return the columns of `finetune status`."""
    status, running = job.status, job.outcome is None
    progress = status.progress or ProgressStatus()
    return {
        "name": job.name,
        "namespace": job.metadata.namespace,
        "link": f"/job/{quote(job.metadata.namespace, safe='')}/{quote(job.name, safe='')}",
        "phase": phase_of(job),
        "stage": status.stage.value if status.stage else "",
        "percent": progress.percent if running else None,
        "progress": f"{progress.percent} %" if progress.percent is not None and running else "",
        "loss": f"{progress.loss:.3f}" if progress.loss is not None else "",
        "left": human_seconds(progress.remaining_seconds) if progress.remaining_seconds is not None and running else "",
        "restarts": str(status.restarts),
        "age": ago(job.metadata.creation_timestamp, now),
    }


def _progress_text(run: Run, now: datetime) -> str:
    progress: Progress | None = run.progress
    if progress is None or run.state == "set aside":
        return ""
    age = now.timestamp() - progress.time if run.state == "running" else None
    return figures_with_age(progress, progress.stage, age)


def _failure(failure: FailureStatus | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    tail = (failure.log_tail or "").splitlines()[-LOG_LINES:]
    return {
        "headline": failure_headline(failure),
        "message": failure.message,
        "hint": failure.hint,
        "tail": "\n".join(readable_lines(Content("\n".join(tail).encode()))),
    }


def _plan_sections(plan: JobPlan | str | None) -> list[dict[str, Any]]:
    if not isinstance(plan, JobPlan):
        return []
    return [
        {
            "title": section.title,
            "rows": [(row.label, row.value, row.remark) for row in section.rows],
            "sentences": all(not row.label for row in section.rows),
        }
        for section in summarise(plan)
    ]


def _figure_rows(figures: Sequence[Figure], comparison: Comparison) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return name, and for each run the value and whether it is the best."""
    return [
        (
            figure.name,
            [(figure.cell(run.name).removesuffix(f" {MARK}"), run.name in figure.best) for run in comparison.runs],
        )
        for figure in figures
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None or not 0 <= seconds < 1e9 else duration(seconds)
