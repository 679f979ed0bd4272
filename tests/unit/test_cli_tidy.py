"""Checkpoints after a run on this machine: deleted when no stage is left, unless the job keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.cli.local.local_request import RunRequest
from finetune_operator.cli.local.local_run import _Run
from finetune_operator.cli.local.workspace import LOCAL_STAGES
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from planning_support.cases import BERT, job

KEPT: dict[str, tuple[dict[str, Any], int, bool, str]] = {
    "all stages have succeeded": ({}, 3, False, "deleted 3.0 KiB of checkpoints because all stages have succeeded"),
    "the job keeps them": ({"checkpoints": {"afterSuccess": "keep"}}, 3, True, "take 3.0 KiB and are kept"),
    "evaluation is left": ({}, 2, True, "they are deleted after all stages have succeeded"),
    "a program wrote them": (
        {"training": {"script": {"git": {"url": "https://github.com/a/b"}, "entryPoint": "a.py"}}},
        3,
        True,
        "",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_checkpoints_are_deleted_when_nothing_needs_them(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, done, stay, message = KEPT[case]
    checked = job(spec)
    facts = Facts(model=BERT, hardware=parse_hardware("cpu=2,hostMemory=16Gi"), local=True)
    request = RunRequest(checked, tmp_path, LOCAL_SETTINGS)
    for name in ("step-1/state/weights.bin", "step-2/weights.bin", "best/step-1.pt"):
        file = request.paths.checkpoints / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(1024))
    request.paths.state.mkdir()
    for stage in LOCAL_STAGES[:done]:
        report = {"job": "job", "stage": stage, "outcome": "succeeded", "seconds": 1.0, "rank": 0, "exitCode": 0}
        (request.paths.state / f"{stage}.json").write_text(json.dumps(report))

    _Run(request, facts, plan(checked, facts, LOCAL_SETTINGS))._clean_up()

    assert request.paths.checkpoints.exists() == stay
    text = capsys.readouterr().err
    assert message in text
    assert bool(message) == bool(text)
    if message:
        assert "afterSuccess" in text


def test_a_link_in_place_of_the_checkpoints_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = job({})
    facts = Facts(model=BERT, hardware=parse_hardware("cpu=2,hostMemory=16Gi"), local=True)
    request = RunRequest(checked, tmp_path / "w", LOCAL_SETTINGS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/data.bin").write_bytes(bytes(1024))
    request.paths.root.mkdir(parents=True)
    request.paths.checkpoints.symlink_to(tmp_path / "elsewhere")

    _Run(request, facts, plan(checked, facts, LOCAL_SETTINGS))._clean_up()

    assert (tmp_path / "elsewhere/data.bin").exists()
    assert capsys.readouterr().err == ""
