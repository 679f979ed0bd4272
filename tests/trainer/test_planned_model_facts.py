"""Facts of models by formula, compared with the models that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.trainer_job import TrainerJob
from finetune_operator.plan.models.architectures import ARCHITECTURES, model_facts

# Shapes with a different number in every place, so that a formula that mixes two of them up is found.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "electra": {"embedding_size": 48, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "roberta": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "xlm-roberta": {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1},
    "camembert": {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1},
    "longformer": {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1},
    "distilbert": {"dim": 96, "n_heads": 6, "hidden_dim": 160, "n_layers": 3},
    "deberta-v2": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "modernbert": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 160},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 256},
    "gemma": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "head_dim": 24,
        "vocab_size": 1000,
    },
    "llama": {"num_hidden_layers": 2, "num_key_value_heads": 8, "vocab_size": 1000},
    "mistral": {"num_hidden_layers": 2, "vocab_size": 1000},
    "mixtral": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "vocab_size": 1000,
    },
    "phi3": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "vocab_size": 1000,
        "pad_token_id": 0,
    },
    "qwen2": {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 1000},
    "qwen3": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "head_dim": 32,
        "vocab_size": 1000,
    },
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "moe_intermediate_size": 40,
        "num_local_experts": 7,
        "num_experts_per_tok": 4,
        "head_dim": 32,
        "vocab_size": 1000,
    },
    "t5": {"d_model": 64, "d_ff": 160, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 24},
}
TASKS = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-lm": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "preference-tuning": "AutoModelForCausalLM",
    "summarization": "AutoModelForSeq2SeqLM",
}
SUPPORTED = {
    **dict.fromkeys(CONFIGS, ("text-classification", "token-classification", "question-answering", "masked-lm")),
    **dict.fromkeys(
        ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
        ("text-classification", "token-classification", "question-answering", "text-generation", "preference-tuning"),
    ),
    **dict.fromkeys(
        ("gemma", "phi3"), ("text-classification", "token-classification", "text-generation", "preference-tuning")
    ),
    "t5": ("text-classification", "question-answering", "summarization"),
}


def test_every_architecture_with_a_formula_is_compared_with_transformers():
    assert tuple(sorted(CONFIGS)) == ARCHITECTURES


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_parameter_counts_equal_those_of_transformers(model_type):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    measured, computed = {}, {}
    for task in SUPPORTED[model_type]:
        labels = 2 if task == "question-answering" else 5
        config.num_labels = labels
        with torch.device("meta"):
            model = getattr(transformers, TASKS[task]).from_config(config)
        measured[task] = sum(parameter.numel() for parameter in model.parameters())
        computed[task] = model_facts(config.to_dict(), task, labels).parameters
    assert computed == measured


def test_the_parts_of_a_bert_are_those_of_its_modules():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, intermediate_size=160)
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    facts = model_facts(config.to_dict())
    embeddings = model.bert.embeddings
    assert facts.block_parameters == sum(p.numel() for p in model.bert.encoder.layer[0].parameters())
    assert facts.embedding_parameters == (
        embeddings.word_embeddings.weight.numel() + embeddings.position_embeddings.weight.numel()
    )
    assert (facts.layers, facts.hidden_size, facts.intermediate_size, facts.attention_heads) == (2, 96, 160, 6)
    assert (facts.vocabulary_size, facts.max_positions, facts.parameter_bytes) == (30522, 512, 4 * facts.parameters)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_counted_as_they_are_measured(model_type, tmp_path):
    measured_facts = pytest.importorskip(
        "finetune_trainer.report.measured_facts", reason="the trainer is not installed"
    )
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    config.save_pretrained(tmp_path)
    job = TrainerJob.model_validate({"name": "a", "task": "text-generation", "model": {"uri": f"file://{tmp_path}"}})
    measured, computed = measured_facts.model_facts(job), model_facts(config.to_dict(), "text-generation")
    names = ("parameters", "idle_parameters", "intermediate_size", "block_parameters", "linear_layers")
    assert {name: getattr(computed, name) for name in names} == {name: getattr(measured, name) for name in names}
    assert computed.idle_parameters > 0
