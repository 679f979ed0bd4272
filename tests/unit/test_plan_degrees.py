"""Degrees of parallelism that `auto` chooses, and those that a refusal names in its hint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from finetune_contract.facts import DataFacts, ModelFacts, SplitFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.strategy.choice import SIMPLER_MARGIN
from finetune_operator.plan.strategy.degrees import degrees
from finetune_operator.plan.types.plan_types import Adaptation, Facts, JobPlan, PlanRefused
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import encoder, job
from suite_plugins.fuzz import examples, scaled


def rows(length: int) -> DataFacts:
    """Return facts of rows of at most `length` tokens, half of that on average."""
    split = SplitFacts(rows=100_000, tokens=50_000 * length, longest=length)
    return DataFacts(fingerprint="f", splits={"train": split}, max_length=length)


FP32 = {"globalBatchSize": 64, "precision": "fp32"}
"""In fp32 DeepSpeed has a master copy besides, so that split layers take less."""
EIGHT_V100 = "gpu=V100,memory=32Gi,gpus=8,cpu=64,hostMemory=192Gi"
"""GPUs without bf16, and too little host memory for the optimizer's state of models that they can train."""


def gpt(h: int, layers: int, heads: int) -> ModelFacts:
    return model_facts({"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": heads}, "text-generation")


def llama(h: int, layers: int, heads: int, shared: int, inner: int = 0) -> ModelFacts:
    shape = {"hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 32000}
    shape |= {"num_key_value_heads": shared, "intermediate_size": inner or 4 * h}
    return model_facts({"model_type": "llama", **shape}, "text-generation")


THIRTEEN_BILLION = gpt(5120, 40, 40)
FIFTY_BILLION = gpt(8192, 60, 64)


def planned(
    shape: ModelFacts | None,
    hardware: str = EIGHT_V100,
    adaptation: Adaptation = Adaptation(),  # noqa: B008 - frozen
    length: int = 512,
    **spec: Any,
) -> JobPlan:
    whole = {"task": "text-generation", "training": {"globalBatchSize": 64}, "resources": {"gpusPerNode": 8}, **spec}
    facts = Facts(model=shape, hardware=parse_hardware(hardware), data=rows(length))
    return plan(job(whole), facts, CLUSTER_SETTINGS, adaptation)


def refusal(shape: ModelFacts | None, hardware: str = EIGHT_V100, **spec: Any) -> Problem:
    with pytest.raises(PlanRefused) as caught:
        planned(shape, hardware, **spec)
    (problem,) = caught.value.problems
    return problem


def strategy(made: JobPlan) -> Strategy:
    assert made.trainer.training is not None
    return made.trainer.training.strategy


def sentence(made: JobPlan) -> str:
    return next(reason for reason in made.reasons if reason.startswith("strategy "))


# ------------------------------------------------------------------------------------------------------------- chosen


def test_layers_are_split_inside_a_node_where_nothing_else_fits():
    made = planned(THIRTEEN_BILLION, training=FP32)
    assert made.strategy == "fsdp+tensor4+activation-checkpointing"
    assert re.fullmatch(
        r"strategy fsdp\+tensor4\+activation-checkpointing: a step takes [0-9.]+ s, and the training with its "
        r"checkpoints at most 2% longer than by any other form that fits \([0-9.]+ GiB of 32.0 GiB\); "
        r"with whole layers on each GPU nothing does: "
        r"deepspeed-zero3\+optimizer-offload needs [0-9.]+ GiB of host memory a node, and there are 192.0 GiB",
        sentence(made),
    )
    assert any("2 replicas of the model, each over 4 processes on one node" in reason for reason in made.reasons)


def test_a_model_that_no_node_holds_is_cut_into_stages_over_several():
    spec = {"resources": {"gpusPerNode": 8, "nodes": 2}, "training": {**FP32, "optimizer": "sgd"}}
    made = planned(FIFTY_BILLION, EIGHT_V100.replace("192", "512"), **spec)
    assert made.strategy == "ddp+tensor4+pipeline4-1f1b+activation-checkpointing"
    assert any("1 replica of the model, each over 16 processes over several nodes" in each for each in made.reasons)
    assert any(each.startswith("pipeline 1f1b: ") for each in made.reasons)


def test_strategy_with_whole_layers_is_preferred():
    made = planned(THIRTEEN_BILLION, EIGHT_V100.replace("192", "256"))
    assert made.strategy == "fsdp+activation-checkpointing"


def test_smallest_degrees_come_first_and_layers_stay_on_one_node():
    assert tuple(degrees(nodes=2, processes_per_node=4)) == (
        *((2, 1), (4, 1)),
        *((1, 2), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)),
    )
    assert tuple(degrees(nodes=1, processes_per_node=1)) == ()


