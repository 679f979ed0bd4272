"""Lets decoders of many families read slices of rows, for `tests/trainer/test_sequence_parallel.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "phi3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "smollm3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def decoder(family: str, **config: Any) -> Any:
    """Return a random model of 2 layers and 4 heads, with half as many key-value heads where the family has those."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    if family == "gpt2":
        del shape["num_key_value_heads"], shape["intermediate_size"]
    torch.manual_seed(3)
    whole = AutoConfig.for_model(family, **{**shape, **OF_FAMILY.get(family, {}), **config})
    model = AutoModelForCausalLM.from_config(whole)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough for each visible token to show in the output
                parameter.mul_(8)
    return model


def prepared(families: list[str], training: dict[str, Any], out: str) -> None:
    """Write to `out`, on rank 0, each family's reason for refusing to split rows; empty where it can split them."""
    import torch

    from finetune_contract.trainer_job import Training
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.core.library_patches import patches_removed
    from finetune_trainer.strategies.select import strategy_for

    torch.distributed.init_process_group("gloo")
    found = {}
    for family in families:
        strategy = strategy_for(Training.model_validate(training), None, Path("unused"))
        try:
            with patches_removed():
                strategy.prepare_model(decoder(family))
            found[family] = ""
        except StageError as error:
            found[family] = error.reason
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()
