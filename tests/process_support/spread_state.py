"""Processes that continue from a checkpoint of a decoder, train a little, and write the next one, with the whole state
beside it as torch gathers it: `tests/trainer/test_shard_files.py` compares them. Needs no task.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

STEPS = 2


def go_on(training: dict[str, Any], model: str, before: str | None, out: str, gathered: bool) -> None:
    """Continue from the checkpoint `before` (None: from the model), and write `loaded.pt`, `saved.pt` and `step-2` into
    `out`. `gathered`: in the form of earlier releases.
    """
    import torch
    from torch import distributed
    from transformers import AutoModelForCausalLM

    from finetune_contract.trainer_job import Training
    from finetune_trainer.checkpoint.checkpoints import verify
    from finetune_trainer.core.distributed import connect, current, disconnect
    from finetune_trainer.strategies.select import strategy_for
    from finetune_trainer.strategies.strategy_protocol import Placed

    plan, world, out_folder = Training.model_validate(training), current(), Path(out)
    connect(world, "cpu", 1, plan.strategy.name)
    strategy = strategy_for(plan, None, out_folder)
    decoder = AutoModelForCausalLM.from_pretrained(model)
    if before is not None:
        for parameter in decoder.parameters():
            torch.nn.init.constant_(parameter, 0.5)  # nothing of it may be left
    decoder = strategy.prepare_model(decoder)
    wrapped: Any = decoder
    if plan.strategy.name == "ddp" and plan.strategy.model_ranks == 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(decoder)
    groups = [
        {"params": [each for each in decoder.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in decoder.parameters() if each.dim() == 1], "weight_decay": 0.0},
    ]
    own = strategy.replica_step
    optimizer = torch.optim.AdamW(groups if own is None else own.stepped_groups(groups), lr=1e-2)
    placed = Placed(decoder, wrapped, optimizer, world.size, torch.device("cpu"))
    if before is not None:
        strategy.load(placed, verify(Path(before)).part("state"))
    _write_whole(placed, out_folder / "loaded.pt")
    for step in range(STEPS):
        ids = torch.arange(8).reshape(2, 4) + step
        wrapped(input_ids=ids, labels=ids).loss.backward()
        if own is not None:
            own.average_gradients(decoder)
        optimizer.step()
        if own is not None:
            own.share_weights()
        decoder.zero_grad()
    _save(strategy, placed, plan.strategy.checkpoint_form, out_folder, gathered=gathered)
    _write_whole(placed, out_folder / "saved.pt")
    if distributed.is_initialized():
        disconnect()


def _save(strategy: Any, placed: Any, form: str, folder: Path, *, gathered: bool) -> None:
    """Write `step-2` as a run does."""
    import torch

    from finetune_trainer.checkpoint.checkpoints import CheckpointStore
    from finetune_trainer.checkpoint.sharded_hashing import ShardedHashing, work_of_rank_0
    from finetune_trainer.core.distributed import barrier, current, patiently_gathered

    rank, size = (current().rank, placed.world_size)
    hashing = ShardedHashing(size)
    store = CheckpointStore(folder, keep=1, hashing=hashing)
    if rank == 0:
        store.begin(STEPS)
        (store.partial(STEPS) / "state").mkdir()
    barrier()
    state = store.partial(STEPS) / "state"
    if gathered:
        weights, optimizer = _whole(placed)
        groups = [
            {**group, "params": [name for name, each in _parameters(placed).items() if _is_in(each, group["params"])]}
            for group in placed.optimizer.param_groups
        ]
        if rank == 0:
            torch.save(weights, state / "weights.pt")
            torch.save({"state": optimizer, "param_groups": groups}, state / "optimizer.pt")
        barrier()
        written = {}
    else:
        written = strategy.save(placed, state)
    hashing.wrote(patiently_gathered({f"state/{name}": entry for name, entry in written.items()}))
    with work_of_rank_0(rank, hashing) as main:
        if main:
            store.commit(STEPS, strategy=form, world_size=size, job={}, first_of_run=True)
    barrier()


def _is_in(parameter: Any, parameters: list[Any]) -> bool:
    return any(parameter is each for each in parameters)


def _parameters(placed: Any) -> dict[str, Any]:
    return dict(placed.model.named_parameters())


def _whole(placed: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return weights and optimizer state, gathered by torch. Every process must call it."""

    from finetune_trainer.core.distributed import patiently_gathered
    from finetune_trainer.strategies.parallel.sharded_tensors import whole_of

    def full(value: Any) -> Any:
        return whole_of(value).detach().clone()

    weights = {name: full(value) for name, value in placed.model.state_dict().items()}
    state = {
        name: {key: full(value) for key, value in placed.optimizer.state[parameter].items()}
        for name, parameter in _parameters(placed).items()
        if parameter in placed.optimizer.state
    }
    # Each replica may have the state of some weights alone.
    return weights, {name: entries for each in patiently_gathered(state) for name, entries in each.items()}


def _write_whole(placed: Any, path: Path) -> None:
    import torch

    whole = _whole(placed)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(whole, path)


def train_killed(arguments: list[str], rank: int, writes: int) -> None:
    """Run the train stage; the process of that rank is killed amid writing its part of that checkpoint, from 1."""
    from finetune_trainer.__main__ import main
    from finetune_trainer.strategies import shard_files

    write, calls = shard_files.write_tensors, []

    def write_half(path: Path, forms: Any, tensors: Any) -> Any:
        calls.append(path)
        if os.environ["RANK"] != str(rank) or len(calls) < writes:
            return write(path, forms, tensors)

        def until_the_second() -> Any:
            for number, tensor in enumerate(tensors):
                if number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield tensor

        return write(path, forms, until_the_second())

    shard_files.write_tensors = write_half
    main(arguments)