def test_processes_of_split_layers_need_no_host_memory_for_whole_models():
    # Host copies of all shards would take 191 GiB, beside 48 GiB of files.
    made = planned(THIRTEEN_BILLION, parallelism={"tensor": 2})
    assert made.strategy.startswith("fsdp+tensor2")
    assert made.memory is not None
    assert made.memory.host_bytes <= 192 * 2**30


def test_the_degree_divides_the_heads_that_keys_and_values_have():
    shared = llama(5120, 40, 40, 4)
    whole = {"activationCheckpointing": "none"}
    made = planned(shared, EIGHT_V100.replace("32Gi", "44Gi"), training=FP32, parallelism=whole)
    assert made.strategy == "fsdp+tensor4"
    problem = refusal(shared, parallelism={"tensor": 8})
    assert (problem.path, problem.rule) == (
        "spec.parallelism.tensor",
        "it has to divide the model's 4 key-value heads",
    )


# ------------------------------------------------------------------------------------------------------------ refused

FAMILIES = "there is no tensor-parallel plan for models of type"
REFUSED: dict[str, tuple[ModelFacts | None, dict[str, Any], tuple[str, ...]]] = {
    "a family without a plan, which is cut but has too few GPUs": (
        encoder(8192, 40),
        {"task": "text-classification"},
        (f"parallelism.tensor is not chosen: {FAMILIES} bert", "ddp+pipeline8-1f1b"),
    ),
    "a family that is neither split nor known to be cut": (
        model_facts({"model_type": "deberta-v2", "hidden_size": 6144, "num_hidden_layers": 48, "vocab_size": 128100,
                     "num_attention_heads": 96, "intermediate_size": 24576}),
        {"task": "text-classification"},
        (f"parallelism.tensor is not chosen: {FAMILIES} deberta-v2",
         "parallelism.pipeline is not chosen: models of type deberta-v2 are not known to be cut into stages"),
    ),
    "adapters": (
        gpt(12288, 96, 96),
        {"model": {"uri": "hf://org/model", "adapter": {"method": "lora"}}},
        ("parallelism.tensor is not chosen: cannot be combined with spec.parallelism.tensor or pipeline.degree",
         "parallelism.pipeline is not chosen: cannot be combined with spec.parallelism.tensor or pipeline.degree"),
    ),
    "fp16": (
        FIFTY_BILLION,
        {"training": {"globalBatchSize": 64, "precision": "fp16"}},
        ("parallelism.tensor is not chosen: must be fp32 or bf16 with spec.parallelism.tensor or pipeline.degree "
            "above 1",),
    ),
    "an optimizer of whole matrices": (
        FIFTY_BILLION,
        {"training": {"globalBatchSize": 64, "optimizer": "adafactor"}},
        ("parallelism.tensor is not chosen: adafactor works on whole matrices, which spec.parallelism shards",),
    ),
    "a compiled model": (
        FIFTY_BILLION,
        {"training": {"globalBatchSize": 64, "arguments": {"torch_compile": True}}},
        ("parallelism.tensor is not chosen: torch_compile cannot be combined with spec.parallelism.tensor",),
    ),
    "activations recomputed in part": (
        FIFTY_BILLION,
        {"parallelism": {"activationCheckpointing": "selective"}},
        ("parallelism.tensor is not chosen: must be auto, none or full with spec.parallelism.tensor or "
            "pipeline.degree",),
    ),
    "a model that nobody has read": (
        None,
        {"model": {"uri": "hf://org/gpt-175b"}},
        ("parallelism.tensor is not chosen: the model has not been read yet",),
    ),
    "heads that no degree divides, and no room for stages": (
        gpt(25 * 320, 50, 25),
        {},
        ("parallelism.tensor is not chosen: it has to divide the model's 25 attention heads", "ddp+pipeline8-1f1b"),
    ),
    "one process a node": (
        gpt(12288, 96, 96),
        {"resources": {"gpusPerNode": 1, "nodes": 2}},
        ("parallelism.tensor is not chosen: layers are split inside of a node, which has one process",
         "ddp+pipeline2-1f1b"),
    ),
    "degrees that do not fit": (
        gpt(12288, 96, 96),
        {},
        ("ddp+tensor8+activation-checkpointing with micro-batch 1 needs ", "ddp+tensor4+pipeline2-1f1b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_fits_no_form_is_refused_with_the_failed_conditions(case: str):
    model, spec, whys = REFUSED[case]
    # One precision has fewer forms to search than two.
    training = {"globalBatchSize": 64, "precision": "fp32", **spec.get("training", {})}
    problem = refusal(model, **{**spec, "training": training})
    assert problem.path == "spec.resources"
    for why in whys:
        assert why in problem.rule, problem.rule


def test_refusal_for_a_single_process_does_not_mention_splitting():
    rule = refusal(FIFTY_BILLION, resources={"gpusPerNode": 1}).rule
    assert "tensor" not in rule
    assert "pipeline" not in rule


def test_refused_strategy_comes_with_every_hint_that_fits():
    problem = refusal(
        THIRTEEN_BILLION, EIGHT_V100.replace("192", "320"), training=FP32, parallelism={"strategy": "ddp"}
    )
    assert problem.path == "spec.parallelism.strategy"
    first, second = problem.hint.split("; or ")
    assert first.startswith("set parallelism.strategy to auto, and the plan takes deepspeed-zero3+")
    assert second.startswith("set parallelism.tensor to 8 (")


def test_degrees_that_do_not_fit_are_refused_with_those_that_do():
    problem = refusal(THIRTEEN_BILLION, training=FP32, parallelism={"tensor": 4, "strategy": "ddp"})
    first, second = problem.hint.split("; or ")
    there = []
    for parallelism in ({"tensor": 4}, {"tensor": 8, "strategy": "ddp"}):
        takes = planned(THIRTEEN_BILLION, training=FP32, parallelism=parallelism).memory
        assert takes is not None
        there.append(f"({takes.total_bytes / 2**30:.1f} GiB of 32.0 GiB a GPU)")
    label = "fsdp+tensor4+activation-checkpointing"
    assert first == f"set parallelism.strategy to auto, and the plan takes {label} {there[0]}"
    assert second == f"set parallelism.tensor to 8 {there[1]}"


def test_hint_names_other_nodes_or_an_adapter_when_nothing_smaller_fits():
    hint = refusal(gpt(5120, 64, 40)).hint
    assert hint.startswith("set parallelism.strategy to deepspeed and parallelism.offload.optimizer to nvme (")
    assert "; or set model.adapter.method to lora, which trains a small part of the weights (" in hint
    assert "; or use 2 nodes (16 GPUs in all), or nodes with at least " in hint


WAY = re.compile(r"set parallelism\.(\w+) to (\w+)(?: and parallelism\.pipeline\.degree to (\d+))? \(([^)]*)\)")


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        pytest.param(THIRTEEN_BILLION, {"parallelism": {"strategy": "ddp"}}, id="ddp"),
        pytest.param(THIRTEEN_BILLION, {"parallelism": {"tensor": 2, "strategy": "ddp"}}, id="a degree"),
        pytest.param(
            FIFTY_BILLION,
            {
                "parallelism": {"tensor": 8, "strategy": "ddp"},
                "resources": {"gpusPerNode": 8, "nodes": 4},
                "training": {"globalBatchSize": 64, "optimizer": "sgd"},
            },
            id="stages beside a degree",
        ),
    ],
)
def test_degree_named_in_a_hint_fits_as_calculated(model: ModelFacts, spec: dict[str, Any]):
    hardware = EIGHT_V100.replace("192", "512") if "resources" in spec else EIGHT_V100
    found = [each for each in WAY.finditer(refusal(model, hardware, **spec).hint) if each[1] == "tensor"]
    assert len(found) == 1
    parallelism = {**spec["parallelism"], "tensor": int(found[0][2]), "pipeline": {"degree": int(found[0][3] or 1)}}
    made = planned(model, hardware, **{**spec, "parallelism": parallelism})
    assert made.memory is not None
    assert found[0][4] == f"{made.memory.total_bytes / 2**30:.1f} GiB of 32.0 GiB a GPU"


# ----------------------------------------------------------------------------------------------- after memory ran out

RECOMPUTED = ("", "+selective-activation-checkpointing", "+activation-checkpointing")
OFFLOAD = "+optimizer-offload"


def adapted(*skipped: str, form: str | None = None) -> str:
    spec = {"resources": {"gpusPerNode": 8}}
    adaptation = Adaptation(None, skipped, form)
    return planned(gpt(768, 12, 12), "gpu=H100,gpus=8,cpu=64,hostMemory=1Ti", adaptation, **spec).strategy


@pytest.mark.parametrize(
    ("skipped", "form", "following"),
    [
        pytest.param(
            ("ddp", "ddp+selective-activation-checkpointing"),
            None,
            "ddp+sequence2",
            id="without a checkpoint the next form",
        ),
        pytest.param(("ddp",), "ddp", "ddp+selective-activation-checkpointing", id="ddp does not go on as ZeRO"),
        pytest.param(tuple(f"ddp{tail}" for tail in RECOMPUTED), "ddp", "ddp+sequence2", id="but with rows in slices"),
        pytest.param(
            ("deepspeed-zero1",),
            "deepspeed-zero1",
            "deepspeed-zero1+selective-activation-checkpointing",
            id="a ZeRO stage goes on as itself",
        ),
        pytest.param(
            tuple(f"deepspeed-zero1{tail}{end}" for tail in RECOMPUTED for end in ("", OFFLOAD)),
            "deepspeed-zero1",
            "deepspeed-zero1+sequence2",
            id="and with rows in slices",
        ),
    ],
)
def test_only_forms_that_resume_from_the_checkpoint_are_tried(skipped: tuple[str, ...], form: str, following: str):
    assert adapted(*skipped, form=form) == following


def test_hint_is_a_new_job_when_no_form_resumes_from_the_checkpoints():
    stage = "deepspeed-zero1"
    degrees = ("", "+sequence2", "+sequence4")
    skipped = tuple(f"{stage}{degree}{tail}{end}" for degree in degrees for tail in RECOMPUTED for end in ("", OFFLOAD))
    with pytest.raises(PlanRefused) as caught:
        adapted(*skipped, form=stage)
    (problem,) = caught.value.problems
    assert problem.rule.endswith(
        "ran out of memory with one row at a time, and none is left that goes on from the checkpoints of "
        "deepspeed-zero1"
    )
    assert problem.hint.startswith("create a new job with checkpoints.resume never, and parallelism for ddp; or ")


# ----------------------------------------------------------------------------------------------------------- properties


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ModelFacts, str, int, dict[str, Any]]:
    """Draw models, nodes, row lengths and settings, of which many fit and many do not."""
    # Some ways to split a model are rare: half of the jobs are of a kind that is split often.
    split = draw(st.booleans())
    heads = draw(st.sampled_from([32, 40, 64] if split else [12, 16, 25, 32, 40, 64]))
    h, layers = heads * draw(st.sampled_from([64, 128])), draw(st.sampled_from([12, 24, 48, 80]))
    kind = draw(st.sampled_from(["gpt2", "llama"] if split else ["gpt2", "llama", "bert"]))
    if kind == "llama":
        shared = draw(st.sampled_from([each for each in (2, 4, 5, 8, heads) if heads % each == 0]))
        model = llama(h, layers, heads, shared, draw(st.sampled_from([4 * h, 11008, 13824])))
    else:
        model = gpt(h, layers, heads) if kind == "gpt2" else encoder(h, layers)
    gpus = draw(st.sampled_from([2, 4, 8] if split else [1, 2, 3, 4, 8]))
    nodes = draw(st.sampled_from([1, 2] if split else [1, 1, 2, 3, 4]))
    device = draw(st.sampled_from(["V100,memory=16Gi", "V100,memory=32Gi", "T4", "A10G", "A100-40GB"]))
    hardware = f"gpu={device},gpus={gpus},cpu=64,hostMemory={draw(st.sampled_from([96, 192, 384, 768]))}Gi"
    training = {
        "globalBatchSize": gpus * nodes * draw(st.sampled_from([1, 4, 6])),
        "optimizer": draw(st.sampled_from(["sgd"] if split else ["adamw", "sgd", "adafactor"])),
        "precision": draw(st.sampled_from(["auto", "fp32"] if split else ["auto", "auto", "fp32"])),
    }
    parallelism = draw(st.sampled_from([{}, {}, {"activationCheckpointing": "none"}]))
    task = "text-classification" if kind == "bert" else "text-generation"
    spec = {"task": task, "training": training, "parallelism": parallelism}
    length = 512 if split else draw(st.sampled_from([512, 32768]))
    return model, hardware, length, {**spec, "resources": {"gpusPerNode": gpus, "nodes": nodes}}


