"""The verdict on a run of several suites: its rules, tests that run again, and the closing line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reports import Outcome, Report, Result, read_report
from run_verdict import MAX_FAILURES, MAX_FLAKY, Verdict, broken_reason, closing_line, final_verdict, judge, refusal

TESTS = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-p", "suite_plugins.times", "-p", "no:cacheprovider", "-p", "pytest_timeout"]

PROJECT = {
    "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\njunit_logging = all\njunit_log_passing_tests = false\n",
    "tests/trainer/test_chance.py": """
from pathlib import Path
import pytest

def fail_once(name):
    file = Path(__file__).with_name(name)
    if not file.exists():
        file.touch()
        print("printed by the first run")
        raise AssertionError("not <ready>\\nafter 3 s")

def test_good(): pass

@pytest.mark.parametrize("case", ["a b/c[d] e::f 'g' \\u00e9"])
def test_chance(case): fail_once("chance")
""",
    "tests/cluster/test_fixture.py": """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def server():
    file = Path(__file__).with_name("server")
    if not file.exists():
        file.touch()
        raise OSError("port is taken")

@pytest.mark.parametrize("number", range(5))
def test_server(server, number): pass
""",
    "tests/e2e/local/test_always.py": """
import pytest

@pytest.fixture
def closed():
    yield
    raise RuntimeError("cannot be closed")

def test_twice(closed): assert False, "wrong for good"
""",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of PROJECT."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def test_failed_tests_are_run_again_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    environment = dict(os.environ)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--options-of-the-first-run")
    command = [*PYTEST, "--junitxml=r/test.xml", "tests"]
    code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode

    verdict, reports = judge(Path("r"), {"test": code}, PYTEST)

    name = "tests/trainer/test_chance.py::test_chance[a b/c[d] e::f 'g' \\xe9]"
    assert f"FLAKY {name}: first: AssertionError: not <ready> after 3 s; passed when run alone" in verdict.lines()
    assert len(verdict.flaky) == 6
    # Its call and its tear-down fail, for which pytest writes two cases.
    assert verdict.failed == ["tests/e2e/local/test_always.py::test_twice"]
    twice = next(result for result in reports[0].results if "test_twice" in result.node_id)
    assert "wrong for good" in twice.text
    assert "cannot be closed" in twice.text
    assert twice.number("cpu.process") > 0
    logs = {log.name: log.read_text() for log in Path("r/again/test").glob("*.first.txt")}
    assert len(logs) == 7
    assert "printed by the first run" in next(text for name, text in logs.items() if "test_chance" in name)
    assert "6 passed" in Path("r/again/test/again.log").read_text()
    assert closing_line(reports, verdict, 61.2).strip("= ") == "1 failed, 7 passed, 6 flaky in 61.20s (0:01:01)"


# ---------------------------------------------------------------------------------------------------------------- rules


def result(name: str = "test_a", file: str = "tests/trainer/test_x.py", **changes: object) -> Result:
    values = {"outcome": Outcome.FAILED, "seconds": 1.0, "message": "assert 0", **changes}
    return Result(f"{file}::{name}", **values)  # type: ignore[arg-type]


PASSED = result("test_p", outcome=Outcome.PASSED)


@pytest.mark.parametrize(
    ("results", "code", "reason"),
    [
        pytest.param([PASSED], 0, "", id="good"),
        pytest.param([PASSED, result()], 1, "", id="a failed test"),
        pytest.param([PASSED, result()], 2, "", id="a failed test, by make"),
        pytest.param([PASSED], 124, "exit code 124", id="time-out"),
        pytest.param([PASSED, result()], 3, "exit code 3", id="internal error"),
        pytest.param([], 5, "no tests ran", id="no tests"),
        pytest.param([], 0, "no tests ran", id="no tests, passed"),
        pytest.param([PASSED], 2, "2, with 0 failed tests", id="fails after pytest"),
        pytest.param([result()], 0, "0, with 1 failed tests", id="exit code lost"),
    ],
)
def test_suite_that_did_not_end_well_is_broken(results: list[Result], code: int, reason: str) -> None:
    assert reason in broken_reason(Report("test", results), code)
    assert bool(broken_reason(Report("test", results), code)) == bool(reason)


def test_missing_or_truncated_report_breaks_the_run(tmp_path: Path) -> None:
    (tmp_path / "cut.xml").write_text('<testsuites><testsuite><testcase classname="tests.x" name="a"')
    verdict, reports = judge(tmp_path, {"gone": 0, "cut": 0}, ["false"])
    assert "is missing" in verdict.broken["gone"]
    assert "cannot be read" in verdict.broken["cut"]
    assert (reports, verdict.good) == ([], False)
    assert closing_line(reports, verdict, 1).strip("= ") == "2 failed in 1.00s (0:00:01)"


@pytest.mark.parametrize("folder", ["trainer", "tracing", "e2e/local", "cluster", "e2e/cluster"])
def test_tests_with_processes_may_be_run_again(folder: str) -> None:
    assert refusal([result(file=f"tests/{folder}/test_x.py")]) == ""


@pytest.mark.parametrize("folder", ["unit", "golden", "chart", "architecture", "new", "trainer_support"])
def test_tests_without_processes_are_not_run_again(folder: str) -> None:
    assert "no processes" in refusal([result(), result(file=f"tests/{folder}/test_x.py")])


def test_crashed_worker_is_never_flaky() -> None:
    message = "failed on setup with \"worker 'gw0' crashed while running 'tests/trainer/test_x.py::test_a'\""
    assert "crashed" in refusal([result(message=message, in_setup=True)])


def many(count: int, **changes: object) -> list[Result]:
    return [result(f"test_a[{number}]", **changes) for number in range(count)]


def test_more_failures_than_chance_explains_are_not_run_again() -> None:
    assert refusal(many(MAX_FAILURES)) == ""
    assert "not chance" in refusal(many(MAX_FAILURES + 1))
    assert refusal(many(MAX_FAILURES + 5, in_setup=True)) == ""


@pytest.mark.parametrize(("count", "good"), [(MAX_FLAKY, True), (MAX_FLAKY + 1, False)])
def test_too_many_flaky_tests_fail_the_run(count: int, good: bool) -> None:
    found = final_verdict(many(count), [each.node_id for each in many(count)])
    assert (len(found.flaky), found.good) == (count, good)
    line = closing_line([Report("test", [PASSED, *many(count)])], found, 3661)
    assert line.strip("= ") == (
        f"{count + 1} passed, {count} flaky in 3661.00s (1:01:01)"
        if good
        else f"{count} failed, 1 passed in 3661.00s (1:01:01)"
    )


def test_failed_step_counts_as_a_failure() -> None:
    line = closing_line([Report("test", [PASSED])], Verdict(broken={"T2": "far above its budget"}), 1)
    assert line.strip("= ") == "1 failed, 1 passed in 1.00s (0:00:01)"


def test_shared_cpu_seconds_are_read_beside_the_report(tmp_path: Path) -> None:
    properties = '<properties><property name="nodeid" value="tests/a.py::b"/><property name="cpu.before" value="2"/>'
    (tmp_path / "e2e.xml").write_text(f"<testsuite><testcase>{properties}</properties></testcase></testsuite>")
    (tmp_path / "e2e.cpu").write_text("40.5\n")
    assert read_report(tmp_path / "e2e.xml").cpu_seconds == 42.5
