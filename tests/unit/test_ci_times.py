"""Times of tests: the plugin that records them, in a small run, and the tables that show them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import suite_table
import test_times
from reports import FOLDERS, End, Outcome, Report, Result, read_end, read_report
from suite_plugins.times import Clock, spent

TESTS = Path(__file__).parents[1]
PROJECT = """
import subprocess, sys, threading, time
import pytest
from suite_plugins.times import spent

BUSY = "import time\\nend = time.process_time() + 0.15\\nwhile time.process_time() < end: pass"

@spent("waiting")
def wait():
    time.sleep(0.2)
    with spent("training"):
        time.sleep(0.1)

@pytest.fixture
def asked():
    time.sleep(0.1)

@pytest.fixture
def asking(request):
    request.getfixturevalue("asked")
    yield
    time.sleep(0.1)

def test_all(asking):
    wait()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", BUSY])

def test_running_child():
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY + "\\nprint(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    globals()["child"] = child

def test_nothing():
    child.communicate(b"1\\n")

@pytest.mark.xdist_group("one")
def test_grouped(): pass

def test_torch():
    import torch
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, End | None]:
    """Return the report of PROJECT, with a torch that takes 0.1 s to import."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_a.py").write_text(PROJECT)
    (folder / "torch.py").write_text("import time; time.sleep(0.1)")
    report = folder / "reports" / "test.xml"
    report.parent.mkdir()
    report.write_text("an older report")
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment |= {"PYTHONPATH": f"{TESTS}{os.pathsep}{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "suite_plugins.times", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={report}", "--rootdir=."], cwd=folder, env=environment, check=True)
    return read_report(report), read_end(report)


def test_a_test_records_phases_fixtures_kinds_and_cpu_time(recorded: tuple[Report, End | None]) -> None:
    result, *_ = recorded[0].results
    assert (result.node_id, result.recorded) == ("test_a.py::test_all", True)
    phases, fixtures, kinds = result.parts("seconds."), result.parts("fixture."), result.parts("kind.")
    assert phases.keys() == {"setup", "call", "teardown"}
    assert min(phases.values()) >= 0.1
    # Time in an inner fixture or kind does not count for the outer one, nor does another thread's.
    assert fixtures["asked"] >= 0.1
    assert sum(fixtures.values()) < phases["setup"] + 0.01
    assert kinds["waiting"] >= 0.2
    assert kinds["training"] >= 0.1
    assert kinds["waiting"] + kinds["training"] < phases["call"] - 0.3
    assert result.parts("cpu.")["children"] >= 0.1  # The child took 0.15 s; a kernel may count in whole ticks.
    assert result.parts("before")[""] > 0


def test_cpu_time_of_a_child_counts_while_it_runs_and_only_once(recorded: tuple[Report, End | None]) -> None:
    _, running, reaped, *_ = recorded[0].results
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not list children")
    assert running.parts("cpu.")["children"] >= 0.1
    assert reaped.parts("cpu.").get("children", 0) < running.parts("cpu.")["children"]


def test_the_first_import_of_torch_is_a_kind(recorded: tuple[Report, End | None]) -> None:
    assert recorded[0].results[-1].parts("kind.")["importing torch"] >= 0.1


def test_the_exit_status_lies_beside_the_report(recorded: tuple[Report, End | None]) -> None:
    assert recorded[1] == End(status=0, collected=5)


def test_a_kind_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AssertionError, match="thinking"):
        spent("thinking")


def test_time_in_an_inner_name_is_counted_once() -> None:
    clock = Clock()
    for name in ("outer", "inner", "inner"):
        clock.enter(name)
    for _ in range(3):
        clock.leave()
    assert clock.take().keys() == {"outer", "inner"}
    assert not clock.take()


# --------------------------------------------------------------------------------------------------------------- tables


def result(name: str, seconds: float, **properties: float) -> Result:
    given = {name.replace("_", "."): str(value) for name, value in properties.items()}
    return Result(name, Outcome.PASSED, seconds, recorded=True, properties=given)


B = "tests/trainer/test_b.py"
REPORTS = [
    Report(
        "test",
        [
            result("tests/unit/test_a.py::test_a", 1.0, cpu_process=0.5, before=3.0),
            result(
                "tests/trainer/test_b.py::test_b", 30.0, cpu_process=2, cpu_children=5, kind_training=20, kind_waiting=4
            ),
            result(f"{B}::test_c", 4.0, kind_training=3, fixture_bench=2.5),
            result("tests/new/test_d.py::test_d", 2.0),
        ],
        20.0,
    ),
    Report("test-slow", [result(f"{B}::test_slow", 100.0)], 101.0),
]


def test_times_are_added_up_by_suite_file_fixture_and_kind() -> None:
    found = test_times.times(REPORTS, top=2)
    assert [(each["name"], each["count"], each["seconds"]) for each in found["suites"]] == [
        ("test", 4, 37.0),
        ("test-slow", 1, 100.0),
    ]
    assert [(each["name"], each["seconds"], each["longest"]) for each in found["kinds"]] == [
        ("training", 23.0, 20.0),
        ("waiting", 4.0, 4.0),
    ]
    assert [(each["name"], each["seconds"]) for each in found["fixtures"]] == [("bench", 2.5)]
    assert [each["name"] for each in found["files"]] == ["tests/trainer/test_b.py", "tests/new/test_d.py"]
    assert [each["nodeid"].rpartition("::")[2] for each in found["tests"]] == ["test_slow", "test_b"]
    assert found["tests"][1]["cpu_seconds"] == 7.0
    assert found["before_first_test"][0] == {"suite": "test", "processes": [3.0]}


def test_the_longest_tests_are_listed_with_their_kinds() -> None:
    lines = test_times.describe(test_times.times(REPORTS, top=2)).splitlines()
    assert lines[-1].split() == ["30.0", "7.0", f"{B}::test_b", "(training", "20.0,", "waiting", "4.0)"]


OLD = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" tests="2" time="8.5">
<testcase classname="tests.unit.test_old.TestGroup" name="test_a[x/y]" time="1.5" />
<testcase classname="tests.e2e.local.test_old" name="test_b" time="6.5"><skipped message="no GPU">x</skipped></testcase>
</testsuite></testsuites>"""


