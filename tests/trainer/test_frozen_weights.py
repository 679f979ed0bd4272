"""Frozen weights of adapters in 16 bits: the same losses and gradients as in fp32, to the last bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from finetune_contract.choices import Precision
from finetune_contract.trainer_job import Adapter, Strategy
from finetune_operator.planning.architectures import model_facts
from finetune_operator.planning.memory import Workload
from finetune_trainer import adapters
from finetune_trainer.failures import StageError
from tracing_support.traced_cases import Case

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 211,
    "pad_token_id": 0,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 211,
    "n_positions": 32,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "num_heads": 4,
    "d_ff": 96,
    "num_layers": 2,
    "vocab_size": 211,
    "pad_token_id": 0,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {"llama": LLAMA, "tied llama": TIED, "gpt2": GPT2, "t5 with a classifier": T5}


def adapted(
    config: dict[str, Any], method: str, strategy: str = "single", precision: Precision = "bf16"
) -> tuple[Any, adapters.Adapted]:
    """Return an adapted model with drawn weights, and its adapter."""
    adapter = Adapter(method=method, rank=4, alpha=8, dropout=0.0)  # type: ignore[arg-type]
    asked = {"strategy": Strategy(name=strategy), "adapter": adapter, "precision": precision}  # type: ignore[arg-type]
    case = Case("frozen weights", size=1 if strategy == "single" else 2, rank=0, **asked)  # type: ignore[arg-type]
    torch.manual_seed(3)
    auto = AutoModelForSequenceClassification if config is T5 else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.config.use_cache = False
    job: Any = SimpleNamespace(
        model=SimpleNamespace(uri="file:///model", revision=None), seed=1, training=case.training
    )
    made = adapters.adapt(model, adapter, job)
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # else nothing of the adapter shows
            torch.nn.init.normal_(weight, std=0.1)
    return model, made


def three_steps(model: Any, classes: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for three steps; return the losses and the trained weights."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    ids = torch.arange(48).reshape(4, 12) * 5 % 200 + 2
    ids[:, -1] = 1  # T5 reads a row's end
    labels = torch.tensor([0, 1, 1, 0]) if classes else ids
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: weight.detach().clone() for name, weight in trained.items()}


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_frozen_weights_in_fp32(name: str, method: str, monkeypatch):
    config = MODELS[name]
    held, made = adapted(config, method)
    monkeypatch.setattr(adapters, "_computing_in_16_bits", lambda *_: ())
    plain, _ = adapted(config, method)
    if method == "lora":
        assert made.narrow
    losses, weights = three_steps(held, config is T5)
    expected, their_weights = three_steps(plain, config is T5)
    assert losses == expected
    assert losses[0] != losses[2]
    for name_of, weight in weights.items():
        assert torch.equal(weight, their_weights[name_of]), name_of


@pytest.mark.parametrize(("name", "head"), [("llama", True), ("tied llama", False), ("gpt2", False)])
def test_linear_layers_are_in_16_bits_as_the_plan_counts(name: str, head: bool):
    model, made = adapted(MODELS[name], "lora")
    made.assert_in_effect(model)
    assert ("lm_head" in made.narrow) == head
    narrow = {each for each, weight in model.named_parameters() if weight.dtype is torch.bfloat16}
    assert narrow
    frozen = {each for each, weight in model.named_parameters() if not weight.requires_grad}
    assert narrow <= frozen
    assert not any("norm" in each or "embed" in each or "wte" in each or "lora" in each for each in narrow)
    facts = model_facts(model.config.to_dict(), "text-generation")
    case = Case("counted", Strategy(name="single"), size=1, rank=0)
    work = Workload(facts, "text-generation", case.strategy, "bf16", "adamw", case.training.world, 1, 8)
    counted = Workload(**{**vars(work), "adapter": made.adapter}).narrow
    weights = sum(weight.numel() for each, weight in model.named_parameters() if each in narrow and weight.ndim == 2)
    assert counted == weights


@pytest.mark.parametrize(("strategy", "precision"), [("single", "fp32"), ("fsdp", "bf16")])
def test_other_strategies_and_fp32_hold_all_weights_in_fp32(strategy: str, precision: Precision):
    model, made = adapted(LLAMA, "lora", strategy, precision)
    assert made.narrow == ()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_dora_reads_the_weights_beside_it_in_fp32():
    model, made = adapted(LLAMA, "dora")
    assert made.narrow == ("lm_head",)
    made.assert_in_effect(model)


def test_trainer_refuses_frozen_weights_in_another_type_than_planned():
    model, made = adapted(LLAMA, "lora")
    model.model.layers[0].self_attn.q_proj.base_layer.float()
    with pytest.raises(StageError, match="1 frozen layers are not in 16 bits"):
        made.assert_in_effect(model)
