"""A generating model is spread like any other: rows that share sequences, a loss over tokens, and tied embeddings; and
a loss against its initial state. Losses and weights are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_contract.choices import Stage, Task
from finetune_contract.trainer_job import Preference, Strategy
from suite_plugins.selection import covering
from trainer_support import grids
from trainer_support.tasks import WORDS, task_job, training_of, write_decoder, write_lines

WRITING, PREFERRING = "text-generation", "preference-tuning"
SPREAD: dict[str, tuple[Task, str, dict[str, Any]]] = {
    "ddp": (WRITING, "llama", {"name": "ddp"}),
    "fsdp, tied": (WRITING, "qwen3", {"name": "fsdp"}),
    # Few steps, so that ZeRO-3's prefetches are still under way when the weights are gathered.
    "deepspeed-zero3": (WRITING, "llama", {"name": "deepspeed", "zero_stage": 3}),
    "tensor, tied": (WRITING, "qwen3", {"name": "ddp", "tensor": 2}),
    "tensor x pipeline, tied": (
        WRITING,
        "gpt2",
        {"name": "ddp", "tensor": 2, "pipeline": {"degree": 2, "micro_batches": 4, "schedule": "1f1b"}},
    ),
    "pipeline, tied": (
        WRITING,
        "gpt2",
        {"name": "ddp", "pipeline": {"degree": 2, "micro_batches": 4, "schedule": "1f1b"}},
    ),
    "preferences by ddp": (PREFERRING, "llama", {"name": "ddp"}),
    "preferences by fsdp, tied": (PREFERRING, "qwen3", {"name": "fsdp"}),
    "preferences by fsdp grad-op": (PREFERRING, "llama", {"name": "fsdp", "fsdp_sharding": "grad-op"}),
    "preferences by deepspeed-zero1": (PREFERRING, "llama", {"name": "deepspeed", "zero_stage": 1}),
    "preferences by deepspeed-zero2": (PREFERRING, "llama", {"name": "deepspeed", "zero_stage": 2}),
    "preferences by deepspeed-zero3, tied": (PREFERRING, "qwen3", {"name": "deepspeed", "zero_stage": 3}),
    "preferences by tensor, tied": (PREFERRING, "qwen3", {"name": "ddp", "tensor": 2}),
    "preferences by tensor of GPT-2": (PREFERRING, "gpt2", {"name": "ddp", "tensor": 2}),
    "preferences recomputed": (PREFERRING, "llama", {"name": "ddp", "activation_checkpointing": "full"}),
}


def axes(case: tuple[Task, str, dict[str, Any]]) -> dict[str, Any]:
    """Neighbours: each engine with the tasks, these with the layouts of the model; each family with its layouts."""
    task, family, settings = case
    strategy = Strategy.model_validate(settings)
    return {
        "sharding": strategy.fsdp_sharding,
        "engine": grids.engine(strategy),
        "task": task,
        "layout": grids.layout(strategy),
        "family": family,
        "checkpointing": strategy.activation_checkpointing,
    }


def cost(case: tuple[Task, str, dict[str, Any]]) -> float:
    strategy = Strategy.model_validate(case[2])
    return grids.seconds(strategy, max(2, strategy.model_ranks))


def text_at(at: int, count: int) -> str:
    return " ".join(WORDS[(at * 7 + each) % len(WORDS)] for each in range(count))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: task and family -> their run in one process."""
    made: dict[tuple[Task, str], Any] = {}
    data = tmp_path_factory.mktemp("rows")
    for split, count in {"train": 96, "validation": 8}.items():
        rows = [
            {
                "text": text_at(at, 3 + at % 17),
                "prompt": text_at(at, 1 + at % 5),
                "chosen": text_at(at + 3, 1 + at % 7),
                "rejected": text_at(at + 5, 1 + at % 11),
            }
            for at in range(count)
        ]
        write_lines(data / f"{split}.jsonl", rows)

    def run(task: Task, family: str, bench: Any) -> Any:
        if (task, family) not in made:
            job = task_job(
                task,
                write_decoder(tmp_path_factory.mktemp("model") / family, family),
                data,
                ["text"] if task == WRITING else ["prompt", "chosen", "rejected"],
                # Adam divides by the size of a gradient: one of mere rounding would count as any other.
                training={**training_of(steps=5, batch=8, micro=8), "arguments": {"adam_epsilon": 1e-5}},
                preparation={"max_length": 64, "packing": task == WRITING},
                evaluation=None,
                predict=None,
            )
            here = type(bench)(tmp_path_factory.mktemp("alone"), job)
            assert here.run(Stage.PREPARE).exit_code == 0
            made[task, family] = here
            here.train_here()
        return made[task, family]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", covering("models that write", SPREAD, axes, cost))
