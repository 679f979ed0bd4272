"""Recipes that plans name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import BERT, job, llama_1b


def planned(strategy: dict[str, Any], arguments: dict[str, Any] | None = None) -> JobPlan:
    spec = {
        "task": "text-generation",
        "preparation": {"maxLength": 4096, "packing": "never"},
        "training": {"globalBatchSize": 16, "arguments": arguments or {}},
        "resources": {"gpusPerNode": 8},
        "parallelism": strategy,
    }
    hardware = parse_hardware("gpu=H100,gpus=8,cpu=96,hostMemory=1Ti")
    return plan(
        job(spec),
        Facts(model=llama_1b("text-generation", max_position_embeddings=8192), hardware=hardware),
        CLUSTER_SETTINGS,
    )


@pytest.mark.parametrize(
    ("strategy", "arguments", "recipe"),
    [
        pytest.param({"strategy": "ddp"}, {}, ("chunked", False, "whole"), id="ddp"),
        pytest.param({"strategy": "deepspeed", "zeroStage": 3}, {}, ("chunked", False, "resharded"), id="ZeRO-3"),
        pytest.param({"strategy": "ddp"}, {"torch_compile": True}, ("chunked", True, "whole"), id="compiled"),
        pytest.param({"strategy": "fsdp"}, {}, ("chunked", False, "resharded"), id="fsdp"),
        pytest.param({"strategy": "fsdp", "sharding": "grad-op"}, {}, ("chunked", False, "kept"), id="fsdp, gathered"),
        pytest.param({"tensor": 8}, {}, None, id="tensor"),
    ],
)
def test_plan_names_the_recipe_of_its_training(
    strategy: dict[str, Any], arguments: dict[str, Any], recipe: tuple[Any, ...] | None
):
    made = planned(strategy, arguments).recipe
    assert made is not None
    if recipe is None:
        assert made.head == "split"
    else:
        assert (made.loss, made.compiled, made.head) == recipe


def test_json_of_a_plan_has_its_recipe():
    read = json.loads(planned({"strategy": "ddp"}).model_dump_json())
    assert read["recipe"] == {"loss": "chunked", "compiled": False, "head": "whole"}


def test_classification_has_no_chunks_of_logits():
    hardware = parse_hardware("gpu=T4,cpu=8,hostMemory=28Gi")
    made = plan(job(), Facts(model=BERT, hardware=hardware), CLUSTER_SETTINGS)
    assert made.recipe is not None
    assert made.recipe.text == "loss full, not compiled, head whole"
