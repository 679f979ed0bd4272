"""The planner's figures for adapters compared with peft and torch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, LinearWidths, ModelFacts, SplitFacts
from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.jobs.render.deepspeed_config import deepspeed_config
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.memory.adapter_sizes import (
    Trained,
    adapted_layers,
    trained_parameters,
)
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.process_memory import estimate
from finetune_operator.plan.memory.state_memory import model_states
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.assumed_models import assumed_model
from finetune_operator.plan.plan import plan
from finetune_operator.plan.summary import Row, summarise
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from planning_support.workloads import adapter_of

GIB = 1 << 30


# ------------------------------------------------------------------------------------------------------------- counting

SHAPE = ModelFacts(
    model_type="bert",
    parameters=1_000_000,
    embedding_parameters=400_000,
    block_parameters=50_000,
    layers=10,
    hidden_size=100,
    intermediate_size=400,
    attention_heads=10,
    vocabulary_size=4000,
    parameter_bytes=4_000_000,
    head_parameters=10_000,
    linear_layers={
        "attention.self.query": LinearWidths(inputs=1000, outputs=1000, weights=100_000),
        "attention.output.dense": LinearWidths(inputs=1000, outputs=1000, weights=100_000),
        "output.dense": LinearWidths(inputs=4000, outputs=1000, weights=400_000),
    },
)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        pytest.param(None, Trained(added=0, trained=1_000_000), id="no adapter trains everything"),
        pytest.param(
            adapter_of(), Trained(added=46_000, trained=46_000), id="4 x (2,000 + 2,000 + 5,000) and the head"
        ),
        pytest.param(adapter_of("dora"), Trained(added=49_000, trained=49_000), id="DoRA has a magnitude an output"),
        pytest.param(
            adapter_of(target_modules=("query",)), Trained(added=18_000, trained=18_000), id="only the named layer"
        ),
    ],
)
def test_trained_parameters_follow_the_formula(adapter: Adapter | None, expected: Trained):
    assert trained_parameters(SHAPE, adapter) == expected


def test_every_weight_counts_as_trained_while_layers_are_unknown():
    unseen = SHAPE.model_copy(update={"linear_layers": {}, "head_parameters": 0})
    assert trained_parameters(unseen, adapter_of()) == Trained(added=0, trained=1_000_000)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        pytest.param(("dense",), {"attention.output.dense", "output.dense"}, id="an end"),
        pytest.param(("ense",), set(SHAPE.linear_layers), id="half a word is no end: an assumed model counts whole"),
        pytest.param(("bert.encoder.layer.3.output.dense",), {"output.dense"}, id="one block's layer counts as all"),
    ],
)
def test_targets_name_layers_by_their_ends(targets: tuple[str, ...], names: set[str]):
    assert set(adapted_layers(SHAPE, adapter_of(target_modules=targets))) == names


# --------------------------------------------------------------------------------------------------------------- memory


def work(model: ModelFacts, strategy: Strategy, adapter: Adapter | None, **changes: Any) -> Workload:
    values: dict[str, Any] = {
        "model": model,
        "task": "text-classification",
        "strategy": strategy,
        "precision": "fp32",
        "optimizer": "adamw",
        "world": World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1),
        "micro_batch": 1,
        "length": 128,
        "adapter": adapter,
    }
    return Workload(**(values | changes))


STRATEGIES = {
    "single": Strategy(name="single"),
    "ddp": Strategy(name="ddp"),
    "fsdp": Strategy(name="fsdp"),
    **{f"ZeRO-{stage}": Strategy.model_validate({"name": "deepspeed", "zero_stage": stage}) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize(
    ("strategy", "terms"),
    [
        ("single", (4 * 1_046_000, 4 * 46_000, 8 * 46_000, None)),
        ("ddp", (4 * 1_046_000, 4 * 46_000, 8 * 46_000, 4 * 46_000)),
        ("fsdp", (1_046_000, 46_000, 2 * 46_000, None)),
        # while there are activations; the optimizer's step has fp32 copies in their place
        ("ZeRO-1", (4 * 1_046_000, 4 * 46_000, 3 * 46_000, 8 * 46_000)),
        ("ZeRO-2", (4 * 1_046_000, 46_000, 3 * 46_000, 8 * 46_000)),
        ("ZeRO-3", (1_046_000, 46_000, 3 * 46_000, 8 * 46_000 + 4 * 1_000_000)),
    ],
)
def test_gradients_and_optimizer_state_cover_the_trained_weights(strategy: str, terms: tuple[int | None, ...]):
    found = {term.name: term.bytes for term in estimate(work(SHAPE, STRATEGIES[strategy], adapter_of()), GIB).terms}
    names = ("parameters", "gradients", "optimizer state", "communication buffers")
    assert tuple(found.get(name) for name in names) == terms


GPU = World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=1)
CPU = GPU.model_copy(update={"device": "cpu"})
PACKED = int((4 + 8 / 64 + 32 / (64 * 256)) / 8 * 600_000)


@pytest.mark.parametrize(
    ("world", "precision", "terms"),
    [
        # 600,000 weights in the linear layers of the blocks, 400 x 100 in the largest
        pytest.param(GPU, "fp32", (4 * 446_000 + PACKED, 4 * 46_000, 8 * 46_000, None, 4 * 40_000), id="on a GPU"),
        pytest.param(
            # autocast keeps no copy of the embeddings or of unfolded weights
            GPU,
            "bf16",
            (4 * 446_000 + PACKED, 4 * 46_000, 8 * 46_000, 0, 2 * 40_000),
            id="in bf16",
        ),
        pytest.param(
            CPU,
            "fp32",
            (4 * 1_046_000 + PACKED, 4 * 46_000, 8 * 46_000, None, 4 * 40_000),
            id="on a CPU, where the model is read and merged whole",
        ),
    ],
)
def test_weights_in_4_bits_are_counted_so_and_the_others_as_they_were(
    world: World, precision: Any, terms: tuple[int | None, ...]
):
    wanted = work(SHAPE, STRATEGIES["single"], adapter_of("qlora"), world=world, precision=precision)
    made = estimate(wanted, GIB)
    found = {term.name: term.bytes for term in made.terms}
    names = ("parameters", "gradients", "optimizer state", "autocast copies", "unfolded layer")
    assert tuple(found.get(name) for name in names) == terms
    lora = estimate(work(SHAPE, STRATEGIES["single"], adapter_of("lora"), world=world, precision=precision), GIB)
    assert (made.total_bytes < lora.total_bytes) == (world == GPU)
    if world == GPU:
        assert made.host_bytes == lora.host_bytes


def test_fsdp_divides_packed_weights_and_keeps_their_scales_whole():
    four = GPU.model_copy(update={"processes_per_node": 4})
    shape = SHAPE.model_copy(update={"block_parameters": 62_000})
    made = [
        estimate(work(shape, Strategy(name="fsdp"), adapter_of(method), world=four, precision="bf16"), GIB)
        for method in ("qlora", "lora")
    ]
    packed, lora = ({term.name: term.bytes for term in each.terms} for each in made)
    scales = PACKED - 600_000 // 2
    assert packed["parameters"] == 4 * 446_000 // 4 + 600_000 // 2 // 4 + scales
    # Half a byte of each in 4 bits instead of two.
    fewer = (lora["gathered blocks"] - packed["gathered blocks"]) / (600_000 // shape.layers)
    assert fewer / (2 - 0.5) in (1, 2), "of one block or two"
    assert made[0].total_bytes < made[1].total_bytes


def test_offload_leaves_only_the_scales_of_packed_weights_on_the_gpu():
    four = GPU.model_copy(update={"processes_per_node": 4})
    strategy = Strategy(name="fsdp", offload_optimizer="cpu", offload_parameters="cpu")
    states = model_states(work(SHAPE, strategy, adapter_of("qlora"), world=four, precision="bf16"))
    assert states.parameters == PACKED - 600_000 // 2
    assert states.offloaded == (4 * 446_000 + 600_000 // 2 + 12 * 46_000) // 4


# ---------------------------------------------------------------------------------------------------------------- plans


def planned(
    adapter: dict[str, Any],
    model: ModelFacts | None = None,
    arguments: dict[str, Any] | None = None,
    hardware: str = "gpu=A10G,gpus=2,hostMemory=512Gi",
    task: str = "text-classification",
    **parallelism: Any,
) -> JobPlan:
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "reviews"},
        "spec": {
            "task": task,
            "model": {"uri": "hf://org/model", "adapter": adapter},
            "dataset": {"uri": "hf://org/data"},
            "training": {"globalBatchSize": 64, "arguments": arguments or {}},
            "parallelism": parallelism,
            "resources": {"gpusPerNode": parse_hardware(hardware).gpus_per_node},
        },
    }
    job = FineTuneJob.model_validate_json(json.dumps(document))
    data = DataFacts(
        fingerprint="f", splits={"train": SplitFacts(rows=640, tokens=640 * 20, longest=32)}, max_length=64
    )
    facts = Facts(model=model or LLAMA, data=data, hardware=parse_hardware(hardware))
    return plan(job, facts, CLUSTER_SETTINGS)


LLAMA = model_facts(
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    }
)
"""TinyLlama's shape, 1.03 billion parameters without its output layer."""


