"""The plugin that scales waits and limits of the tests to the speed of the machine."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest
import pytest_timeout

from cluster_support.control_plane import Cluster
from suite_plugins import patience
from suite_plugins.patience import MAX_FACTOR, REFERENCE_SECONDS, VARIABLE, bounded, factor, patient, raise_to
from suite_plugins.waiting import wait_until


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Unset the factor, and return the ratios that a measurement finds."""
    ratios = dict.fromkeys(REFERENCE_SECONDS, 0.5)
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(patience, "_factor", None)
    monkeypatch.setattr(patience, "_ratios", {})
    monkeypatch.setattr(patience, "measured_ratios", lambda: ratios)
    return ratios


def test_the_slowest_kind_of_work_gives_the_factor(unknown: dict[str, float]) -> None:
    unknown["disk"] = 2.4
    assert patient(60) == pytest.approx(144)
    assert os.environ[VARIABLE] == "2.40"
    assert patience.pytest_report_header() == "patience: 2.4 (import 0.5, disk 2.4, cpu 0.5)"


@pytest.mark.parametrize(("ratio", "expected"), [(0.1, 1.0), (1000.0, MAX_FACTOR)])
def test_the_factor_has_bounds(unknown: dict[str, float], ratio: float, expected: float) -> None:
    unknown.update(dict.fromkeys(unknown, ratio))
    assert factor() == expected


def test_the_environment_is_believed_and_nothing_is_measured(
    unknown: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "measured_ratios", None)
    monkeypatch.setenv(VARIABLE, "30")
    assert factor() == 30


@pytest.mark.parametrize("wrong", ["fast", "0.5", "-1", "nan", "inf"])
def test_a_wrong_factor_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(VARIABLE, wrong)
    with pytest.raises(pytest.UsageError, match="set it to a number of at least 1"):
        factor()


def test_a_suite_raises_the_factor_and_never_lowers_it(unknown: dict[str, float]) -> None:
    raise_to(3.5, "API server")
    raise_to(2.0, "API server")
    assert (factor(), os.environ[VARIABLE]) == (3.5, "3.50")
    raise_to(1000.0, "API server")
    assert factor() == MAX_FACTOR


def test_limits_of_tests_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setenv(VARIABLE, "3")
    monkeypatch.setattr(
        pytest_timeout, "pytest_timeout_set_timer", lambda item, settings: limits.append(settings.timeout)
    )
    for seconds in (500, 700, 2400):
        patience.pytest_timeout_set_timer(None, namedtuple("Settings", "timeout")(seconds))  # type: ignore[arg-type]
    assert limits == [1500, patience.MOST_TEST_SECONDS, 2400]


@pytest.mark.parametrize(
    ("seconds", "factor", "limit"), [(240, 2, 480), (240, 10, 900), (1200, 2, 1200), (2400, 10, 2400)]
)
def test_wait_without_success_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, factor: int, limit: float
) -> None:
    monkeypatch.setenv(VARIABLE, str(factor))
    assert bounded(seconds, 900) == limit


def test_limits_of_kubectl_are_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    ran = Cluster("echo", tmp_path / "config").kubectl("wait", "--timeout=120s", "--for=condition=Ready")
    assert ran.stdout.split()[2:] == ["wait", "--timeout=240s", "--for=condition=Ready"]


def test_machine_is_measured_within_the_bounds() -> None:
    assert patience.measured_ratios().keys() == REFERENCE_SECONDS.keys()
    assert all(0 < ratio < 1000 for ratio in patience.measured_ratios().values())


def test_waiting_ends_with_the_first_true_value() -> None:
    values = iter([None, "", 0, "here", "later"])
    assert wait_until(lambda: next(values), "something") == "here"


def test_failed_wait_reports_its_condition() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: 3 of 4 pods"):
        wait_until(lambda: False, lambda: "3 of 4 pods", 0)
