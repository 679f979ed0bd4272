"""Trains a tiny language model over replicas whose rows have different lengths, with evaluations between the steps, for
`tests/trainer/test_sharded_stages.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from process_support.tied_stages import ADAM, model_of

STEPS, PASSES, MICRO_BATCHES, REPLICAS = 3, 2, 2, 2
CLIP = 0.5


def rows_of(step: int, replica: int) -> list[list[dict[str, Any]]]:
    """Return the micro-batches of a step by pass: the rows of replica 0 have one length, those of replica 1 a new one
    in each pass.
    """
    import torch

    random = torch.Generator().manual_seed(100 * step + replica)
    made = []
    for number in range(PASSES):
        length = 6 if replica == 0 else 6 + PASSES * step + number
        rows = [torch.randint(3, 41, (2, length), generator=random) for _ in range(MICRO_BATCHES)]
        made.append([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in rows])
    return made


def share(model: Any, batch: dict[str, Any]) -> Any:
    """Return a micro-batch's share of the loss of a step of one replica."""
    return model(**batch).loss / (PASSES * MICRO_BATCHES)


def evaluated(model: Any) -> float:
    """Return the loss of a row that is no training row."""
    import torch

    ids = torch.arange(3, 11).unsqueeze(0)
    model.train(False)
    with torch.no_grad():
        loss: float = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.item()
    model.train()
    return loss


def in_one_process(family: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Train with the rows of all replicas; return the norms, the losses of the evaluations, and the weights."""
    import torch

    model = model_of(family)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    norms, losses = [], []
    for step in range(STEPS):
        for replica in range(REPLICAS):
            for batch in (each for rows in rows_of(step, replica) for each in rows):
                (share(model, batch) / REPLICAS).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(evaluated(model))
    return norms, losses, model.state_dict()


def in_replicas(family: str, training: dict[str, Any], out: str) -> None:
    """Train the same over several processes, as `training` has it; rank 0 writes the result to `out`."""
    import torch

    from finetune_contract.trainer_job import Training
    from finetune_trainer.strategies.select import strategy_for
    from finetune_trainer.strategies.strategy_protocol import Placed

    torch.distributed.init_process_group("gloo")
    strategy: Any = strategy_for(Training.model_validate(training), None, Path(out))
    model = strategy.prepare_model(model_of(family))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    placed = Placed(model, model, optimizer, torch.distributed.get_world_size(), torch.device("cpu"))
    strategy.assert_in_effect(placed)
    replica = strategy.shape.data_rank(torch.distributed.get_rank())
    norms, losses = [], []
    for step in range(STEPS):
        for rows in rows_of(step, replica):
            strategy.pipeline.step(rows, share)
        strategy.average_gradients(model)
        norms.append(strategy.clip_gradients(model, CLIP).item())
        optimizer.step()
        model.zero_grad()
        losses.append(evaluated(model))
    strategy.write_weights(placed, Path(out) / "weights.safetensors")
    if torch.distributed.get_rank() == 0:
        torch.save((norms, losses), Path(out) / "result.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
