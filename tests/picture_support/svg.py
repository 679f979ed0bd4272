"""A dashboard as a self-contained SVG: Grafana's grid of 24 columns, on white, in the fonts of the reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from picture_support.panels import Line, Shown, View, colour, formatted

COLUMN, ROW, GAP = 48.0, 30.0, 8.0
"""Pixels: width of a grid column with its gap, height of a grid row, and the gap."""
MARGIN, HEADER = 20.0, 62.0
WIDTH = 24 * COLUMN - GAP + 2 * MARGIN

INK, SOFT, FAINT, GRID, EDGE, PAPER, GROUND = (
    "#1f2633", "#5d6675", "#98a1b0", "#edeff3", "#dfe3ea", "#ffffff", "#f4f5f8",
)  # fmt: skip
THRESHOLDS = {"text": INK, "green": "#3d7d43", "orange": "#c96a12", "red": "#c02f3a"}
PALETTE = (
    "#5b9a53", "#d6a419", "#3f9fb5", "#d9722e", "#bf4a54", "#4272b8", "#a55aa2", "#7466b0", "#2f6f50", "#8a7420",
    "#1f6580", "#8f4a1d",
)  # fmt: skip
_LEGEND_ROWS = 6
STYLE = (
    "text{font-family:Inter,'Helvetica Neue',Arial,'Liberation Sans',sans-serif;font-size:11px;"
    f"fill:{SOFT}}}"
    f".title{{font-size:12.5px;font-weight:600;fill:{INK}}}"
    f".head{{font-size:19px;font-weight:600;fill:{INK}}}"
    f".row{{font-size:13.5px;font-weight:600;fill:{INK}}}"
    ".chip{font-size:12px}"
    f".none{{font-size:13px;fill:{FAINT}}}"
    f".cell{{font-size:12px;fill:{INK}}}"
    ".end{text-anchor:end}.mid{text-anchor:middle}"
    ".line{fill:none;stroke-linejoin:round;stroke-width:1.4}"
)


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h


def box_of(panel: Mapping[str, Any]) -> Box:
    place = panel["gridPos"]
    return Box(
        MARGIN + place["x"] * COLUMN,
        HEADER + place["y"] * (ROW + GAP),
        place["w"] * COLUMN - GAP,
        place["h"] * (ROW + GAP) - GAP,
    )


def dashboard_svg(dashboard: Mapping[str, Any], shown: Mapping[int, Shown], view: View, about: str, mark: str) -> str:
    """Return the picture; `shown`: content by panel id, `about`: alternative text, `mark`: digest of its sources."""
    height = max(box_of(panel).bottom for panel in dashboard["panels"]) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(WIDTH)} {_n(height)}" role="img">',
        f"<title>{escape(dashboard['title'])}</title>",
        f"<desc>{escape(about)}</desc>",
        f"<metadata>{escape(mark)}</metadata>",
        f"<style>{STYLE}</style>",
        _rect(Box(0, 0, WIDTH, height), fill=GROUND),
        *_header(dashboard, view),
    ]
    for panel in dashboard["panels"]:
        box = box_of(panel)
        parts.append(f'<g id="panel-{panel["id"]}">')
        if panel["type"] == "row":
            parts += _row(panel["title"], box)
        else:
            parts += [_rect(box, fill=PAPER, stroke=EDGE, rx=4)]
            parts += [_text(box.x + 12, box.y + 21, fitting(panel["title"], box.w - 20, 12.5, bold=True), "title")]
            parts += _inside(shown[panel["id"]], Box(box.x, box.y + 30, box.w, box.h - 30), view)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _header(dashboard: Mapping[str, Any], view: View) -> Iterator[str]:
    yield _text(MARGIN, 38, dashboard["title"], "head")
    start, end = (datetime.fromtimestamp(moment, UTC) for moment in (view.start, view.end))
    span = f"{start:%Y-%m-%d %H:%M} to {end:%H:%M} UTC"
    right = WIDTH - MARGIN
    for label, value in reversed([*view.chosen.items(), ("", span)]):
        width = text_width(label, 12) + text_width(value, 12) + (28 if label else 20)
        yield _rect(Box(right - width, 20, width, 26), fill=PAPER, stroke=EDGE, rx=4)
        apart = ' dx="6"' if label else ""
        label_markup = f'{escape(label)}<tspan style="fill:{INK}"{apart}>{escape(value)}</tspan>'
        yield f'<text x="{_n(right - width / 2)}" y="37.2" class="chip mid">{label_markup}</text>'
        right -= width + GAP


def _row(title: str, box: Box) -> Iterator[str]:
    middle = box.y + box.h / 2
    yield f'<path d="M{_n(box.x + 3)} {_n(middle - 2)}l4 4l4-4" fill="none" stroke="{SOFT}" stroke-width="1.5"/>'
    yield _text(box.x + 20, middle + 5, title, "row")


def _inside(shown: Shown, box: Box, view: View) -> Iterable[str]:
    if shown.empty:
        placeholder = shown.panel["fieldConfig"]["defaults"].get("noValue", "No data")
        return [_text(box.x + box.w / 2, box.y + box.h / 2, placeholder, "none mid")]
    match shown.panel["type"]:
        case "stat":
            return _stat(shown, box, view)
        case "table":
            return _table(shown, box)
        case _:
            return _timeseries(shown, box, view)


# ----------------------------------------------------------------------------------------------------------------- stat


def _stat(shown: Shown, box: Box, view: View) -> Iterator[str]:
    """Draw one value, or several beside each other."""
    defaults = shown.panel["fieldConfig"]["defaults"]
    mode = shown.panel["options"]["textMode"]
    part = box.w / len(shown.lines)
    for number, line in enumerate(shown.lines):
        value = line.points[-1][1]
        fill = THRESHOLDS[colour(value, defaults)]
        value_text, unit = (line.name, "") if mode == "name" else formatted(
            value, defaults["unit"], defaults.get("decimals"), view.end
        )  # fmt: skip
        size = 40.0
        while text_width(value_text, size, bold=True) + text_width(f" {unit}", size * 0.5) > part - 28:
            size -= 1
        middle, under = box.x + part * (number + 0.5), mode == "value_and_name" and line.name
        y = box.y + box.h / 2 + size * 0.35 - 12 - (7 if under else 0)
        markup = f'<tspan style="font-size:{_n(size)}px;font-weight:600">{escape(value_text)}</tspan>'
        if unit:
            apart = size * (0.04 if unit == "%" else 0.15)
            markup += f'<tspan style="font-size:{_n(size * 0.5)}px" dx="{_n(apart)}">{escape(unit)}</tspan>'
        yield f'<text x="{_n(middle)}" y="{_n(y)}" class="mid" style="fill:{fill}">{markup}</text>'
        if under:
            yield _text(middle, y + 22, line.name, "chip mid")


# ---------------------------------------------------------------------------------------------------------------- table


def _table(shown: Shown, box: Box) -> Iterator[str]:
    defaults = shown.panel["fieldConfig"]["defaults"]
    names, rows = shown.table()
    cells = [
        [one if isinstance(one, str) else " ".join(formatted(one, defaults["unit"])).strip() for one in row]
        for row in rows
    ]
    needs = [
        max(text_width(name, 12), *(text_width(row[index], 12) for row in cells)) + 14
        for index, name in enumerate(names)
    ]
    room = box.w - 24
    widths = _shared(room, needs)
    height, y = 19.5, box.y + 16
    fit = int((box.h - 28) // height)
    shown_rows = cells if len(cells) <= fit else cells[: fit - 1]
    for index, name in enumerate(names):
        x = box.x + 12 + sum(widths[:index])
        yield _text(x, y, name, "chip")
    for row in shown_rows:
        yield f'<path d="M{_n(box.x + 12)} {_n(y + 5.5)}h{_n(room)}" stroke="{EDGE}"/>'
        y += height
        for index, cell_text in enumerate(row):
            x = box.x + 12 + sum(widths[:index])
            yield _text(x, y, fitting(cell_text, widths[index] - 6, 12), "cell")
    if len(shown_rows) < len(cells):
        yield _text(box.x + 12, y + height, f"and {len(cells) - len(shown_rows)} more", "none")


def _shared(room: float, needs: Sequence[float]) -> list[float]:
    """Return widths of columns: the needed ones, with the widest reduced if there is no room."""
    most = room
    while sum(min(need, most) for need in needs) > room:
        most -= 1
    widths = [min(need, most) for need in needs]
    return [width + (room - sum(widths)) / len(widths) for width in widths]


# ----------------------------------------------------------------------------------------------------------- timeseries


def _timeseries(shown: Shown, box: Box, view: View) -> Iterator[str]:
    custom, defaults = shown.panel["fieldConfig"]["defaults"]["custom"], shown.panel["fieldConfig"]["defaults"]
    legend = _legend([line.name for line in shown.lines], box)
    stacked = custom["stacking"]["mode"] == "normal"
    bands = (
        _stacked(shown.lines) if stacked else [[(at, 0.0, value) for at, value in one.points] for one in shown.lines]
    )
    highest = max(top for band in bands for _, _, top in band)
    ticks = value_ticks(highest, defaults["unit"])
    labels = _tick_labels(ticks, defaults["unit"])
    left = max(text_width(label, 11) for label in labels) + 20
    plot = Box(box.x + left, box.y + 8, box.w - left - 16, box.h - 8 - 24 - (len(legend) * 17 + 8))

    def x_of(at: float) -> float:
        return plot.x + (at - view.start) / view.seconds * plot.w

    def y_of(value: float) -> float:
        return plot.bottom - value / ticks[-1] * plot.h

    for tick, label in zip(ticks, labels, strict=True):
        yield f'<path d="M{_n(plot.x)} {_n(y_of(tick))}h{_n(plot.w)}" stroke="{GRID}"/>'
        yield _text(plot.x - 8, y_of(tick) + 3.8, label, "end")
    for at, label in time_ticks(view, int(plot.w / 46)):
        yield f'<path d="M{_n(x_of(at))} {_n(plot.y)}v{_n(plot.h)}" stroke="{GRID}"/>'
        yield _text(x_of(at), plot.bottom + 16, label, "mid")
    for number, band in reversed(list(enumerate(bands))):
        inside = [(max(plot.x, x_of(at)), y_of(low), y_of(top)) for at, low, top in band]
        wide = shown.step / view.seconds * plot.w
        yield from _drawn(inside, custom, _colour(number), wide, plot.right)
    for row, entries in enumerate(legend):
        y = plot.bottom + 36 + 17 * row
        for x, which, name in entries:
            if which is not None:
                yield _rect(Box(x, y - 5.5, 12, 3), fill=_colour(which), rx=1.5)
            yield _text(x + (0 if which is None else 17), y, name)


def _drawn(
    points: Sequence[tuple[float, float, float]], custom: Mapping[str, Any], fill: str, wide: float, right: float
) -> Iterator[str]:
    """Draw one series: x, lower and upper y of its points, `wide` pixels apart if none is missing."""
    opacity = custom["fillOpacity"] / 100
    if custom["drawStyle"] == "bars":
        bars = "".join(
            f"M{_n(x)} {_n(low)}V{_n(top)}h{_n(min(wide * 0.9, right - x))}V{_n(low)}z"
            for x, low, top in points
            if low - top > 0.05 and x < right
        )
        if bars:
            yield f'<path d="{bars}" fill="{fill}" fill-opacity="{max(opacity, 0.75):g}"/>'
        return
    steps = custom["lineInterpolation"] == "stepAfter"
    tops, areas = "", ""
    for run in _runs(points, wide):
        upper = _path([(x, top) for x, _, top in run], steps, min(right, run[-1][0] + wide) if steps else None)
        lower = _path([(x, low) for x, low, _ in run], steps, min(right, run[-1][0] + wide) if steps else None)
        tops += "M" + "L".join(upper)
        if any(low - top > 0.05 for _, low, top in run):
            areas += "M" + "L".join([*upper, *reversed(lower)]) + "z"
    if areas:
        yield f'<path d="{areas}" fill="{fill}" fill-opacity="{opacity:g}"/>'
    if custom["stacking"]["mode"] == "none" or areas:
        yield f'<path d="{tops}" class="line" stroke="{fill}"/>'


def _runs(points: Sequence[tuple[float, float, float]], wide: float) -> Iterator[list[tuple[float, float, float]]]:
    """Yield runs of points without gaps between them."""
    run: list[tuple[float, float, float]] = []
    for point in points:
        if run and point[0] - run[-1][0] > wide * 1.5:
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def _path(points: Sequence[tuple[float, float]], steps: bool, until: float | None) -> list[str]:
    """Return the corners of a line, without redundant ones."""
    corners: list[tuple[float, float]] = []
    for before, (x, y) in pairwise([(points[0][0], points[0][1]), *points]):
        if steps and corners and abs(y - before[1]) > 0.05:
            corners.append((x, before[1]))
        corners.append((x, y))
    if until is not None:
        corners.append((until, points[-1][1]))
    kept = [
        point
        for index, point in enumerate(corners)
        if index in (0, len(corners) - 1)
        or not (abs(corners[index - 1][1] - point[1]) < 0.05 and abs(corners[index + 1][1] - point[1]) < 0.05)
    ]
    if len(kept) == 1:  # Grafana draws nothing for a single point; a short line makes it visible.
        kept.append((kept[0][0] + 1.5, kept[0][1]))
    return [f"{_n(x)} {_n(y)}" for x, y in kept]


def _stacked(lines: Sequence[Line]) -> list[list[tuple[float, float, float]]]:
    """Return time, lower and upper edge of each series, stacked on those before it."""
    sums: dict[float, float] = {}
    bands = []
    for line in lines:
        band = []
        for at, value in line.points:
            low = sums.get(at, 0.0)
            sums[at] = low + value
            band.append((at, low, low + value))
        bands.append(band)
    return bands


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _legend(names: Sequence[str], box: Box) -> list[list[tuple[float, int | None, str]]]:
    """Return rows of entries: place, number and name of a series; the last one counts those that do not fit."""
    rows: list[list[tuple[float, int | None, str]]] = [[]]
    x = box.x + 14
    for number, name in enumerate(names):
        label = fitting(name, box.w - 50, 11, middle=True)
        width = 17 + text_width(label, 11) + 14
        if rows[-1] and x + width - 14 > box.right - 10:
            if len(rows) == _LEGEND_ROWS - 1 and number < len(names) - 1:
                return [*rows, [(box.x + 14, None, f"and {len(names) - number} more")]]
            rows.append([])
            x = box.x + 14
        rows[-1].append((x, number, label))
        x += width
    return rows


# ----------------------------------------------------------------------------------------------------------------- axes


def value_ticks(highest: float, unit: str, most: int = 5) -> list[float]:
    """Return ticks from 0 to a round value above the highest one."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / most
    if unit == "s" and rough > 5:
        for step in (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400):
            if step >= rough:
                break
        else:
            step = 86_400 * math.ceil(rough / 86_400)
        size = float(step)
    elif unit == "bytes":
        size = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    count = math.ceil(highest / size - 1e-9)
    return [size * number for number in range(count + 1)]


