"""Plans whose rows are divided among processes: the arithmetic, what is decided, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.cli.jobview import plan_lines
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Facts, JobPlan, PlanRefused
from finetune_operator.reconcile.planned import plan_status
from finetune_operator.rendering.deepspeed import deepspeed_config
from planning_support.cases import job, llama_1b

LLAMA = llama_1b("text-generation", max_position_embeddings=131072)
EIGHT = parse_hardware("gpu=H100,gpus=8,cpu=64,hostMemory=1Ti")
TWO_CORES = parse_hardware("cpu=2,hostMemory=256Gi")
LONG = DataFacts(
    fingerprint="f", splits={"train": SplitFacts(rows=10_000, tokens=80_000_000, longest=16_383)}, max_length=16_384
)


def planned(spec: Mapping[str, Any], hardware: Any = EIGHT, model: Any = LLAMA) -> JobPlan:
    usual = {
        "task": "text-generation",
        "training": {"globalBatchSize": 16, "microBatchSize": 1},
        "resources": {"gpusPerNode": hardware.gpus_per_node},
    }
    return plan(job({**usual, **spec}), Facts(model=model, hardware=hardware, data=LONG), CLUSTER_SETTINGS)


def activations(result: JobPlan) -> Any:
    assert result.memory is not None
    return next(term for term in result.memory.terms if term.name == "activations")


def test_the_processes_are_groups_that_read_the_same_rows_with_a_part_of_the_activations_each():
    whole, divided = (planned({"parallelism": {"strategy": "fsdp", "sequence": degree}}) for degree in (1, 4))
    training = divided.trainer.training
    assert training is not None
    assert (training.strategy.sequence, training.strategy.label) == (4, divided.strategy)
    assert divided.strategy.startswith("fsdp+sequence4")
    batch = training.batch
    assert (batch.data_parallel, batch.micro_batch_size, batch.gradient_accumulation) == (2, 1, 8)
    # Of an odd row the last process has one token less.
    assert activations(divided).formula.startswith("1 rows x 4096 of 16383 tokens x (")
    assert activations(whole).bytes > 3.9 * activations(divided).bytes
    assert (
        "rows are divided among 4 neighbouring processes on one node, 2 groups of them: of 16383 tokens each has "
        "4096 and, in attention, 8 of 32 heads"
    ) in divided.reasons
    assert "16 = 1 micro x 8 accumulation x 2 ranks" in " ".join(divided.reasons)


def test_plain_text_is_packed_only_when_asked_for():
    def packs(spec: Mapping[str, Any]) -> bool:
        return planned(spec).trainer.preparation.packing

    assert packs({})
    assert not packs({"parallelism": {"sequence": 2}})
    assert packs({"parallelism": {"sequence": 2}, "preparation": {"packing": "always"}})


def test_the_status_and_the_command_tell_how_many_groups_there_are():
    result = planned({"parallelism": {"sequence": 8}})
    status = plan_status(result)
    assert (status.world_size, status.data_parallel) == (8, 1)
    assert "sequence8" in status.strategy
    lines = plan_lines(status)
    assert lines[0] == "ddp+sequence8 by job, 8 processes, batch 16 = 1 x 16 x 1"


def test_auto_takes_the_first_strategy_whose_state_fits_beside_the_slices():
    labels = {degree: planned({"parallelism": {"sequence": degree}}).strategy for degree in (1, 2, 8)}
    assert labels == {1: "deepspeed-zero1", 2: "ddp+sequence2", 8: "ddp+sequence8"}


def test_deepspeed_is_told_of_all_processes_as_it_takes_them_for_replicas():
    config = deepspeed_config(planned({"parallelism": {"strategy": "deepspeed", "zeroStage": 2, "sequence": 4}}))
    assert config is not None
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in sizes] == [16 * 4, 1, 8]


def test_on_a_cpu_there_are_as_many_processes_as_slices():
    result = planned({"parallelism": {"strategy": "ddp", "sequence": 4}, "resources": {"nodes": 2}}, TWO_CORES)
    assert result.trainer.world is not None
    assert (result.trainer.world.nodes, result.trainer.world.processes_per_node) == (2, 2)
    assert "2 processes a node: as few as the slices of a row take" in result.reasons
    assert any("4 neighbouring processes of several nodes, 1 group of them" in reason for reason in result.reasons)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "heads that it does not divide": (
        {"parallelism": {"sequence": 3}, "resources": {"gpusPerNode": 6}, "training": {"globalBatchSize": 64}},
        "spec.parallelism.sequence",
        "it has to divide the model's 32 attention heads",
    ),
    "key-value heads that it does not divide": (
        {"parallelism": {"sequence": 16}, "resources": {"nodes": 2, "gpusPerNode": 8}},
        "spec.parallelism.sequence",
        "it has to divide the model's 8 key-value heads",
    ),
    "a world that it does not divide": (
        {"parallelism": {"sequence": 4}, "resources": {"gpusPerNode": 6}},
        "spec.resources.processesPerNode",
        "have to be a multiple of parallelism.sequence = 4",
    ),
    "a compiled model": (
        {"parallelism": {"sequence": 2}, "training": {"arguments": {"torch_compile": True}}},
        "spec.training.arguments.torch_compile",
        "rows are divided among processes (parallelism.sequence)",
    ),
    "Liger's kernels": (
        {"parallelism": {"sequence": 2}, "training": {"arguments": {"use_liger_kernel": True}}},
        "spec.training.arguments.use_liger_kernel",
        "rows are divided among processes (parallelism.sequence)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_with_field_rule_and_way_out(case: str):
    spec, path, rule = REFUSED[case]
    with pytest.raises(PlanRefused) as caught:
        planned(spec)
    problem = next(each for each in caught.value.problems if each.path == path)
    assert rule in problem.rule
    assert problem.way_out


def test_degrees_of_tensor_parallelism_are_not_chosen_beside_slices():
    narrow = parse_hardware("gpu=H100,memory=8Gi,gpus=8,cpu=64,hostMemory=32Gi")
    with pytest.raises(PlanRefused, match=r"does not go together with spec\.parallelism\.tensor"):
        planned({"parallelism": {"sequence": 2}}, narrow)
