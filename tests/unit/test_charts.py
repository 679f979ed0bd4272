"""Charts of one run and of several: inside their frames, distinguishable, readable, safe against hostile names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from finetune_contract import charts
from finetune_contract.charts import Curve, bars, chart, fitted, loss_chart, running_mean, shares, training_charts

HOSTILE = "</title><script>alert(1)</script>&\"'"


def history(steps: int = 50, loss: float = 1.0) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": i, "epoch": i / 10, "loss": loss + 1 / i, "learning_rate": 2e-5, "tokens_per_second": 100.0 + i % 7}
        for i in range(1, steps + 1)
    ]
    return [*lines, {"step": steps // 2, "eval_loss": loss, "eval_f1": 0.5}, {"step": steps, "eval_loss": loss / 2}]


def tree(drawn: object) -> ElementTree.Element:
    """Parse a figure, which has to be well-formed XML."""
    return ElementTree.fromstring(str(drawn))


def curve_classes(drawn: object) -> list[str]:
    return [line.attrib["class"] for line in tree(drawn).iterfind(".//ul/li/svg/line")]


@pytest.mark.parametrize(
    "losses", [[0.5, 0.5], [3.0, 1e-6], [1e6, 2e6], [0.7, float("nan"), 0.6], [-1.0, -2.0], [0.0, 0.0]], ids=str
)
def test_a_chart_stays_inside_its_frame(losses):
    drawn = loss_chart({"a": [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]})
    assert drawn is not None
    points = [tuple(map(float, point.split(","))) for point in drawn.line(drawn.curves[0]).split()]
    assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in points)
    assert all(0 <= tick.at <= 1 for axis in (drawn.x, drawn.y) for tick in axis.ticks)
    assert len(drawn.y.ticks) >= 2
    assert {"1", "2"} <= {tick.text for tick in drawn.x.ticks}


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        pytest.param([2.1, 2.3], 2.09, 2.31, id="far from zero: the range of the values"),
        pytest.param([0.01, 1.0], 0.0, 1.05, id="near zero: from zero"),
        pytest.param([-1.0, 1.0], -1.1, 1.1, id="on both sides"),
        pytest.param([5.0, 5.0], 4.45, 5.55, id="all the same"),
    ],
)
def test_an_axis_is_fitted_to_its_values(values, low, high):
    axis = fitted(values)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))


def test_between_whole_steps_nothing_is_marked():
    drawn = loss_chart({"a": history(3)})
    assert drawn is not None
    assert [tick.text for tick in drawn.x.ticks] == ["1", "2", "3"]


def test_a_long_run_makes_a_short_line():
    drawn = loss_chart({"a": [{"step": i + 1, "loss": 1 / (i + 1)} for i in range(100_000)]})
    assert drawn is not None
    points = drawn.line(drawn.curves[0]).split()
    assert 1000 < len(points) <= 1501
    assert points[-1].startswith("1000,")


def test_one_loss_makes_no_chart():
    assert loss_chart({"a": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}]}) is None
    assert training_charts({}) == training_charts({"a": []}) == []


def test_after_a_resume_the_later_log_of_a_step_counts():
    rows = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 1, "loss": 5.0}]
    drawn = loss_chart({"a": rows})
    assert drawn is not None
    assert drawn.summary == "Loss from 5 at step 1 to 8 at step 2"


def test_a_single_run_has_its_validation_loss_beside_its_training_loss():
    drawn = training_charts({"a": history()})
    assert [each.title for each in drawn] == ["Loss", "Learning rate", "Throughput"]
    assert "validation, step 25: 1" in str(drawn[0])
    assert "The strong line is the mean" in str(drawn[0])


def test_runs_are_laid_over_each_other_and_keep_their_colours():
    runs = {"a": history(), "b": [line for line in history(30, 2.0) if "eval_loss" not in line], "c": history(40, 3.0)}
    drawn = {each.title: each for each in training_charts(runs)}
    assert list(drawn) == ["Training loss", "Validation loss", "Learning rate", "Throughput"]
    assert [text for item in tree(drawn["Validation loss"]).iterfind(".//ul/li") for text in item.itertext()] == [
        "a",
        "c",
    ]
    all_three, two = curve_classes(drawn["Training loss"]), curve_classes(drawn["Validation loss"])
    assert two == [all_three[0], all_three[2]]


def test_another_field_can_be_the_x_axis():
    drawn = loss_chart({"a": history(), "b": history(20)}, x="epoch")
    assert drawn is not None
    assert drawn.x.high == 5.0
    assert ">epoch<" in str(drawn)


def test_curves_differ_in_more_than_colour():
    drawn = chart("many", [Curve(str(i), [(0, i), (1, i)]) for i in range(64)])
    classes = curve_classes(drawn)
    assert len(set(classes)) == 64
    assert len({each.split()[2] for each in classes[:8]}) == 8


def test_of_many_noisy_curves_only_the_means_are_drawn():
    def lines(runs: int) -> int:
        return str(loss_chart({str(i): history() for i in range(runs)})).count("<polyline")

    assert (lines(2), lines(4)) == (4, 4)


def test_axis_of_many_noisy_curves_fits_the_drawn_means():
    noisy = [{"step": i, "loss": 100.0 * (i % 2)} for i in range(200)]
    one, many = loss_chart({"a": noisy}), loss_chart({str(i): noisy for i in range(4)})
    assert one is not None
    assert many is not None
    assert one.y.high > 100
    assert many.y.high < 70


def test_the_running_mean_follows_the_values():
    values = [(float(i), float(i % 2)) for i in range(100)]
    mean = running_mean(values)
    assert mean is not None
    assert [x for x, _ in mean] == [x for x, _ in values]
    assert all(0.3 < y < 0.7 for _, y in mean)
    assert running_mean(values[:10]) is None


def test_hostile_names_arrive_as_text():
    figure = tree(chart(HOSTILE, [Curve(HOSTILE, [(0, 1), (1, 2)], dots=True), Curve("b", [(1, 2)])], unit=HOSTILE))
    assert "".join(figure.itertext()).count(HOSTILE) == 5  # title, unit, two dots, legend
    histogram = tree(bars(HOSTILE, [(HOSTILE, 3)], unit="rows", x_label="tokens"))
    assert "".join(histogram.itertext()).count(HOSTILE) == 5  # title, bar, axis, twice in the caption


def test_bars_show_their_counts():
    drawn = bars("Lengths", [("1 to 16", 30), ("17 to 32", 10)], unit="rows", x_label="tokens")
    assert drawn is not None
    assert drawn.summary == "Lengths: most, 30 of 40 rows, have 1 to 16 tokens"
    heights = [float(rect.attrib["height"].rstrip("%")) for rect in tree(drawn).iterfind(".//rect")]
    assert heights == pytest.approx([100, 33.33])
    assert bars("none", [("1", 0)], unit="rows", x_label="tokens") is None


def test_shares_fill_the_bar():
    assert sum(each.width for each in shares({"a": 1.0, "b": 2.0, "c": 0.5})) == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize(("page", "dark"), [("#ffffff", False), ("#14171c", True)], ids=["light", "dark"])
def test_every_colour_can_be_read_on_its_page(page, dark):
    pairs: Sequence[tuple[str, str]] = charts._COLOURS
    assert [pair[dark] for pair in pairs if contrast(pair[dark], page) < 4.5] == []


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio as WCAG 2 defines it."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(part, 16) / 255 for part in re.findall("..", colour.lstrip("#"))]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(factor * each for factor, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_style_needs_no_escaping():
    assert not set("<>&\"'") & set(charts.STYLE)
