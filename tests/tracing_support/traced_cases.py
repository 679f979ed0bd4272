"""Traced runs: each strategy at the width of Llama 3.1 8B, as one process in the middle of its world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from finetune_contract.choices import OptimizerName, Precision, Task
from finetune_contract.trainer_job import (
    Adapter,
    Batch,
    CheckpointSchedule,
    Pipeline,
    Strategy,
    Training,
    World,
)

WIDTH: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "pad_token_id": 0,
}
"""Fields of the config of Llama 3.1 8B, without its number of layers."""
BLOCK_WEIGHTS = (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096
"""Weights of a block's linear layers: queries and output, keys and values, and the three of the feed-forward part."""
TOKENS = 8192
"""Tokens of each row; a micro-batch has one row."""
STEPS = 2
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Case:
    """One process of a training."""

    name: str
    strategy: Strategy
    size: int = 8
    """Number of processes."""
    rank: int = 3
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    layers: int = 2
    accumulation: int = 2
    """Micro-batches of a step."""
    adapter: Adapter | None = None
    config: Mapping[str, Any] = field(default_factory=lambda: WIDTH, hash=False)
    """Fields of the model's config, with `model_type`, without its number of layers."""
    layers_field: str = "num_hidden_layers"
    task: Task = "text-generation"
    rows: int = 1
    """Rows of a micro-batch."""
    tokens: int = TOKENS
    """Tokens of the longest row."""
    packed: int = 0
    """Rows of a pack; 0: rows are not packed."""
    held: bool = False
    """True if no formula or constant of the plan was fitted to this trace."""

    @property
    def model_config(self) -> dict[str, Any]:
        """Return the model's whole config."""
        return {**self.config, self.layers_field: self.layers}

    @property
    def training(self) -> Training:
        """Settings as decided by a plan."""
        data_parallel = self.size // self.strategy.replica_ranks
        rows = self.accumulation * data_parallel * self.rows
        nodes = -(-self.size // GPUS_PER_NODE)
        return Training(
            max_steps=STEPS,
            steps_per_epoch=STEPS,
            learning_rate=1e-5,
            scheduler="linear",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            optimizer=self.optimizer,
            seed=1,
            label_smoothing=0.0,
            adapter=self.adapter,
            precision=self.precision,
            strategy=self.strategy,
            batch=Batch(
                global_batch_size=rows,
                micro_batch_size=self.rows,
                gradient_accumulation=self.accumulation,
                data_parallel=data_parallel,
            ),
            world=World(nodes=nodes, processes_per_node=self.size // nodes, device="cuda", threads_per_process=1),
            checkpoints=CheckpointSchedule(every_steps=1000, keep=1),
        )

    def of_world(self, size: int) -> Case:
        """Return the case for a process in the middle of a world of `size`."""
        return replace(self, name=f"{self.name}, {size} processes", size=size, rank=size // 2 - 1)


def _adapter(method: str) -> Adapter:
    return Adapter(method=method, rank=16, alpha=32, dropout=0.0)  # type: ignore[arg-type]


def _zero(stage: int) -> Strategy:
    return Strategy(name="deepspeed", zero_stage=stage)  # type: ignore[arg-type]


CASES = (
    Case("single", Strategy(name="single"), size=1, rank=0),
    Case("ddp", Strategy(name="ddp")),
    Case("fsdp", Strategy(name="fsdp", activation_checkpointing="full")),
    Case("ZeRO-1", _zero(1)),
    Case("ZeRO-2", _zero(2)),
    Case("ZeRO-3", _zero(3)),
    Case("tensor", Strategy(name="ddp", tensor=4)),
    # A stage in the middle: neither the embeddings nor the head.
    Case(
        "pipeline", Strategy(name="ddp", pipeline=Pipeline(degree=4, micro_batches=4)), layers=4, rank=2, accumulation=4
    ),
    Case(
        "fsdp and pipeline",
        Strategy(name="fsdp", pipeline=Pipeline(degree=2, micro_batches=4)),
        layers=4,
        rank=2,
        accumulation=8,
    ),
    Case("sequence", Strategy(name="fsdp", sequence=4)),
    Case("LoRA", Strategy(name="ddp"), adapter=_adapter("lora")),
    Case("QLoRA", Strategy(name="ddp"), adapter=_adapter("qlora")),
    Case("fp8", Strategy(name="fsdp"), precision="fp8"),
    Case("fp16", Strategy(name="ddp"), precision="fp16"),
    Case("fp16 with fsdp", Strategy(name="fsdp"), precision="fp16"),
    Case("fp16 with SGD", Strategy(name="ddp"), precision="fp16", optimizer="sgd"),
    Case("packs", Strategy(name="single"), size=1, rank=0, packed=8),
    Case("activations in host memory", Strategy(name="single", offload_activations="cpu"), size=1, rank=0),
)
LARGER_WORLDS = (16, 64)


def named(name: str) -> Case:
    """Return the case of that name, including those of larger worlds."""
    larger = (case.of_world(size) for case in CASES if case.size > 1 for size in LARGER_WORLDS)
    return next(case for case in (*CASES, *larger) if case.name == name)