def test_plan_has_the_adapter_and_its_trained_share_and_memory():
    made = planned({"method": "lora", "targetModules": ["q_proj", "v_proj"], "alpha": 8})
    training = made.trainer.training
    assert training is not None
    assert training.adapter == Adapter(
        method="lora", rank=16, alpha=8, dropout=0.05, target_modules=("q_proj", "v_proj")
    )
    # q 2,048 x 2,048 and v 2,048 x 256 in 22 layers, rank 16; 2 x 2,048 of the head
    trained = 22 * 16 * (2048 + 2048 + 2048 + 256) + 2 * 2048
    assert trained_parameters(LLAMA, training.adapter).trained == trained == 2_256_896
    assert [reason for reason in made.reasons if reason.startswith("adapter")] == [
        "adapter lora of rank 16 on self_attn.q_proj, self_attn.v_proj: 2.26 million parameters are trained (0.22% of "
        "1.03 billion), 4,096 of them the head, whole"
    ]
    sections = {section.title: section.rows for section in summarise(made)}
    assert [row for row in sections["Training"] if row.label in ("adapter", "trainable")] == [
        Row("adapter", "lora", "rank 16, alpha 8, dropout 0.05, on q_proj, v_proj"),
        Row("trainable", "2.26 million", "0.22% of 1.03 billion parameters"),
    ]
    # 16 bytes for each of 1.0B parameters leave 24 GB no room for all activations; 2, and 12 for each trained one, do.
    assert (planned({"method": "none"}).strategy, made.strategy) == ("ddp+selective-activation-checkpointing", "ddp")


