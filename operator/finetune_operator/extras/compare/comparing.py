"""`finetune compare`: settings that differ and results side by side, as a table, as data and as a page.

Pure: the input is read by `runfolders.py`, the output is values and text. A metric whose better direction is unknown
has no mark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune_contract.byte_text import human_bytes
from finetune_contract.charts import STYLE, Chart, training_charts
from finetune_contract.choices import Stage
from finetune_contract.metrics import LOWER_IS_BETTER, METRICS, metrics_of
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.cli.terminal.display import duration
from finetune_operator.extras.compare.runfolders import NO_SETTINGS, Run

Better: TypeAlias = Literal["higher", "lower"]

_KNOWN_METRICS = frozenset(name for task in METRICS for name in metrics_of(task))
NOT_SET, NOT_KNOWN = "-", "?"
"""Texts for a setting that a run does not have, and for one of a run whose settings cannot be read."""
MARK = "*"
"""Mark behind the best value of a row."""


@dataclass(frozen=True)
class Setting:
    """A setting of all runs."""

    field: str
    """Path in job.json, or `plan.` and a path in plan.json."""
    values: Mapping[str, Any]
    """Name of a run -> value; missing if the run's settings are unknown."""
    differs: bool


@dataclass(frozen=True)
class Figure:
    """A result of all runs."""

    name: str
    values: Mapping[str, float]
    """Name of a run -> value; missing if it was not measured."""
    better: Better | None
    """Direction of improvement; None: unknown."""
    show: Callable[[float], str]

    @property
    def best(self) -> tuple[str, ...]:
        """Names of the runs with the best value, as it is shown; empty if no value can be better than another."""
        finite = {name: value for name, value in self.values.items() if math.isfinite(value)}
        shown = {name: self.show(value) for name, value in finite.items()}
        if self.better is None or len(set(shown.values())) < 2:
            return ()
        best = self.show(max(finite.values()) if self.better == "higher" else min(finite.values()))
        return tuple(name for name, text in shown.items() if text == best)

    def cell(self, run: str) -> str:
        """Return the value of a run with its mark."""
        if run not in self.values:
            return NOT_SET
        return self.show(self.values[run]) + (f" {MARK}" if run in self.best else "")


