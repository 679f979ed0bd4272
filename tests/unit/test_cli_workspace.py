"""A job's folder: one writer, the same job only, nothing lost; and the environment of a stage's process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_operator.cli.files.job_files import absolute_uri, read_inputs
from finetune_operator.cli.local.environment import trainer_environment
from finetune_operator.cli.local.workspace import (
    LOCAL_STAGES,
    BusyError,
    DifferentJobError,
    bytes_to_predict,
    changed_after_training,
    check_same_job,
    finished,
    locked,
    move_earlier_results,
    record_inputs,
)
from finetune_operator.cli.terminal.display import Tail, duration, latest
from finetune_operator.cli.terminal.progress_text import figures, figures_with_age
from finetune_operator.spec.types import FineTuneJob, ProgressStatus


def job(folder: Path, **changes: Any) -> FineTuneJob:
    """Return a valid job whose data lie in `folder`; `changes` replace parts of its spec."""
    spec: dict[str, Any] = {
        "task": "text-classification",
        "model": {"uri": "hf://some-org/some-model"},
        "dataset": {"uri": "file://rows.jsonl"},
        "training": {"epochs": 2},
        "predict": {},
    }
    value = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "one"},
        "spec": spec | changes,
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(value))
    inputs = read_inputs([str(file)])
    assert inputs.problems == ()
    return inputs.entries[0].job


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("rows.jsonl", 26), ("*.jsonl", 26), ("rows.parquet", None), ("missing.jsonl", None), (None, None)],
)
def test_bytes_to_predict_are_those_of_text_files(uri: str | None, expected: int | None, paths: JobPaths) -> None:
    folder = paths.root.parents[1]
    (folder / "rows.parquet").write_bytes(b"PAR1")
    made = job(folder)
    assert made.spec.dataset is not None
    source = None if uri is None else made.spec.dataset.model_copy(update={"uri": f"file://{folder}/{uri}"})
    predict = made.spec.predict and made.spec.predict.model_copy(update={"dataset": source})
    spec = made.spec.model_copy(update={"predict": predict})
    assert bytes_to_predict(made.model_copy(update={"spec": spec})) == expected


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 0}\n')
    return JobPaths.of(tmp_path / "runs", "one")


@dataclass(frozen=True)
class Change:
    spec: dict[str, Any]
    refused_from: Stage | None
    message: str = ""


CHANGES = {
    "nothing": Change({}, None),
    "the learning rate changes what training gives": Change(
        {"training": {"epochs": 2, "learningRate": 0.1}}, Stage.TRAIN, "spec.training.learningRate was 2e-05 and is 0.1"
    ),
    "the columns to copy change only the predictions": Change(
        {"predict": {"columns": ["text"]}}, Stage.PREDICT, 'spec.predict.columns was [] and is ["text"]'
    ),
    "a gate changes only the evaluation": Change(
        {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.5}}},
        Stage.EVALUATE,
        "spec.evaluation.gate.metric was not set",
    ),
    "the length changes the prepared data": Change(
        {"preparation": {"maxLength": 16}}, Stage.PREPARE, "spec.preparation.maxLength was not set and is 16"
    ),
    "workers only prepare faster": Change({"preparation": {"workers": 2}}, None),
    "pods make the same of rows": Change({"preparation": {"engine": "job", "workers": 3}}, None),
    "Spark makes the same of rows": Change({"preparation": {"engine": "spark"}}, None),
    "Spark answers the same rows": Change({"predict": {"workers": 3, "engine": "spark"}}, None),
    "checkpoints and processes may change between runs": Change(
        {"checkpoints": {"keep": 1}, "resources": {"processesPerNode": 1}}, None
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_stage_is_kept_only_if_its_inputs_are_unchanged(change: Change, paths: JobPaths, tmp_path: Path) -> None:
    before = job(tmp_path)
    write_results(paths)
    for stage in LOCAL_STAGES:
        record_inputs(paths, before, stage)
    now = job(tmp_path, **change.spec)
    refused: dict[Stage, str] = {}
    for stage in LOCAL_STAGES:
        try:
            check_same_job(paths, now, [stage])
        except DifferentJobError as different:
            refused[stage] = str(different)
    if change.refused_from is None:
        assert refused == {}
    else:
        assert next(iter(refused)) is change.refused_from
        assert change.message in refused[change.refused_from]


AFTER = {
    "a gate": ({"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.5}}}, {Stage.EVALUATE}),
    "metrics": ({"evaluation": {"metrics": ["f1"]}}, {Stage.EVALUATE}),
    "where predictions go": ({"predict": {"output": "file:///tmp/out.jsonl"}}, {Stage.PREDICT}),
    "columns to copy, which prepare keeps": ({"predict": {"columns": ["text"]}}, set()),
    "a gate and the learning rate": (
        {"evaluation": {"metrics": ["f1"]}, "training": {"epochs": 2, "learningRate": 0.1}},
        set(),
    ),
}


@pytest.mark.parametrize(("spec", "stages"), AFTER.values(), ids=AFTER.keys())
def test_stage_after_training_reruns_if_only_its_own_settings_change(
    spec: dict[str, Any], stages: set[Stage], paths: JobPaths, tmp_path: Path
) -> None:
    before = job(tmp_path, evaluation={}, predict={})
    for stage in LOCAL_STAGES:
        record_inputs(paths, before, stage)
    now = job(tmp_path, **{"evaluation": {}, "predict": {}, **spec})
    changed = changed_after_training(paths, now)
    assert set(changed) == stages
    assert all(" was " in phrase for phrases in changed.values() for phrase in phrases)


ROWS_TO_PREDICT: dict[str, Any] = {"predict": {"dataset": {"uri": "file://more.jsonl"}}}
OF_PREDICT: dict[str, tuple[dict[str, Any], dict[str, Any], set[Stage]]] = {
    "other rows": (ROWS_TO_PREDICT, {"predict": {"dataset": {"uri": "file://rows.jsonl"}}}, {Stage.PREDICT}),
    "rows of their own": ({"predict": {}}, ROWS_TO_PREDICT, {Stage.PREDICT}),
    "columns of rows of their own": (
        ROWS_TO_PREDICT, {"predict": {**ROWS_TO_PREDICT["predict"], "columns": ["text"]}}, {Stage.PREDICT},
    ),
    "the prepared rows, which have other columns": (ROWS_TO_PREDICT, {"predict": {}}, set()),
}  # fmt: skip


@pytest.mark.parametrize(("before", "now", "stages"), OF_PREDICT.values(), ids=OF_PREDICT.keys())
def test_rows_that_only_predict_reads_keep_the_results_of_other_stages(
    before: dict[str, Any], now: dict[str, Any], stages: set[Stage], paths: JobPaths, tmp_path: Path
) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "c"}\n')
    write_results(paths)
    for stage in LOCAL_STAGES:
        record_inputs(paths, job(tmp_path, evaluation={}, **before), stage)
    changed = job(tmp_path, evaluation={}, **now)
    assert set(changed_after_training(paths, changed)) == stages
    check_same_job(paths, changed, [Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE])
    with pytest.raises(DifferentJobError):
        check_same_job(paths, changed, [Stage.PREDICT])


def test_changed_rows_to_predict_change_only_the_predictions(paths: JobPaths, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "c"}\n')
    same = job(tmp_path, **ROWS_TO_PREDICT)
    for stage in LOCAL_STAGES:
        record_inputs(paths, same, stage)
    assert changed_after_training(paths, same) == {}
    (tmp_path / "more.jsonl").write_text('{"text": "another text"}\n')
    [phrase] = changed_after_training(paths, same)[Stage.PREDICT]
    assert "more.jsonl have changed" in phrase


def test_generation_settings_affect_only_generated_results(paths: JobPaths, tmp_path: Path) -> None:
    writes = {"task": "text-generation", "dataset": {"uri": f"file://{tmp_path}/rows.jsonl"}, "evaluation": {}}
    before = job(tmp_path, **writes)
    for stage in LOCAL_STAGES:
        record_inputs(paths, before, stage)
    now = job(tmp_path, **writes, generation={"maxNewTokens": 8})
    assert set(changed_after_training(paths, now)) == {Stage.EVALUATE, Stage.PREDICT}
    check_same_job(paths, now, [Stage.PREPARE, Stage.TRAIN])


def test_changed_rows_make_a_different_job(paths: JobPaths, tmp_path: Path) -> None:
    same = job(tmp_path)
    write_results(paths)
    record_inputs(paths, same, Stage.PREPARE)
    check_same_job(paths, same, [Stage.PREPARE])
    (tmp_path / "rows.jsonl").write_text('{"text": "b", "label": 1}\n{"text": "c", "label": 0}\n')
    with pytest.raises(DifferentJobError, match=r"the files of file://.*rows\.jsonl have changed"):
        check_same_job(paths, same, [Stage.PREPARE])


def test_job_is_corrected_in_place_after_a_stage_that_left_nothing(paths: JobPaths, tmp_path: Path) -> None:
    record_inputs(paths, job(tmp_path), Stage.PREPARE)
    (tmp_path / "rows.jsonl").write_text('{"text": "b", "label": 1}\n')
    corrected = job(tmp_path, training={"epochs": 3})
    check_same_job(paths, corrected, LOCAL_STAGES)

    record_inputs(paths, job(tmp_path), Stage.TRAIN)
    paths.checkpoints.mkdir(parents=True)
    check_same_job(paths, corrected, LOCAL_STAGES)
    (paths.checkpoints / "step-1").mkdir()
    with pytest.raises(DifferentJobError, match=r"spec.training.epochs was 2.0 and is 3.0"):
        check_same_job(paths, corrected, LOCAL_STAGES)


def write_results(paths: JobPaths) -> None:
    for stage in LOCAL_STAGES:
        report = TrainerReport(job="one", stage=stage, outcome="succeeded")
        marker = paths.state / f"{stage}.json"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(report.to_json())
    for file in (paths.prepared / "data.json", paths.model / "config.json", paths.predictions_jsonl, paths.metrics):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")


def files_under(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_results_without_recorded_inputs_are_refused(paths: JobPaths, tmp_path: Path) -> None:
    write_results(paths)
    with pytest.raises(DifferentJobError, match="does not record the inputs of prepare"):
        check_same_job(paths, job(tmp_path), LOCAL_STAGES)


def test_all_results_are_renamed_together_without_overwriting(paths: JobPaths) -> None:
    assert move_earlier_results(paths, LOCAL_STAGES) is None
    for number in (1, 2):
        write_results(paths)
        before = files_under(paths.root)
        place = paths.root.with_name(f"one.previous-{number}")
        assert move_earlier_results(paths, LOCAL_STAGES) == place
        assert files_under(place) == before
        assert not paths.root.exists()


def test_results_of_training_are_renamed_and_prepared_data_stays(paths: JobPaths) -> None:
    write_results(paths)
    place = move_earlier_results(paths, [Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT])
    assert place is not None
    assert files_under(place) == {
        "metrics.json",
        "model/config.json",
        "predictions.jsonl",
        "state/train.json",
        "state/evaluate.json",
        "state/predict.json",
    }
    assert finished(paths, Stage.PREPARE) is not None
    assert finished(paths, Stage.TRAIN) is None
    assert move_earlier_results(paths, []) is None


def test_lock_names_its_owner_and_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from finetune_operator.cli.local.workspace import locked\n"
        "with locked(Path(sys.argv[1]), 'one'): print('ready', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(BusyError, match=f"process {other.pid} is running this job"), locked(tmp_path, "one"):
        pass
    with locked(tmp_path, "two"):
        pass
    other.kill()
    other.communicate()
    with locked(tmp_path, "one"):
        pass


def test_an_absolute_uri_stays_and_a_relative_one_counts_from_the_file(tmp_path: Path) -> None:
    assert absolute_uri("file:///data/rows", tmp_path) == "file:///data/rows"
    assert absolute_uri("file://../rows/*.jsonl", tmp_path / "jobs") == f"file://{tmp_path}/rows/*.jsonl"
    assert absolute_uri("hf://org/rows", tmp_path) == "hf://org/rows"
    assert absolute_uri("file://~/rows.csv", tmp_path) == f"file://{Path.home()}/rows.csv"


def test_stage_environment_drops_variables_of_other_launchers() -> None:
    base = {
        "HOME": "/home/me",
        "HF_HUB_OFFLINE": "1",
        "RANK": "3",
        "MASTER_ADDR": "a",
        "OMPI_COMM_WORLD_RANK": "1",
        "PATH": "/bin",
    }
    found = trainer_environment(base, device="cpu", threads=2, report=Path("r-{rank}.json"), progress=Path("p.jsonl"))
    assert found == {
        "HOME": "/home/me",
        "HF_HUB_OFFLINE": "1",
        "PATH": "/bin",
        "FINETUNE_REPORT": "r-{rank}.json",
        "FINETUNE_PROGRESS": "p.jsonl",
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "true",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        (Stage.PREDICT, "row 30/120  33 samples/s  1,234 tokens/s  65 s left"),
        (Stage.TRAIN, "step 30/120  33 samples/s  65 s left"),
    ],
)
def test_report_and_job_status_show_same_progress(stage: Stage, shown: str) -> None:
    values: dict[str, Any] = {
        "step": 30, "total_steps": 120, "samples_per_second": 33.3, "tokens_per_second": 1234.5, "remaining_seconds": 65
    }  # fmt: skip
    for progress in (Progress(stage=stage, **values, time=0), ProgressStatus(**values, percent=25)):
        assert figures(progress, stage) == shown
        assert figures_with_age(progress, stage, 60) == f"25 %  {shown}"
        assert figures_with_age(progress, stage, 300) == f"25 %  {shown}  (reported 5 min ago)"
        assert figures_with_age(progress, stage, None) == f"25 %  {shown}"
    assert figures_with_age(ProgressStatus(), None, None) == ""


def test_a_tail_gives_whole_lines_once_and_the_newest_progress_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    tail = Tail(file)
    assert tail.lines() == []
    progress = Progress(
        stage=Stage.TRAIN, step=30, total_steps=120, loss=0.5, samples_per_second=33.3, remaining_seconds=65, time=0
    )
    file.write_text("not json\n" + progress.model_dump_json() + "\n" + '{"half"')
    lines = tail.lines()
    assert len(lines) == 2
    assert latest(lines) == progress
    assert figures(progress, progress.stage) == "step 30/120  loss 0.500  33 samples/s  65 s left"
    with file.open("a") as stream:
        stream.write(": 1}\n")
    assert tail.lines() == ['{"half": 1}']
    assert latest(['{"half": 1}']) is None
    assert (duration(7), duration(3725)) == ("0:07", "1:02:05")
