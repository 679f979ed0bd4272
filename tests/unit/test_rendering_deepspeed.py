"""The DeepSpeed configuration: whole values, the user's keys, and the libraries' own checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, HardwareFacts, SplitFacts
from finetune_operator.api.deepspeed_overrides import OWNED_KEYS, override_problems
from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.api.types import FineTuneJob
from finetune_operator.planning.architectures import model_facts
from finetune_operator.planning.assumed_facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.plan_types import Facts, JobPlan
from finetune_operator.rendering.contract import DEEPSPEED_FILE, JOB_FILE, files, fingerprint
from finetune_operator.rendering.deepspeed_config import deepspeed_config, uses_offload_folder
from finetune_operator.rendering.merging import merge
from suite_plugins.patience import patient

MODEL = model_facts(
    {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    }
)
DATA = DataFacts(fingerprint="f", splits={"train": SplitFacts(rows=640, tokens=640 * 20, longest=32)}, max_length=64)
CPU = HardwareFacts(cpu_cores=2, memory_bytes=16 << 30)
GPUS = parse_hardware("gpu=H100,gpus=2")


def planned(parallelism: dict[str, Any], hardware: HardwareFacts = CPU, **training: Any) -> JobPlan:
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "reviews"},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "hf://org/model"},
            "dataset": {"uri": "hf://org/data"},
            "training": {"globalBatchSize": 64, "maxGradNorm": 0.5, **training},
            "parallelism": parallelism,
            "resources": {"gpusPerNode": hardware.gpus_per_node},
        },
    }
    job = FineTuneJob.model_validate_json(json.dumps(document))
    return plan(job, Facts(model=MODEL, data=DATA, hardware=hardware), CLUSTER_SETTINGS)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_only_deepspeed_has_a_configuration(strategy):
    parallelism = {"strategy": strategy}
    assert deepspeed_config(planned(parallelism)) is None
    assert list(files(planned(parallelism))) == ["job.json", "estimate.json"]


def test_zero_2_on_cpu():
    assert deepspeed_config(planned({"zeroStage": 2})) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": MODEL.parameters,
            "allgather_bucket_size": MODEL.parameters,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }


def test_zero_3_with_offload_on_gpus():
    result = deepspeed_config(
        planned({"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "cpu"}}, GPUS, microBatchSize=8)
    )
    assert result == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": MODEL.parameters,
            "allgather_bucket_size": MODEL.parameters,
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": MODEL.parameters,
            "stage3_param_persistence_threshold": 320,
            "stage3_max_live_parameters": 2 * MODEL.embedding_parameters,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }


def test_offloaded_files_use_a_pod_volume_or_the_trainers_folder():
    parallelism = {"strategy": "deepspeed", "offload": {"optimizer": "nvme", "parameters": "nvme"}}
    in_cluster = deepspeed_config(planned(parallelism, GPUS))
    assert in_cluster is not None
    zero = in_cluster["zero_optimization"]
    assert isinstance(zero, dict)
    assert zero["offload_optimizer"] == {
        "device": "nvme",
        "pin_memory": True,
        "nvme_path": "/offload",
        "buffer_count": 4,
    }
    assert zero["offload_param"] == {
        "device": "nvme",
        "pin_memory": True,
        "nvme_path": "/offload",
        "buffer_count": 5,
        "buffer_size": MODEL.embedding_parameters // 2,
        "max_in_cpu": 0,
    }
    assert zero["sub_group_size"] == 50_000_000
    assert uses_offload_folder(in_cluster)
    here = planned(parallelism, GPUS).model_copy(update={"launcher": "local"})
    config = deepspeed_config(here)
    assert config is not None
    assert not uses_offload_folder(config)
    assert "nvme_path" not in str(config)
    elsewhere = {"zero_optimization": {name: {"nvme_path": "/mine"} for name in ("offload_optimizer", "offload_param")}}
    config = deepspeed_config(planned({**parallelism, "deepspeedConfig": elsewhere}, GPUS))
    assert config is not None
    assert not uses_offload_folder(config)


def test_zero_0_has_nothing_to_tune():
    config = deepspeed_config(planned({"zeroStage": 0}))
    assert config is not None
    assert config["zero_optimization"] == {"stage": 0}


def test_the_users_keys_are_merged_last_and_deep():
    overrides = {
        "zero_optimization": {"reduce_bucket_size": 1000, "round_robin_gradients": True},
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},
    }
    config = deepspeed_config(planned({"strategy": "deepspeed", "zeroStage": 2, "deepspeedConfig": overrides}))
    assert config is not None
    assert config["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": MODEL.parameters,
        "round_robin_gradients": True,
    }
    assert (config["wall_clock_breakdown"], config["flops_profiler"]) == (True, {"enabled": True})


def test_merging_changes_neither_side():
    base, added = {"a": {"b": 1}}, {"a": {"c": 2}, "d": {"e": 3}}
    assert merge(base, added) == {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    assert (base, added) == ({"a": {"b": 1}}, {"a": {"c": 2}, "d": {"e": 3}})


FIELD = "spec.parallelism.deepspeedConfig"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        pytest.param(
            {"zero_optimisation": {}},
            (
                f"{FIELD}.zero_optimisation",
                "is not a DeepSpeed key, so that DeepSpeed would ignore it",
                "did you mean zero_optimization?",
            ),
            id="a typing error",
        ),
        pytest.param(
            {"zero_optimization": {"reduce_bucket": 5}},
            (
                f"{FIELD}.zero_optimization.reduce_bucket",
                "is not a DeepSpeed key, so that DeepSpeed would ignore it",
                "did you mean reduce_bucket_size?",
            ),
            id="a typing error below",
        ),
        pytest.param(
            {"train_batch_size": 128},
            (
                f"{FIELD}.train_batch_size",
                "is set by spec.training.globalBatchSize",
                "set spec.training.globalBatchSize to 128, and leave this out",
            ),
            id="a number that the spec has",
        ),
        pytest.param(
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            (
                f"{FIELD}.zero_optimization.offload_optimizer.device",
                "is set by spec.parallelism.offload.optimizer",
                "set spec.parallelism.offload.optimizer to cpu, and leave this out",
            ),
            id="a choice that the spec has, two levels down",
        ),
        pytest.param(
            {"zero_optimization": 2},
            (f"{FIELD}.zero_optimization", "must be an object for DeepSpeed", "write its keys below it"),
            id="a number where an object belongs",
        ),
    ],
)
def test_a_key_that_cannot_stand_is_refused(overrides, problem):
    assert [(each.path, each.rule, each.hint) for each in override_problems(overrides)] == [problem]


def test_every_key_that_a_plan_writes_and_another_field_decides_is_owned():
    written = deepspeed_config(
        planned({"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "cpu"}}, GPUS)
    )
    assert written is not None
    tunable = {"zero_allow_untested_optimizer", "wall_clock_breakdown", "zero_optimization"}
    for key in written.keys() - tunable:
        value: Any = {"enabled": True} if key in ("bf16", "fp16") else 1
        assert [problem.reason for problem in override_problems({key: value})] == ["Forbidden"], key
    assert {path[0] for path in OWNED_KEYS} >= written.keys() - tunable


# ------------------------------------------------------------------------------------------------- the libraries' view

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


# ------------------------------------------------------------------------------------------------------------ contract


def test_equal_plans_give_equal_bytes_and_others_another_fingerprint():
    one, again, other = planned({"zeroStage": 2}), planned({"zeroStage": 2}), planned({"zeroStage": 1})
    assert files(one) == files(again)
    assert fingerprint(files(one)) == fingerprint(files(again)) != fingerprint(files(other))
    assert all(text.endswith("}\n") for text in files(one).values())


def test_trainer_reads_the_planned_job_back():
    from finetune_contract.trainer_job import TrainerJob

    result = planned({"zeroStage": 2}, arguments={"note": "ü {{ x }} $(Y)\n"})
    assert TrainerJob.model_validate_json(files(result)["job.json"]) == result.trainer
