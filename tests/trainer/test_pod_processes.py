"""Several processes of one pod evaluate and predict like one: equal metrics, equal bytes, and one that is killed is the
cause of the failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from finetune_contract.choices import Stage
from finetune_contract.inference_settings import InferenceProcesses
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.pod_processes import BatchShard, visible_gpus
from finetune_trainer.predict.predict import predict, worker_threads
from finetune_trainer.predict.prediction_inputs import PredictionInputs
from finetune_trainer.predict.tensor_group import WHOLE_MODEL
from process_support.command_lines import command_of, trainer_arguments
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.forking import start_server
from trainer_support.tasks import (
    INFERENCE,
    WORDS,
    read_lines,
    task_job,
    trained,
    training_of,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

TIMEOUT_SECONDS = patient(280)
FILLER = "-" * 2000
"""Text of a column that no task reads, so that a few rows make several shards."""


def tokens_of_row(at: int, count: int) -> list[str]:
    return [WORDS[(at * 7 + each * (1 + at % 3)) % len(WORDS)] for each in range(count)]


def row(at: int) -> dict[str, Any]:
    """Return a row that has the columns of all tasks."""
    text = tokens_of_row(at, 3 + at % 17)
    return {
        "text": " ".join(text),
        "label": ("bad", "good")[at % 2],
        "tokens": text,
        "tags": [("O", "B-X")[(at + each) % 2] for each in range(len(text))],
        "question": " ".join(tokens_of_row(at + 1, 3)),
        "context": " ".join(text),
        "answers": {"text": [text[0]], "answer_start": [0]},
        "source": " ".join(text),
        "target": " ".join(tokens_of_row(at + 2, 2 + at % 4)),
        "prompt": " ".join(tokens_of_row(at, 1 + at % 5)),
        "chosen": " ".join(tokens_of_row(at + 3, 1 + at % 7)),
        "rejected": " ".join(tokens_of_row(at + 5, 1 + at % 11)),
        "filler": FILLER,
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for first, (split, count) in enumerate({"train": 16, "validation": 8, "test": 101}.items()):
        write_lines(folder / f"{split}.jsonl", [row(1000 * first + at) for at in range(count)])
    return folder


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "text-classification": (["text", "label"], {}),
    "token-classification": (["tokens", "tags"], {}),
    "question-answering": (["question", "context", "answers"], {}),
    "text-generation": (["text"], {"generation": {"max_new_tokens": 5}}),
    "summarization": (["source", "target"], {"generation": {"max_new_tokens": 5, "temperature": 1.0}}),
    "preference-tuning": (["prompt", "chosen", "rejected"], {}),
}
"""Columns of each task, and other settings. Texts of the summarization are drawn at random."""
ANSWERS = {"label", "tags", "answers", "target"}


@pytest.fixture
def job_of(tmp_path: Path, data: Path, tiny_bert: Callable[..., Path]) -> Callable[..., TrainerJob]:
    """Return a function: task -> a job with a trained model, whose rows to predict are in several shards."""

    def make(task: str) -> TrainerJob:
        columns, changes = CASES[task]
        match task:
            case "summarization":
                model = write_encoder_decoder(tmp_path / "model")
            case "text-generation" | "preference-tuning":
                model = write_decoder(tmp_path / "model")
            case _:
                model = tiny_bert(tmp_path / "model", words=WORDS, initializer_range=0.5)
        given = {name: name for name in columns if name not in ANSWERS}
        rows = {"uri": f"file://{data}/test.jsonl", "columns": given}
        settings = {"training": training_of(steps=1, threads=1), "preparation": {"max_length": 48}}
        settings |= {"predict": None if task == "preference-tuning" else {**INFERENCE, "dataset": rows}}
        return trained(task_job(task, model, data, columns, **settings, **changes), JobPaths.of(tmp_path / "w", "job"))

    return make


def in_processes(job: TrainerJob, count: int) -> TrainerJob:
    """Return the job with several processes to evaluate and to predict."""
    spread = {"processes": count}
    return job.model_copy(
        update={
            "evaluation": job.evaluation and job.evaluation.model_copy(update=spread),
            "predict": job.predict and job.predict.model_copy(update=spread),
        }
    )


def start(
    job: TrainerJob, paths: JobPaths, stage: Stage, python: str | None = None
) -> tuple[subprocess.Popen[str], Path]:
    """Start the stage as in a pod; return its first process and the file of its report. `python`: interpreter, in place
    of forks of a server that has imported everything.
    """
    file, message = paths.root.parent / "job.json", paths.root.parent / f"{stage}-report.json"
    file.write_text(job.to_json(), encoding="utf-8")
    message.unlink(missing_ok=True)
    command = [python or start_server().python, "-m", "finetune_trainer", "launch", str(stage), "--job", str(file)]
    command += ["--workspace", str(paths.root.parent), "--with", "torchrun"]
    settled = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FINETUNE_REPORT": str(message)}
    process = subprocess.Popen(command, env=settled, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process, message


def end(process: subprocess.Popen[str], message: Path) -> tuple[int, TrainerReport, str]:
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert message.exists(), output
    return process.returncode, TrainerReport.model_validate_json(message.read_bytes()), output


@pytest.fixture
def one_thread():
    """Compute with one thread, as each of the processes does: sums in fp32 depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("task", CASES)
