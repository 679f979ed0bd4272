"""Trains a tiny language model with tied embeddings, in one process or in stages, for the comparisons of
`tests/trainer/test_model_parallel.py`. Needs no task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEPS = 4
ADAM: dict[str, float] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
"""Options of AdamW; with its default eps of 1e-8, gradients of mere rounding error would cause a full step."""
MICRO_BATCHES = 4


def model_of(family: str) -> Any:
    """Return a model of 4 layers with tied embeddings, no dropout, and a weight that nothing uses."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    # An odd vocabulary, as GPT-2's: two processes have shards of unequal size.
    shape = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"intermediate_size": 32, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    config = AutoConfig.for_model(family, tie_word_embeddings=True, **shape, **drops)
    model = AutoModelForCausalLM.from_config(config)
    model.spare = torch.nn.Linear(3, 3)
    return model


def batches() -> list[list[dict[str, Any]]]:
    """Return the micro-batches of each step; their length differs from step to step."""
    import torch

    random = torch.Generator().manual_seed(1)
    made = []
    for step in range(STEPS):
        rows = [torch.randint(3, 41, (2, 6 + step), generator=random) for _ in range(MICRO_BATCHES)]
        made.append([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in rows])
    return made


def share(model: Any, batch: dict[str, Any]) -> Any:
    """Return a micro-batch's share of the loss of a step."""
    return model(**batch).loss / MICRO_BATCHES


def alone(family: str, clip: float) -> tuple[dict[str, Any], list[float], list[float]]:
    """Train in one process; return the weights, the losses and the gradient norms."""
    import torch

    model = model_of(family)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in batches():
        total = 0.0
        for batch in step:
            loss = share(model, batch)
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model.state_dict(), losses, norms


def in_stages(family: str, training: dict[str, Any], clip: float, out: str) -> None:
    """Train the same in stages over several processes, as `training` has it; rank 0 writes the result to `out`."""
    import torch

    from finetune_contract.trainer_job import Training
    from finetune_trainer.strategies.parallel import gradient_reducer
    from finetune_trainer.strategies.select import strategy_for
    from finetune_trainer.strategies.strategy_protocol import Placed

    torch.distributed.init_process_group("gloo")
    gradient_reducer.ALONE_ELEMENTS = 64  # matrices of this model are reduced by themselves, as those of large ones
    strategy: Any = strategy_for(Training.model_validate(training), None, Path(out))
    model = strategy.prepare_model(model_of(family))
    optimizer = torch.optim.AdamW(strategy.stepped_groups([{"params": list(model.parameters())}]), **ADAM)
    placed = Placed(model, model, optimizer, torch.distributed.get_world_size(), torch.device("cpu"))
    strategy.assert_in_effect(placed)
    losses, norms = [], []
    tokens: set[int] = set()
    sliced = family == "llama" and strategy.shape.tensor > 1 and strategy.pipeline is None
    if sliced:
        model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, given: tokens.add(given[0].shape[1]))
    for step in batches():
        if strategy.pipeline is not None:
            losses.append(strategy.pipeline.step(step, share).item())
        else:
            parts = [share(model, batch) for batch in step]
            for part in parts[:-1]:
                with strategy.accumulating(placed):
                    part.backward()
            parts[-1].backward()
            losses.append(sum(part.item() for part in parts))
        strategy.average_gradients(model)
        norms.append(strategy.clip_gradients(model, clip).item())
        optimizer.step()
        strategy.share_weights()
        model.zero_grad()
    assert strategy.reducer is None or strategy.reducer.early > 0, "the last step reduces during its backward pass"
    # Rows have 6 to 9 tokens, of which each of two processes has a half in norms.
    assert not sliced or max(tokens) <= 5, tokens
    strategy.write_weights(placed, Path(out) / "weights.safetensors")
    folder = Path(out) / "checkpoint"
    folder.mkdir(exist_ok=True)
    strategy.save(placed, folder)
    if torch.distributed.get_rank() == 0:
        torch.save((losses, norms), Path(out) / "result.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
