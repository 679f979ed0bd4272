"""DeepSpeed's import, without what no job uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from suite_plugins.patience import patient

LEFT_OUT = ("mlflow", "torch._inductor.compile_fx")
PROGRAM = """\
import json, sys
from finetune_trainer.strategies.deepspeed_import import import_deepspeed

import_deepspeed()
import deepspeed.ops
import deepspeed.runtime.engine
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

imported = [name for name in sys.argv[1:] if name in sys.modules]
import mlflow

print(json.dumps({
    "imported": imported,
    "tracker": hasattr(mlflow, "start_run"),
    "plain": type(original_muon.muon_update).__name__,
    "compiled": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
}))
"""


def test_deepspeed_is_imported_without_mlflow_and_compiler():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *LEFT_OUT],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"imported": [], "tracker": True, "plain": "function", "compiled": False}
