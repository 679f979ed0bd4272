"""Launcher of a stage in a local run: its command line, and its report of a failure."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from finetune_contract.choices import Stage
from finetune_contract.facts import DeviceFacts, HardwareFacts
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.cli.local.local_run import note_fewer_processes, note_idle_gpus
from finetune_operator.cli.local.local_stage import LOG_LINES, failure_of, stage_command
from finetune_operator.cli.terminal.result_tables import print_failure
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from finetune_operator.spec.types import FailureStatus
from planning_support.cases import job


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "train.log"
    file.write_text("".join(f"line {number}\n" for number in range(100)))
    return file


def test_failure_is_not_repeated_from_the_end_of_its_log() -> None:
    message = "accuracy is 0.9 on the test split"
    log = f"step 1\n16:08 GateNotMet (GateNotMet): {message}. Train longer.\nend"
    failure = FailureStatus(
        failure_class="GateNotMet", reason="GateNotMet", message=message, hint="Train longer.", stage=Stage.EVALUATE,
        exit_code=15, log_tail=log,
    )  # fmt: skip
    console = Console(file=StringIO(), width=120)
    print_failure(console, failure, "evaluate.log")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(message) == 1
    assert shown.endswith("  Log: evaluate.log\n    step 1\n    end\n")


def test_failed_stage_shows_the_launchers_report_and_the_end_of_the_log(tmp_path: Path, log: Path) -> None:
    failure = FailureReport(failure_class=FailureClass.DATA, reason="NoRows", message="none", hint="add some", time=1.0)
    report = TrainerReport(job="j", stage=Stage.TRAIN, rank=1, world_size=2, outcome="failed", failure=failure)
    (tmp_path / "train-1.json").write_text(report.to_termination_message())

    found = failure_of(Stage.TRAIN, 10, tmp_path, log)

    assert found.model_dump(exclude_none=True) == {
        "failure_class": "DataError",
        "reason": "NoRows",
        "message": "none",
        "hint": "add some",
        "stage": "train",
        "rank": 1,
        "exit_code": 10,
        "log_tail": "\n".join(f"line {number}" for number in range(100 - LOG_LINES, 100)),
    }


@pytest.mark.parametrize(
    ("exit_code", "expected", "message"),
    [
        pytest.param(-9, ("Killed", "Killed", 137), "SIGKILL", id="it was killed"),
        pytest.param(16, ("StorageFull", "NoReport", 16), "exit code 16", id="the disk is full, also for its report"),
        pytest.param(5, ("ProgramError", "NoReport", 1), "exit code 5", id="an unknown exit code"),
        pytest.param(0, ("ProgramError", "NoReport", 1), "may be incomplete", id="it ended well without a result"),
    ],
)
def test_launcher_without_a_report_is_judged_by_its_end(
    exit_code: int, expected: tuple[str, str, int], message: str, tmp_path: Path, log: Path
) -> None:
    (tmp_path / "train-0.json").write_text('{"job": "j", "sta')

    found = failure_of(Stage.TRAIN, exit_code, tmp_path, log)

    assert (found.failure_class, found.reason, found.exit_code) == expected
    assert found.rank is None
    assert message in found.message


def test_workers_are_ranks_of_torchrun_and_fewer_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts = Facts(hardware=HardwareFacts(cpu_cores=4, memory_bytes=64 << 30), local=True)
    for workers, starter, noted in ((1, "process", ""), (3, "torchrun", ""), (6, "torchrun", "4 of 6 processes")):
        predicts = {"workers": workers, "dataset": {"uri": "hf://org/texts"}}
        requested = job({"training": None, "dataset": None, "predict": predicts, "resources": {"gpusPerNode": 0}})
        planned = plan(requested, facts, LOCAL_SETTINGS)
        assert starter in stage_command(Stage.PREDICT, JobPaths.of(tmp_path, "job"), planned)
        note_fewer_processes(requested, planned)
        text = capsys.readouterr().err
        assert noted in text
        assert bool(noted) == bool(text)


@pytest.mark.parametrize(
    ("resources", "gpus", "noted"),
    [
        pytest.param(None, 1, "this machine's GPU is not used", id="one GPU"),
        pytest.param({"accelerator": {"product": "NVIDIA-H100"}}, 4, "4 GPUs are not used", id="several"),
        pytest.param(None, 0, "", id="no GPU"),
        pytest.param({"gpusPerNode": 0}, 1, "", id="declined"),
        pytest.param({"gpusPerNode": "auto"}, 1, "", id="used"),
    ],
)
def test_gpus_that_a_job_leaves_idle_are_noted(
    resources: dict[str, object] | None, gpus: int, noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = DeviceFacts(product="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, bf16=True, capability="9.0")
    hardware = HardwareFacts(cpu_cores=4, memory_bytes=64 << 30, gpus_per_node=gpus, gpu=gpu if gpus else None)
    note_idle_gpus(job({} if resources is None else {"resources": resources}), hardware)
    text = capsys.readouterr().err
    assert noted in text
    assert bool(noted) == bool(text)
