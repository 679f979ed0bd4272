"""A prediction whose workers are Spark's driver and the tasks of one Spark job."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict import answering, prediction_spark, prediction_workers
from finetune_trainer.predict.predict import predict
from finetune_trainer.predict.prediction_spark import Work, predict_by_spark
from finetune_trainer.predict.prediction_workers import STATUS_FILE, CrewStatus
from finetune_trainer.stage import stages
from process_support.command_lines import command_of
from suite_plugins.waiting import wait_until
from trainer_support.spark_submit import skip_without_spark
from trainer_support.tasks import write_lines

ROWS = 240
WORDS = [f"w{number}" for number in range(60)]
TEXTS = [" ".join(WORDS[(7 * row + at) % 60] for at in range(400 + row % 5)) for row in range(ROWS)]
"""Texts of 1.6 KB, of which the model reads the first words: six shards of 64 KiB at least."""


def job_of(model: Path, data: Path, **changes: Any) -> TrainerJob:
    predict_settings = {
        "dataset": {"uri": f"file://{data}", "columns": {"text": "text"}},
        "device": "cpu",
        "batch_tokens": 256,
        **changes,
    }
    return TrainerJob.model_validate(
        {
            "name": "job",
            "task": "text-classification",
            "model": {"uri": f"file://{model}"},
            "preparation": {"max_length": 24},
            "predict": predict_settings,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model") / "m", words=WORDS, labels=("bad", "good"), initializer_range=0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "rows.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> bytes:
    """Return the output of one process."""
    paths = JobPaths(tmp_path_factory.mktemp("plain") / "job")
    predict(job_of(model, data), paths, NoProgress())
    return paths.predictions_jsonl.read_bytes()


class RecordedProgress(NoProgress):
    """Records progress."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.figures: dict[str, float] = {}

    def update(self, step: int, total: int, **values: float) -> None:
        self.steps.append((step, total))
        self.figures |= values


def in_the_driver(monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]) -> None:
    """Run `first` when worker 0 answers its first shard."""
    answers, done = answering.Answerer.answers, threading.Event()

    def answer(self: Any, *given: Any) -> Any:
        if threading.current_thread().name != "tasks" and not done.is_set():
            done.set()
            first()
        return answers(self, *given)

    monkeypatch.setattr(answering.Answerer, "answers", answer)


# ---------------------------------------------------------------------------------------------------------- real Spark


