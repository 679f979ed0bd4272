"""Spark sessions of stages: whose master they have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer_support.spark import run_with_spark, skip_without_spark, submit

SESSION = """
from finetune_trainer.spark_session import SparkRequest, spark_session

with spark_session(SparkRequest("own", "field", "hint", "local[1,4]", {"spark.task.maxFailures": "4"})) as session:
    print(f"master {session.sparkContext.master}")
"""
AFTER_ANOTHER = f"""
from pyspark.sql import SparkSession

here = {{"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}}
SparkSession.builder.master("local[2]").config(map=here).getOrCreate().stop()
{SESSION}
"""

pytestmark = pytest.mark.slow


def master_of(run: subprocess.CompletedProcess[str]) -> str:
    """Return the master that the program has printed."""
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("master "))
    return line.removeprefix("master ")


def test_session_keeps_the_master_of_spark_submit(tmp_path: Path) -> None:
    skip_without_spark()
    program = tmp_path / "stage.py"
    program.write_text(SESSION, encoding="utf-8")
    assert master_of(submit("local[3]", program)) == "local[3]"


def test_session_takes_no_master_from_one_that_has_ended() -> None:
    skip_without_spark()
    assert master_of(run_with_spark(sys.executable, "-c", AFTER_ANOTHER)) == "local[1,4]"
