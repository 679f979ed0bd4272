"""A strategy other than the requested one is an error: each check gets a case that it must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Strategy, World
from finetune_trainer.core.failures import StageError


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process a group of one."""
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


def fsdp(precision: str = "fp32", device: str = "cpu", processes: int = 1, nodes: int = 1, **settings: Any) -> Any:
    from finetune_trainer.strategies.fsdp import FullySharded

    world = World.model_validate(
        {"nodes": nodes, "processes_per_node": processes, "device": device, "threads_per_process": 1}
    )
    return FullySharded(Strategy(name="fsdp", **settings), precision, world)  # type: ignore[arg-type]


def tiny(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def placed(model: Any, wrapped: Any, world_size: int = 1) -> Any:
    import torch

    from finetune_trainer.strategies.strategy_protocol import Placed

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


def test_fsdp_refuses_unsharded_parameters_wrong_meshes_and_whole_blocks(group, tiny_model: Path):
    import torch
    from torch.distributed.fsdp import fully_shard

    strategy = fsdp()
    sharded = strategy.prepare_model(tiny(tiny_model))
    strategy.assert_in_effect(placed(sharded, sharded))
    assert refusal(fsdp(processes=2), placed(sharded, sharded)) == "WrongMesh"
    assert refusal(fsdp(device="cuda"), placed(sharded, sharded)) == "WrongMesh"

    plain = tiny(tiny_model)
    # accelerate's result of FSDP on CPU.
    assert refusal(strategy, placed(plain, torch.nn.parallel.DistributedDataParallel(plain))) == "NotFullySharded"

    partly = tiny(tiny_model)
    fully_shard(partly, ignored_params={partly.classifier.weight})
    assert refusal(strategy, placed(partly, partly)) == "ParameterNotSharded"

    coarse = tiny(tiny_model)
    fully_shard(coarse)
    assert refusal(strategy, placed(coarse, coarse)) == "BlocksNotSharded"

    uneven = tiny(tiny_model)
    fully_shard(uneven.bert.encoder.layer[0])
    fully_shard(uneven)
    assert refusal(strategy, placed(uneven, uneven)) == "BlocksNotSharded"


FULL: dict[str, Any] = {}
GRAD_OP: dict[str, Any] = {"fsdp_sharding": "grad-op"}
HYBRID: dict[str, Any] = {"fsdp_sharding": "hybrid"}
OFFLOADED: dict[str, Any] = {"offload_parameters": "cpu", "offload_optimizer": "cpu"}


@pytest.mark.parametrize(
    ("settings", "found", "reason"),
    [
        pytest.param(GRAD_OP, FULL, "WrongSharding", id="gathered again for the backward pass"),
        pytest.param(FULL, GRAD_OP, "WrongSharding", id="parameters that stay gathered"),
        pytest.param(HYBRID, FULL, "WrongMesh", id="no copies"),
        pytest.param(FULL, HYBRID, "WrongMesh", id="copies"),
        pytest.param(OFFLOADED, FULL, "WrongOffload", id="state on the device"),
        pytest.param(FULL, OFFLOADED, "WrongOffload", id="state in host memory"),
    ],
)
def test_fsdp_refuses_another_sharding_and_offload(group, tiny_model: Path, settings, found, reason):
    model = fsdp(**found).prepare_model(tiny(tiny_model))
    fsdp(**found).assert_in_effect(placed(model, model))
    assert refusal(fsdp(**settings), placed(model, model)) == reason


def test_fsdp_computes_in_bf16_and_keeps_weights_and_gradients_in_fp32(group, tiny_model: Path):
    import torch

    model = fsdp("bf16").prepare_model(tiny(tiny_model))
    seen: list[torch.dtype] = []
    model.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(module.weight.dtype))
    answer = model(input_ids=torch.tensor([[2, 7, 3]]), labels=torch.tensor([1]))
    answer.loss.backward()
    assert seen == [torch.bfloat16]
    assert answer.logits.dtype == torch.float32
    assert {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None} == {
        (torch.float32, torch.float32)
    }


