"""Charts as HTML and SVG text, for pages that load nothing and need no script.

`str(chart)` is a `<figure>` that fits any width, escaped and ready for a page; Jinja2 inserts it by `{{ chart }}`, also
with autoescape. A page puts `STYLE` into a `<style>` element once: it holds the colours of light, dark and paper.

    training_charts({"a": history_of_a, "b": history_of_b})  # one chart for each figure, the runs laid over each other
    chart("Loss", [Curve("a", [(1, 0.7), (2, 0.5)])])  # any other curves
    bars("Lengths", [("1 to 16", 40), ("17 to 32", 12)], unit="rows", x_label="tokens")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, TypeAlias

from finetune_contract.metrics import GREATEST

Series: TypeAlias = Sequence[tuple[float, float]]
"""(x, y) by rising x."""

_MOST_POINTS = 1500
"""About the pixels of a wide screen's width: more are invisible, and a long run has a hundred thousand steps."""
_STEPS = 5
"""Marks of an axis, about."""
_UNITS = 1000
"""Width and height of the plot area in SVG units; it is stretched to the page's width."""
_ROOM = 0.05
"""Fraction of the values' range left free above and below, so that no curve runs along the frame."""
_MEANS_OF = 40
"""Minimum number of values for a mean line, which covers a twentieth of them; a shorter curve is drawn as it is."""
_FAINT = 3
"""Maximum number of noisy curves drawn with their values; of more, only the means are drawn."""
_LETTERS = 36
"""Characters that fit below a chart on a telephone."""

_COLOURS: Final[Sequence[tuple[str, str]]] = (
    ("#1f5fbf", "#7fb0ff"),
    ("#b3541e", "#ffb07a"),
    ("#1b7a45", "#6fd19b"),
    ("#8b3bb0", "#d6a3f2"),
    ("#b0174f", "#ff92b4"),
    ("#0b6f86", "#5fd0e0"),
    ("#6b5f00", "#d8c95a"),
    ("#555c68", "#b8c0cc"),
)
"""Colours on light and on dark pages; each has a contrast above 4.5 with its page."""
_DASHES: Final[Sequence[str]] = ("none", "7 4", "2 4", "10 4 2 4", "14 5", "4 2", "10 3 2 3 2 3", "1 3 6 3")
"""Dash patterns, so that curves differ not only by colour. A curve has the colour of its place, and the pattern of its
place moved on by one for each round of colours, so that 64 curves differ.
"""


@dataclass(frozen=True)
class Curve:
    """One line of a chart, or a row of dots. Its place among the curves determines its colour and dashes."""

    name: str
    values: Series = ()
    """Points of the curve. Empty: it is not drawn, and the others keep their colours."""
    dots: bool = False
    """True if each value has a dot with a text of its own: for few values."""
    mean: bool = False
    """True for a noisy curve that is drawn faintly behind its running mean."""


@dataclass(frozen=True)
class Tick:
    """Mark of an axis."""

    at: float
    """Position: 0 at the axis's low end, 1 at its high end."""
    text: str


