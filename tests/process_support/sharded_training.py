"""One rank of a short FSDP training on the CPU, by the trainer's step, as a process of a fork server."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from process_support.stage_forks import fork

STEPS = 6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


@dataclass(frozen=True)
class ShardedRank:
    """Settings of a rank to start; it writes the figures of each step to `figures`."""

    rank: int
    size: int
    precision: str
    folder: Path
    optimizer: str = "adamw_torch"
    scale: float | None = None
    """Factor of the loss in the first step; None: torch's."""
    backend: str | None = None
    """Backend of torch.compile; None: nothing is compiled."""
    rounds_gathered: bool = True
    """False: weights of layers in fp8 are gathered in bf16."""

    @property
    def figures(self) -> Path:
        return self.folder / f"{self._name}-{self.rank}.json"

    @property
    def store(self) -> Path:
        """Return the file by which the ranks find each other."""
        return self.folder / f"store-{self._name}"

    @property
    def _name(self) -> str:
        return f"{self.precision}-{self.backend}-{self.rounds_gathered}"

    def start(self) -> BaseProcess:
        """Start the rank."""
        return fork(_run, self)


def rows_of(rank: int) -> Any:
    """Return the token ids of a rank's rows, which are those of every step."""
    import torch

    return torch.randint(0, SIZES["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(rank))


def _run(one: ShardedRank) -> None:
    numbers = {"RANK": one.rank, "WORLD_SIZE": one.size, "LOCAL_RANK": one.rank, "LOCAL_WORLD_SIZE": one.size}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import pytest
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

    from finetune_contract.trainer_job import Strategy, World
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.models import float8
    from finetune_trainer.strategies.fsdp import FullySharded
    from finetune_trainer.training.engine import engine_of
    from finetune_trainer.training.loop_parts import LoopModel
    from finetune_trainer.training.step import OptimizerStep, StepBatch

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(one.store), one.size)
    torch.distributed.init_process_group("gloo", store=store, rank=one.rank, world_size=one.size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    in_float8 = float8.convert(model) if one.precision == "fp8" else None
    if not one.rounds_gathered:
        float8.gather_in_float8 = lambda module, ranks: None
    world = {"nodes": 1, "processes_per_node": one.size, "device": "cpu", "threads_per_process": 1}
    strategy = FullySharded(Strategy(name="fsdp"), one.precision, World.model_validate(world))  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        "use_cpu": True, "max_steps": STEPS, "learning_rate": 1e-3, "optim": one.optimizer, "report_to": [],
    }  # fmt: skip
    if one.backend is not None:
        arguments |= {"torch_compile": True, "torch_compile_backend": one.backend}
    args = TrainingArguments(str(one.folder), **arguments, **strategy.arguments())
    engine = engine_of(model, args, strategy, adapted=False)
    scaler = engine.accelerator.scaler
    if one.scale is not None:
        scaler._init_scale = one.scale
    ids = rows_of(one.rank)
    batch = {"input_ids": ids, "labels": ids}
    engine.start(lambda model: model(**batch).loss)
    with nullcontext() if one.rounds_gathered else pytest.raises(StageError, match="fp8 are gathered in bf16"):
        engine.assert_in_effect("adamw")
    steps = []
    sent = _count_gathered_bytes()
    step = OptimizerStep(engine, LoopModel(model, strategy, in_float8=in_float8), lambda part: None)
    for _ in range(STEPS):
        sent.clear()
        done = step.take([StepBatch(batch, [ids.numel()])], ids.numel() * one.size)
        if in_float8 is not None:
            in_float8.assert_in_effect(model)
        gathered = sum(sent)
        weight: Any = next(model.parameters())
        scale = None if scaler is None else scaler.get_scale()
        state = {"loss": float(done.loss), "norm": float(done.grad_norm), "scale": scale, "gathered": gathered}
        steps.append(state | {"weight": float(weight.full_tensor().float().abs().sum())})
    one.figures.write_text(json.dumps(steps), encoding="utf-8")
    torch.distributed.destroy_process_group()


def _count_gathered_bytes() -> list[int]:
    """Return a list that gets the bytes which this rank gives to each gather of weights."""
    import torch

    sent: list[int] = []
    gather = torch.distributed.all_gather_single

    def counted(output_tensor: Any, input_tensor: Any, **settings: Any) -> Any:
        sent.append(input_tensor.numel() * input_tensor.element_size())
        return gather(output_tensor, input_tensor, **settings)

    torch.distributed.all_gather_single = counted
    return sent