@dataclass(frozen=True)
class Comparison:
    """All results of comparing several runs."""

    runs: tuple[Run, ...]
    settings: tuple[Setting, ...]
    metrics: tuple[Figure, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    """Warnings about the tables, for their reader."""

    def data(self, *, every: bool) -> dict[str, Any]:
        """Return the data for `-o json`. `every`: also settings that do not differ."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "task": run.job.get("task"),
                    "state": run.state,
                    "problems": list(run.problems),
                }
                for run in self.runs
            ],
            "settings": [
                {"field": setting.field, "differs": setting.differs, "values": dict(setting.values)}
                for setting in self.settings
                if setting.differs or every
            ],
            "metrics": [_figure_data(metric) for metric in self.metrics],
            "figures": [_figure_data(figure) for figure in self.figures],
            "notes": list(self.notes),
        }


def _figure_data(figure: Figure) -> dict[str, Any]:
    values = {run: value if math.isfinite(value) else None for run, value in figure.values.items()}
    return {"name": figure.name, "better": figure.better, "best": list(figure.best), "values": values}


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare all runs, in the order given."""
    return Comparison(tuple(runs), tuple(_settings(runs)), tuple(_metrics(runs)), tuple(_figures(runs)), _notes(runs))


# ------------------------------------------------------------------------------------------------------------ settings


def _settings(runs: Sequence[Run]) -> Iterator[Setting]:
    for of in (_of_job, _of_plan, _of_environment):
        flat = {run.name: dict(_flat(section)) for run in runs if (section := of(run))}
        for field in dict.fromkeys(field for fields in flat.values() for field in fields):
            values = {name: fields.get(field) for name, fields in flat.items()}
            yield Setting(field, values, len({_key(value) for value in values.values()}) > 1)


def _of_job(run: Run) -> Mapping[str, Any]:
    return {name: value for name, value in run.job.items() if name not in NO_SETTINGS}


def _of_plan(run: Run) -> Mapping[str, Any]:
    """Return the settings that job.json lacks, except the machine's memory: its free part varies by the minute."""
    if not run.plan:
        return {}
    hardware, data = run.plan.get("hardware"), run.plan.get("data")
    known = hardware if isinstance(hardware, Mapping) else {}
    return {
        "plan": {
            "strategy": run.plan.get("strategy"),
            "deepspeedOverrides": run.plan.get("deepspeedOverrides") or None,
            "hardware": {name: known.get(name) for name in ("cpuCores", "gpusPerNode", "gpu")},
            "data": {"fingerprint": str(data.get("fingerprint"))[:12] if isinstance(data, Mapping) else None},
        }
    }


def _of_environment(run: Run) -> Mapping[str, Any]:
    versions = run.environment.get("versions")
    return {"versions": versions} if isinstance(versions, Mapping) else {}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{name}.")
        elif inner is not None:
            yield f"{prefix}{name}", inner


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def setting_text(setting: Setting, run: str) -> str:
    """Return a value as people write it."""
    if run not in setting.values:
        return NOT_KNOWN
    value = setting.values[run]
    if value is None:
        return NOT_SET
    if isinstance(value, bool | list):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------- results


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _figure(
    runs: Sequence[Run], name: str, of: Callable[[Run], object], better: Better | None, show: Callable[[float], str]
) -> Iterator[Figure]:
    values = {run.name: value for run in runs if (value := _number(of(run))) is not None}
    if values:
        yield Figure(name, values, better, show)


def _metrics(runs: Sequence[Run]) -> Iterator[Figure]:
    sections = [run.section("evaluate") for run in runs]
    for name in dict.fromkeys(name for section in sections for name in section):
        if name == "rows":
            continue
        yield from _figure(runs, name, _of("evaluate", name), _better(name), _four)
    yield from _figure(runs, "training loss, last 5 % of steps", _of("train", "loss_last"), None, _four)


def _of(section: str, name: str) -> Callable[[Run], object]:
    return lambda run: run.section(section).get(name)


def _seconds_of(stage: Stage) -> Callable[[Run], object]:
    return lambda run: run.seconds.get(stage)


def _better(metric: str) -> Better | None:
    if metric not in _KNOWN_METRICS:
        return None
    return "lower" if metric in LOWER_IS_BETTER else "higher"


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for stage in Stage:
        yield from _figure(runs, f"time of {stage}", _seconds_of(stage), "lower", duration)
    yield from _figure(runs, "time of all stages", _total_seconds, "lower", duration)

    yield from _figure(runs, "optimizer steps", _of("train", "steps"), None, _whole)
    yield from _figure(runs, "tokens trained on", _of("train", "tokens"), None, _whole)
    yield from _figure(runs, "samples/s", _of("train", "samples_per_second"), "higher", _one)
    yield from _figure(runs, "tokens/s", _of("train", "tokens_per_second"), "higher", _one)
    yield from _figure(runs, "peak memory of a process", _of("train", "peak_memory_bytes"), "lower", human_bytes)
    currencies = {_estimate(run).get("currency") for run in runs if _cost(run) is not None}
    if len(currencies) == 1:
        yield from _figure(runs, f"cost in {currencies.pop()}", _cost, "lower", lambda value: f"{value:,.2f}")


def _total_seconds(run: Run) -> float | None:
    """Return the duration of a finished run; an unfinished one has none to compare."""
    return sum(run.seconds.values()) if run.state == "finished" else None


def _estimate(run: Run) -> Mapping[str, Any]:
    estimate = run.plan.get("estimate")
    return estimate if isinstance(estimate, Mapping) else {}


def _cost(run: Run) -> float | None:
    """Return the cost of the nodes that a finished run has used, at its plan's price; None without one."""
    estimate, nodes = _estimate(run), _nodes(run)
    cost, expected, total = _number(estimate.get("cost")), _number(estimate.get("seconds")), _total_seconds(run)
    if cost is None or not expected or total is None:
        return None
    used = total + (nodes - 1) * run.seconds.get(Stage.TRAIN, 0.0)
    return cost / (expected * nodes) * used


def _nodes(run: Run) -> int:
    """Return the number of the training's nodes."""
    for name in ("training", "script"):
        settings = run.job.get(name)
        world = settings.get("world") if isinstance(settings, Mapping) else None
        if isinstance(world, Mapping) and isinstance(world.get("nodes"), int):
            return int(world["nodes"])
    return 1


def _four(value: float) -> str:
    return f"{value:.4f}"


def _one(value: float) -> str:
    return f"{value:,.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _notes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return reasons why figures may not be comparable, and omissions of the marks."""
    notes = [f"{run.name}: {problem}." for run in runs for problem in run.problems]
    tasks = {str(run.job.get("task")) for run in runs if run.job}
    if len(tasks) > 1:
        notes.append(f"The runs have different tasks: {', '.join(sorted(tasks))}.")
    measured = [run for run in runs if run.section("evaluate")]
    if len({_key(_measured_on(run)) for run in measured}) > 1:
        rows = "; ".join(f"{run.name}: {_rows_text(run)}" for run in measured)
        notes.append(f"The metrics were measured on different rows and are not directly comparable ({rows}).")
    return tuple(notes)


def _measured_on(run: Run) -> object:
    """Return the identity of the rows that were measured on."""
    evaluated, data = run.section("evaluate"), run.job.get("dataset")
    known = {name: data.get(name) for name in ("uri", "config", "splits")} if isinstance(data, Mapping) else None
    return [evaluated.get("rows"), evaluated.get("split"), known]


def _rows_text(run: Run) -> str:
    evaluated = run.section("evaluate")
    return f"{evaluated.get('rows', 'unknown')} rows of {evaluated.get('split', 'an unknown split')}"


# ------------------------------------------------------------------------------------------------------------- showing


def print_comparison(console: Console, comparison: Comparison, *, every: bool) -> None:
    """Print tables, one column a run."""
    names = [run.name for run in comparison.runs]
    _print_table(console, "Runs", ["", *names], [["state", *(run.state for run in comparison.runs)]])
    shown = [setting for setting in comparison.settings if setting.differs or every]
    rows = [[setting.field, *(setting_text(setting, name) for name in names)] for setting in shown]
    _print_table(console, "Settings" if every else "Settings that differ", ["", *names], rows)
    if not rows:
        console.print("  none")
    for title, figures in (("Metrics", comparison.metrics), ("Time, throughput, memory, cost", comparison.figures)):
        _print_table(
            console, title, ["", *names], [[figure.name, *(figure.cell(name) for name in names)] for figure in figures]
        )
        if not figures:
            console.print("  none measured")
    if any(metric.best for metric in (*comparison.metrics, *comparison.figures)):
        console.print(f"{MARK} the best of its row")


def _print_table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(title, style="bold cyan")
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, name in enumerate(head):
        table.add_column(Text(f"  {name}" if at == 0 else name), overflow="fold")
    for row in rows:
        cells = [Text(cell, style="bold green" if cell.endswith(f" {MARK}") else "") for cell in row[1:]]
        table.add_row(Text(f"  {row[0]}"), *cells)
    print_trimmed(console, table)


def page(comparison: Comparison, *, every: bool) -> str:
    """Return one HTML page that loads and runs nothing, with the curves of all runs laid over each other."""
    return (
        _environment()
        .get_template("compare.html.jinja")
        .render(
            comparison=comparison,
            names=[run.name for run in comparison.runs],
            settings=[setting for setting in comparison.settings if setting.differs or every],
            every=every,
            setting_text=setting_text,
            charts=curves(comparison),
            chart_style=STYLE,
            mark=MARK,
        )
    )


def curves(comparison: Comparison) -> list[Chart]:
    """Return the curves of all runs laid over each other, by epochs if their steps differ in size."""
    by = "epoch" if _by_epoch(comparison.runs) else "step"
    return training_charts(
        {run.name: _with_epochs(run) if by == "epoch" else run.history for run in comparison.runs}, by
    )


def _by_epoch(runs: Sequence[Run]) -> bool:
    """Return True if steps of the runs differ in size, so that curves are laid over each other by epochs."""
    lengths = {_steps_per_epoch(run) for run in runs if run.history}
    return len(lengths) > 1 and None not in lengths


def _steps_per_epoch(run: Run) -> float | None:
    training = run.job.get("training")
    return (_number(training.get("stepsPerEpoch")) or None) if isinstance(training, Mapping) else None


def _with_epochs(run: Run) -> list[Mapping[str, Any]]:
    """Return the history with an epoch in each line: those of evaluations have only the step."""
    steps = _steps_per_epoch(run) or 1
    return [
        line if "epoch" in line or _number(line.get("step")) is None else {**line, "epoch": line["step"] / steps}
        for line in run.history
    ]


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("finetune_operator.extras.compare"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
