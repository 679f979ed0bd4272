"""The planned DeepSpeed configuration beside transformers' own arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from finetune_contract.facts import HardwareFacts
from finetune_operator.jobs.render.contract import DEEPSPEED_FILE, JOB_FILE, files
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from planning_support.deepspeed_plans import planned
from suite_plugins.patience import patient

TRAINING_ARGUMENTS = """
import json, sys
from transformers import TrainingArguments
answers = []
for job, config in json.load(sys.stdin):
    training = job["training"]
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=training["batch"]["microBatchSize"],
        gradient_accumulation_steps=training["batch"]["gradientAccumulation"],
        learning_rate=training["learningRate"],
        weight_decay=training["weightDecay"],
        max_grad_norm=training["maxGradNorm"],
        max_steps=training["maxSteps"],
        bf16=training["precision"] == "bf16",
        fp16=training["precision"] == "fp16",
    )
    in_force = arguments.hf_deepspeed_config
    changed = sorted(key for key in config if in_force.config.get(key) != config[key])
    answers.append({"mismatches": in_force.mismatches, "changed": changed})
print(json.dumps(answers))
"""


def test_transformers_finds_no_difference_to_its_own_arguments(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    one_process = HardwareFacts(cpu_cores=1, memory_bytes=16 << 30)
    plans = [
        planned({"zeroStage": 2}, one_process, microBatchSize=8),
        planned(
            {"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "cpu"}},
            one_process,
            precision="bf16",
            weightDecay=0.01,
        ),
        planned(
            {"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "nvme", "parameters": "cpu"}},
            one_process,
        ),
        planned({"strategy": "deepspeed", "zeroStage": 2}, parse_hardware("gpu=T4,gpus=1"), precision="fp16"),
    ]
    questions = [[json.loads(files(each)[name]) for name in (JOB_FILE, DEEPSPEED_FILE)] for each in plans]
    # In a process of its own: a DeepSpeed configuration is global state that would reach other tests.
    ran = subprocess.run(
        [sys.executable, "-c", TRAINING_ARGUMENTS],
        input=json.dumps(questions),
        cwd=tmp_path,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.strip().splitlines()[-1]) == [{"mismatches": [], "changed": []}] * 4