@dataclass(frozen=True)
class Axis:
    """Range shown, fitted to the values."""

    low: float
    high: float
    ticks: tuple[Tick, ...]

    def at(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Chart:
    """Curves over one axis."""

    title: str
    unit: str
    """Unit of the values; empty if the title names it."""
    x_label: str
    curves: tuple[Curve, ...]
    x: Axis
    y: Axis
    summary: str
    """Description for people who cannot see the chart."""
    note: str = ""

    def line(self, curve: Curve) -> str:
        """Return `points` of a curve's polyline, in SVG units."""
        places = ((self.x.at(x), 1 - self.y.at(y)) for x, y in _thinned(curve.values))
        return " ".join(f"{_short(x * _UNITS)},{_short(y * _UNITS)}" for x, y in places)

    def __str__(self) -> str:
        drawn = [(place, curve) for place, curve in enumerate(self.curves) if curve.values]
        lines = "".join(part for place, curve in drawn for part in self._curve(place, curve))
        legend = "".join(f"<li>{_swatch(place)}{escape(curve.name)}</li>" for place, curve in drawn)
        caption = self.summary + "." if len(drawn) == 1 else ""
        text = escape(" ".join(filter(None, (caption, self.note))))
        return (
            f'<figure class="chart"><p class="chart-title"><b>{escape(self.title)}</b> {escape(self.unit)}</p>\n'
            f'<svg class="chart-plot" role="img" aria-label="{escape(self.summary)}">\n{_grid(self.y)}'
            f'<svg viewBox="0 0 {_UNITS} {_UNITS}" width="100%" height="100%" preserveAspectRatio="none" '
            f'overflow="visible">\n{lines}</svg>\n{_x_axis(self.x)}</svg>\n'
            f'<p class="chart-axis">{escape(self.x_label)}</p>\n'
            + (f'<ul class="chart-legend">{legend}</ul>\n' if len(drawn) > 1 else "")
            + (f"<figcaption>{text}</figcaption>" if text else "")
            + "</figure>\n"
        )

    def __html__(self) -> str:
        """Return the text that Jinja2 inserts into a page without escaping it again."""
        return str(self)

    def _curve(self, place: int, curve: Curve) -> Iterable[str]:
        style = f'class="chart-curve {_classes(place)}"'
        smooth = running_mean(curve.values) if curve.mean else None
        if smooth is not None and _noisy(self.curves) <= _FAINT:
            yield f'<polyline class="chart-curve chart-faint {_classes(place)}" points="{self.line(curve)}"/>\n'
        if smooth is not None:
            curve = Curve(curve.name, smooth)
        if len(curve.values) > 1:
            yield f'<polyline {style} points="{self.line(curve)}"/>\n'
        for x, y in curve.values if curve.dots else ():
            at = f"M{_short(self.x.at(x) * _UNITS)} {_short((1 - self.y.at(y)) * _UNITS)}h0"  # a dot is a round end
            title = escape(f"{curve.name}, {self.x_label} {number(x)}: {number(y)}")
            yield f'<path class="chart-dot {_classes(place)}" d="{at}"><title>{title}</title></path>\n'


@dataclass(frozen=True)
class Bars:
    """Counts side by side, such as a histogram."""

    title: str
    unit: str
    x_label: str
    counts: tuple[tuple[str, int], ...]
    """Name and height of each bar."""
    summary: str

    def __str__(self) -> str:
        top = max(count for _, count in self.counts)
        y = fitted([0, top], room=0, whole=True)
        width = 1 / len(self.counts)
        letters = max(len(name) for name, _ in self.counts)
        every = -(-len(self.counts) // max(1, _LETTERS // (letters + 2)))
        drawn = "".join(
            f'<rect class="chart-bar" x="{_percent((i + 0.08) * width)}" width="{_percent(0.84 * width)}" '
            f'y="{_percent(1 - y.at(count))}" height="{_percent(y.at(count))}">'
            f"<title>{escape(f'{name} {self.x_label}: {count:,} {self.unit}')}</title></rect>\n"
            for i, (name, count) in enumerate(self.counts)
        )
        names = [Tick((i + 0.5) * width, name) for i, (name, _) in enumerate(self.counts) if i % every == 0]
        return (
            f'<figure class="chart"><p class="chart-title"><b>{escape(self.title)}</b> {escape(self.unit)}</p>\n'
            f'<svg class="chart-plot" role="img" aria-label="{escape(self.summary)}">\n'
            f"{_grid(y)}{drawn}{_x_axis(Axis(0, 1, tuple(names)))}</svg>\n"
            f'<p class="chart-axis">{escape(self.x_label)}</p>\n<figcaption>{escape(self.summary)}.</figcaption>'
            "</figure>\n"
        )

    def __html__(self) -> str:
        """Return the text that Jinja2 inserts into a page without escaping it again."""
        return str(self)


@dataclass(frozen=True)
class Share:
    """Part of a bar."""

    x: float
    """Start, in percent of the bar."""
    width: float
    """Width, in percent of the bar."""
    title: str


# ---------------------------------------------------------------------------------------------------------- of runs


def training_charts(runs: Mapping[str, Sequence[Mapping[str, Any]]], x: str = "step") -> list[Chart]:
    """Return the charts of the histories: loss, metrics of the validation rows, learning rate, throughput. Those
    metrics of a single run that are between 0 and 1 share a chart.

    `runs`: name -> lines of its `history.jsonl`. The curves of several runs are laid over each other, and a run has the
    same colour in each chart. `x`: the field of the lines that is the x axis.
    """
    names = {name: None for lines in runs.values() for line in lines for name in line if name.startswith("eval_")}
    together: list[str] = []
    if len(runs) == 1:
        names.pop("eval_loss", None)  # shown beside the training loss
        together = [name for name in names if GREATEST.get(name.removeprefix("eval_")) == 1]
        together = together if len(together) > 1 else []
    charts = [
        loss_chart(runs, x),
        _shares_measured(runs, together, x),
        *(
            _measured(runs, name, x)
            for name in sorted(names, key=lambda name: name != "eval_loss")
            if name not in together
        ),
        overlaid("Learning rate", runs, "learning_rate", x),
        overlaid("Throughput", runs, "tokens_per_second", x, unit="tokens/s without padding", mean=True),
    ]
    return [shown for shown in charts if shown is not None]


def loss_chart(runs: Mapping[str, Sequence[Mapping[str, Any]]], x: str = "step") -> Chart | None:
    """Return the training loss; of a single run beside its validation loss. None without two finite values."""
    if len(runs) == 1:
        [lines] = runs.values()
        curves = [
            Curve("training", series(lines, "loss", x), mean=True),
            Curve("validation", series(lines, "eval_loss", x), dots=True),
        ]
        return chart("Loss", curves, x_label=x)
    return overlaid("Training loss", runs, "loss", x, mean=True)


def overlaid(
    title: str,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    name: str,
    x: str = "step",
    *,
    unit: str = "",
    mean: bool = False,
    dots: bool = False,
) -> Chart | None:
    """Return the field `name` of the histories of `runs`, one curve a run."""
    curves = [Curve(run, series(lines, name, x), dots=dots, mean=mean) for run, lines in runs.items()]
    return chart(title, curves, unit=unit, x_label=x)


def _measured(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str, x: str) -> Chart | None:
    return overlaid(f"Validation {name.removeprefix('eval_').replace('_', ' ')}", runs, name, x, dots=True)


def _shares_measured(runs: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], x: str) -> Chart | None:
    """Return a chart of the metrics between 0 and 1, laid over each other."""
    curves = [
        Curve(name.removeprefix("eval_").replace("_", " "), series(lines, name, x), dots=True)
        for lines in runs.values()
        for name in names
    ]
    return chart("Validation metrics", curves, x_label=x)


def series(rows: Iterable[Mapping[str, Any]], name: str, x: str = "step") -> Series:
    """Return the finite values of a field by rising `x`; after a resume the later log of a step counts."""
    points = {float(row[x]): float(row[name]) for row in rows if _finite(row.get(x)) and _finite(row.get(name))}
    return sorted(points.items())


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --------------------------------------------------------------------------------------------------------- drawing


def chart(title: str, curves: Sequence[Curve], *, unit: str = "", x_label: str = "step") -> Chart | None:
    """Return `curves` over one fitted axis; None unless one of them has two values to connect."""
    if not any(len(curve.values) > 1 for curve in curves):
        return None
    noisy = _noisy(curves)
    points = [point for curve in curves for point in _drawn(curve, noisy)]
    lines = "The strong line is the mean" if noisy <= _FAINT else "The lines are means"
    means = f"{lines} over a twentieth of the values." if noisy else ""
    xs = [x for x, _ in points]
    return Chart(
        title=title,
        unit=unit,
        x_label=x_label,
        curves=tuple(curves),
        x=fitted(xs, room=0, whole=all(x == int(x) for x in xs)),
        y=fitted([y for _, y in points]),
        summary=_summary(title, curves, x_label),
        note=means,
    )


def bars(title: str, counts: Sequence[tuple[str, int]], *, unit: str, x_label: str) -> Bars | None:
    """Return counts side by side; None when there is nothing to count."""
    total = sum(count for _, count in counts)
    if not total:
        return None
    name, most = max(counts, key=lambda bar: bar[1])
    summary = f"{title}: most, {most:,} of {total:,} {unit}, have {name} {x_label}"
    return Bars(title, unit, x_label, tuple(counts), summary)


def shares(seconds: Mapping[str, float]) -> list[Share]:
    """Return a bar divided in proportion to `seconds`."""
    total = sum(seconds.values()) or 1.0
    bar: list[Share] = []
    x = 0.0
    for name, value in seconds.items():
        width = value / total * 100
        bar.append(Share(round(x, 3), round(width, 3), f"{name}: {value / total:.1%}"))
        x += width
    return bar


def fitted(values: Sequence[float], room: float = _ROOM, *, whole: bool = False) -> Axis:
    """Return the axis for `values` (at least one): their range, with `room` of it added at both ends. Zero is included
    if it is nearer to them than a fifth of their range. `whole`: mark whole numbers only.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    elif 0 < low < (high - low) / 5:
        low = 0.0
    free = (high - low) * room
    low, high = low - (free if low else 0), high + free
    ticks = [tick for tick in nice_ticks(low, high) if low <= tick <= high and not (whole and tick % 1)]
    return Axis(low, high, tuple(Tick((tick - low) / (high - low), number(tick)) for tick in ticks))


def nice_ticks(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that cover low to high in about `_STEPS` steps."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / _STEPS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * _STEPS >= span * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def running_mean(values: Series) -> Series | None:
    """Return the mean over a twentieth of the values around each; None if they are too few to be noisy."""
    if len(values) < _MEANS_OF:
        return None
    half = len(values) // _MEANS_OF
    sums = [0.0]
    for _, y in values:
        sums.append(sums[-1] + y)
    edges = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(x, (sums[high] - sums[low]) / (high - low)) for (x, _), (low, high) in zip(values, edges, strict=True)]


def number(value: float) -> str:
    """Format a number for people: thousands separated, four digits if it is small or not whole."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"


def _drawn(curve: Curve, noisy: int) -> Series:
    """Return the values drawn for a curve, given the number of `noisy` curves."""
    return (running_mean(curve.values) if curve.mean and noisy > _FAINT else None) or curve.values


def _noisy(curves: Iterable[Curve]) -> int:
    """Count the curves that have a running mean."""
    return sum(curve.mean and running_mean(curve.values) is not None for curve in curves)


def _summary(title: str, curves: Sequence[Curve], x_label: str) -> str:
    drawn = [curve for curve in curves if curve.values]
    parts = [(f"{curve.name} " if len(drawn) > 1 else "") + _trend(curve.values, x_label) for curve in drawn]
    return f"{title}{':' if len(drawn) > 1 else ''} {'; '.join(parts)}"


def _trend(values: Series, x_label: str) -> str:
    (x, y), (last_x, last_y) = values[0], values[-1]
    start = f"from {number(y)} at {x_label} {number(x)} to " if len(values) > 1 else ""
    return f"{start}{number(last_y)} at {x_label} {number(last_x)}"


def _grid(y: Axis) -> str:
    return "".join(
        f'<line class="chart-rule" x1="0" x2="100%" y1="{_percent(1 - tick.at)}" y2="{_percent(1 - tick.at)}"/>'
        f'<text x="0" y="{_percent(1 - tick.at)}" dx="-8" dy="4" text-anchor="end">{escape(tick.text)}</text>\n'
        for tick in y.ticks
    )


def _x_axis(x: Axis) -> str:
    line = '<line class="chart-line" x1="0" x2="100%" y1="100%" y2="100%"/>\n'
    return line + "".join(
        f'<text x="{_percent(tick.at)}" y="100%" dy="18" text-anchor="middle">{escape(tick.text)}</text>\n'
        for tick in x.ticks
    )


def _classes(place: int) -> str:
    colours = len(_COLOURS)
    return f"chart-colour{place % colours} chart-dash{(place + place // colours) % len(_DASHES)}"


def _swatch(place: int) -> str:
    return (
        '<svg class="chart-swatch" width="34" height="10" aria-hidden="true">'
        f'<line class="chart-curve {_classes(place)}" x1="0" x2="34" y1="5" y2="5"/></svg>'
    )


def _thinned(line: Series) -> Series:
    every = -(-len(line) // _MOST_POINTS)
    return line if every == 1 else [*line[:-1:every], line[-1]]


def _percent(share: float) -> str:
    return f"{_short(share * 100)}%"


def _short(value: float) -> str:
    return f"{round(value, 2):g}" if abs(value) < 1e4 else f"{value:.2f}"


def _variables(dark: bool) -> str:
    return " ".join(f"--chart{place}: {pair[dark]};" for place, pair in enumerate(_COLOURS))


STYLE: Final = "\n".join(
    [
        f":root {{ {_variables(False)} --chart-text: #545d6b; --chart-rule: #d9dee6; }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(True)}"
        " --chart-text: #a9b2bf; --chart-rule: #323944; } }",
        ".chart { margin: 0; min-width: 0; break-inside: avoid; }",
        ".chart-title, .chart-axis { margin: 0; font-size: .8125rem; }",
        ".chart-title { font-size: .9375rem; } .chart-axis { color: var(--chart-text); text-align: center; }",
        ".chart-plot { display: block; overflow: visible; height: 13rem; margin: .75rem 1rem 1.5rem 3.75rem;"
        " width: calc(100% - 4.75rem); }",
        ".chart-plot text { fill: var(--chart-text); font-size: 12px; font-variant-numeric: tabular-nums; }",
        ".chart-rule { stroke: var(--chart-rule); } .chart-line { stroke: var(--chart-text); }",
        ".chart-curve, .chart-dot { fill: none; stroke-width: 2px; stroke-linejoin: round;"
        " vector-effect: non-scaling-stroke; }",
        ".chart-faint { stroke-width: 1px; opacity: .4; stroke-dasharray: none !important; }",
        ".chart-curve.chart-dot, .chart-dot { stroke-width: 8px; stroke-linecap: round;"
        " stroke-dasharray: none !important; }",
        ".chart-bar { fill: var(--chart0); }",
        *(f".chart-colour{place} {{ stroke: var(--chart{place}); }}" for place in range(len(_COLOURS))),
        *(f".chart-dash{place} {{ stroke-dasharray: {dashes}; }}" for place, dashes in enumerate(_DASHES)),
        ".chart-legend { display: flex; flex-wrap: wrap; gap: .125rem 1.25rem; margin: .25rem 0; padding: 0;"
        " list-style: none; font-size: .8125rem; overflow-wrap: anywhere; }",
        ".chart-swatch { margin-right: .5rem; vertical-align: middle; }",
        ".chart figcaption { color: var(--chart-text); font-size: .8125rem; }",
    ]
)
"""CSS rules of charts; all names begin with `chart`, and nothing in them must be escaped in HTML."""
