"""A strategy that is not what was asked for is an error: each check is handed what it must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.job import Strategy
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    import os

    import torch

    earlier = {name: os.environ.get(name) for name in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    for name, value in earlier.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def tiny(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def placed(model: Any, wrapped: Any, world_size: int = 1) -> Any:
    import torch

    from finetune_trainer.strategies.base import Placed

    return Placed(model, wrapped, torch.optim.SGD(model.parameters()), world_size, torch.device("cpu"))


def refusal(strategy: Any, found: Any) -> str:
    with pytest.raises(StageError) as error:
        strategy.assert_in_effect(found)
    assert error.value.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT
    return error.value.reason


def test_single_refuses_a_wrapper_and_company(group, tiny_model: Path):
    import torch

    from finetune_trainer.strategies.single import Single

    model = tiny(tiny_model)
    single = Single("fp32")
    single.assert_in_effect(placed(model, model))
    assert refusal(single, placed(model, torch.nn.parallel.DistributedDataParallel(model))) == "ModelIsWrapped"
    assert refusal(single, placed(model, model, world_size=2)) == "WorldNotSingle"


def test_ddp_refuses_a_bare_model_and_a_group_of_the_wrong_size(group, tiny_model: Path):
    import torch

    from finetune_trainer.strategies.ddp import DataParallel

    model = tiny(tiny_model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    DataParallel("fp32", 1).assert_in_effect(placed(model, wrapped))
    assert refusal(DataParallel("fp32", 1), placed(model, model)) == "NotDistributedDataParallel"
    assert refusal(DataParallel("fp32", 2), placed(model, wrapped)) == "WrongGroupSize"


def test_fsdp_refuses_ddp_whole_parameters_the_wrong_mesh_and_unsharded_blocks(group, tiny_model: Path):
    import torch
    from torch.distributed.fsdp import fully_shard

    from finetune_trainer.strategies.fsdp import FullySharded

    asked = FullySharded("fp32", "cpu", 1)
    sharded = asked.prepare_model(tiny(tiny_model))
    asked.assert_in_effect(placed(sharded, sharded))
    assert refusal(FullySharded("fp32", "cpu", 2), placed(sharded, sharded)) == "WrongMesh"
    assert refusal(FullySharded("fp32", "cuda", 1), placed(sharded, sharded)) == "WrongMesh"

    plain = tiny(tiny_model)
    # What accelerate makes of FSDP on CPU.
    assert refusal(asked, placed(plain, torch.nn.parallel.DistributedDataParallel(plain))) == "NotFullySharded"

    partly = tiny(tiny_model)
    fully_shard(partly, ignored_params={partly.classifier.weight})
    assert refusal(asked, placed(partly, partly)) == "ParameterNotSharded"

    coarse = tiny(tiny_model)
    fully_shard(coarse)
    assert refusal(asked, placed(coarse, coarse)) == "BlocksNotSharded"

    uneven = tiny(tiny_model)
    fully_shard(uneven.bert.encoder.layer[0])
    fully_shard(uneven)
    assert refusal(asked, placed(uneven, uneven)) == "BlocksNotSharded"


def test_fsdp_computes_in_bf16_and_keeps_weights_and_gradients_in_fp32(group, tiny_model: Path):
    import torch

    from finetune_trainer.strategies.fsdp import FullySharded

    model = FullySharded("bf16", "cpu", 1).prepare_model(tiny(tiny_model))
    seen: list[torch.dtype] = []
    model.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(module.weight.dtype))
    answer = model(input_ids=torch.tensor([[2, 7, 3]]), labels=torch.tensor([1]))
    answer.loss.backward()
    assert seen == [torch.bfloat16]
    assert answer.logits.dtype == torch.float32
    assert {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None} == {
        (torch.float32, torch.float32)
    }


def test_deepspeed_refuses_another_stage_offload_precision_world_and_no_engine(group, tiny_model: Path):
    import deepspeed
    import torch

    from finetune_trainer.strategies.deepspeed import DeepSpeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    asked = Strategy(name="deepspeed", zero_stage=1)
    model = DeepSpeed(asked, "fp32", 1, config).prepare_model(tiny(tiny_model))
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))
    found = placed(model, engine)
    DeepSpeed(asked, "fp32", 1, config).assert_in_effect(found)

    refusals = {
        "WrongZeroStage": DeepSpeed(asked.model_copy(update={"zero_stage": 2}), "fp32", 1, config),
        "WrongOffload": DeepSpeed(asked.model_copy(update={"offload_optimizer": "cpu"}), "fp32", 1, config),
        "WrongPrecision": DeepSpeed(asked, "bf16", 1, config),
        "WrongGroupSize": DeepSpeed(asked, "fp32", 2, config),
    }
    assert {reason: refusal(strategy, found) for reason, strategy in refusals.items()} == {
        name: name for name in refusals
    }
    assert refusal(DeepSpeed(asked, "fp32", 1, config), placed(model, model)) == "NotDeepSpeed"

    # An engine that says one stage and has the optimizer of another; and one that says 3 with whole parameters.
    engine.optimizer, kept = engine.optimizer.optimizer, engine.optimizer
    assert refusal(DeepSpeed(asked, "fp32", 1, config), found) == "WrongOptimizer"
    engine.optimizer = kept


def test_an_undecided_value_in_the_deepspeed_file_is_refused():
    from finetune_trainer.strategies.deepspeed import refuse_auto

    with pytest.raises(StageError, match=r"deepspeed.json.zero_optimization.reduce_bucket_size is 'auto'"):
        refuse_auto({"zero_optimization": {"reduce_bucket_size": "auto"}})
