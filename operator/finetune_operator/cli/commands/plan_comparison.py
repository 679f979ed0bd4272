"""Tables of `finetune plan --alternatives` and `--what-if`: forms of one training, and one training on other nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import typer
from rich.table import Table

from finetune_contract.byte_text import human_bytes
from finetune_contract.facts import HardwareFacts
from finetune_operator.cli.commands.steps import hardware_of, refuse_plan
from finetune_operator.cli.files.job_files import JobEntry
from finetune_operator.cli.terminal.console import Output, UsageError, emit, out
from finetune_operator.plan.plan import other_forms, plan
from finetune_operator.plan.strategy.alternatives import Alternative
from finetune_operator.plan.time.cost import step_duration
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.settings.settings import Settings

MOST_ROWS = 20
"""Rows of a table for people; -o json has all."""
MOST_NODES = 4096


@dataclass(frozen=True)
class Scenario:
    """Hardware to compare, and the plan for it."""

    text: str
    nodes: int
    made: JobPlan | None
    refused: str = ""

    def data(self) -> dict[str, Any]:
        """Return the scenario for programs."""
        row: dict[str, Any] = {"hardware": self.text, "nodes": self.nodes}
        if self.made is None or self.made.trainer.training is None:
            return {**row, "refused": self.refused or "nothing is trained"}
        memory, estimate = self.made.memory, self.made.estimate
        return {
            **row,
            "strategy": self.made.strategy,
            "microBatch": self.made.trainer.training.batch.micro_batch_size,
            "memoryBytes": None if memory is None else memory.total_bytes,
            "capacityBytes": None if memory is None else memory.capacity_bytes,
            "seconds": estimate.seconds,
            "cost": estimate.cost,
            "currency": estimate.currency,
        }


@dataclass(frozen=True)
class Wanted:
    """Order of compared hardware, and bounds that it should keep."""

    by_cost: bool
    hours: float | None = None
    """Most hours of the training; None: any."""
    cost: float | None = None
    """Most cost of the training; None: any."""

    def missed(self, row: Scenario) -> tuple[str, ...]:
        """Return the bounds that the plan of `row` does not keep, or that its unknown figures may not keep."""
        if row.made is None:
            return ()
        estimate, missed = row.made.estimate, []
        if self.hours is not None and (estimate.seconds is None or estimate.seconds > 3600 * self.hours):
            missed.append(f"longer than {self.hours:g} h" if estimate.seconds is not None else "time unknown")
        if self.cost is not None and (estimate.cost is None or estimate.cost > self.cost):
            missed.append(f"costs more than {self.cost:g}" if estimate.cost is not None else "cost unknown")
        return tuple(missed)

    def order(self, row: Scenario) -> tuple[bool, bool, float, float]:
        """Return the sort key: refused hardware last, before it what misses a bound."""
        if row.made is None:
            return True, True, 0.0, 0.0
        seconds, cost = row.made.estimate.seconds, row.made.estimate.cost
        figures = (float("inf") if seconds is None else seconds, float("inf") if cost is None else cost)
        first, second = reversed(figures) if self.by_cost else figures
        return False, bool(self.missed(row)), first, second


# ---------------------------------------------------------------------------------------------------------------- forms


def compare_forms(entry: JobEntry, facts: Facts, settings: Settings, output: Output) -> None:
    """Print all forms of a job's training; end with 1 if the job is refused."""
    try:
        rows = other_forms(entry.job, facts, settings)
    except PlanRefused as refused:
        refuse_plan(entry, refused, output)
    if output is not Output.TEXT:
        data = [row.model_dump(mode="json", by_alias=True) for row in rows]
        emit([{"name": entry.job.name, "alternatives": data}], output)
        return
    if not rows:
        out().print(f"{entry.job.name}: nothing to compare, as no built-in training runs")
        return
    table = _table("strategy", "micro-batch", "checkpointing", "memory", "step", "time", "cost", "why")
    for row in rows[:MOST_ROWS]:
        table.add_row(*_cells(row), style="bold" if row.chosen else "")
    out().print(table)
    if len(rows) > MOST_ROWS:
        out().print(f"{len(rows) - MOST_ROWS} more forms: -o json lists all")


def _cells(row: Alternative) -> tuple[str, ...]:
    return (
        row.strategy,
        str(row.micro_batch),
        row.checkpointing,
        f"{human_bytes(row.memory_bytes)} of {human_bytes(row.capacity_bytes)}",
        "unknown" if row.step_seconds is None else step_duration(row.step_seconds),
        _time(row.seconds),
        _cost(row.cost, row.currency),
        row.why,
    )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else human_seconds(seconds)


def _cost(cost: float | None, currency: str | None) -> str:
    return "unknown" if cost is None else f"{cost:,.2f} {currency}"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


# ------------------------------------------------------------------------------------------------------------- hardware


@dataclass(frozen=True)
class Described:
    """Hardware that an option --what-if describes."""

    text: str
    node: HardwareFacts | None
    """None: that of the plan."""
    nodes: int | None
    """None: those of the job."""
    counts_gpus: bool
    """True if it says how many GPUs a node has; otherwise as many as the job asks for."""


