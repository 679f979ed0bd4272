"""The session of a stage that uses Spark: whose master it has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_support.spark import skip_without_spark

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


def master_of(command: list[str]) -> str:
    """Return the master that the program of `command` prints."""
    import pyspark

    given = {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PYSPARK_PYTHON": sys.executable}
    run = subprocess.run(command, env={**os.environ, **given}, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("master "))
    return line.removeprefix("master ")


@pytest.mark.slow
def test_session_keeps_the_master_of_spark_submit(tmp_path: Path) -> None:
    skip_without_spark()
    program = tmp_path / "stage.py"
    program.write_text(SESSION, encoding="utf-8")
    submit = Path(sys.executable).with_name("spark-submit")
    here = ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"]
    assert master_of([str(submit), "--master", "local[3]", *here, str(program)]) == "local[3]"


@pytest.mark.slow
def test_session_takes_no_master_from_one_that_has_ended() -> None:
    skip_without_spark()
    assert master_of([sys.executable, "-c", AFTER_ANOTHER]) == "local[1,4]"
