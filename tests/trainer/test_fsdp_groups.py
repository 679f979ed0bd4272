"""Groups of weights that FSDP gathers together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from finetune_trainer.strategies.fsdp_groups import groups_of, transformer_blocks
from process_support import sharded_training
from suite_plugins.patience import patient

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("auto", "tied", "groups"),
    [
        pytest.param(AutoModelForMaskedLM, True, ["BertLayer", "BertLayer"], id="the head shares their weights"),
        pytest.param(
            AutoModelForMaskedLM, False, ["BertEmbeddings", "BertLayer", "BertLayer"], id="the head has its own"
        ),
        pytest.param(
            AutoModelForSequenceClassification, True, ["BertEmbeddings", "BertLayer", "BertLayer"], id="a classifier"
        ),
    ],
)
def test_embeddings_are_a_group_unless_head_shares_their_weights(auto: Any, tied: bool, groups: list[str]):
    model = auto.from_config(AutoConfig.for_model("bert", **SIZES, tie_word_embeddings=tied))
    if tied and auto is AutoModelForMaskedLM:
        # transformers ties no weights while another thread of the process loads a model.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert [type(block).__name__ for block in transformer_blocks(model)] == groups


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
def test_groups_are_found_again_after_fully_shard_has_changed_classes(auto: Any):
    model = auto.from_config(AutoConfig.for_model("bert", **SIZES))
    groups = transformer_blocks(model)
    for each in groups:
        each.__class__ = type(f"FSDP{type(each).__name__}", (type(each),), {})
    assert transformer_blocks(model) == groups != []


@pytest.mark.parametrize(
    ("auto", "family", "config", "ends"),
    [
        pytest.param(AutoModelForCausalLM, "llama", {}, [("Embedding", False), ("Linear", True)], id="decoder"),
        pytest.param(AutoModelForCausalLM, "llama", {"tie_word_embeddings": True}, [], id="tied weights"),
        pytest.param(AutoModelForSequenceClassification, "llama", {}, [("Embedding", False)], id="classifier"),
        pytest.param(AutoModelForSeq2SeqLM, "t5", {"d_model": 32, "num_layers": 2}, [], id="shared by two stacks"),
        pytest.param(
            AutoModelForMaskedLM, "deberta-v2", {"tie_word_embeddings": False}, [], id="head that may read embeddings"
        ),
    ],
)
def test_embedding_and_head_are_groups_of_their_own(auto: Any, family: str, config: dict[str, Any], ends: Any):
    model = auto.from_config(AutoConfig.for_model(family, **{**SIZES, **config}))
    if config.get("tie_word_embeddings"):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    blocks = {id(block) for block in transformer_blocks(model)}
    others = [group for group in groups_of(model, releases=True) if id(group.module) not in blocks]
    assert [(type(group.module).__name__, group.gathers_for_backward) for group in others] == ends
    assert [group.releases for group in others] == [True, False][: len(ends)], "the head's backward pass follows"


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["", "compiled"])
def test_groups_train_as_one_process(backend: str | None, tmp_path: Path):
    ranks = [sharded_training.ShardedRank(rank, 2, "fp32", tmp_path, backend=backend) for rank in range(2)]
    processes = [one.start() for one in ranks]
    for process in processes:
        process.join(patient(120))
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (json.loads(one.figures.read_text()) for one in ranks)
    losses, norms, weights = _alone()
    assert [(one["loss"] + other["loss"]) / 2 for one, other in zip(first, second, strict=True)] == pytest.approx(
        losses, rel=1e-5
    )
    assert [each["norm"] for each in first] == pytest.approx(norms, rel=1e-4)
    assert [each["weight"] for each in second] == pytest.approx(weights, rel=1e-5)


def _alone() -> tuple[list[float], list[float], list[float]]:
    """Return losses, gradient norms and sums of the first weight of the same training in one process."""
    steps = sharded_training.STEPS
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sharded_training.SIZES))
    assert len([each for each in groups_of(model, releases=True) if isinstance(each.module, torch.nn.Embedding)]) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses, norms, weights = [], [], []
    for _ in range(steps):
        total = 0.0
        for rank in range(2):
            ids = sharded_training.rows_of(rank)
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        weights.append(next(model.parameters()).abs().sum().item())
    return losses, norms, weights