@pytest.mark.parametrize(
    ("task", "asked", "dropout"),
    [
        pytest.param("preference-tuning", {}, 0.0, id="trl's DPOTrainer turns it off"),
        pytest.param("preference-tuning", {"dropout": 0.1}, 0.1, id="the job's own value"),
        pytest.param("text-generation", {}, 0.05, id="another task"),
        pytest.param("text-generation", {"dropout": 0}, 0.0, id="none"),
    ],
)
def test_adapter_of_preference_tuning_has_no_dropout_by_default(task: str, asked: dict[str, Any], dropout: float):
    training = planned({"method": "lora", **asked}, task=task).trainer.training
    assert training is not None
    assert training.adapter is not None
    assert training.adapter.dropout == dropout


def test_model_with_unknown_layers_is_planned_as_fully_trained():
    unseen = LLAMA.model_copy(update={"linear_layers": {}, "head_parameters": 0})
    made = planned({"method": "lora", "targetModules": ["whatever"]}, model=unseen)
    assert [each for each in made.assumptions if each.startswith("adapter")] == [
        "adapter: the model's layers are not known yet; memory is counted as if every weight were trained"
    ]
    assert "adapter lora of rank 16: as asked" in made.reasons
    rows = {row.label for section in summarise(made) for row in section.rows}
    assert "adapter" in rows
    assert "trainable" not in rows
    assert made.memory is not None
    assert f"{unseen.parameters:,}" in next(term.formula for term in made.memory.terms if term.name == "gradients")