def described(text: str, settings: Settings) -> Described:
    """Parse the value of an option --what-if: keys of --hardware, and `nodes`."""
    pairs = [pair.strip() for pair in text.split(",")]
    counts = [value for pair in pairs for key, _, value in [pair.partition("=")] if key.strip() == "nodes"]
    node = ",".join(pair for pair in pairs if pair.partition("=")[0].strip() != "nodes")
    if len(counts) > 1:
        raise UsageError(f"--what-if {text}: nodes is given twice; give it once")
    for count in map(str.strip, counts):
        if not (count.isascii() and count.isdigit() and 0 < int(count) <= MOST_NODES):
            raise UsageError(f"--what-if nodes={count}: it is a whole number from 1 to {MOST_NODES}")
    nodes = int(counts[0]) if counts else None
    counts_gpus = any(pair.partition("=")[0].strip() == "gpus" for pair in pairs)
    return Described(node or "as planned", hardware_of(node or None, settings, "--what-if"), nodes, counts_gpus)


def compare_hardware(
    entry: JobEntry, facts: Facts, settings: Settings, given: Iterable[Described], wanted: Wanted, output: Output
) -> None:
    """Print the plans of a job for each described hardware; end with 1 if each refuses it or misses a bound."""
    rows = sorted((_scenario(entry, facts, settings, description) for description in given), key=wanted.order)
    if output is not Output.TEXT:
        hardware = [{**row.data(), "missed": list(wanted.missed(row))} for row in rows]
        emit([{"name": entry.job.name, "hardware": hardware}], output)
    else:
        table = _table("hardware", "nodes", "strategy", "micro-batch", "memory", "time", "cost", "remark")
        for row in rows:
            table.add_row(*_hardware_cells(row, rows, wanted))
        out().print(table)
    if all(row.made is None or wanted.missed(row) for row in rows):
        raise typer.Exit(1)


def _scenario(entry: JobEntry, facts: Facts, settings: Settings, given: Described) -> Scenario:
    resources = entry.job.spec.resources
    node, nodes = given.node or facts.hardware, given.nodes or resources.nodes
    accelerator = resources.accelerator
    if given.node is not None:
        accelerator = accelerator.model_copy(update={"product": None, "memory": None})
        if given.node.gpu is not None and not given.counts_gpus and isinstance(resources.gpus_per_node, int):
            node = given.node.model_copy(update={"gpus_per_node": resources.gpus_per_node})
    changes: dict[str, Any] = {"nodes": nodes, "accelerator": accelerator}
    if node is not None:
        changes["gpus_per_node"] = node.gpus_per_node
    spec = entry.job.spec.model_copy(update={"resources": resources.model_copy(update=changes)})
    job = entry.job.model_copy(update={"spec": spec})
    try:
        # Several nodes are no run of this machine.
        made = plan(job, replace(facts, hardware=node, local=False), settings, as_known=True)
    except PlanRefused as refused:
        problem = refused.problems[0]
        return Scenario(given.text, nodes, None, f"{problem.path}: {problem.rule}; {problem.hint}")
    return Scenario(given.text, nodes, made)


def _hardware_cells(row: Scenario, rows: list[Scenario], wanted: Wanted) -> tuple[str, ...]:
    made = row.made
    if made is None or made.trainer.training is None:
        return row.text, str(row.nodes), "refused", "", "", "", "", row.refused or "nothing is trained"
    memory, estimate = made.memory, made.estimate
    return (
        row.text,
        str(row.nodes),
        made.strategy,
        str(made.trainer.training.batch.micro_batch_size),
        "" if memory is None else f"{human_bytes(memory.total_bytes)} of {human_bytes(memory.capacity_bytes)}",
        _time(estimate.seconds),
        _cost(estimate.cost, estimate.currency),
        ", ".join((*wanted.missed(row), *_remarks(row, rows))),
    )


def _remarks(row: Scenario, rows: list[Scenario]) -> list[str]:
    """Return whether hardware is the quickest or cheapest, or on the front between both."""
    figures = [scenario.made.estimate for scenario in rows if scenario.made is not None]
    assert row.made is not None
    estimate, remarks = row.made.estimate, []
    times = [figure.seconds for figure in figures if figure.seconds is not None]
    costs = [figure.cost for figure in figures if figure.cost is not None]
    if estimate.seconds is not None and estimate.seconds == min(times):
        remarks.append("quickest")
    if estimate.cost is not None and estimate.cost == min(costs):
        remarks.append("cheapest")
    if estimate.seconds is None or estimate.cost is None or remarks:
        return remarks
    seconds, cost = estimate.seconds, estimate.cost
    better = [
        figure
        for figure in figures
        if figure.seconds is not None and figure.cost is not None and figure.seconds < seconds and figure.cost <= cost
    ]
    return ["another is quicker and costs no more"] if better else ["none is both quicker and cheaper"]