def test_deepspeed_refuses_deviating_stage_offload_precision_or_engine(group, tiny_model: Path):
    import deepspeed
    import torch

    from finetune_trainer.strategies.deepspeed import DeepSpeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    requested = Strategy(name="deepspeed", zero_stage=1)
    scratch = Path("unused")
    model = DeepSpeed(requested, "fp32", 1, config, scratch).prepare_model(tiny(tiny_model))
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))
    found = placed(model, engine)
    DeepSpeed(requested, "fp32", 1, config, scratch).assert_in_effect(found)

    quantized = {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}}
    assert refusal(DeepSpeed(requested, "fp32", 1, {**config, **quantized}, scratch), found) == "WrongQuantization"
    moved = {"offload_parameters": "cpu"}
    assert refusal(DeepSpeed(requested.model_copy(update=moved), "fp32", 1, config, scratch), found) == "WrongOffload"
    refusals = {
        "WrongZeroStage": DeepSpeed(requested.model_copy(update={"zero_stage": 2}), "fp32", 1, config, scratch),
        "WrongOffload": DeepSpeed(
            requested.model_copy(update={"offload_optimizer": "cpu"}), "fp32", 1, config, scratch
        ),
        "WrongPrecision": DeepSpeed(requested, "bf16", 1, config, scratch),
        "WrongGroupSize": DeepSpeed(requested, "fp32", 2, config, scratch),
    }
    assert {reason: refusal(strategy, found) for reason, strategy in refusals.items()} == {
        name: name for name in refusals
    }
    assert refusal(DeepSpeed(requested, "fp32", 1, config, scratch), placed(model, model)) == "NotDeepSpeed"

    # An engine that reports one stage and has the optimizer of another; and one that reports 3 with whole parameters.
    engine.optimizer, kept = engine.optimizer.optimizer, engine.optimizer
    assert refusal(DeepSpeed(requested, "fp32", 1, config, scratch), found) == "WrongOptimizer"
    engine.optimizer = kept


def test_an_undecided_value_in_the_deepspeed_file_is_refused():
    from finetune_trainer.strategies.deepspeed import refuse_auto

    with pytest.raises(StageError, match=r"deepspeed.json.zero_optimization.reduce_bucket_size is 'auto'"):
        refuse_auto({"zero_optimization": {"reduce_bucket_size": "auto"}})


def test_offloaded_state_goes_to_the_folder_of_the_plan_or_of_the_job(tmp_path: Path):
    from finetune_trainer.strategies.deepspeed import DeepSpeed

    requested = Strategy(name="deepspeed", zero_stage=3, offload_optimizer="nvme", offload_parameters="nvme")
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/offload"},
        "offload_param": {"device": "nvme"},
    }
    made = DeepSpeed(requested, "fp32", 1, {"zero_optimization": zero}, tmp_path / "offload").arguments()["deepspeed"]
    sections = made["zero_optimization"]
    assert sections["offload_optimizer"]["nvme_path"] == "/offload"
    assert sections["offload_param"]["nvme_path"] == str(tmp_path / "offload")
    assert "nvme_path" not in zero["offload_param"]


@pytest.mark.parametrize(
    ("builder", "settings", "zero", "message"),
    [
        pytest.param(
            "AsyncIOBuilder",
            {"offload_optimizer": "nvme"},
            {"offload_optimizer": {"device": "nvme"}},
            "parallelism.offload with nvme needs DeepSpeed's AsyncIO operator, which is not available here: no libaio.",
            id="state in files",
        ),
        pytest.param(
            "QuantizerBuilder",
            {},
            {"zero_quantized_weights": True},
            "zero_optimization.zero_quantized_weights needs DeepSpeed's Quantizer operator",
            id="quantized communication",
        ),
    ],
)
def test_operator_missing_in_the_image_is_reported_before_the_set_up(
    monkeypatch, tiny_model: Path, builder, settings, zero, message
):
    from deepspeed.ops import op_builder

    from finetune_trainer.strategies.deepspeed import DeepSpeed

    def broken(self: object, verbose: bool = False) -> None:
        raise RuntimeError("no libaio\nand more")

    monkeypatch.setattr(getattr(op_builder, builder), "load", broken)
    requested, config = (
        Strategy(name="deepspeed", zero_stage=3, **settings),
        {"zero_optimization": {"stage": 3, **zero}},
    )
    with pytest.raises(StageError) as caught:
        DeepSpeed(requested, "fp32", 1, config, Path("unused")).prepare_model(tiny(tiny_model))
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "OperatorMissing")
    assert message in caught.value.message


def test_sequence_parallelism_refuses_other_attention_and_meshes(group, bench, monkeypatch):
    import torch
    from transformers import AttentionInterface

    from finetune_trainer.strategies.parallel.sequence import ATTENTION, SequenceParallel, ShardedAttention
    from finetune_trainer.strategies.single import Single
    from process_support.sliced import decoder

    training = bench.job.training
    strategy = SequenceParallel(Single("fp32"), training)
    model = decoder("llama")
    found = placed(model, model)
    assert refusal(strategy, found) == "NotSequenceParallel"

    strategy.attention = ShardedAttention(torch.distributed.group.WORLD)
    strategy.attention.take_over(model)
    assert refusal(strategy, found) == "NotSliced"  # it has not seen any tokens yet
    ids = torch.tensor([[3, 5, 8]])
    model(input_ids=ids, position_ids=torch.arange(3)[None])
    strategy.assert_in_effect(found)
    strategy.attention.whole_tokens = 6
    assert refusal(strategy, found) == "NotSliced"
    strategy.attention.whole_tokens = 3

    two = training.model_copy(update={"batch": training.batch.model_copy(update={"data_parallel": 2})})
    assert refusal(SequenceParallel(Single("fp32"), two), found) == "WrongMesh"
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, print)
    assert refusal(strategy, found) == "NotSequenceParallel"
