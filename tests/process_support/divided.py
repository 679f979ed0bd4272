"""Shards a model with ZeRO-3 and records each process's peak memory, which `tests/trainer/test_divided.py` compares
with the model's size. Needs no task.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Bytes of the live tensors of one dtype that were created under this mode."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the tensors that `function` creates."""
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.dtype == self._dtype:
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._forget, size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, size: int) -> None:
        self.bytes -= size


def divide(model: str, settings: dict[str, Any], config: dict[str, Any], out: str) -> None:
    """Shard in bf16, which none of the model's tensors has at first: only tensors on, or for, a device are counted.
    Ranks other than 0 start with other weights.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM

    from finetune_contract.trainer_job import Strategy
    from finetune_trainer.strategies.deepspeed import DeepSpeed
    from finetune_trainer.strategies.strategy_protocol import Placed

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    counts = [parameter.numel() for parameter in whole.parameters()]
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(float(rank == 0))
    settings_of_strategy = Strategy(name="deepspeed", zero_stage=3, **settings)
    strategy = DeepSpeed(settings_of_strategy, "bf16", size, config, Path(out))
    with Alive(torch.bfloat16) as alive:
        strategy.prepare_model(whole)
        dividing = alive.peak
        optimizer = torch.optim.AdamW(whole.parameters())
        engine, *_ = deepspeed.initialize(model=whole, config=config, optimizer=optimizer)
    placed = Placed(whole, engine, engine.optimizer, size, torch.device("cpu"))
    strategy.assert_in_effect(placed)
    strategy.write_weights(placed, Path(out) / "weights.safetensors")
    sizes = {
        "whole": 2 * sum(counts),
        "largest": 2 * max(counts),
        "share": sum(2 * -(-count // size) for count in counts),
        "dividing": dividing,
        "starting": alive.peak,
    }
    (Path(out) / f"bytes-{rank}.json").write_text(json.dumps(sizes), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