@pytest.mark.slow
def test_executors_write_the_bytes_of_one_process_also_after_one_is_killed(
    model: Path, data: Path, plain: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_spark()
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setattr(prediction_spark, "LOOK_SECONDS", 0.0)
    paths, progress = JobPaths(tmp_path / "job"), RecordedProgress()

    def beats() -> list[Path]:
        return list(paths.root.glob("predictions.parts/*/attempt-*/beat-1.json"))

    def kill_first_worker() -> None:
        wait_until(beats, "worker 1 lives")
        heartbeat = beats()[0].read_bytes()
        forks = [
            one
            for one in psutil.Process().children(recursive=True)
            if "pyspark.daemon" in command_of(one) and "pyspark.daemon" in command_of(one.parent() or one)
        ]
        for one in forks:
            os.kill(one.pid, signal.SIGKILL)
        wait_until(
            lambda: beats() and heartbeat.split(b",")[0] != beats()[0].read_bytes().split(b",")[0], "another lives"
        )

    in_the_driver(monkeypatch, kill_first_worker)
    result = predict_by_spark(job_of(model, data, workers=2, engine="spark"), paths, progress)
    assert paths.predictions_jsonl.read_bytes() == plain
    assert (result["rows"], progress.steps[-1], progress.figures["replaced_pods"]) == (ROWS, (ROWS, ROWS), 1)
    assert progress.figures["rows_per_second"] > 0
    assert not list(paths.root.glob("predictions.parts*"))
    from pyspark.sql import SparkSession

    assert SparkSession.getActiveSession() is None, "the stage's own session stays"


# --------------------------------------------------------------------------------------------- a stand-in for Spark


class Context:
    """Runs tasks one after the other, in the thread that asks for them."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure
        self.cancelled: list[str] = []
        self._numbers: Sequence[int] = ()

    def setJobGroup(self, _group: str, _description: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        assert interruptOnCancel

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        self.cancelled.append(group)

    def parallelize(self, numbers: Sequence[int], partitions: int) -> Context:
        assert len(numbers) == partitions
        self._numbers = numbers
        return self

    def map(self, work: Callable[[int], int]) -> Context:
        self._work = work
        return self

    def collect(self) -> list[int]:
        if self._failure is not None:
            raise self._failure
        return [self._work(number) for number in self._numbers]


@pytest.fixture
def tasks_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    """Have tasks run in this process, or fail all."""

    def begin(failure: Exception | None = None) -> Context:
        context = Context(failure)

        class Session:
            sparkContext = context  # noqa: N815

        @contextmanager
        def session(_settings: object) -> Iterator[Any]:
            yield Session

        monkeypatch.setattr(prediction_spark, "spark_session", session)
        monkeypatch.setattr(Work, "_settle", lambda *_: None)
        monkeypatch.setattr(prediction_workers, "BEAT_SECONDS", 0.0)
        return context

    return begin


def test_failure_that_would_repeat_in_other_executors_fails_the_stage(
    tasks_here: Callable[..., Context], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tasks_here()
    paths = JobPaths(tmp_path / "job")
    answers = answering.Answerer.answers

    def refuse(self: Any, *given: Any) -> Any:
        if threading.current_thread().name == "tasks":
            raise StageError(FailureClass.DATA, "BadRow", "Row 77 cannot be encoded.", "Correct it.")
        wait_until((paths.root / STATUS_FILE).exists, "an executor has failed")
        return answers(self, *given)

    monkeypatch.setattr(answering.Answerer, "answers", refuse)
    with pytest.raises(StageError) as caught:
        predict_by_spark(job_of(model, data, workers=3, engine="spark"), paths, NoProgress())
    error = caught.value
    assert (error.failure_class, error.reason, error.message, error.hint) == (
        FailureClass.DATA,
        "BadRow",
        "Row 77 cannot be encoded.",
        "Correct it.",
    )
    assert CrewStatus.model_validate_json((paths.root / STATUS_FILE).read_bytes()).worker in (1, 2)
    assert len(context.cancelled) == 1


def test_stage_fails_when_spark_gives_up_its_executors(
    tasks_here: Callable[..., Context], model: Path, data: Path, tmp_path: Path
) -> None:
    message = (
        "Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times\n  File x.py, line 3\n"
        "finetune_trainer.core.failures.StageError: An executor does not see the job's folder /w/job.\n"
        "\tat org.apache.spark"
    )
    tasks_here(RuntimeError(message))
    with pytest.raises(StageError) as caught:
        predict_by_spark(job_of(model, data, workers=3, engine="spark"), JobPaths(tmp_path / "job"), NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.COLLECTIVE, "ExecutorsLost")
    assert caught.value.message == (
        "Spark gave up on the 2 executors that predict beside the driver: An executor does not see the job's folder "
        "/w/job."
    )


def test_task_that_another_executor_could_do_is_left_to_spark(
    tasks_here: Callable[..., Context], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks_here()
    work = Work(job_of(model, data, workers=2, engine="spark").to_json(), str(tmp_path / "job"), 2, "a", 1)
    with pytest.raises(StageError, match="does not see the job's folder"):
        work(1)
    (tmp_path / "job").mkdir()

    def lost(*_: Any) -> None:
        raise StageError(FailureClass.STORAGE_LOST, "StorageUnavailable", "The storage did not answer.")

    monkeypatch.setattr(answering.Answerer, "answers", lost)
    with pytest.raises(StageError, match="did not answer"):
        work(1)
    assert not (tmp_path / "job" / STATUS_FILE).exists()


def test_stage_predict_takes_the_engine_of_the_job(
    tasks_here: Callable[..., Context], model: Path, data: Path, plain: bytes, tmp_path: Path
) -> None:
    tasks_here()
    paths = JobPaths(tmp_path / "job")
    job = job_of(model, data, workers=3, engine="spark")
    given = stages.StageInput(job, paths, NoProgress(), stages.ProcessWorld(), None, stages.Interruption())
    assert stages._predict(given).metrics["rows"] == ROWS
    assert paths.predictions_jsonl.read_bytes() == plain


def test_without_spark_its_engine_is_refused(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(StageError) as caught:
        predict_by_spark(job_of(model, data, workers=2, engine="spark"), JobPaths(tmp_path / "job"), NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "SparkMissing")
    assert caught.value.message == "predict.engine is 'spark', and pyspark is not installed."
    assert "leave predict.engine out" in caught.value.hint