def test_reports_without_properties_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.xml"
    file.write_text(OLD)
    assert test_times.main(["-o", "json", str(file), str(tmp_path / "missing.xml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["nodeid"] for each in found["tests"]] == [
        "tests/e2e/local/test_old.py::test_b",
        "tests/unit/test_old.py::TestGroup::test_a[x/y]",
    ]
    assert found["suites"][0]["wall_seconds"] == 8.5
    assert test_times.main([str(tmp_path / "missing.xml")]) == 1


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_each_test_file_belongs_to_a_kind_with_a_budget() -> None:
    files = [file.relative_to(TESTS.parent).as_posix() for file in TESTS.rglob("test_*.py")]
    assert len(files) > 100
    assert [file for file in files if suite_table.kind("test", result(f"{file}::test_a", 1.0)) == "other"] == []
    assert suite_table.BUDGETS.keys() == {*FOLDERS, "slow"}


def test_the_page_on_tests_names_every_budget() -> None:
    page = (TESTS.parent / "docs" / "tests.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \|.*\| (\d+) s \| (\d+) s \|$", page, re.MULTILINE)
    assert {name: suite_table.Budget(int(every), int(each)) for name, every, each in rows} == suite_table.BUDGETS


def test_suites_stand_beside_their_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_table, "BUDGETS", {**suite_table.BUDGETS, "trainer": suite_table.Budget(all=30, each=20)})
    text = suite_table.describe(REPORTS, factor=1.0, top=2)
    assert row(text, "trainer") == ["trainer", "2", "34.0", "7.0", "30", "4", "s", "over"]
    assert row(text, "unit")[-1] == "within"
    assert row(text, "other") == ["other", "1", "2.0", "no", "budget"]
    assert row(text, "slow")[:3] == ["slow", "1", "100.0"]
    assert "single tests over theirs: 1 trainer" in text
    assert "tests/trainer/test_b.py::test_slow" in text.splitlines()[-2]


def test_patience_scales_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_table, "BUDGETS", {"trainer": suite_table.Budget(all=30, each=20)})
    assert row(suite_table.describe(REPORTS, factor=2.0, top=2), "trainer")[-2:] == ["60", "within"]
    for text, factor in (("2.5", 2.5), ("", 1.0), ("much", 1.0)):
        monkeypatch.setenv(suite_table.PATIENCE, text)
        assert suite_table.patience() == factor


def test_the_table_is_printed_though_a_report_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.xml"
    file.write_text(OLD)
    assert suite_table.main([str(file), str(tmp_path / "none.xml")]) == 0
    text = capsys.readouterr().out
    assert "none.xml is missing" in text
    assert row(text, "e2e/local")[:3] == ["e2e/local", "1", "6.5"]