def test_losses_and_weights_are_those_of_one_process(
    case: str, alone: Any, bench: Any, tmp_path: Path, compared: Callable[..., tuple[float, float]]
):
    task, family, settings = SPREAD[case]
    one = alone(task, family, bench)
    strategy = Strategy.model_validate(settings)
    here = one.at(tmp_path / "spread")
    processes, micro = max(2, strategy.model_ranks), 2
    replicas = processes // strategy.model_ranks
    batch = {
        "global_batch_size": 8,
        "micro_batch_size": micro,
        "gradient_accumulation": 8 // (micro * replicas),
        "data_parallel": replicas,
    }
    world = one.job.training.world.model_copy(update={"processes_per_node": processes, "threads_per_process": 1})
    here = here.with_training(strategy=strategy, batch=type(one.job.training.batch)(**batch), world=world)
    config = here.deepspeed_config() if strategy.name == "deepspeed" else None
    ended = here.run(processes=processes, deepspeed=config)
    assert ended.exit_code == 0, ended.output
    assert ended.reports[0].metrics["train"]["strategy"] == strategy.label
    assert len(here.losses()) == 5
    assert max(compared(here, one)) <= 1e-5
    AutoModelForCausalLM.from_pretrained(here.paths.model)


@pytest.mark.slow
def test_resume_under_another_strategy_keeps_the_reference(alone: Any, bench: Any, tmp_path: Path):
    one = alone(PREFERRING, "llama", bench)
    begun = one.at(tmp_path / "spread").spread("ddp", 2, micro=2)
    begun = begun.with_training(checkpoints=one.job.training.checkpoints.model_copy(update={"every_steps": 3}))
    ended = begun.run(processes=2)
    assert ended.exit_code == 0, ended.output
    (reference,) = begun.paths.checkpoints.glob("reference-*.npz")
    written = reference.stat().st_mtime_ns
    begun.paths.history.unlink()
    went_on = begun.spread("fsdp", 2, micro=2)
    ended = went_on.run(processes=2)
    assert ended.exit_code == 0, ended.output
    assert went_on.losses() == pytest.approx(one.losses()[3:], rel=1e-4)
    assert reference.stat().st_mtime_ns == written
    for name, weight in one.weights().items():
        torch.testing.assert_close(went_on.weights()[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
def test_reference_values_are_not_rounded_to_the_precision_of_the_model(alone: Any, bench: Any, tmp_path: Path):
    """Log-likelihoods of whole answers have steps of a quarter and more in bf16; the untrained model equals the
    reference up to the rounding of its own forward pass.
    """
    one = alone(PREFERRING, "llama", bench).at(tmp_path / "spread")
    here = one.spread("deepspeed", 2, micro=2, zero_stage=1).with_training(precision="bf16", max_steps=2)
    here = type(one)(here.workspace, here.job.model_copy(update={"preference": Preference(beta=1.0)}))
    ended = here.run(processes=2, deepspeed=here.deepspeed_config())
    assert ended.exit_code == 0, ended.output
    assert here.losses()[0] == pytest.approx(math.log(2), rel=2e-3)
    assert here.losses()[1] != pytest.approx(math.log(2), rel=2e-3)
