"""The Spark session of a stage: a running one, that of spark-submit, or one on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Variable that spark-submit sets in the Python program that it starts. A SparkConf says less: it is empty before the
first session, and then has the master of an earlier, ended session of this process.
"""


@dataclass(frozen=True)
class SparkRequest:
    """A stage's request for a Spark session."""

    name: str
    """Name of the application."""
    field: str
    """Field of the job that asks for Spark."""
    instead: str
    """Hint where there is no Spark."""
    master: str
    """Master where spark-submit has given none."""
    settings: Mapping[str, str]


@contextmanager
def spark_session(request: SparkRequest) -> Iterator[SparkSession]:
    """Yield the running session, of a notebook or a larger program, and leave it running; else a new one, which is
    stopped at the end. Raise StageError CONFIG `SparkMissing` without pyspark or Java.
    """
    try:
        from pyspark import SparkConf
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise _missing(request, "pyspark is not installed") from error
    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        settings = SparkConf()
        for name, value in _settings(request, os.environ).items():
            settings = settings.set(name, value)
        session = SparkSession.builder.config(conf=settings).getOrCreate()
    except PySparkRuntimeError as error:
        raise _missing(request, f"Spark does not start ({error}); it needs Java 17 or newer") from error
    try:
        yield session
    finally:
        session.stop()


def _settings(request: SparkRequest, environment: Mapping[str, str]) -> dict[str, str]:
    """Return our settings beside those of spark-submit, which has set a master: Spark runs there."""
    ours = {"spark.app.name": request.name, **request.settings}
    if _SUBMITTED in environment:
        return ours
    here = {
        "spark.master": request.master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    return {**ours, **here}


def _missing(request: SparkRequest, problem: str) -> StageError:
    return StageError(
        FailureClass.CONFIG,
        "SparkMissing",
        f"{request.field} is 'spark', and {problem}.",
        f"Install finetune-trainer[spark] and Java where the stage runs, or {request.instead}.",
    )