def written_out(made: JobPlan, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that request the degrees of a plan."""
    chosen = strategy(made)
    degree = 1 if chosen.pipeline is None else chosen.pipeline.degree
    return {**fixed, "tensor": chosen.tensor, "pipeline": {"degree": degree}, "sequence": chosen.sequence}


NEAR: tuple[ModelFacts, str, int, dict[str, Any]] = (
    gpt(2560, 24, 40),
    "gpu=V100,memory=16Gi,gpus=8,cpu=64,hostMemory=96Gi",
    512,
    {
        "task": "text-generation",
        "training": {"globalBatchSize": 64, "optimizer": "sgd", "precision": "fp32"},
        "parallelism": {},
        "resources": {"gpusPerNode": 8, "nodes": 2},
    },
)
"""A micro-batch of 4 takes 2% longer than one of 2: it is near the quickest only among forms of these degrees."""


@examples(50, everything=240, suppress_health_check=list(HealthCheck))
@given(jobs())
@example(case=NEAR)
def check(counts: Counter[str], case: tuple[ModelFacts, str, int, dict[str, Any]]) -> None:
    model, hardware, length, spec = case
    try:
        made = planned(model, hardware, length=length, **spec)
    except PlanRefused:
        counts["refused"] += 1
        return
    chosen, memory = strategy(made), made.memory
    assert memory is not None
    assert memory.total_bytes <= memory.capacity_bytes
    assert memory.host_bytes <= made.hardware.memory_bytes
    world, batch = made.trainer.world, made.trainer.training.batch if made.trainer.training else None
    assert world is not None
    assert batch is not None
    resources = spec["resources"]
    assert (world.nodes, world.processes_per_node) == (resources["nodes"], resources["gpusPerNode"])
    assert batch.global_batch_size == spec["training"]["globalBatchSize"]
    assert batch.data_parallel * chosen.replica_ranks == world.size
    if chosen.replica_ranks == 1:
        counts["whole"] += 1
        return
    kind = "tensor" if chosen.pipeline is None else "stages" if chosen.tensor == 1 else "both"
    counts["slices" if chosen.sequence > 1 else kind] += 1
    assert world.processes_per_node % chosen.tensor == 0
    explicit = {**spec, "parallelism": written_out(made, spec["parallelism"])}
    if chosen.sequence > 1:
        # A job that requests slices gets packs only on request, too.
        explicit["preparation"] = {"packing": "always" if made.trainer.preparation.packing else "never"}
    document = job(explicit).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert validate_job(document)[1] == []
    again = planned(model, hardware, length=length, **explicit)
    asked = made.trainer.preparation.model_copy(update={"packing_asked": again.trainer.preparation.packing_asked})
    expected = made.trainer.model_copy(update={"preparation": asked})
    if (again.trainer, again.memory, again.strategy) != (expected, memory, made.strategy):
        # Without the other degrees, a simpler form may be near enough to the quickest.
        counts["near"] += 1
        assert made.estimate.seconds is not None
        assert again.estimate.seconds is not None
        assert again.estimate.seconds <= made.estimate.seconds * (1 + SIMPLER_MARGIN)


@pytest.mark.hypothesis
def test_degrees_that_are_chosen_are_those_that_could_be_written_and_fit() -> None:
    counts: Counter[str] = Counter()
    check(counts)
    print(dict(counts))
    assert all(
        counts[kind] >= scaled(2, everything=5) for kind in ("refused", "whole", "tensor", "stages", "both", "slices")
    ), counts
    assert counts["near"] <= sum(counts.values()) // 50, counts