def test_weights_in_4_bits_save_recomputing_activations():
    model, _ = assumed_model("hf://org/llama-13b")
    made = planned({"method": "qlora"}, model=model)
    assert (planned({"method": "lora"}, model=model).strategy, made.strategy) == (
        "fsdp+activation-checkpointing",
        "fsdp",
    )
    assert [reason for reason in made.reasons if reason.startswith("4 bits")] == [
        "4 bits: the linear layers of the blocks have 12.7 billion weights, frozen, that take 6.1 GiB in NF4 with "
        "double quantization instead of 47.3 GiB"
    ]


def test_lora_of_7_billion_weights_fits_a_gpu_of_24_gb():
    model, _ = assumed_model("hf://org/llama-7b")
    made = planned({"method": "lora"}, model=model, hardware="gpu=A10G,gpus=1,hostMemory=64Gi")
    assert made.strategy == "single+selective-activation-checkpointing"
    assert made.memory is not None
    terms = {term.name: term for term in made.memory.terms}
    frozen = sum(each.weights for each in model.linear_layers.values())
    assert f"2 x {frozen:,} frozen" in terms["parameters"].formula
    assert terms["parameters"].bytes < 16 * GIB


def test_uncounted_weights_are_planned_as_with_lora():
    layers = {name: each.model_copy(update={"weights": 0}) for name, each in LLAMA.linear_layers.items()}
    uncounted = LLAMA.model_copy(update={"linear_layers": layers})
    made = planned({"method": "qlora"}, model=uncounted)
    assert [each for each in made.assumptions if each.startswith("adapter")] == [
        "adapter: the weights of the model's linear layers are not known yet; memory is counted as with lora"
    ]
    assert made.memory == planned({"method": "lora"}, model=uncounted, strategy="ddp").memory


@pytest.mark.parametrize(
    ("method", "size", "memory", "named"),
    [
        pytest.param("none", "3b", "16Gi", "lora", id="the small part is enough"),
        pytest.param("none", "13b", "56Gi", "qlora", id="it is not, and 4 bits are"),
        pytest.param("lora", "13b", "56Gi", "qlora", id="from LoRA"),
        pytest.param("dora", "13b", "56Gi", "qlora", id="from DoRA"),
        pytest.param("none", "13b", "40Gi", None, id="no room to read the weights"),
        pytest.param("qlora", "13b", "40Gi", None, id="none to read them for weights in 4 bits"),
    ],
)
def test_refusal_names_the_adapter_with_which_the_job_fits(method: str, size: str, memory: str, named: str | None):
    """Each job has one GPU of 24 GB."""
    model, _ = assumed_model(f"hf://org/llama-{size}")
    with pytest.raises(PlanRefused) as refused:
        planned({"method": method}, model=model, hardware=f"gpu=A10G,gpus=1,hostMemory={memory}")
    message = str(refused.value)
    assert ("set model.adapter.method to" in message) == (named is not None), message
    assert named is None or f"set model.adapter.method to {named}, which trains a small part" in message


def test_deepspeed_buckets_are_as_small_as_the_trained_weights():
    made = planned({"method": "lora"}, strategy="deepspeed", zeroStage=2)
    config = deepspeed_config(made)
    assert config is not None
    assert made.trainer.training is not None
    trained = trained_parameters(LLAMA, made.trainer.training.adapter).trained
    assert config["zero_optimization"]["reduce_bucket_size"] == trained < 50_000_000  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        pytest.param(
            {"method": "lora", "targetModules": ["query", "q_proj"]},
            "no linear layer in the blocks of this model is called query; there are mlp.down_proj, mlp.gate_proj, ",
            id="layers that a measured model does not have",
        ),
        pytest.param(
            {"method": "qlora", "targetModules": ["query"]},
            "no linear layer in the blocks of this model is called query",
            id="with weights in 4 bits, too",
        ),
    ],
)
def test_unknown_target_modules_are_refused_with_the_known_ones(adapter: dict[str, Any], problem: str):
    with pytest.raises(PlanRefused) as refused:
        planned(adapter)
    assert problem in str(refused.value)
