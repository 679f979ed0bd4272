"""Plans and results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from finetune_contract.byte_text import human_bytes
from finetune_contract.metrics import BASELINE, LOSS
from finetune_contract.plan_check import PlanCheck
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.cli.terminal.display import duration
from finetune_operator.plan.summary import MEMORY_SECTION, summarise
from finetune_operator.plan.types.plan_types import JobPlan, MemoryEstimate
from finetune_operator.spec.types import FailureStatus


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    return table


def _print_indented(console: Console, table: Table, bottom: int) -> None:
    """Print the table without the spaces that fill its last column, which are unwanted in copied or compared text."""
    print_trimmed(console, Padding(table, (0, 0, bottom, 2), expand=False))


def print_plan(console: Console, plan: JobPlan, *, picture: bool | None = None) -> None:
    """Print a plan, section by section. `picture`: also draw its memory; None: on a terminal only."""
    if picture is None:
        picture = console.is_terminal
    for section in summarise(plan):
        console.print(section.title, style="bold cyan")
        table = _table()
        if all(not row.label for row in section.rows):
            table.columns[0].no_wrap = False
            table.columns[0].style = ""
            for row in section.rows:
                table.add_row(f"- {row.value}")
        else:
            table.add_column(overflow="fold")
            table.add_column(style="dim", overflow="fold")
            for row in section.rows:
                table.add_row(row.label, row.value, row.remark)
        _print_indented(console, table, bottom=1)
        if picture and section.title == MEMORY_SECTION and plan.memory is not None:
            _draw_memory(console, plan.memory)


def _draw_memory(console: Console, memory: MemoryEstimate) -> None:
    console.print(f"Memory by term, against {human_bytes(memory.capacity_bytes)}", style="bold cyan")
    table = _table()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    for bar in memory_bars(memory):
        table.add_row(bar.name, bar.size, bar.drawn)
    _print_indented(console, table, bottom=1)


def result_rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the result of a run as label and value; omit values that were not measured."""
    metrics: Mapping[str, Any] = data["metrics"]
    evaluated, majority = metrics.get("evaluate") or {}, metrics.get("majority") or {}
    train = metrics.get("train") or {}
    rows = []
    for name, value in evaluated.items():
        if isinstance(value, float) and name != LOSS:
            beside = f"  (baseline: {majority[name]:.4f})" if name in majority else ""
            rows.append((name, f"{value:.4f}{beside}"))
    if BASELINE in evaluated:
        rows.append((BASELINE, evaluated[BASELINE]))
    if train.get("loss_first") is not None and train.get("loss_last") is not None:
        means = f"{train['loss_first']:.4f} at first, {train['loss_last']:.4f} at last"
        rows.append(("loss", f"{means}  (means of 5 % of the steps)"))
    if train.get("samples_per_second") is not None:
        rows.append(("speed", f"{train['samples_per_second']:,.1f} samples/s"))
    if train.get("peak_memory_bytes") is not None:
        rows.append(("peak memory", f"{human_bytes(int(train['peak_memory_bytes']))} in one process"))
    if train.get("plan_check") is not None:
        rows.append(("plan check", " ".join(PlanCheck.model_validate(train["plan_check"]).sentences())))
    processes = train.get("world_size", data["worldSize"])
    rows.append(
        ("strategy", f"{train.get('strategy', data['strategy'])}, {processes} process{'es' * (processes != 1)}")
    )
    if train.get("devices") is not None:
        rows.append(("device", train["devices"]["text"]))
    stages = [f"{s['name']} {duration(s['seconds'])}{' (kept)' if s['kept'] else ''}" for s in data["stages"]]
    rows.append(("time", ", ".join(stages)))
    rows.extend(data["artifacts"].items())
    return rows


def print_result(console: Console, data: Mapping[str, Any]) -> None:
    """Print the result of a run that succeeded."""
    console.print(f"{data['name']}: {data['outcome']}", style="bold green")
    table = _table()
    table.add_column(overflow="fold")
    for label, value in result_rows(data):
        table.add_row(label, value)
    _print_indented(console, table, bottom=0)


def print_failure(console: Console, failure: FailureStatus, log: str) -> None:
    """Print the failure, the hint, and the end of the log without lines that only repeat the failure."""
    rank = "" if failure.rank is None else f" on rank {failure.rank}"
    kind = f"{failure.failure_class} ({failure.reason}), exit code {failure.exit_code}"
    headline = f"Error: {failure.stage} failed{rank}: {kind}"
    console.print(headline, style="bold red", soft_wrap=True)
    console.print(f"  {failure.message}", soft_wrap=True)
    if failure.hint:
        console.print(f"  {failure.hint}", style="yellow", soft_wrap=True)
    console.print(f"  Log: {log}", soft_wrap=True)
    for line in (failure.log_tail or "").splitlines():
        if failure.message in line and kind.partition(",")[0] in line:
            continue
        console.print(f"    {line}", style="dim", soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- memory

PICTURE_WIDTH = 40
"""Characters of the whole device."""
_FULL, _THIN, _FREE, _ABOVE = "█", "▏", "·", "▒"


@dataclass(frozen=True)
class Bar:
    """Row of the picture."""

    name: str
    size: str
    drawn: str
    """Characters of the bar, from the left edge on."""


def memory_bars(memory: MemoryEstimate, width: int = PICTURE_WIDTH) -> tuple[Bar, ...]:
    """Return a bar for each term that begins where the one before ends, and the part that stays free. `width`
    characters are the device, or all terms if they need more; bytes above the device's are drawn lighter.
    """
    total, capacity = memory.total_bytes, memory.capacity_bytes
    scale = max(total, capacity, 1)
    edge = round(capacity * width / scale)
    bars, begin = [], 0
    for term in memory.terms:
        first, last = round(begin * width / scale), round((begin + term.bytes) * width / scale)
        inside = max(0, min(last, edge) - first)
        cells = _FULL * inside + _ABOVE * (last - first - inside)
        bars.append(Bar(term.name, human_bytes(term.bytes), " " * first + (cells or (_THIN if term.bytes else ""))))
        begin += term.bytes
    if total <= capacity:
        first = round(total * width / scale)
        bars.append(Bar("free", human_bytes(capacity - total), " " * first + _FREE * (width - first)))
    else:
        bars.append(Bar("above the device", human_bytes(total - capacity), " " * edge + _ABOVE * (width - edge)))
    return tuple(bars)
