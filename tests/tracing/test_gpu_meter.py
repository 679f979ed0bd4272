"""The meter of a prediction's backends, dry: torch's CUDA functions are called, on a runtime without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracing_support import stub_cuda

PROGRAM = """
import ctypes, json
from finetune_trainer.predict.backends.device_meter import meter_of, timed
waits = ctypes.CDLL(None).stub_cuda_waits
waits.restype = ctypes.c_ulong
meter = meter_of("cuda")
meter.begin()
before = waits()
result, seconds = timed(meter, lambda: "answers")
found = {"gpu": meter.gpu, "waits": waits() - before, "taken": meter.taken(), "result": result, "timed": seconds >= 0}
meter.release()
print(json.dumps(found))
"""


def test_meter_of_a_gpu_waits_before_and_after_the_work(tmp_path: Path) -> None:
    if (reason := stub_cuda.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "stub"
    folder.mkdir()
    stub_cuda.build(folder)
    settled = {**os.environ, **stub_cuda.environment(folder)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=settled, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "gpu": "NVIDIA H100 80GB HBM3",
        "waits": 2,
        "taken": 0,
        "result": "answers",
        "timed": True,
    }
