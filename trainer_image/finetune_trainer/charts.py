"""Curves of a training as plain SVG coordinates, for a page that runs nothing and loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 16, 40
"""Margins in SVG units for the axes' labels."""
_MOST_POINTS = 1500
"""Twice as many as a chart has units: more would not be seen, and a long run has a hundred thousand steps."""

Series = list[tuple[float, float]]
"""(step, value) by rising step."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: place in SVG units, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws, in SVG units."""

    title: str
    axis: str
    """What the values are."""
    line: str
    """`points` of the polyline."""
    points: tuple[tuple[float, float, str], ...]
    """x, y and text of each point that stands out."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str
    note: str = ""
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = _HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Share:
    """A part of a bar, in SVG units."""

    x: float
    width: float
    title: str


def training_charts(history: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Loss, what was measured on validation rows, learning rate, throughput: those that the history has."""
    metrics = {name: None for line in history for name in line if name.startswith("eval_") and name != "eval_loss"}
    found = [
        loss_chart(history),
        *(_measured(history, name) for name in metrics),
        chart("Learning rate", "learning rate", series(history, "learning_rate")),
        chart("Throughput", "tokens/s without padding", series(history, "tokens_per_second")),
    ]
    return [each for each in found if each is not None]


def loss_chart(history: Iterable[Mapping[str, Any]]) -> Chart | None:
    """The loss over the optimizer steps; None without two finite values to connect."""
    rows = list(history)
    note = "Points: loss on the validation split."
    return chart("Training loss", "loss", series(rows, "loss"), series(rows, "eval_loss"), note)


def _measured(history: Sequence[Mapping[str, Any]], name: str) -> Chart | None:
    values = series(history, name)
    words = name.removeprefix("eval_").replace("_", " ")
    return chart(f"Validation {words}", words, values, values)


def chart(
    title: str, axis: str, line: Series, points: Sequence[tuple[float, float]] = (), note: str = ""
) -> Chart | None:
    """`line` over the optimizer steps, and `points` that stand out; None without two values to connect."""
    if len(line) < 2:
        return None
    both = [*line, *points]
    x_low, x_high = min(x for x, _ in both), max(x for x, _ in both)
    y_ticks = nice_ticks(min(0.0, min(y for _, y in both)), max(y for _, y in both))
    y_low, y_high = y_ticks[0], max(y_ticks[-1], max(y for _, y in both))

    def x(step: float) -> float:
        return round(_LEFT + (step - x_low) / ((x_high - x_low) or 1) * (_WIDTH - _LEFT - _RIGHT), 2)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - y_low) / ((y_high - y_low) or 1) * (_HEIGHT - _TOP - _BOTTOM), 2)

    x_ticks = [step for step in nice_ticks(x_low, x_high) if x_low <= step <= x_high and step == int(step)]
    first, last = line[0], line[-1]
    return Chart(
        title=title,
        axis=axis,
        line=" ".join(f"{x(step)},{y(value)}" for step, value in _thinned(line)),
        points=tuple((x(step), y(value), f"step {step:g}: {value:.4f}") for step, value in points),
        x_ticks=tuple(Tick(x(step), f"{int(step):,}") for step in x_ticks),
        y_ticks=tuple(Tick(y(value), f"{value:g}") for value in y_ticks),
        summary=f"{title} from {_text(first[1])} at step {first[0]:g} to {_text(last[1])} at step {last[0]:g}",
        note=note if points else "",
    )


def shares(seconds: Mapping[str, float]) -> list[Share]:
    """A bar as wide as a chart, divided by `seconds`."""
    total = sum(seconds.values()) or 1.0
    bar: list[Share] = []
    x = 0.0
    for name, value in seconds.items():
        width = value / total * _WIDTH
        bar.append(Share(round(x, 2), round(width, 2), f"{name}: {value / total:.1%}"))
        x += width
    return bar


def series(rows: Iterable[Mapping[str, Any]], name: str) -> Series:
    """Finite values by rising step; after a resume the later log of a step counts."""
    points = {
        float(row["step"]): float(row[name])
        for row in rows
        if isinstance(row.get("step"), int | float)
        and isinstance(row.get(name), int | float)
        and math.isfinite(row[name])
    }
    return sorted(points.items())


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover low to high in about `wanted` steps."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * wanted >= span * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _thinned(line: Series) -> Series:
    every = -(-len(line) // _MOST_POINTS)
    return line if every == 1 else [*line[:-1:every], line[-1]]


def _text(value: float) -> str:
    """With four places; what would then be nothing, or is large, with four digits."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:,.4g}"
