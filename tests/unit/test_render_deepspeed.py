"""The DeepSpeed configuration: whole values, the user's keys, and the libraries' own checks."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.jobs.render.contract import files, fingerprint
from finetune_operator.jobs.render.deepspeed_config import deepspeed_config, uses_offload_folder
from finetune_operator.jobs.render.merging import merge
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.spec.checks.deepspeed_overrides import OWNED_KEYS, override_problems
from planning_support.deepspeed_plans import MODEL, planned

GPUS = parse_hardware("gpu=H100,gpus=2")


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
                "set spec.training.globalBatchSize to 128 (instead)",
            ),
            id="a number that the spec has",
        ),
        pytest.param(
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            (
                f"{FIELD}.zero_optimization.offload_optimizer.device",
                "is set by spec.parallelism.offload.optimizer",
                "set spec.parallelism.offload.optimizer to cpu (instead)",
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
