"""Prediction by Spark: the stage's own process, Spark's driver, is worker 0, and each other worker a task of one Spark
job.

The workers are those of an Indexed Job (`prediction_workers`): they meet in the job's folder, which executors must see
under the same path, and no rows pass through Spark. Spark restarts the task of a lost executor under the same number,
as a Job replaces a pod, and gives up when one task is lost for the fourth time. Worker 0 depends on no task: it answers
the remaining rows, also before the first task runs.

Executors write no report. An error in one that would occur in any other is reported as the driver's own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.progress import NoProgress, ProgressSink
from finetune_trainer.core.spark_session import SparkRequest, spark_session
from finetune_trainer.core.stage_console import quiet_libraries, settle_console
from finetune_trainer.core.unused_libraries import leave_out_unused
from finetune_trainer.predict.predict import predict_as
from finetune_trainer.predict.prediction_workers import OtherFailedError, publish_failure, would_help
from finetune_trainer.predict.shard_claims import Worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

TRIES = 4
"""Times that Spark starts one task (spark.task.maxFailures), which is 1 in local mode unless set."""
LOOK_SECONDS = 5.0
"""Shortest time between two queries of Spark's task status."""
END_SECONDS = 30.0
"""Time that cancelled tasks may take to end."""
REPLACED = "replaced_pods"
"""Progress figure: lost executors whose workers Spark restarted."""


def predict_by_spark(job: TrainerJob, paths: JobPaths, progress: ProgressSink) -> dict[str, Any]:
    """Predict with `predict.workers` workers; result and errors as of `predict`. StageError CONFIG `SparkMissing`
    without pyspark or Java, COLLECTIVE `ExecutorsLost` if Spark gives up on a task.
    """
    import torch

    assert job.predict is not None
    worker = Worker(0, job.predict.workers, uuid.uuid4().hex)
    executors = worker.count - 1
    request = SparkRequest(
        "finetune-predict",
        "predict.engine",
        "leave predict.engine out",
        f"local[{max(1, executors)},{TRIES}]",
        {"spark.task.maxFailures": str(TRIES)},
    )
    paths.root.mkdir(parents=True, exist_ok=True)
    with spark_session(request) as session, Tasks(session, job, paths, worker, torch.get_num_threads()) as tasks:
        try:
            return predict_as(worker, job, paths, _DriverProgress(progress, tasks), tasks.check)
        except OtherFailedError as error:
            failure = error.failure
            raise StageError(failure.failure_class, failure.reason, failure.message, failure.hint) from error


class Tasks:
    """Context manager that runs all workers but the first as Spark tasks."""

    def __init__(self, session: SparkSession, job: TrainerJob, paths: JobPaths, worker: Worker, threads: int) -> None:
        self._context = session.sparkContext
        self._work = Work(job.to_json(), str(paths.root.absolute()), worker.count, worker.attempt, threads)
        self._workers = range(1, worker.count)
        self._group = f"finetune-predict-{worker.attempt}"
        self._error: Exception | None = None
        self._replaced = 0
        self._thread = threading.Thread(target=self._run, name="tasks", daemon=True)

    def __enter__(self) -> Tasks:
        if self._workers:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers:
            with suppress(Exception):  # Spark itself may have ended, which another error reports
                self._context.cancelJobGroup(self._group)
            self._thread.join(END_SECONDS)

    def check(self) -> None:
        """Raise StageError COLLECTIVE `ExecutorsLost` if Spark has given up."""
        if self._error is not None:
            raise StageError(
                FailureClass.COLLECTIVE,
                "ExecutorsLost",
                f"Spark gave up on the {len(self._workers)} executors that predict beside the driver: "
                f"{_reason_of(self._error)}",
                "Check the executors' pods and the log above; finished parts are kept.",
            ) from self._error

    def replaced(self) -> int:
        """Return the number of lost tasks, as far as Spark reports it."""
        with suppress(Exception):
            tracker = self._context.statusTracker()
            jobs = [tracker.getJobInfo(job_id) for job_id in tracker.getJobIdsForGroup(self._group)]
            stages = [tracker.getStageInfo(stage_id) for job in jobs if job is not None for stage_id in job.stageIds]
            self._replaced = max(self._replaced, sum(stage.numFailedTasks for stage in stages if stage is not None))
        return self._replaced

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, "finetune predict", interruptOnCancel=True)
            self._context.parallelize(self._workers, len(self._workers)).map(self._work).collect()
        except Exception as error:
            self._error = error


def _reason_of(error: Exception) -> str:
    """Return the task's own error in Spark's message; else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = (line.rpartition("StageError: ")[2] for line in lines if "StageError: " in line)
    return next(errors, lines[0] if lines else type(error).__name__)


class _DriverProgress:
    """Progress that also reports replaced executors."""

    def __init__(self, progress: ProgressSink, tasks: Tasks, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._tasks = tasks
        self._clock = clock
        self._next_look = clock() + LOOK_SECONDS
        self._replaced = 0

    def update(self, step: int, total: int, **values: float) -> None:
        """Report the progress of worker 0, which counts the rows of all."""
        if self._clock() >= self._next_look:
            self._look()
        figures = {REPLACED: float(self._replaced)} if self._replaced else {}
        self._progress.update(step, total, **values, **figures)

    def close(self) -> None:
        """Close the progress."""
        self._progress.close()

    def _look(self) -> None:
        self._next_look = self._clock() + LOOK_SECONDS
        count = self._tasks.replaced()
        if count > self._replaced:
            log.warning(
                "Workers of executors lost so far: %d. Spark starts them again; finished parts are kept.", count
            )
        self._replaced = count


class Work:
    """Function of a task: runs one worker, by its number, and returns the number of rows that it answered.

    Raises errors that another executor may not meet, so that Spark restarts the task. Others are written to the job's
    folder, where all workers read them and end.
    """

    def __init__(self, job: str, root: str, count: int, attempt: str, threads: int) -> None:
        self._job = job
        self._root = root
        self._count = count
        self._attempt = attempt
        self._threads = threads

    def __call__(self, index: int) -> int:
        job, paths = TrainerJob.model_validate_json(self._job), JobPaths(Path(self._root))
        if not paths.root.is_dir():
            raise StageError(
                FailureClass.CONFIG,
                "FolderNotShared",
                f"An executor does not see the job's folder {paths.root}.",
                "Mount it in the executors at the same path as in the driver.",
            )
        self._settle(index, job)
        worker = Worker(index, self._count, self._attempt)
        try:
            return int(predict_as(worker, job, paths, NoProgress())["rows"])
        except OtherFailedError:
            return 0
        except Exception as error:
            failure = classify(error)
            if would_help(failure):
                raise
            log.exception("Worker %d has failed.", index)
            publish_failure(worker, paths, failure)
            return 0

    def _settle(self, index: int, job: TrainerJob) -> None:
        """Set up the process like a stage's own; Spark sets OMP_NUM_THREADS to the cores of its task."""
        settle_console(index)
        quiet_libraries()
        leave_out_unused(job)
        os.environ["RAYON_NUM_THREADS"] = str(self._threads)  # for the tokenizer
        import torch

        torch.set_num_threads(self._threads)
