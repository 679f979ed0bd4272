"""Spark on this machine, where it can run."""

from __future__ import annotations

import shutil

import pytest


def skip_without_spark() -> None:
    """Skip the test without pyspark or Java."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (finetune-trainer[spark])")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none")