def test_two_processes_evaluate_and_predict_like_one(task: str, job_of: Callable[..., TrainerJob], tmp_path: Path):
    job, paths = job_of(task), JobPaths.of(tmp_path / "w", "job")
    alone = evaluate(job, paths, NoProgress())
    samples = (paths.root / "samples.json").read_bytes() if (paths.root / "samples.json").exists() else None
    code, report, output = end(*start(in_processes(job, 2), paths, Stage.EVALUATE))
    assert (code, report.rank, report.world_size) == (0, 0, 2), output
    taken = re.findall(r"Rows answered by each process: (\d+), (\d+)\.", output)
    assert taken, output
    assert all(int(rows) > 20 for each in taken for rows in each)
    assert report.metrics == json.loads(json.dumps(alone))
    if samples is not None:
        assert (paths.root / "samples.json").read_bytes() == samples
    if job.predict is None:
        return
    tokens = predict(job, paths, NoProgress()).get("generated_tokens")
    expected = paths.predictions_jsonl.read_bytes()
    paths.predictions_jsonl.unlink()
    code, report, output = end(*start(in_processes(job, 2), paths, Stage.PREDICT))
    assert (code, report.metrics["rows"], report.metrics.get("generated_tokens")) == (0, 101, tokens), output
    assert (tokens is None) == ("tokens_per_second" not in report.metrics)
    assert paths.predictions_jsonl.read_bytes() == expected
    assert not list(paths.root.glob("predictions.parts*"))


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes of the stage itself, as far as started."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    return [each for each in descendants if trainer_arguments(command_of(each))]


SPLIT: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "text-classification by llama": ("text-classification", "llama", {}, 2),
    # Its queries share keys and values, and its output layer is its embedding.
    "text-generation by qwen3": ("text-generation", "qwen3", {"generation": {"max_new_tokens": 5}}, 4),
    "text-generation by gpt2": (
        "text-generation",
        "gpt2",
        {"generation": {"max_new_tokens": 5, "temperature": 1.0}},
        2,
    ),
}
"""Task, family, other settings, processes; two hold one model. Texts of the last are drawn at random."""


def close_to(value: Any) -> Any:
    """Return an expected value: numbers within 1e-5, all else exact."""
    if isinstance(value, dict):
        return {name: close_to(each) for name, each in value.items()}
    if isinstance(value, list):
        return [close_to(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def in_groups(job: TrainerJob, count: int) -> TrainerJob:
    """Return the job with `count` processes, of which two hold one model."""
    body = in_processes(job, count).model_dump()
    for stage in ("evaluation", "predict"):
        body[stage] |= {"tensor": 2}
    return TrainerJob.model_validate(body)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if "gpt2" in case else []) for case in SPLIT]
)
def test_two_processes_with_half_of_each_layer_answer_like_one(case: str, tmp_path: Path, data: Path):
    task, family, changes, processes = SPLIT[case]
    columns, _ = CASES[task]
    model = write_decoder(tmp_path / "model", family)
    given = {name: name for name in columns if name not in ANSWERS}
    rows = {"uri": f"file://{data}/test.jsonl", "columns": given}
    settings = {"training": training_of(steps=1, threads=1), "preparation": {"max_length": 48}}
    paths = JobPaths.of(tmp_path / "w", "job")
    job = trained(
        task_job(task, model, data, columns, **settings, predict={**INFERENCE, "dataset": rows}, **changes), paths
    )
    alone = evaluate(job, paths, NoProgress())["evaluate"]
    predict(job, paths, NoProgress())
    expected = read_lines(paths.predictions_jsonl)
    paths.predictions_jsonl.unlink()
    code, report, output = end(*start(in_groups(job, processes), paths, Stage.EVALUATE))
    assert (code, report.rank, report.world_size) == (0, 0, processes), output
    held = re.search(r"2 processes share .*: this one has (\d+) % of its weights", output)
    assert held is not None, output
    assert 50 <= int(held[1]) < 75, "all but the embeddings and norms is divided"
    assert report.metrics["evaluate"] == close_to(alone)
    code, report, output = end(*start(in_groups(job, processes), paths, Stage.PREDICT))
    assert (code, report.metrics["rows"]) == (0, 101), output
    found = read_lines(paths.predictions_jsonl)
    assert found == [{name: close_to(value) for name, value in each.items()} for each in expected]


