"""The first cause of a failed stage is found among its processes' reports, their signals and torchrun's
summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.cli.causes import LOG_LINES, first_cause

SUMMARY = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : somewhere
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
"""


@dataclass(frozen=True)
class Case:
    exit_code: int
    reports: dict[int, tuple[FailureClass, float]] = field(default_factory=dict)
    """Rank -> class and time of its failure."""
    log: str = ""
    expected: tuple[str, str, int | None, int] = ("", "", None, 0)
    """Class, reason, rank and exit code."""


CASES = {
    "the earliest report wins over a later one of another rank": Case(
        1,
        {0: (FailureClass.MODEL, 2.0), 1: (FailureClass.DATA, 1.0)},
        expected=("DataError", "Told", 1, 10),
    ),
    "a broken connection is an echo even when it was reported first": Case(
        1,
        {0: (FailureClass.COLLECTIVE, 1.0), 1: (FailureClass.LOSS_NOT_FINITE, 2.0)},
        expected=("LossNotFinite", "Told", 1, 17),
    ),
    "a killed rank without a report is the cause of the broken connection of the other": Case(
        1,
        {0: (FailureClass.COLLECTIVE, 1.0)},
        SUMMARY.format(rank=1, code=-9),
        ("OutOfMemory", "Killed", 1, 137),
    ),
    "a killed rank is the cause when torchrun told the other to end": Case(
        1,
        {0: (FailureClass.PREEMPTED, 1.0)},
        SUMMARY.format(rank=1, code=-11),
        ("ProgramError", "KilledBySignal", 1, 1),
    ),
    "a killed rank is the cause when torchrun saw the rank that lost its connection first": Case(
        1,
        {0: (FailureClass.COLLECTIVE, 1.0)},
        SUMMARY.format(rank=1, code=-9) + SUMMARY.format(rank=0, code=150),
        ("OutOfMemory", "Killed", 1, 137),
    ),
    "a process that somebody else told to end is worth another try": Case(
        143, expected=("Preempted", "Terminated", 0, 143)
    ),
    "a report with a cause of its own wins over a rank that torchrun then ended": Case(
        1,
        {1: (FailureClass.CONFIG, 1.0)},
        SUMMARY.format(rank=0, code=-15),
        ("ConfigError", "Told", 1, 11),
    ),
    "a single process that was killed is named by its signal": Case(137, expected=("OutOfMemory", "Killed", 0, 137)),
    "out of memory that the process could report keeps its own words": Case(
        137, {0: (FailureClass.OUT_OF_MEMORY, 1.0)}, expected=("OutOfMemory", "Told", 0, 137)
    ),
    "a rank that ended by itself in silence is the cause of the broken connection of the other": Case(
        1,
        {0: (FailureClass.COLLECTIVE, 1.0)},
        SUMMARY.format(rank=0, code=150) + SUMMARY.format(rank=1, code=3),
        ("ProgramError", "NoReport", 1, 1),
    ),
    "a rank whose report is lost is told of by its exit code": Case(
        1, log=SUMMARY.format(rank=1, code=16), expected=("StorageFull", "NoReport", 1, 16)
    ),
    "a broken connection alone is all that is known": Case(
        150, {0: (FailureClass.COLLECTIVE, 1.0)}, expected=("CollectiveFailed", "Told", 0, 150)
    ),
    "exit code 0 without a completion marker is a failure": Case(
        0, expected=("ProgramError", "NoCompletionMarker", None, 0)
    ),
    "an end without a report keeps its exit code in the message": Case(
        3, expected=("ProgramError", "NoReport", None, 1)
    ),
    "a code of the contract without a report is no signal": Case(
        150, expected=("CollectiveFailed", "NoReport", None, 150)
    ),
    "a process that was told to end from the terminal is worth another try": Case(
        130, expected=("Preempted", "Terminated", 0, 143)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_first_cause_is_found(case: Case, tmp_path: Path) -> None:
    for rank, (failure_class, time) in case.reports.items():
        failure = FailureReport(failure_class=failure_class, reason="Told", message="as it was", time=time)
        report = TrainerReport(job="j", stage=Stage.TRAIN, rank=rank, world_size=2, outcome="failed", failure=failure)
        (tmp_path / f"train-{rank}.json").write_text(report.to_termination_message())
    log = tmp_path / "train.log"
    log.write_text(case.log)

    found = first_cause(Stage.TRAIN, case.exit_code, tmp_path, log)

    assert (found.failure_class, found.reason, found.rank, found.exit_code) == case.expected
    assert found.stage == "train"


def test_the_log_tail_holds_the_last_lines_and_a_damaged_report_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train-0.json").write_text('{"job": "j", "sta')
    log = tmp_path / "train.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))

    found = first_cause(Stage.TRAIN, 5, tmp_path, log)

    assert found.log_tail is not None
    assert found.log_tail.splitlines() == [f"line {number}" for number in range(100 - LOG_LINES, 100)]
    assert "exit code 5" in found.message
