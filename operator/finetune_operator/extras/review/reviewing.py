"""`finetune review`: effects of a change of job files, as a page of Markdown for a code review.

For each job the verdict, the plan, its duration and its cost at the prices of the settings, and for each problem its
line, rule and hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune_contract.byte_text import human_bytes
from finetune_operator.cli.cluster.costs import money
from finetune_operator.cli.files.job_files import JobEntry
from finetune_operator.cli.terminal.console import described, problem_data
from finetune_operator.plan.summary import summarise
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.quantities import human_seconds


@dataclass(frozen=True)
class Reviewed:
    """A job, planned or refused."""

    entry: JobEntry
    plan: JobPlan | None
    problems: tuple[Problem, ...] = ()
    budget_problem: str = ""
    """Reason why a job that could run exceeds the limits."""

    @property
    def passes(self) -> bool:
        """True if there is no objection to it."""
        return self.plan is not None and not self.budget_problem

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`."""
        plan = self.plan
        return {
            "file": self.entry.source,
            "line": self.entry.document.line,
            "name": self.entry.job.name,
            "passes": self.passes,
            "over": self.budget_problem or None,
            "problems": [problem_data(self.entry.source, one) for one in self.problems],
            "plan": None
            if plan is None
            else {
                "strategy": plan.strategy,
                "launcher": plan.launcher,
                "stages": [stage.value for stage in plan.stages],
                "processes": None if plan.trainer.world is None else plan.trainer.world.size,
                "estimate": {
                    "seconds": plan.estimate.seconds,
                    "cost": plan.estimate.cost,
                    "currency": plan.estimate.currency,
                },
            },
        }


@dataclass(frozen=True)
class Review:
    """All files of a change."""

    jobs: tuple[Reviewed, ...]
    unread: tuple[tuple[str, Problem], ...] = ()
    """Problems of files in which no job could be read, with their files."""

    @property
    def passes(self) -> bool:
        """True if there is no objection to any of them."""
        return not self.unread and all(one.passes for one in self.jobs)

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`."""
        return {
            "passes": self.passes,
            "jobs": [one.data() for one in self.jobs],
            "problems": [problem_data(source, problem) for source, problem in self.unread],
        }


def markdown(review: Review) -> str:
    """Return the page: a table of all jobs, the problems, and each plan folded away."""
    parts = ["## Fine-tuning jobs", ""]
    if review.jobs:
        parts += [
            "| | Job | Strategy | Processes | Memory per process | Training time | Cost |",
            "|---|---|---|---|---|---|---|",
        ]
        parts += [_row(one) for one in review.jobs]
        parts.append("")
    elif not review.unread:
        parts += ["There is no job in these files.", ""]
    problems = [described(problem, source) for source, problem in review.unread]
    problems += [described(problem, one.entry.source) for one in review.jobs for problem in one.problems]
    problems += [
        f"{one.entry.source}: {one.entry.job.name}: {one.budget_problem}" for one in review.jobs if one.budget_problem
    ]
    if problems:
        parts += ["### Problems", "", *(f"- {_plain(line)}" for line in problems), ""]
    for one in review.jobs:
        if one.plan is not None:
            parts += _folded(one.plan)
    return "\n".join(parts).rstrip() + "\n"


def _row(one: Reviewed) -> str:
    name = _plain(one.entry.job.name)
    if one.plan is None:
        return f"| ❌ | {name} | refused | | | | |"
    plan, world, estimate = one.plan, one.plan.trainer.world, one.plan.estimate
    cells = (
        f"{plan.strategy} by {plan.launcher}",
        "" if world is None else f"{world.size} on {world.device}",
        "" if plan.memory is None else human_bytes(plan.memory.total_bytes),
        "unknown" if estimate.seconds is None else human_seconds(estimate.seconds),
        "unknown" if estimate.cost is None else money(estimate.cost, estimate.currency),
    )
    verdict = "✅" if one.passes else "❌"
    return f"| {verdict} | {name} | {' | '.join(_plain(cell) for cell in cells)} |"


def _folded(plan: JobPlan) -> list[str]:
    lines = ["<details>", f"<summary>{_plain(plan.name)}: plan and reasons</summary>", ""]
    for section in summarise(plan):
        lines += [f"**{_plain(section.title)}**", ""]
        for row in section.rows:
            text = f"{row.label}: {row.value}" if row.label else row.value
            lines.append(f"- {_plain(text)}{f' ({_plain(row.remark)})' if row.remark else ''}")
        lines.append("")
    return [*lines, "</details>", ""]


_SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "@": "&#64;"})
"""Characters that Markdown interprets; `@name` would notify somebody of the review."""


def _plain(text: str) -> str:
    """Return a job file's text so that it is shown literally, and cannot become markup."""
    return " ".join(text.split()).translate(_SIGNS)


def over_budget(plan: JobPlan, limit: float | None) -> str:
    """Return why the job costs more than `limit`; empty: it does not, or there is no limit."""
    if limit is None:
        return ""
    cost = plan.estimate.cost
    if cost is None:
        return f"its cost is unknown, so --max-cost {limit:g} cannot be checked; pass --settings with prices"
    if cost <= limit:
        return ""
    return f"its expected cost of {money(cost, plan.estimate.currency)} exceeds --max-cost {limit:g}"