@pytest.mark.parametrize("stage", [Stage.EVALUATE, Stage.PREDICT])
def test_killed_process_fails_the_stage_as_its_cause(stage: Stage, job_of: Callable[..., TrainerJob], tmp_path: Path):
    job, paths = job_of("text-classification"), JobPaths.of(tmp_path / "w", "job")
    process, message = start(in_processes(job, 2), paths, stage, sys.executable)
    wait_until(lambda: len(ranks(process)) == 2, "both processes run")
    ranks(process)[1].send_signal(signal.SIGKILL)
    code, report, output = end(process, message)
    assert report.failure is not None, output
    assert (code, report.failure.failure_class, report.failure.reason) == (137, FailureClass.KILLED, "Killed")
    assert not list(paths.state.glob(f"{stage}.json"))
    # The next attempt is not disturbed by what it left.
    code, report, output = end(*start(in_processes(job, 2), paths, stage))
    assert (code, report.outcome) == (0, "succeeded"), output


def test_other_number_of_processes_than_planned_is_refused(job_of: Callable[..., TrainerJob], tmp_path: Path):
    job, paths = in_processes(job_of("text-classification"), 2), JobPaths.of(tmp_path / "w", "job")
    for stage in (evaluate, predict):
        with pytest.raises(StageError) as caught:
            stage(job, paths, NoProgress())
        assert (caught.value.failure_class, caught.value.reason) == (FailureClass.WORLD_SIZE, "WorldSizeMismatch")
        assert "1 " in caught.value.message
        assert "2 " in caught.value.message


@pytest.mark.parametrize(("rows", "expected"), [(20, 4), (200, 1)])
def test_few_shards_leave_their_workers_the_threads_of_others(
    rows: int, expected: int, tmp_path: Path, tiny_bert: Callable[..., Path]
):
    write_lines(tmp_path / "rows.jsonl", [row(at) for at in range(rows)])
    source = {"uri": f"file://{tmp_path}/rows.jsonl", "columns": {"text": "text"}}
    model = tiny_bert(tmp_path / "model", words=WORDS, labels=("bad", "good"))
    predicts = {**INFERENCE, "dataset": source, "processes": 4}
    body = {"name": "job", "task": "text-classification", "model": {"uri": f"file://{model}"}, "predict": predicts}
    given = PredictionInputs.of(TrainerJob.model_validate(body), JobPaths(tmp_path / "job"), {}, WHOLE_MODEL)
    assert worker_threads(given, 1) == expected
    alone = TrainerJob.model_validate({**body, "predict": {**predicts, "processes": 1}})
    assert worker_threads(replace(given, job=alone), 3) == 3


def test_batches_are_dealt_out_each_once():
    batches = list(range(11))
    shares = [BatchShard(index, 3).of(batches) for index in range(3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


@pytest.mark.parametrize(
    ("given", "local_rank", "count", "visible"),
    [
        (None, 0, 1, ["0"]),
        (None, 3, 2, ["6", "7"]),
        ("4,5,6,7", 1, 2, ["6", "7"]),
        ("GPU-a,GPU-b", 1, 1, ["GPU-b"]),
        ("0", 1, 1, []),
    ],
)
def test_each_process_sees_its_own_gpus(given: str | None, local_rank: int, count: int, visible: list[str]):
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environment, local_rank, count) == visible


def test_each_process_sees_an_instance_of_a_partitioned_gpu():
    environment = {"NVIDIA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert [visible_gpus(environment, rank, 1) for rank in range(2)] == [["MIG-a"], ["MIG-b"]]
    assert visible_gpus({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1, 1) == ["1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {**INFERENCE, "devices_per_process": 2}}, "devices_per_process is for GPUs"),
        ({"predict": {**INFERENCE, "processes": 2, "workers": 2}}, "processes is for one pod"),
        ({"evaluation": {**INFERENCE, "processes": 3, "tensor": 2}}, "processes must be a multiple of tensor, 2"),
        (
            {"predict": {**INFERENCE, "processes": 2, "tensor": 2, "optimization": "bf16"}},
            "optimization is none with tensor",
        ),
    ],
)
def test_job_that_spreads_in_two_ways_is_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        task_job("text-classification", tmp_path, tmp_path, ["text", "label"], **changes)


def test_job_file_names_processes_only_if_there_are_several(tmp_path: Path):
    alone = task_job("text-classification", tmp_path, tmp_path, ["text", "label"])
    assert not {'"processes"', '"devicesPerProcess"'} & set(re.findall(r'"\w+"', alone.to_json()))
    assert in_processes(alone, 2).to_json().count('"processes":') == 2
    assert TrainerJob.model_validate_json(in_processes(alone, 2).to_json()).inference(Stage.PREDICT).processes == 2
    assert alone.inference(Stage.TRAIN) == InferenceProcesses()
