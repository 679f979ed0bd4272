"""Inputs of the memory model in tests."""

from __future__ import annotations

from typing import Any

from finetune_contract.choices import AdapterMethod
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.plan.memory.memory_workload import Workload


def model_of(parameters: int) -> ModelFacts:
    return ModelFacts(
        model_type="gpt2",
        parameters=parameters,
        embedding_parameters=parameters // 100,
        block_parameters=parameters // 50,
        layers=48,
        hidden_size=1024,
        intermediate_size=4096,
        attention_heads=16,
        vocabulary_size=50257,
        parameter_bytes=2 * parameters,
    )


def work(model: ModelFacts, strategy: Strategy, **changes: Any) -> Workload:
    values: dict[str, Any] = {
        "model": model,
        "task": "text-classification",
        "strategy": strategy,
        "precision": "bf16",
        "optimizer": "adamw",
        "world": World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=1),
        "micro_batch": 1,
        "length": 128,
    }
    return Workload(**(values | changes))


def adapter_of(method: AdapterMethod = "lora", **changes: Any) -> Adapter:
    return Adapter(**({"method": method, "rank": 4, "alpha": 8, "dropout": 0.0} | changes))