def _tick_labels(ticks: Sequence[float], unit: str) -> list[str]:
    found = []
    for tick in ticks:
        number, unit_name = formatted(tick, unit, 6)
        number = number.rstrip("0").rstrip(".")
        found.append(f"{number}{'' if unit_name == '%' else ' '}{unit_name}".strip())
    return found


def time_ticks(view: View, most: int) -> Iterator[tuple[float, str]]:
    """Yield whole minutes or hours, at most `most`."""
    sizes = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 86_400)
    step = next((size for size in sizes if view.seconds / size <= most), sizes[-1])
    at = math.ceil((view.start + view.seconds * 0.02) / step) * step
    while at < view.end - view.seconds * 0.02:
        yield at, f"{datetime.fromtimestamp(at, UTC):%H:%M}"
        at += step


# ----------------------------------------------------------------------------------------------------------------- text

_NARROW, _SLIM, _WIDE = frozenset("iljI.,:;'|! "), frozenset('frt()[]/-"{}*'), frozenset("mwMW@%")


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return the width in pixels in DejaVu Sans, the widest fallback font of a browser."""
    units = sum(
        0.34 if one in _NARROW else 0.42 if one in _SLIM else 0.97 if one in _WIDE else 0.70 if one.isupper() else 0.61
        for one in text
    )
    return units * size * (1.12 if bold else 1.0)


def fitting(text: str, width: float, size: float, bold: bool = False, middle: bool = False) -> str:
    """Return the text, shortened to the width: its start, or with `middle` both of its ends."""
    shortened, kept = text, len(text)
    while kept and text_width(shortened, size, bold) > width:
        kept -= 1
        head = (kept + 1) // 2 if middle else kept
        shortened = f"{text[:head].rstrip()}\u2026{text[len(text) - kept + head :].lstrip()}"
    return shortened


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attributes = f" class={quoteattr(kind)}" if kind else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{escape(text)}</text>'


def _rect(box: Box, fill: str, stroke: str = "", rx: float = 0) -> str:
    more = (f' stroke="{stroke}"' if stroke else "") + (f' rx="{_n(rx)}"' if rx else "")
    return f'<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.w)}" height="{_n(box.h)}" fill="{fill}"{more}/>'


def _n(value: float) -> str:
    """Format a length to a tenth of a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
