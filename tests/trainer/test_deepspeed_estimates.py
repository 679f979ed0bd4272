"""The memory model compared with DeepSpeed's own estimators."""

from __future__ import annotations

import os

import pytest

from each_case import each_case
from finetune_contract.trainer_job import Strategy, World
from finetune_operator.plan.memory.exchange_memory import gathered_bytes
from finetune_operator.plan.memory.state_memory import SUB_GROUP_ELEMENTS, ModelStates, model_states
from finetune_trainer.strategies.deepspeed_import import import_deepspeed
from planning_support.workloads import model_of, work

SIZES = [124_647_170, 355_361_794, 1_543_714_304, 6_738_415_616, 30_000_000_000, 175_000_000_000]
GRID = [(parameters, gpus, nodes) for parameters in SIZES for gpus in (1, 2, 4, 8) for nodes in (1, 2, 16)]


@pytest.fixture(autouse=True)
def deepspeed_without_mlflow() -> None:
    """Import DeepSpeed as the trainer does."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_deepspeed()


def deepspeed_states(parameters: int, stage: int, offload: bool, gpus: int, nodes: int) -> ModelStates:
    strategy = Strategy.model_validate(
        {"name": "deepspeed", "zero_stage": stage, "offload_optimizer": "cpu" if offload else "none"}
    )
    world = World(nodes=nodes, processes_per_node=gpus, device="cuda", threads_per_process=1)
    return model_states(work(model_of(parameters), strategy, world=world))


def on_device(states: ModelStates) -> int:
    return states.parameters + states.gradients + states.optimizer


def close(ours: int, theirs: int) -> bool:
    """Return whether both are equal up to rounding: each of our terms is cut to a whole byte by itself."""
    return abs(ours - theirs) <= 8


@each_case("parameters, gpus, nodes", GRID)
def test_zero_2_needs_the_memory_of_the_deepspeed_estimate(parameters: int, gpus: int, nodes: int):
    from deepspeed.runtime.zero import stage_1_and_2 as zero2

    for offload in (False, True):
        host, device = zero2.estimate_zero2_model_states_mem_needs(parameters, gpus, nodes, offload, 1.0)
        ours = deepspeed_states(parameters, 2, offload, gpus, nodes)
        assert close(on_device(ours), device)
        # Their host formula counts the loading of all nodes on each node, and does not divide offloaded state by nodes.
        assert ours.host <= host
        # It counts whole models in fp32 in each process while they are read; ours stay in their files.
        assert ours.host == (0 if not offload else pytest.approx(16 * parameters / nodes, abs=8 * gpus))
        if nodes == 1:
            assert close(max(ours.host, 4 * parameters * gpus), host)


@each_case("parameters, gpus, nodes", GRID)
def test_zero_3_needs_the_deepspeed_estimate_and_its_omitted_part(parameters: int, gpus: int, nodes: int):
    from deepspeed.runtime.zero import stage3 as zero3

    ranks, largest = gpus * nodes, parameters // 50
    _, device, layer = zero3.estimate_zero3_model_states_mem_needs(parameters, largest, gpus, nodes, False, False)
    assert gathered_bytes(largest, 2) == layer
    # DeepSpeed: 18 bytes = gradients 2 + fp32 gradients 4 + master copy 4 + moments 8, without the 16-bit weights. Ours
    # counts the weights (2), and fp32 gradients of one sub-group only, as stage 3 steps by sub-group.
    shard = parameters / ranks
    difference = 2 * shard - 4 * max(0.0, shard - SUB_GROUP_ELEMENTS)
    assert close(on_device(deepspeed_states(parameters, 3, False, gpus, nodes)), int(device - layer + difference))

    # DeepSpeed's zero_init corresponds to weights that stay in their files.
    for width in (4, 2):
        host, device, layer = zero3.estimate_zero3_model_states_mem_needs(
            parameters, largest, gpus, nodes, True, False, True, 1.0
        )
        model = model_of(parameters).model_copy(update={"parameter_bytes": width * parameters})
        world = World(nodes=nodes, processes_per_node=gpus, device="cuda", threads_per_process=1)
        optimizer = Strategy(name="deepspeed", zero_stage=3, offload_optimizer="cpu")
        ours = model_states(work(model, optimizer, world=world))
        assert close(on_device(ours), device - layer)
        assert close(ours.host, host)

        host, device, layer = zero3.estimate_zero3_model_states_mem_needs(
            parameters, largest, gpus, nodes, True, True, True, 1.0
        )
        both = optimizer.model_copy(update={"offload_parameters": "cpu"})
        ours = model_states(work(model, both, world=world))
        assert (on_device(ours), device) == (0, layer)
        assert close(ours.host, host)
