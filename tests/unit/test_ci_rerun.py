"""Reruns of failed tests: the rules, the verdict on a run, and a real run of a small project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import rerun
from reports import End, Outcome, Report, Result, read_report
from rerun import MAX_FAILURES, MAX_FLAKY, SuiteRun, Verdict, broken_reason, final_verdict, first_verdict, refusal

TESTS = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-p", "suite_plugins.times", "-p", "no:cacheprovider"]

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

class TestGroup:
    def test_method(self): fail_once("method")
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
    "tests/unit/test_pure.py": "def test_sum(): assert 1 + 1 == 3\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run paths of PROJECT as the suite `test`, in the current folder, and return pytest's exit code."""
    for name, text in PROJECT.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--options-of-the-first-run")

    def run(*paths: str) -> int:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        command = [*PYTEST, "--junitxml=.test-reports/test.xml", *paths]
        return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode

    return run


def judge(code: int) -> int:
    return rerun.main(["--suite", f"test={code}", "--", *PYTEST])


def verdict() -> dict[str, object]:
    found: dict[str, object] = json.loads(Path(".test-reports/verdict.json").read_text())
    return found


def test_tests_that_pass_alone_are_flaky_and_keep_both_logs(
    project: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(project("tests/trainer", "tests/cluster")) == 0
    lines = capsys.readouterr().out.splitlines()
    chance = "FLAKY tests/trainer/test_chance.py::test_chance[a b/c[d] e::f 'g' \\xe9]: first: AssertionError: "
    assert f"{chance}not <ready> after 3 s; passed when run alone" in lines
    assert sum(line.startswith("FLAKY") for line in lines) == 7
    logs = sorted(Path(".test-reports/again/test").glob("*.first.txt"))
    assert len(logs) == 7
    assert "printed by the first run" in next(log.read_text() for log in logs if "test_chance" in log.name)
    assert "7 passed" in Path(".test-reports/again/test/again.log").read_text()
    assert verdict()["good"] is True


def test_a_test_that_fails_again_fails_the_run(project: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(project("tests/e2e/local")) == 1
    assert "FAILED tests/e2e/local/test_always.py::test_twice" in capsys.readouterr().out.splitlines()
    assert verdict()["failed"] == ["tests/e2e/local/test_always.py::test_twice"]
    # Its call and its tear-down fail, for which pytest writes two cases.
    (result,) = read_report(Path(".test-reports/test.xml")).results
    assert (result.outcome, result.recorded) == (Outcome.FAILED, True)
    assert "wrong for good" in result.text
    assert "cannot be closed" in result.text


def test_a_failed_unit_test_is_not_run_again(project: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(project("tests/trainer", "tests/unit")) == 1
    assert "not run again: tests/unit/test_pure.py::test_sum" in capsys.readouterr().out
    assert not Path(".test-reports/again").exists()


# ---------------------------------------------------------------------------------------------------------------- rules


def result(name: str = "test_a", file: str = "tests/trainer/test_x.py", **changes: object) -> Result:
    values = {"outcome": Outcome.FAILED, "seconds": 1.0, "recorded": True, "message": "assert 0", **changes}
    return Result(f"{file}::{name}", **values)  # type: ignore[arg-type]


def suite(
    *results: Result, code: int | None = None, status: int | None = None, collected: int | None = None
) -> SuiteRun:
    bad = any(not each.good for each in results)
    end = End(int(bad) if status is None else status, len(results) if collected is None else collected)
    return SuiteRun("test", (2 if bad else 0) if code is None else code, Report("test", results, 9.0), end)


PASSED = result("test_p", outcome=Outcome.PASSED)


def test_a_suite_that_passed_is_good() -> None:
    assert first_verdict([suite(PASSED)]) == Verdict()
    assert Verdict().good


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        pytest.param(SuiteRun("test", 2, problem="test.xml is missing"), "test.xml is missing", id="no report"),
        pytest.param(SuiteRun("test", 0, Report("test", [PASSED], 1.0)), "did not come to its end", id="killed"),
        pytest.param(suite(PASSED, code=124), "exit code 124", id="timeout"),
        pytest.param(suite(PASSED, code=2, status=2), "exit status is 2", id="interrupted"),
        pytest.param(suite(result(), code=2, status=3), "exit status is 3", id="internal error"),
        pytest.param(suite(code=2, status=5), "exit status is 5", id="no tests"),
        pytest.param(suite(), "0 of 0 tests", id="no tests, passed"),
        pytest.param(suite(PASSED, code=2), "its command's 2, with 0 failed", id="fails after pytest"),
        pytest.param(suite(result(), code=0), "its command's 0, with 1 failed", id="exit code lost"),
        pytest.param(suite(PASSED, collected=2), "1 of 2 tests", id="cut short"),
    ],
)
def test_a_suite_that_did_not_end_well_fails_the_run(run: SuiteRun, reason: str) -> None:
    assert reason in broken_reason(run)
    judged = first_verdict([suite(PASSED), run])
    assert not judged.good
    assert reason in judged.broken["test"]


@pytest.mark.parametrize("folder", ["trainer", "e2e/local", "cluster", "e2e/cluster"])
def test_tests_with_processes_may_be_run_again(folder: str) -> None:
    assert refusal([result(file=f"tests/{folder}/test_x.py")]) == ""


@pytest.mark.parametrize("folder", ["unit", "golden", "chart", "architecture", "new", "trainer_support"])
def test_tests_without_processes_are_not_run_again(folder: str) -> None:
    assert "no processes" in refusal([result(), result(file=f"tests/{folder}/test_x.py")])


def test_a_crashed_worker_is_never_flaky() -> None:
    message = "failed on setup with \"worker 'gw0' crashed while running 'tests/trainer/test_x.py::test_a'\""
    assert "crashed" in refusal([result(message=message, outcome=Outcome.ERROR, in_setup=True)])


def test_a_test_without_recorded_node_id_is_not_run_again() -> None:
    assert "node id" in refusal([result(recorded=False)])


def many(count: int, **changes: object) -> list[Result]:
    return [result(f"test_a[{number}]", **changes) for number in range(count)]


def test_more_failures_than_chance_explains_are_not_run_again() -> None:
    assert refusal(many(MAX_FAILURES)) == ""
    assert "not chance" in refusal(many(MAX_FAILURES + 1))


def test_one_broken_set_up_of_a_file_counts_once() -> None:
    assert refusal(many(MAX_FAILURES + 5, outcome=Outcome.ERROR, in_setup=True)) == ""


def judged_again(first: Sequence[Result], second: Sequence[Result]) -> Verdict:
    return final_verdict([("test", each) for each in first], {each.node_id: each for each in second})


def test_too_many_flaky_tests_fail_the_run() -> None:
    for count, good in ((MAX_FLAKY, True), (MAX_FLAKY + 1, False)):
        found = judged_again(many(count), many(count, outcome=Outcome.PASSED))
        assert (len(found.flaky), found.good) == (count, good)


@pytest.mark.parametrize("again", [[], [result(outcome=Outcome.SKIPPED)], [result(outcome=Outcome.ERROR)]])
def test_only_a_test_that_passes_alone_is_flaky(again: list[Result]) -> None:
    found = judged_again([result()], again)
    assert (list(found.flaky), found.failed, found.good) == ([], [result().node_id], False)
