"""Budgets in CPU seconds: what pytest records of a test, what is over its budget, and the record in the table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import budgets
from budgets import TIERS, by_file, calibration, describe, exceeds, over, record, summary
from dear_tests import DearFile
from reports import Outcome, Report, Result, read_report

TESTS = Path(__file__).parents[1]
PROGRAM = """
import subprocess, sys, time

BUSY = "import time; end = time.process_time() + {0}\\nwhile time.process_time() < end: pass"


def test_here():
    exec(BUSY.format(0.3))


def test_below():
    subprocess.run([sys.executable, "-c", BUSY.format(0.4)], check=True)
    time.sleep(0.2)
"""


def test_report_has_the_cpu_seconds_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-p", "suite_plugins.times", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    subprocess.run([*command, "--junitxml=r.xml"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)

    here, below = read_report(tmp_path / "r.xml").results

    assert here.node_id == "test_program.py::test_here"
    assert 0.3 <= here.number("cpu.process") < below.number("cpu.children") + 0.3
    assert below.number("cpu.children") >= 0.4
    assert below.number("cpu.process") < 0.2  # it sleeps, and that costs nothing
    assert here.number("cpu.before") > 0.05
    assert here.number("calibration") > 0.2
    assert "calibration" not in below.properties


def result(node_id: str, cpu: float, **properties: float) -> Result:
    values = {"cpu.process": cpu, **properties}
    return Result(node_id, Outcome.PASSED, 1.0, properties={name: str(value) for name, value in values.items()})


def t1(*cpu: float, speed: float = 1.0) -> Report:
    return Report(
        "test", [result(f"tests/unit/test_x.py::test_{at}", each, calibration=speed) for at, each in enumerate(cpu)]
    )


def test_seconds_are_those_of_the_reference_machine() -> None:
    report = t1(10, 20, speed=2.0)
    assert calibration([report]) == 2.0
    assert by_file([report], 2.0) == {"tests/unit/test_x.py": 15.0}
    assert summary([report], "T1").startswith("T1: 15 of 550 CPU s; this machine took 2.00 times as long")


def test_imports_and_shared_servers_count_for_the_suite() -> None:
    report = Report("e2e", [result("tests/e2e/cluster/test_x.py::test_a", 2, **{"cpu.before": 3})], shared=4)
    assert report.cpu_seconds == 9
    assert by_file([report], 1.0) == {"tests/e2e/cluster/test_x.py": 6}


@pytest.mark.parametrize(
    ("part", "noted", "failed"), [(1.0, False, False), (1.09, False, False), (1.2, True, False), (1.6, True, True)]
)
def test_tier_above_its_budget_is_noted_and_far_above_fails(part: float, noted: bool, failed: bool) -> None:
    report = t1(*[part * TIERS["T1"] / 100] * 100)
    lines = over([report], [], 1.0, "T1")
    assert any(line.endswith("CPU s: T1") for line in lines) == noted
    assert exceeds([report], "T1") == failed


def test_dear_test_of_t1_is_named() -> None:
    assert over([t1(10.9, 11.1)], [], 1.0, "") == [
        "over budget: 11.1 of 10 CPU s: tests/unit/test_x.py::test_1: mark it slow"
    ]


def test_dear_file_far_above_its_row_is_named() -> None:
    files = [DearFile("tests/trainer/test_a.py", 40, ()), DearFile("tests/trainer/test_b.py", 40, ())]
    report = Report(
        "dear", [result("tests/trainer/test_a.py::test_a", 60), result("tests/trainer/test_b.py::test_a", 48)]
    )
    assert over([report], files, 1.0, "") == ["over budget: 60 of 40 CPU s: tests/trainer/test_a.py"]


def test_command_fails_far_above_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = '<testcase><properties><property name="cpu.process" value="{}"/></properties></testcase>'
    codes = []
    for cpu in (500, 900):
        (tmp_path / "test.xml").write_text(f"<testsuite>{case.format(cpu)}</testsuite>")
        codes.append(budgets.main(["--tier", "T1", str(tmp_path / "test.xml")]))
    assert codes == [0, 1]
    assert "over budget: 900 of 550 CPU s: T1" in capsys.readouterr().out
    assert budgets.main(["--tier", "T1", str(tmp_path / "none.xml")]) == 2


def test_tables_show_the_dearest_first() -> None:
    shown = describe([t1(1, 12, 3)], "T1")
    assert [line.split()[-1] for line in shown.split("\n\n")[2].splitlines()[1:]] == [
        f"tests/unit/test_x.py::test_{at}" for at in (1, 2, 0)
    ]


def test_measured_seconds_are_recorded_in_the_table() -> None:
    text = (
        '[tests.cluster]\ncrd = {cpu = 3, areas = "api"}\n[tests."e2e/cluster"]\nbox_tour = {cpu = 9, areas = "cli"}\n'
    )
    measured = {"tests/cluster/test_crd.py": 31.6, "tests/e2e/cluster/test_crd.py": 5.0}
    assert record(text, measured) == text.replace("cpu = 3", "cpu = 32")
