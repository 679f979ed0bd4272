"""Splits a decoder, loaded from its files, among processes, measures the anonymous memory of each, and trains a
little: `tests/trainer/test_split_memory.py` compares weights as stored with weights that are all converted before.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

STEPS = 2
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs; its threads' stacks and libraries' data are in it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def loaded(model: str, *, converted: bool) -> Any:
    """Return the decoder as stored, or with all weights in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from finetune_trainer.models.stored_weights import as_stored, in_training_type

    decoder = as_stored(lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    if converted:
        in_training_type(decoder.parameters())
    return decoder


def prepared(model: str, training: dict[str, Any], converted: bool, out: str) -> None:
    """Write to `out`, as `rank.json`, the growth of the anonymous memory while the model is loaded and split: `peak`,
    seen after each operation of torch, and `kept`.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from finetune_contract.trainer_job import Training
    from finetune_trainer.core.distributed import connect, current, disconnect
    from finetune_trainer.strategies.select import strategy_for

    plan, world = Training.model_validate(training), current()
    connect(world, "cpu", 1, plan.strategy.name)
    loaded(model, converted=False)(input_ids=_ids(3, 8))  # imports, caches and the pool of buffers for products
    strategy = strategy_for(plan, None, Path(out))
    # Freed memory goes back to the system at once: glibc would keep pieces of 32 MiB.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)
    before = peak = anonymous_bytes()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            made = func(*args, **(kwargs or {}))
            peak = max(peak, anonymous_bytes())
            return made

    with Watching():
        decoder = strategy.prepare_model(loaded(model, converted=converted))
    figures = {"peak": peak - before, "kept": anonymous_bytes() - before}
    assert decoder is not None
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    disconnect()


def trained(model: str, training: dict[str, Any], converted: bool, out: str) -> None:
    """Train a few steps; write the losses of each rank to `rank.json` and all weights to `weights.safetensors`."""
    import torch

    from finetune_contract.trainer_job import Training
    from finetune_trainer.core.distributed import connect, current, disconnect
    from finetune_trainer.strategies.select import strategy_for
    from finetune_trainer.strategies.strategy_protocol import Placed

    plan, world = Training.model_validate(training), current()
    connect(world, "cpu", 1, plan.strategy.name)
    strategy: Any = strategy_for(plan, None, Path(out))
    decoder = strategy.prepare_model(loaded(model, converted=converted))
    assert all(parameter.dtype == torch.float32 for parameter in decoder.parameters())
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    placed = Placed(decoder, decoder, optimizer, world.size, torch.device("cpu"))
    losses = []
    for step in range(STEPS):
        batches = [{"input_ids": ids, "labels": ids} for ids in (_ids(step, 8), _ids(step + 7, 8))]
        if plan.strategy.sequence > 1:
            batches = [strategy.shape.token_shard(world.rank).of(batch) for batch in batches]
        if (own := strategy.replica_step) is not None and own.pipeline is not None:
            losses.append(float(own.pipeline.step(batches, lambda whole, batch: whole(**batch).loss / 2)))
        else:
            for batch in batches:
                loss = decoder(**batch, use_cache=False).loss / 2
                loss.backward()
                losses.append(float(loss.detach()))
        if own is not None:
            own.average_gradients(decoder)
        optimizer.step()
        decoder.zero_grad()
    strategy.write_weights(placed, Path(out) / "weights.safetensors")
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(losses), encoding="utf-8")
    disconnect()


def _ids(seed: int, tokens: int) -> Any:
    import torch

    return torch.randint(3, 40, (2, tokens), generator=torch.Generator().manual_seed(seed))
