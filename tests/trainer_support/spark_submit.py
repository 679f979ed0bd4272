"""Spark on this machine, where it can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def skip_without_spark() -> None:
    """Skip the test without pyspark or Java."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (finetune-trainer[spark])")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none")


def submit(master: str, program: Path, *arguments: str | Path) -> str:
    """Run a Python program by spark-submit; return Spark's log. Fail the test if the program fails."""
    import pyspark

    here = ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"]
    command = [Path(sys.executable).with_name("spark-submit"), "--master", master, *here, program, *arguments]
    given = {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PYSPARK_PYTHON": sys.executable}
    run = subprocess.run(list(map(str, command)), env={**os.environ, **given}, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    return run.stderr
