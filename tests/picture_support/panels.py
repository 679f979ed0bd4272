"""Content of each panel of a dashboard as in Grafana: variables substituted, expressions answered by Prometheus.

Only features used by the chart's dashboards are supported; anything else fails, so that a picture never differs from
Grafana.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picture_support.samples import Answer, Engine

MIN_STEP_SECONDS = 15
"""Scrape interval that Grafana assumes by default for a Prometheus; it never queries at a finer step."""
_STEPS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600)
"""Steps in seconds to which Grafana rounds."""
TYPES = ("stat", "timeseries", "table")


@dataclass(frozen=True)
class View:
    """Selection at the top of the dashboard."""

    start: float
    end: float
    """Unix times."""
    variables: Mapping[str, str]
    """Values as inserted into an expression: `.*` for all."""
    chosen: Mapping[str, str]
    """Displayed values, by the variable's label."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Line:
    """One series of a panel. An instant query gives it one point."""

    name: str
    points: list[tuple[float, float]]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Shown:
    """A panel with its answers."""

    panel: Mapping[str, Any]
    lines: Sequence[Line]
    step: float

    @property
    def title(self) -> str:
        return str(self.panel["title"])

    @property
    def empty(self) -> bool:
        return not self.lines

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Return column names and rows of a table panel: labels in order, then the value, without hidden ones."""
        hidden: set[str] = set()
        for change in self.panel["transformations"]:
            assert change["id"] == "organize", change["id"]
            hidden |= {name for name, yes in change["options"]["excludeByName"].items() if yes}
        names = sorted({name for line in self.lines for name in line.labels} - hidden)
        rows: list[list[str | float]] = [[line.labels.get(name, "") for name in names] for line in self.lines]
        if "Value" not in hidden:
            names = [*names, "Value"]
            rows = [[*row, line.points[-1][1]] for row, line in zip(rows, self.lines, strict=True)]
        return names, rows


def step_of(seconds: float, pixels: float) -> float:
    """Return seconds between two points of a panel with this width."""
    return next((step for step in _STEPS if step >= max(MIN_STEP_SECONDS, seconds / pixels)), float(_STEPS[-1]))


def query_panel(engine: Engine, panel: Mapping[str, Any], view: View, pixels: float) -> Shown:
    """Return the panel with its answers; `pixels` is its width."""
    assert panel["type"] in TYPES, f"{panel['title']}: a panel of type {panel['type']} cannot be drawn"
    step, lines = step_of(view.seconds, pixels), []
    for target in panel["targets"]:
        expression = put_in(target["expr"], view, step)
        if target["instant"]:
            answers = engine.at(expression, view.end)
        else:
            # Grafana queries at whole steps, so that a picture does not jitter over time.
            start, end = (math.floor(moment / step) * step for moment in (view.start, view.end))
            answers = engine.over(expression, start, end, step)
        found = [_line(target["legendFormat"], answer) for answer in answers]
        lines += sorted((line for line in found if line.points), key=lambda line: line.name)
    return Shown(panel, lines, step)


def put_in(expression: str, view: View, step: float) -> str:
    """Return the expression as sent by Grafana."""
    rate = max(step + MIN_STEP_SECONDS, 4 * MIN_STEP_SECONDS)
    values = {"__rate_interval": f"{rate:g}s", "__range": f"{view.seconds:.0f}s", **view.variables}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


def _line(legend: str, answer: Answer) -> Line:
    name = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: answer.labels.get(found[1], ""), legend)
    return Line(name, [point for point in answer.points if not math.isnan(point[1])], answer.labels)


# ---------------------------------------------------------------------------------------------------------------- units


def formatted(value: float, unit: str, decimals: int | None = None, now: float = 0.0) -> tuple[str, str]:
    """Return a value and its unit as written by Grafana; `now` is the end of the range, for relative times."""
    match unit:
        case "none":
            return _number(value, decimals), ""
        case "short":
            for size, letter in ((1e9, "Bil"), (1e6, "Mil"), (1e3, "K")):
                if abs(value) >= size:
                    return _number(value / size, decimals), letter
            return _number(value, decimals), ""
        case "bytes":
            for size, letters in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
                if abs(value) >= size:
                    return _number(value / size, decimals), letters
            return _number(value, decimals), "B"
        case "s":
            return _duration(value, decimals)
        case "h":
            return _number(value, decimals), "hour"
        case "percent":
            return _number(value, decimals), "%"
        case "percentunit":
            return _number(100 * value, decimals), "%"
        case "reqps" | "ops":
            return _number(value, decimals), {"reqps": "req/s", "ops": "ops/s"}[unit]
        case "dateTimeFromNow":
            number, unit_name = _duration(now - value / 1000, 0)
            return f"{number} {'seconds' if unit_name == 's' else unit_name.replace('min', 'minute')}", "ago"
    raise AssertionError(f"unit {unit} cannot be written")


def _duration(value: float, decimals: int | None) -> tuple[str, str]:
    for size, unit_name in ((86_400, "days"), (3600, "hours"), (60, "mins")):
        if abs(value) >= size:
            number = _number(value / size, decimals)
            return number, unit_name.removesuffix("s") if number == "1" else unit_name
    if 0 < abs(value) < 1:
        return _number(value * 1000, decimals), "ms"
    return _number(value, decimals), "s"


def _number(value: float, decimals: int | None) -> str:
    """Format with three digits by default."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.0995 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def colour(value: float, defaults: Mapping[str, Any]) -> str:
    """Return the name of the value's threshold colour."""
    assert defaults["thresholds"]["mode"] == "absolute"
    steps = defaults["thresholds"]["steps"]
    return str([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])
