"""Groups of weights that FSDP gathers together."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from finetune_trainer.strategies.fsdp import transformer_blocks

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
