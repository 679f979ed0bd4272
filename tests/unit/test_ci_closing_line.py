"""The last line of a run: its counts, and its text for a run that is not good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import closing_line

CASE = '<testcase classname="tests.trainer.test_x" name="{0}" time="0.5">{1}</testcase>'
PROPERTY = '<properties><property name="nodeid" value="tests/trainer/test_x.py::{0}"/></properties>'
INSIDE = {
    "passed": "",
    "skipped": "<skipped/>",
    "failed": "<failure/>",
    "error": "<error/>",
}


def report(folder: Path, name: str, **tests: str) -> str:
    cases = "".join(CASE.format(test, PROPERTY.format(test) + INSIDE[outcome]) for test, outcome in tests.items())
    file = folder / f"{name}.xml"
    file.write_text(f'<testsuites><testsuite name="pytest" time="61.2">{cases}</testsuite></testsuites>')
    return str(file)


def write_verdict(folder: Path, good: bool, **changes: object) -> None:
    file = folder / "verdict.json"
    file.write_text(json.dumps({"good": good, "flaky": [], "failed": [], "broken": {}, "refusal": "", **changes}))


def line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, int]:
    code = closing_line.main(arguments)
    return capsys.readouterr().out.strip().strip("= "), code


FLAKY = {"flaky": [{"suite": "b", "nodeid": "tests/trainer/test_x.py::test_d", "first": "f"}]}


def test_all_suites_are_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = report(tmp_path, "a", test_a="passed", test_b="skipped"), report(tmp_path, "b", test_c="passed")
    assert line(capsys, *reports) == ("2 passed, 1 skipped in 122.40s (0:02:02)", 0)
    assert line(capsys, "--seconds", "3600", *reports) == ("2 passed, 1 skipped in 3600.00s (1:00:00)", 0)


def test_failures_and_errors_are_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = line(capsys, report(tmp_path, "a", test_a="failed", test_b="error", test_c="passed"))
    assert found == ("2 failed, 1 passed in 61.20s (0:01:01)", 1)


def test_flaky_tests_are_passed_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, "a", test_a="passed")
    report(tmp_path, "b", test_d="failed")
    write_verdict(tmp_path, True, **FLAKY)
    assert line(capsys, "--reports", str(tmp_path)) == ("2 passed, 1 flaky in 122.40s (0:02:02)", 0)


def test_refused_flaky_tests_are_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, "a", test_a="passed", test_d="failed")
    write_verdict(tmp_path, False, refusal="too many", **FLAKY)
    assert line(capsys, "--reports", str(tmp_path)) == ("1 failed, 1 passed in 61.20s (0:01:01)", 1)


def test_each_broken_suite_counts_as_one_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = report(tmp_path, "a", test_a="passed")
    (tmp_path / "b.xml").write_text(Path(good).read_text()[:-30])
    write_verdict(tmp_path, False, broken={"b": "cut short", "c": "missing"})
    assert line(capsys, "--reports", str(tmp_path)) == ("2 failed, 1 passed in 61.20s (0:01:01)", 1)


def test_a_failed_step_without_report_counts_as_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = line(capsys, "--failed", "images", report(tmp_path, "a", test_a="passed"))
    assert found == ("1 failed, 1 passed in 61.20s (0:01:01)", 1)


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_verdict_that_cannot_be_read_is_a_failure(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, "a", test_a="passed")
    if text is not None:
        (tmp_path / "verdict.json").write_text(text)
    assert line(capsys, "--reports", str(tmp_path)) == ("1 failed, 1 passed in 61.20s (0:01:01)", 1)


def test_a_run_without_tests_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line(capsys) == ("1 failed in 0.00s (0:00:00)", 1)
    assert line(capsys, report(tmp_path, "a")) == ("1 failed in 61.20s (0:01:01)", 1)


def test_a_verdict_that_is_not_good_has_a_failure_in_any_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, "a", test_a="passed")
    write_verdict(tmp_path, False)
    assert line(capsys, "--reports", str(tmp_path)) == ("1 failed, 1 passed in 61.20s (0:01:01)", 1)
