"""Causes of processes that ended without a report, and the first cause of several failures."""

from __future__ import annotations

import signal

import pytest

from finetune_contract.causes import Cause, first_cause, of_exit, signal_of
from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.report import FailureReport, TrainerReport

ENDS = {
    "killed": (-9, ("Killed", "Killed", "killed from outside with SIGKILL")),
    "killed, as a container tells it": (137, ("Killed", "Killed", "killed from outside with SIGKILL")),
    "told to end": (-15, ("Preempted", "Terminated", "stopped by SIGTERM")),
    "told to end, as a container tells it": (143, ("Preempted", "Terminated", "stopped by SIGTERM")),
    "a crash": (-11, ("ProgramError", "KilledBySignal", "ended by SIGSEGV")),
    "a crash, as a container tells it": (139, ("ProgramError", "KilledBySignal", "ended by SIGSEGV")),
    "a signal without a name": (-40, ("ProgramError", "KilledBySignal", "ended by signal 40")),
    "a code of the contract that would be SIGTTOU": (150, ("CollectiveFailed", "NoReport", "exit code 150")),
    "a code of the contract that would be SIGPROF": (155, ("OutOfMemory", "NoReport", "exit code 155")),
    "a code of the contract": (16, ("StorageFull", "NoReport", "exit code 16")),
    "a code that is none": (3, ("ProgramError", "NoReport", "exit code 3")),
    "a code above all signals": (255, ("ProgramError", "NoReport", "exit code 255")),
    "an end without an error": (0, ("ProgramError", "NoReport", "exit code 0")),
}


@pytest.mark.parametrize(("code", "expected"), ENDS.values(), ids=ENDS.keys())
def test_exit_code_without_a_report_has_a_class_and_reason(code: int, expected: tuple[str, str, str]):
    failure = of_exit(code, 7.0, "Rank 3")
    failure_class, reason, text = expected
    assert (failure.failure_class, failure.reason, failure.time) == (failure_class, reason, 7.0)
    assert failure.message.startswith("Rank 3 ")
    assert text in failure.message
    assert failure.hint


def test_only_two_of_the_contracts_codes_are_signals():
    assert {code: signal_of(code) for code in EXIT_CODES.values() if signal_of(code) is not None} == {
        137: signal.SIGKILL,
        143: signal.SIGTERM,
    }


def test_a_report_without_a_time_comes_after_those_with_one():
    reports = []
    for rank, time in enumerate((0.0, 5.0)):
        failure = FailureReport(failure_class=FailureClass.DATA, reason="Told", message="m", time=time)
        reports.append(
            TrainerReport(job="j", stage=Stage.TRAIN, rank=rank, world_size=2, outcome="failed", failure=failure)
        )
    assert first_cause(reports, {}) == Cause(1, reports[1].failure)  # type: ignore[arg-type]


def test_where_nothing_failed_there_is_no_cause():
    assert first_cause([], {}) is None
