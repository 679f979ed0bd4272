"""The plan's memory compared with published figures of fine-tuning on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.plan.hardware.gpu_table import GPU_MODELS
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.process_memory import estimate
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.known_models import known_config
from finetune_operator.plan.types.plan_types import MemoryEstimate
from planning_support.published_memory import BOUND, GIB, RUNS, MemoryRun

LLAMA_65B = {
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 32000,
}


def planned(config: dict[str, Any], method: str, length: int, whole_logits: bool = True) -> MemoryEstimate:
    """Return the plan's memory of an adapter of rank 64 on one GPU, with batches of one row and recomputation. The
    published trainings compute their losses from all logits.
    """
    sizes = {"model_type": "llama", "vocab_size": 151936, "max_position_embeddings": 8192, **config}
    return estimate(
        Workload(
            model=model_facts(sizes, "text-generation"),
            task="text-generation",
            strategy=Strategy(name="single", activation_checkpointing="full"),
            precision="bf16",
            optimizer="adamw",
            world=World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=1),
            micro_batch=1,
            length=length,
            adapter=Adapter(method=method, rank=64, alpha=16, dropout=0.05),  # type: ignore[arg-type]
            whole_logits=whole_logits,
        ),
        80 * GIB,
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_planned_memory_is_the_published_one_or_differs_for_a_reason(run: MemoryRun):
    assert run.ratio == pytest.approx(1, abs=run.bound)
    assert bool(run.why) is (run.bound > BOUND)


def test_most_published_runs_are_planned_within_the_bound():
    assert sum(abs(run.ratio - 1) <= BOUND for run in RUNS) >= 22
    packed = [run for run in RUNS if "QLoRA" in run.name]
    assert len(packed) == 12
    assert sum(abs(run.ratio - 1) <= BOUND for run in packed) >= 9


def test_qlora_of_65_billion_weights_fits_a_card_of_48_gb():
    """Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), abstract: one GPU of 48 GB."""
    card = next(gpu for gpu in GPU_MODELS if "A6000" in gpu.name)
    assert planned(LLAMA_65B, "qlora", 512).total_bytes <= card.memory_mib << 20


@pytest.mark.parametrize(
    ("processes", "offload", "length", "card"),
    [
        # Answer.AI's fsdp_qlora (2024), "Finetune Llama-2 70B on Dual 24GB GPUs": with offload, 512 tokens.
        pytest.param(2, "cpu", 512, 24, id="two cards of 24 GB"),
        # P. Schmid, "Efficiently fine-tune Llama 3 with PyTorch FSDP and Q-Lora" (2024).
        pytest.param(2, "none", 512, 40, id="two cards of 40 GB"),
        pytest.param(4, "cpu", 3072, 24, id="four cards of 24 GB with long rows"),
    ],
)
def test_qlora_of_70_billion_weights_fits_the_gpus_that_others_used(
    processes: int, offload: Any, length: int, card: int
):
    model = model_facts(known_config("llama-3.1-70b"), "text-generation")
    strategy = Strategy(
        name="fsdp", activation_checkpointing="full", offload_optimizer=offload, offload_parameters=offload
    )
    made = estimate(
        Workload(
            model=model,
            task="text-generation",
            strategy=strategy,
            precision="bf16",
            optimizer="adamw",
            world=World(nodes=1, processes_per_node=processes, device="cuda", threads_per_process=1),
            micro_batch=1,
            length=length,
            adapter=Adapter(method="qlora", rank=64, alpha=16, dropout=0.0),
        ),
        card * GIB,
    )
    assert made.total_bytes <= 0.97 * made.capacity_bytes


def test_fsdp_of_175_billion_weights_fits_128_gpus_of_80_gb():
    """States are 16 bytes a weight over 128 processes, 22 GB; gathered weights and gradients are most of the rest."""
    config = {"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96, "vocab_size": 50257}
    model = model_facts({**config, "n_positions": 2048}, "text-generation")
    made = estimate(
        Workload(
            model=model,
            task="text-generation",
            strategy=Strategy(name="fsdp", activation_checkpointing="full"),
            precision="bf16",
            optimizer="adamw",
            world=World(nodes=16, processes_per_node=8, device="cuda", threads_per_process=1),
            micro_batch=1,
            length=2048,
        ),
        80 * GIB,
    )
    assert 16 * model.parameters / 128 < made.total_bytes < 60 * GIB
