"""Plans with tensor and pipeline parallelism: the arithmetic, decisions and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.facts import DataFacts, HardwareFacts, SplitFacts
from finetune_contract.plans import owners_of
from finetune_contract.trainer_job import Pipeline, Strategy, World
from finetune_operator.cli.cluster.jobview import plan_lines
from finetune_operator.jobs.state.planned import plan_status
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.model_parallel_plan import (
    bubble,
    in_flight,
    layers_of_a_process,
    parameters_of_a_process,
    rank_order,
    weights_of_a_process,
)
from finetune_operator.plan.memory.process_memory import CPU_PROCESS_BYTES, estimate
from finetune_operator.plan.memory.state_memory import model_states
from finetune_operator.plan.plan import plan
from finetune_operator.plan.strategy.ladder import ladder
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import ParallelismSpec, PipelineSpec
from planning_support.cases import BERT, job, llama_1b

LLAMA = llama_1b("text-classification")
EIGHT = parse_hardware("gpu=H100,gpus=8,cpu=64,hostMemory=1Ti")
LAPTOP = HardwareFacts(cpu_cores=2, memory_bytes=64 << 30)
ROWS = DataFacts(
    fingerprint="f", splits={"train": SplitFacts(rows=100_000, tokens=10_000_000, longest=256)}, max_length=256
)


def planned(spec: Mapping[str, Any], hardware: HardwareFacts = EIGHT, model: Any = LLAMA) -> JobPlan:
    whole = {"training": {"globalBatchSize": 64}, "resources": {"gpusPerNode": hardware.gpus_per_node}, **spec}
    return plan(job(whole), Facts(model=model, hardware=hardware, data=ROWS), CLUSTER_SETTINGS)


def strategy(result: JobPlan) -> Strategy:
    assert result.trainer.training is not None
    return result.trainer.training.strategy


def sizes(result: JobPlan) -> tuple[int, int, int]:
    assert result.trainer.training is not None
    batch = result.trainer.training.batch
    return batch.micro_batch_size, batch.gradient_accumulation, batch.data_parallel


def pipeline(schedule: str, degree: int, micro_batches: int) -> Pipeline:
    return Pipeline.model_validate({"schedule": schedule, "degree": degree, "micro_batches": micro_batches})


# --------------------------------------------------------------------------------------------------------- arithmetic


def states(name: str, world: int, **degrees: Any) -> Any:
    """Return weights, gradients and optimizer state of a process of `world` on nodes of 8 GPUs."""
    work = Workload(
        model=LLAMA,
        task="text-classification",
        strategy=Strategy(name=name, **degrees),  # type: ignore[arg-type]
        precision="bf16",
        optimizer="adamw",
        world=World(nodes=max(1, world // 8), processes_per_node=min(8, world), device="cuda", threads_per_process=1),
        micro_batch=1,
        length=128,
    )
    return model_states(work)


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": Pipeline(degree=2, micro_batches=4)}])
def test_fsdp_divides_the_state_of_split_models_among_replicas(degrees):
    whole, divided = (states(name, 8, **degrees) for name in ("ddp", "fsdp"))
    assert divided.parameters == pytest.approx(whole.parameters / 4, rel=1e-6)
    assert divided.optimizer == pytest.approx(whole.optimizer / 4, rel=1e-6)
    assert divided.gradients <= whole.gradients / 4


@pytest.mark.parametrize(
    ("degrees", "most"),
    # A weight is not divided: the embeddings are a third of the first stage.
    [({"tensor": 2}, 1.02), ({"pipeline": Pipeline(degree=2, micro_batches=4)}, 1.41)],
)
def test_zero_1_divides_the_optimizer_state_of_split_models_among_replicas(degrees, most: float):
    whole, divided = states("ddp", 8, **degrees), states("ddp", 8, zero_stage=1, **degrees)
    assert (divided.parameters, divided.gradients) == (whole.parameters, whole.gradients)
    assert whole.optimizer / 4 <= divided.optimizer <= most * whole.optimizer / 4
    alone = states("ddp", 2, zero_stage=1, **degrees)
    assert alone.optimizer == whole.optimizer, "one replica has all of it"


def test_one_owner_steps_the_embeddings_that_are_more_than_an_even_share():
    embeddings = LLAMA.vocabulary_size * LLAMA.hidden_size // 2
    assert states("ddp", 64, zero_stage=1, tensor=2).optimizer == 8 * embeddings


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 20))
def test_owners_have_at_most_one_weight_more_than_an_even_share(weights: list[int], ranks: int):
    owners = owners_of(weights, ranks)
    loads = [sum(size for size, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(weights)
    assert max(loads) <= sum(weights) / ranks + max(weights, default=0)


def test_requested_zero_1_beside_split_layers_sends_as_much_as_ddp():
    parallelism = {"tensor": 2, "activationCheckpointing": "none"}
    made = planned({"parallelism": {**parallelism, "zeroStage": 1}})
    assert made.strategy == "ddp-zero1+tensor2"
    assert any(each.startswith("strategy ddp-zero1+tensor2: as asked; ") for each in made.reasons)
    whole = planned({"parallelism": {**parallelism, "strategy": "ddp"}})
    mine, theirs = made.estimate.step_parts, whole.estimate.step_parts
    assert mine["communication"] == pytest.approx(theirs["communication"])
    assert mine["optimizer"] < theirs["optimizer"]
    assert made.memory is not None
    assert whole.memory is not None
    assert made.memory.total_bytes < whole.memory.total_bytes


def test_split_layers_with_fsdp_gather_a_slice_and_have_less_memory():
    def of(name: str, **degrees: Any) -> dict[str, int]:
        work = Workload(
            model=llama_1b("text-generation"),
            task="text-generation",
            strategy=Strategy(name=name, activation_checkpointing="full", **degrees),  # type: ignore[arg-type]
            precision="bf16",
            optimizer="adamw",
            world=World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=1),
            micro_batch=1,
            length=8192,
        )
        made = estimate(work, 80 << 30)
        return {term.name: term.bytes for term in made.terms} | {"total": made.total_bytes}

    whole, split, replicated = of("fsdp"), of("fsdp", tensor=2), of("ddp", tensor=2)
    assert split["gathered blocks"] == pytest.approx(whole["gathered blocks"] / 2, rel=0.15)
    assert split["total"] < replicated["total"]


def test_stages_with_fsdp_are_whole_during_a_pass_and_divided_between():
    world = World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=1)
    strategy = Strategy(name="fsdp", pipeline=pipeline("1f1b", 2, 4), activation_checkpointing="full")
    work = Workload(
        llama_1b("text-generation"), "text-generation", strategy, "bf16", "adamw", world, 1, length=128, end="first"
    )
    terms = {term.name: term.bytes for term in estimate(work, 80 << 30).terms}
    assert terms["parameters"] == pytest.approx(4 * work.held / 4, rel=1e-6)
    assert terms["optimizer state"] == pytest.approx(8 * work.held / 4, rel=1e-6)
    assert (terms["gathered blocks"], terms["whole gradients"]) == (2 * work.held, 4 * work.held)


def test_auto_tries_fsdp_over_the_stages_of_several_replicas():
    labels = {
        rung.label
        for rung in ladder(
            ParallelismSpec(tensor=2, pipeline=PipelineSpec(degree=2)),
            World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=1),
        )
    }
    assert {each.partition("+")[0] for each in labels} == {"ddp", "ddp-zero1", "fsdp"}


@pytest.mark.parametrize(
    ("schedule", "degree", "micro_batches", "idle", "kept"),
    [
        ("gpipe", 4, 8, 3 / 11, 8),
        ("1f1b", 4, 8, 3 / 11, 4),
        ("1f1b", 4, 2, 3 / 5, 2),
        # Two stages a process: half the bubble, and torch's warm-up admits 2 (p - 1) + p + 1 half-micro-batches.
        ("interleaved", 4, 8, 3 / 19, 5.5),
        ("interleaved", 2, 4, 1 / 9, 2.5),
    ],
)
def test_a_schedule_is_idle_and_keeps_activations_by_its_formula(schedule, degree, micro_batches, idle, kept):
    made = pipeline(schedule, degree, micro_batches)
    assert bubble(made) == pytest.approx(idle)
    assert in_flight(made) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("placement", "order"),
    [("cluster", "DPT"), ("spread", "PTD"), ("TDP", "TDP"), ("T", "DPT"), ("P", "DTP"), ("PT", "DPT"), ("TD", "PTD")],
)
def test_placement_is_an_order_of_all_dimensions(placement: str, order: str):
    assert rank_order(placement) == order


def test_a_process_holds_its_part_of_the_model():
    whole = LLAMA.parameters
    assert parameters_of_a_process(LLAMA, Strategy(name="ddp", tensor=4)) == whole // 4
    halves = Strategy(name="ddp", pipeline=pipeline("1f1b", 2, 8))
    assert layers_of_a_process(LLAMA, halves.pipeline) == 8
    embeddings = LLAMA.embedding_parameters
    assert parameters_of_a_process(LLAMA, halves) == 8 * LLAMA.block_parameters + embeddings
    # 16 layers in 3 x 2 stages: at most 3 layers a stage, and two stages a process.
    assert layers_of_a_process(LLAMA, pipeline("interleaved", 3, 6)) == 6


def test_last_stage_has_fewer_layers_for_its_head():
    model = LLAMA.model_copy(update={"layers": 8, "block_parameters": 218})
    cut = pipeline("1f1b", 4, 8)
    ends = [layers_of_a_process(model, cut, end=end, head=525) for end in ("first", "last", None)]
    # A head of 2.4 layers: 2, 2, 3 and 1 layers.
    assert ends == [2, 1, 3]


def test_first_process_of_a_pipeline_has_no_logits():
    model = LLAMA.model_copy(update={"vocabulary_size": 10 * LLAMA.vocabulary_size})
    strategy = Strategy(name="ddp", pipeline=pipeline("1f1b", 4, 8))
    world = World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1)
    work = Workload(model, "text-generation", strategy, "bf16", "adamw", world, micro_batch=1, length=4096)
    sizes = [estimate(replace(work, end=end), 1 << 40).total_bytes for end in ("first", "last", None)]
    assert sizes[0] < sizes[1] == sizes[2]


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("width", [4, 2])
def test_host_memory_holds_read_and_saved_weights(width: int, tensor: int):
    model = LLAMA.model_copy(update={"parameter_bytes": width * LLAMA.parameters})
    parallelism = {"tensor": tensor, "pipeline": {"degree": 2}}
    result = planned({"parallelism": parallelism}, model=model)
    assert result.memory is not None
    # On rank 0 all but 15 of 16 blocks are converted to fp32, none of files in fp32; later the embeddings are gathered.
    converted = LLAMA.parameters - 15 * LLAMA.block_parameters if width == 2 else 0
    copied = 12 * LLAMA.parameters  # a checkpoint: weights and two moments
    needed = 4 * max(converted, LLAMA.embedding_parameters) + copied
    assert result.memory.host_bytes - 8 * CPU_PROCESS_BYTES == needed


# ---------------------------------------------------------------------------------------------------------- decisions


def test_tensor_parallelism_leaves_fewer_replicas_and_less_on_each_gpu():
    parallelism = {"strategy": "ddp", "tensor": 4}
    spread, plain = planned({"parallelism": parallelism}), planned({"parallelism": {"strategy": "ddp"}})
    assert spread.strategy == "ddp+tensor4"
    assert sizes(spread)[2] == 2
    assert spread.memory is not None
    assert plain.memory is not None
    theirs = {term.name: term.bytes for term in plain.memory.terms}
    mine = {term.name: term.bytes for term in spread.memory.terms}
    for name in ("parameters", "optimizer state"):
        assert mine[name] == pytest.approx(theirs[name] / 4, rel=1e-6)
    # The gradient of the embeddings is whole.
    whole = 4 * LLAMA.embedding_parameters * 3 / 4
    assert mine["gradients"] == pytest.approx(theirs["gradients"] / 4 + whole, rel=1e-6)
    assert any("2 replicas of the model, each over 4 processes on one node" in reason for reason in spread.reasons)


def test_pipeline_has_enough_micro_batches_to_idle_a_fifth_at_most():
    result = planned({"parallelism": {"pipeline": {"degree": 4}}})
    made = strategy(result).pipeline
    assert made == pipeline("1f1b", 4, 16)
    assert sizes(result) == (2, 16, 2)
    assert bubble(made) < 0.2
    assert any("16 micro-batches a pass leave 16% of it idle, 3 / (16 + 3)" in reason for reason in result.reasons)
    # The idle time is 3/16 of computation and exchanges.
    assert "idle pipeline 1" in result.estimate.basis


def test_requested_micro_batches_are_those_of_a_pass():
    result = planned({"parallelism": {"pipeline": {"degree": 2, "microBatches": 4, "schedule": "gpipe"}}})
    assert strategy(result).pipeline == pipeline("gpipe", 2, 4)
    micro, accumulation, replicas = sizes(result)
    assert (micro * accumulation * replicas, accumulation % 4) == (64, 0)


def test_pipeline_on_a_cpu_gets_large_passes_if_none_other_divides():
    pipelining = {"degree": 3, "schedule": "interleaved"}
    result = planned({"parallelism": {"pipeline": pipelining}, "training": {"globalBatchSize": 23}}, LAPTOP, BERT)
    assert sizes(result) == (23, 1, 1)


def test_on_a_cpu_there_are_as_many_processes_as_one_replica_takes():
    result = planned({"parallelism": {"tensor": 2, "pipeline": {"degree": 2}}}, LAPTOP)
    assert result.trainer.world is not None
    assert result.trainer.world.size == 4
    assert sizes(result)[2] == 1


def test_rank_order_shows_if_a_replica_stays_on_its_node():
    parallelism = {"tensor": 2, "pipeline": {"degree": 2}}
    here = planned({"parallelism": parallelism, "resources": {"gpusPerNode": 8, "nodes": 2}})
    there = planned(
        {"parallelism": {**parallelism, "placement": "spread"}, "resources": {"gpusPerNode": 8, "nodes": 2}}
    )
    assert strategy(here).rank_order == "DPT"
    assert any("processes on one node" in reason and "ranks ordered DPT" in reason for reason in here.reasons)
    assert strategy(there).rank_order == "PTD"
    assert any("over several nodes" in reason and "ranks ordered PTD" in reason for reason in there.reasons)


def test_the_status_counts_the_rows_of_replicas_and_not_of_processes():
    spread = plan_status(planned({"parallelism": {"strategy": "ddp", "tensor": 4}}))
    assert (spread.world_size, spread.data_parallel) == (8, 2)
    assert plan_lines(spread)[0] == "ddp+tensor4 by job, 8 processes, batch 64 = 32 x 1 x 2"
    plain = plan_status(planned({"parallelism": {"strategy": "ddp"}}))
    assert (plain.world_size, plain.data_parallel) == (8, None)


# ------------------------------------------------------------------------------------------------------------ refusals

REFUSED: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "a model without a plan": (
        {"parallelism": {"tensor": 2}}, BERT, "spec.parallelism.tensor",
        "there is no tensor-parallel plan for models of type bert; there is one for afmoe, ",
    ),
    "heads that the degree does not divide": (
        {"parallelism": {"tensor": 3}, "resources": {"gpusPerNode": 6}, "training": {"globalBatchSize": 64}}, LLAMA,
        "spec.parallelism.tensor", "it has to divide the model's 32 attention heads",
    ),
    "more stages than layers": (
        {"parallelism": {"pipeline": {"degree": 8, "schedule": "interleaved"}}}, BERT,
        "spec.parallelism.pipeline.degree", "the model has 12 layers for 16 stages, two for each process",
    ),
    "micro-batches that make no whole passes": (
        {"parallelism": {"pipeline": {"degree": 2, "microBatches": 3}}}, LLAMA,
        "spec.parallelism.pipeline.microBatches", "must divide the micro-batches of a replica's step",
    ),
    "a world that the degrees do not divide": (
        {"parallelism": {"tensor": 2, "pipeline": {"degree": 3}}}, LLAMA,
        "spec.parallelism", "a product of tensor, pipeline.degree and sequence that divides the number of processes",
    ),
    "processes that the degrees do not divide": (
        {"parallelism": {"tensor": 2, "pipeline": {"degree": 3}}, "resources": {"processesPerNode": 4}}, LLAMA,
        "spec.parallelism", "a product of tensor, pipeline.degree and sequence that divides the number of processes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_cannot_be_spread_is_refused(case: str):
    spec, model, path, rule = REFUSED[case]
    with pytest.raises(PlanRefused) as caught:
        planned(spec, model=model)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert rule in problem.rule


def test_weights_of_a_shape_that_no_model_has_are_a_short_list():
    shape = LLAMA.model_copy(update={"parameters": 2**48, "vocabulary_size": 1, "hidden_size": 1})
    weights = weights_of_a_process(shape, Strategy(name="fsdp"), 1, 2**48)
    assert (sum(weights), len(weights) < 1100) == (2**48, True)
