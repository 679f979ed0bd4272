"""Hints of the commands themselves: following one clears its message."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from finetune_contract.choices import Stage
from finetune_operator.cli.local import hub_reach, local_run
from finetune_operator.cli.local.local_request import RunRequest, RunResult
from finetune_operator.cli.main import app

JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: first}
spec:
  task: text-classification
  model: {uri: file://model}
  dataset: {uri: file://rows}
  training: {}
  predict: {}
"""


@pytest.fixture(autouse=True)
def _in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("stage", ["train", "evaluate", "predict"])
def test_stages_that_a_message_adds_are_enough(stage: str) -> None:
    arguments = ["run", "job.yaml", "--no-measure", "--dry-run", "--stage", stage]
    refused = call(*arguments)
    assert refused.exit_code == 1
    added = refused.stderr.rstrip(".\n").partition("; add ")[2].split()
    ran = call(*arguments, *added)
    assert (
        ran.exit_code,
        f"Would run: {', '.join(sorted({*added[1::2], stage}, key=list(Stage).index))}" in ran.stdout,
    ) == (
        0,
        True,
    )


@pytest.mark.parametrize(
    ("hardware", "mended"),
    [
        ("gpus=2", "gpus=2,gpu=H100"),
        ("gpu=FOO,gpus=1", "gpu=FOO,gpus=1,memory=80Gi"),
        ("memory=80Gi", "hostMemory=80Gi"),
        ("gpu=H100 gpus=8", "gpu=H100,gpus=8"),
        ("gpu=H100,bf16=yes", "gpu=H100,bf16=true"),
    ],
)
def test_message_about_hardware_leads_to_a_valid_value(hardware: str, mended: str) -> None:
    refused = call("plan", "job.yaml", "--no-measure", "--hardware", hardware)
    assert refused.exit_code == 2
    assert "--hardware: " in refused.stderr
    assert call("plan", "job.yaml", "--no-measure", "--hardware", mended).exit_code == 0


def test_resume_command_has_all_options_of_the_interrupted_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("schemes: [file, hf]\n")

    def interrupted(request: RunRequest) -> RunResult:
        return RunResult(local_run.planned_run(request)[0], interrupted=Stage.PREPARE, exit_code=130)

    monkeypatch.setattr(local_run, "run", interrupted)
    options = ["--workspace", "results", "--settings", "settings.yaml", "--no-measure", "--stage", "prepare"]
    ran = call("run", "job.yaml", *options)
    assert ran.exit_code == 130
    command = re.search(r"Resume with: finetune (.*)", ran.stderr)
    assert command is not None
    assert shlex.split(command[1]) == ["run", "job.yaml", *options, "--resume"]


def test_hint_of_a_cluster_plan_names_no_local_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub_reach, "unreachable_reason", lambda: "the Hub cannot be reached (connection refused)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "job.yaml").write_text(JOB.replace("file://", "hf://some-org/"))
    message = call("plan", "job.yaml", "--cluster", "--measure").stderr
    assert "and there is no copy here. Connect, or omit --measure.\n" in message
    assert "file://" not in message
    again = call("plan", "job.yaml", "--cluster")
    assert (again.exit_code, again.stderr) == (0, "")
