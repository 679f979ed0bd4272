"""The pictures in docs/metrics.md: of the present dashboards, with every panel, from the recorded samples."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dashboard_picture import DASHBOARDS, DOCS, draw_all, mark, picture, samples_of
from picture_support.panels import View, formatted, put_in, step_of
from picture_support.samples import Samples, missing_programs, notation
from picture_support.svg import box_of, fitting, text_width, time_ticks, value_ticks

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = {
    ("job", "Completed"): "not running",
    ("job", "Time left"): "not running",
    ("job", "Last report"): "not running",
    ("endpoints", "Requests, vLLM"): "no vLLM server",
    ("endpoints", "Latency, vLLM"): "no vLLM server",
    ("endpoints", "Tokens per second, vLLM"): "no vLLM server",
    ("endpoints", "Cache of keys and values, vLLM"): "no vLLM server",
}
"""Panels without data in these runs, as docs/metrics.md explains, and their text."""
LARGEST_BYTES = 200_000
AGAIN = "draw it again: make pictures"


def groups(name: str) -> dict[int, ElementTree.Element]:
    """Return each panel's drawing, by the panel's id."""
    root = ElementTree.parse(picture(name)).getroot()
    return {int(one.attrib["id"].removeprefix("panel-")): one for one in root.iter(f"{SVG}g")}


def texts_of(element: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in element.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_picture_is_up_to_date_with_dashboard_and_samples(name: str) -> None:
    found = ElementTree.parse(picture(name)).getroot().findtext(f"{SVG}metadata")
    assert found == mark(name, samples_of(name)), AGAIN


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_is_in_the_picture_with_its_title_and_a_value(name: str) -> None:
    drawn = groups(name)
    assert set(drawn) == {panel["id"] for panel in DASHBOARDS[name]["panels"]}
    for panel in DASHBOARDS[name]["panels"]:
        title, *others = texts_of(drawn[panel["id"]])
        assert title == panel["title"]
        if panel["type"] == "row":
            continue
        if (name, title) in EMPTY:
            assert others == [EMPTY[name, title]], title
        else:
            assert others not in (["No data"], ["not running"], ["no requests"], ["no vLLM server"]), title
        if panel["type"] == "timeseries" and (name, title) not in EMPTY:
            paths = [one for one in drawn[panel["id"]].iter(f"{SVG}path") if one.get("class") or one.get("fill")]
            assert paths, title


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_text_runs_into_another_or_out_of_its_panel(name: str) -> None:
    looked_at = 0
    for panel in DASHBOARDS[name]["panels"]:
        box, places = box_of(panel), []
        for text in groups(name)[panel["id"]].iter(f"{SVG}text"):
            spans = list(text.iter(f"{SVG}tspan"))
            sizes = [float(re.findall(r"font-size:([\d.]+)px", one.get("style", ""))[0]) for one in spans]
            texts = [one.text or "" for one in spans] or [text.text or ""]
            kinds = (text.get("class") or "").split()
            own = {"title": 12.5, "row": 13.5, "chip": 12, "cell": 12, "none": 13}
            size = next((own[kind] for kind in kinds if kind in own), 11.0)
            # A tenth less than the estimate, which is on the safe side.
            width = 0.9 * sum(text_width(one, high) for one, high in zip(texts, sizes or [size], strict=True))
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            left = x - width if "end" in kinds else x - width / 2 if "mid" in kinds else x
            assert box.x <= left, (panel["title"], texts)
            assert left + width <= box.right, (panel["title"], texts)
            assert box.y <= y <= box.bottom, (panel["title"], texts)
            places.append((left, left + width, y - max([*sizes, size]) * 0.7, y, texts))
        for one, other in combinations(places, 2):
            apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
            assert apart, (panel["title"], one, other)
            looked_at += 1
    assert looked_at > 300


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_picture_is_small_and_the_documentation_shows_it(name: str) -> None:
    assert picture(name).stat().st_size < LARGEST_BYTES
    assert f"]({picture(name).name})" in (DOCS / "metrics.md").read_text(encoding="utf-8")


def test_prometheus_still_returns_the_values_in_the_pictures() -> None:
    if missing := missing_programs():
        pytest.skip(f"{' and '.join(missing)} not in PATH (Debian's package prometheus has them)")
    compared = 0
    for name, text in draw_all().items():
        new, there = pieces(text), pieces(picture(name).read_text(encoding="utf-8"))
        for panel in DASHBOARDS[name]["panels"]:
            # topk chooses any of several equals, and not the same ones each time.
            if any("topk" in target["expr"] for target in panel.get("targets", ())):
                continue
            one, other = new[panel["id"]], there[panel["id"]]
            assert NUMBER.sub("0", one) == NUMBER.sub("0", other), f"{name}, {panel['title']}: {AGAIN}"
            # Another version may add up in another order: a tiny difference is no change.
            pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
            moved = [pair for pair in pairs if abs(float(pair[0]) - float(pair[1])) > 0.11]
            assert moved == [], f"{name}, {panel['title']}: {AGAIN}"
            compared += 1
    assert compared > 60


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def pieces(text: str) -> dict[int, str]:
    """Return the source of each panel, by its id."""
    return {int(number): inside for number, inside in re.findall(r'<g id="panel-(\d+)">(.*?)</g>', text, re.DOTALL)}


# ---------------------------------------------------------------------------------------------------- the parts of it


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples = Samples(1_700_000_000.0, 5, "Of a test.\nTwo lines.")
    still, late = notation("still", {"b": 'say "a"', "a": "\\"}), notation("late", {})
    samples.add(0, {still: 0.0})
    samples.add(1, {still: 0.0, late: 1_700_000_005.0})
    samples.add(3, {still: 0.0})  # one scrape was missed
    samples.add(4, {still: 0.25, late: 3.0})
    samples.write(tmp_path / "s.yaml")
    found = Samples.read(tmp_path / "s.yaml")
    assert found == samples
    assert found.series[still] == [0.0, 0.0, None, 0.0, 0.25]
    assert found.series[late] == [None, 1_700_000_005.0, None, None, 3.0]
    lines = list(found.open_metrics())
    assert 'still{a="\\\\",b="say \\"a\\""} 0.25 1700000020.000\n' in lines
    assert lines[-1] == "# EOF\n"


def test_figures_that_stand_still_are_no_numbers_to_yaml(tmp_path: Path) -> None:
    """`0x12` is a series of thirteen zeros here, and 18 to YAML."""
    samples = Samples(0.0, 5, "")
    for scrape in range(13):
        samples.add(scrape, {"still": 0.0})
    samples.write(tmp_path / "s.yaml")
    assert Samples.read(tmp_path / "s.yaml").series["still"] == [0.0] * 13


FORMATTED: dict[tuple[float, str, int | None], tuple[str, str]] = {
    (0.0, "short", None): ("0", ""),
    (12_340.0, "short", None): ("12.3", "K"),
    (0.954, "short", 0): ("1", ""),
    (75.0, "s", None): ("1.25", "mins"),
    (60.0, "s", None): ("1", "min"),
    (0.0042, "s", None): ("4.2", "ms"),
    (7200.0, "s", None): ("2", "hours"),
    (0.125, "percentunit", None): ("12.5", "%"),
    (2.0**20, "bytes", None): ("1", "MiB"),
    (3.5, "reqps", None): ("3.5", "req/s"),
    (940_000.0, "dateTimeFromNow", None): ("1 minute", "ago"),
}


@pytest.mark.parametrize("case", FORMATTED, ids=str)
def test_values_are_written_with_their_units(case: tuple[float, str, int | None]) -> None:
    value, unit, decimals = case
    assert formatted(value, unit, decimals, now=1000.0) == FORMATTED[case]


def test_expressions_are_queried_as_grafana_queries_them() -> None:
    view = View(0.0, 1200.0, {"namespace": ".*", "job": "a"}, {})
    step = step_of(view.seconds, 360)
    assert step == 15
    sent = put_in('rate(a{n=~"$namespace",j="$job"}[$__rate_interval]) + b[$__range]', view, step)
    assert sent == 'rate(a{n=~".*",j="a"}[60s]) + b[1200s]'
    assert step_of(24 * 3600, 360) == 300


def test_axes_end_above_the_values_at_round_numbers() -> None:
    assert value_ticks(0.0, "short") == [0.0, 1.0]
    assert value_ticks(11.0, "short") == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5]
    assert value_ticks(150.0, "s") == [0.0, 30.0, 60.0, 90.0, 120.0, 150.0]
    assert [label for _, label in time_ticks(View(0.0, 1200.0, {}, {}), 7)] == ["00:05", "00:10", "00:15"]


def test_a_text_that_is_too_long_is_shortened_where_it_matters_least() -> None:
    assert fitting("short", 100, 11) == "short"
    assert fitting("a rather long title", 60, 11).endswith("\u2026")
    shortened = fitting("estimated of trainings, EUR", 100, 11, middle=True)
    assert (shortened[0], shortened[-3:], "\u2026" in shortened) == ("e", "EUR", True)
