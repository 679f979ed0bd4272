"""A folder that outlives its job: another run's results move aside, finished stages are not repeated, and prepare
reports its measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.layout import ENV_DELETE_CHECKPOINTS, REPORT_LIMIT_BYTES, FailureClass, JobPaths
from finetune_contract.report import FailureReport, MeasuredFacts, TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.stage import runs
from trainer_support.forking import start_server

JOB = TrainerJob.model_validate({"name": "j", "task": "masked-lm", "model": {"uri": "file:///m"}, "run": "uid-1"})
REPORT = TrainerReport(job="j", stage=Stage.PREPARE, outcome="succeeded", fingerprint="f", metrics={"rows": 3})


def fill(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


MARK = '{\n  "run": "uid-1"\n}\n'
OTHER = '{"run": "uid-0"}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({}, {"j/run.json": MARK}, id="an empty workspace is taken"),
        pytest.param(
            {"j/run.json": MARK, "j/metrics.json": "{}"},
            {"j/run.json": MARK, "j/metrics.json": "{}"},
            id="its own folder stays",
        ),
        pytest.param(
            {"j/run.json": OTHER, "j/model/a": "weights"},
            {"j.previous-1/run.json": OTHER, "j.previous-1/model/a": "weights", "j/run.json": MARK},
            id="the folder of another run moves aside",
        ),
        pytest.param(
            {"j/model/a": "weights", "j.previous-1/model/a": "older"},
            {"j.previous-1/model/a": "older", "j.previous-2/model/a": "weights", "j/run.json": MARK},
            id="results without a marker move aside, to a name that is free",
        ),
        pytest.param(
            {"j/run.json": "{", "j/model/a": "weights"},
            {"j.previous-1/model/a": "weights", "j.previous-1/run.json": "{", "j/run.json": MARK},
            id="a damaged marker is nobody's",
        ),
    ],
)
def test_prepare_takes_the_folder_and_deletes_nothing(before, after, tmp_path: Path):
    fill(tmp_path, before)
    runs.claim(JobPaths.of(tmp_path, "j"), Stage.PREPARE, JOB)
    assert {name: text for name, text in content(tmp_path).items() if name != ".j.lock"} == after


@pytest.mark.parametrize("files", [{}, {"j/run.json": OTHER}, {"j/prepared/COMPLETE": ""}])
@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT])
def test_a_later_stage_refuses_a_folder_of_another_run_and_leaves_it_alone(files, stage: Stage, tmp_path: Path):
    fill(tmp_path, files)
    with pytest.raises(StageError) as caught:
        runs.claim(JobPaths.of(tmp_path, "j"), stage, JOB)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "OtherRun")
    assert "uid-1" in caught.value.message
    assert content(tmp_path) == files


def test_without_a_run_nothing_is_claimed_and_nothing_counts_as_done(tmp_path: Path):
    paths, job = JobPaths.of(tmp_path, "j"), JOB.model_copy(update={"run": None})
    given = runs.RecordedSettings.of(job, None)
    runs.claim(paths, Stage.PREPARE, job)
    assert content(tmp_path) == {}
    runs.mark_complete(paths, Stage.PREPARE, given, REPORT)
    assert list(content(tmp_path)) == ["j/state/prepare.json"]
    assert runs.finished(paths, Stage.PREPARE, given) is None


def test_a_stage_is_done_only_for_the_same_run_with_the_same_settings(tmp_path: Path):
    paths, deepspeed = JobPaths.of(tmp_path, "j"), tmp_path / "deepspeed.json"
    deepspeed.write_text('{"zero_optimization": {"stage": 2}}')
    runs.mark_complete(paths, Stage.TRAIN, runs.RecordedSettings.of(JOB, deepspeed), REPORT)
    assert runs.finished(paths, Stage.TRAIN, runs.RecordedSettings.of(JOB, deepspeed)) == REPORT
    assert runs.finished(paths, Stage.EVALUATE, runs.RecordedSettings.of(JOB, deepspeed)) is None
    for change in ({"run": "uid-2"}, {"seed": 1}):
        assert (
            runs.finished(paths, Stage.TRAIN, runs.RecordedSettings.of(JOB.model_copy(update=change), deepspeed))
            is None
        )
    deepspeed.write_text('{"zero_optimization": {"stage": 3}}')
    assert runs.finished(paths, Stage.TRAIN, runs.RecordedSettings.of(JOB, deepspeed)) is None


def test_a_stage_that_was_run_again_takes_the_marks_of_the_later_ones_away(tmp_path: Path):
    paths, given = JobPaths.of(tmp_path, "j"), runs.RecordedSettings.of(JOB, None)
    for stage in (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE, Stage.TRAIN):
        runs.mark_complete(paths, stage, given, REPORT)
    done = [stage for stage in Stage if runs.finished(paths, stage, given) is not None]
    assert done == [Stage.PREPARE, Stage.TRAIN]


# --------------------------------------------------------------------------------------------------- whole stages


def launch(stage: Stage, job: TrainerJob, folder: Path, **environment: str) -> tuple[TrainerReport, str]:
    file, message = folder / "job.json", folder / "message.json"
    file.write_text(job.to_json(), encoding="utf-8")
    command = [start_server().python, "-m", "finetune_trainer", "launch", str(stage), "--job", str(file)]
    ended = subprocess.run(
        [*command, "--workspace", str(folder / "w"), "--with", "process"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "FINETUNE_REPORT": str(message), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert message.stat().st_size < REPORT_LIMIT_BYTES
    report = TrainerReport.model_validate_json(message.read_bytes())
    assert ended.returncode == (0 if report.failure is None else report.failure.exit_code), ended.stderr
    message.unlink()
    return report, ended.stderr


def state_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def cluster_job(tiny_data: Path, tiny_bert, tmp_path: Path) -> TrainerJob:
    """Return an inference job with model and data on claims, as the operator writes it, and output on another claim."""
    claims = tmp_path / "claims"
    model = tiny_bert(claims / "models" / "bert", labels=("0", "1"))
    data = claims / "data"
    data.mkdir()
    for name in ("validation.jsonl", "test.jsonl"):
        (data / name).write_bytes((tiny_data / name).read_bytes())
    return TrainerJob.model_validate(
        {
            "name": "tiny",
            "run": "uid-1",
            "task": "text-classification",
            "model": {"uri": f"file://{model}"},
            "dataset": {"uri": f"file://{data}", "columns": {"text": "text", "label": "label"}},
            "preparation": {"max_length": 32},
            "evaluation": {"device": "cpu", "batch_tokens": 1024},
            "predict": {"device": "cpu", "batch_tokens": 1024, "output": f"file://{claims}/out/deep/predictions.jsonl"},
        }
    )


def test_stages_of_a_cluster_run_once_and_report(cluster_job: TrainerJob, tmp_path: Path):
    paths, claims = JobPaths.of(tmp_path / "w", "tiny"), tmp_path / "claims"
    read_only = {name: state_of(claims / name) for name in ("models", "data")}
    home = {"HF_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}

    prepared, _ = launch(Stage.PREPARE, cluster_job, tmp_path, **home)
    assert prepared.measured is not None
    assert prepared.measured.model is not None
    assert (prepared.measured.model.model_type, prepared.measured.model.layers) == ("bert", 2)
    data = DataFacts.model_validate_json((paths.prepared / "data.json").read_bytes())
    assert data.labels == ("0", "1")
    assert prepared.measured.data == data.model_copy(update={"labels": (), "label_counts": {}})

    fill(paths.checkpoints, {"step-10/weights": "w"})
    evaluated, _ = launch(Stage.EVALUATE, cluster_job, tmp_path, **home)
    assert evaluated.outcome == "succeeded"
    assert not paths.report.exists()
    assert content(paths.checkpoints) == {"step-10/weights": "w"}
    home[ENV_DELETE_CHECKPOINTS] = "1"  # of the last stage
    predicted, _ = launch(Stage.PREDICT, cluster_job, tmp_path, **home)
    assert predicted.outcome == "succeeded"
    assert predicted.artifacts["checkpoints_deleted"] == "checkpoints"
    assert not paths.checkpoints.exists()
    output = claims / "out" / "deep" / "predictions.jsonl"
    assert len(output.read_text().splitlines()) == 40
    assert "kubectl apply -f tiny.yaml" in paths.report.read_text()
    assert "transformers" in json.loads(paths.environment.read_text())["versions"]
    assert {name: state_of(claims / name) for name in ("models", "data")} == read_only

    output.unlink()
    again, log_text = launch(Stage.PREDICT, cluster_job, tmp_path, **home)
    assert again == predicted
    assert "is done with the same settings" in log_text
    assert not output.exists()

    other = cluster_job.model_copy(update={"run": "uid-2"})
    refused, _ = launch(Stage.EVALUATE, other, tmp_path, **home)
    assert refused.failure is not None
    assert (refused.failure.failure_class, refused.failure.reason) == (FailureClass.CONFIG, "OtherRun")


# ------------------------------------------------------------------------------------------------- size of a report


def facts(splits: int, buckets: int, labels: int) -> DataFacts:
    histogram = {8 * (i + 1): 10**9 + i for i in range(buckets)}
    split = SplitFacts(rows=10**12, tokens=10**15, length_histogram=histogram, longest=8 * buckets)
    names = tuple(f"label {i} {'ü' * 50}" for i in range(labels))
    return DataFacts(
        fingerprint="f" * 64,
        splits={f"split-{i}": split for i in range(splits)},
        labels=names,
        label_counts=dict.fromkeys(names, 10**9),
        max_length=512,
    )


LONG = '"\x00\\ü' * 3000


@pytest.mark.parametrize(
    "report",
    [
        pytest.param({"measured": MeasuredFacts(data=facts(4, 500, 10_000))}, id="10,000 labels and long texts"),
        pytest.param({"measured": MeasuredFacts(data=facts(300, 64, 2))}, id="many splits"),
        pytest.param({"metrics": {"path": LONG}, "measured": MeasuredFacts(data=facts(4, 20, 2))}, id="long metrics"),
        pytest.param({"job": LONG, "artifacts": {LONG: LONG}, "fingerprint": LONG}, id="everything long"),
        pytest.param(
            {
                "outcome": "failed",
                "metrics": {"path": LONG},
                "failure": FailureReport(
                    failure_class=FailureClass.DATA, reason="\x00" * 64, message=LONG, hint=LONG, time=1.0
                ),
            },
            id="a failure that is long in all its parts",
        ),
    ],
)
def test_a_termination_message_is_never_too_long_and_always_a_report(report: dict[str, Any]):
    whole = TrainerReport.model_validate({"job": "j", "stage": "prepare", "outcome": "succeeded", **report})
    text = whole.to_termination_message()
    assert len(text.encode()) < REPORT_LIMIT_BYTES
    read = TrainerReport.model_validate_json(text)
    assert (read.stage, read.outcome) == (whole.stage, whole.outcome)


def test_oversized_report_drops_buckets_first_and_counts_every_row():
    whole = TrainerReport(
        job="j",
        stage=Stage.PREPARE,
        outcome="succeeded",
        metrics={"rows": {"train": 1}},
        measured=MeasuredFacts(data=facts(4, 500, 10)),
    )
    read = TrainerReport.model_validate_json(whole.to_termination_message())
    assert read.metrics == whole.metrics
    assert read.measured is not None
    assert read.measured.data is not None
    for role, split in read.measured.data.splits.items():
        before = facts(4, 500, 10).splits[role]
        assert 8 <= len(split.length_histogram) <= 32
        assert sum(split.length_histogram.values()) == sum(before.length_histogram.values())
        assert max(split.length_histogram) == before.longest
