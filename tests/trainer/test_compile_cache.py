"""Kernels of torch.compile in a folder of each type of processor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from finetune_trainer.devices.compile_cache import separate_compile_cache
from suite_plugins.patience import patient

PROGRAM = """
import json, sys, torch
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification
from finetune_trainer.predict.backends.torch_backends import COMPILE

torch.manual_seed(1)
config = BertConfig(vocab_size=50, hidden_size=40, num_hidden_layers=1, num_attention_heads=2, intermediate_size=72)
model = BertForSequenceClassification(config).eval()
batches = [{"input_ids": torch.arange(rows * 9).reshape(rows, 9) % 50} for rows in (5,)]
compiled = COMPILE.prepare(model, batches, Path())
with torch.inference_mode():
    pairs = [(model(**batch).logits, compiled(**batch).logits) for batch in batches]
print(json.dumps(max(float((one - other).abs().max()) for one, other in pairs)))
"""
"""Program that prints the largest difference between a compiled model and the model."""


def test_each_type_of_processor_has_a_folder(tmp_path: Path) -> None:
    folders = []
    for flags in ("fpu avx2", "fpu avx2 avx512f"):
        processor = tmp_path / "cpuinfo"
        processor.write_text(f"model name : x\nflags : {flags}\n", encoding="utf-8")
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shared")}
        folders.append(separate_compile_cache(environment, processor))
        # A process that this one starts inherits the variable.
        assert separate_compile_cache(environment, processor) == folders[-1]
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(folders[-1])
    assert len(set(folders)) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "shared"}
    assert separate_compile_cache({}, tmp_path / "none").parent != tmp_path / "shared"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_kernels_for_other_instructions_are_not_reused(tmp_path: Path) -> None:
    # A process without AVX512 compiles first, then one with all that the processor has.
    less = "avx2" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "default"
    for capability in (less, ""):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        environment |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=patient(300)
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout.splitlines()[-1]) < 1e-5
    assert len(list(tmp_path.iterdir())) == 2
