"""Traced runs for the plan's memory: families, strategies, checkpointing and lengths."""

from __future__ import annotations

from typing import Any

from finetune_contract.trainer_job import Adapter, Strategy
from tracing_support.traced_cases import WIDTH, Case

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_head": 25,
    "vocab_size": 50257,
    "n_positions": 1024,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
"""Width of GPT-2 XL."""
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
"""Width of BERT large."""
DEBERTA: dict[str, Any] = {
    **BERT,
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": -1,
}
"""Width of DeBERTa-v3 large."""
QWEN3: dict[str, Any] = {
    **WIDTH,
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
"""Width of Qwen3 1.7B."""


def _strategy(name: str, **settings: Any) -> Strategy:
    return Strategy(name=name, **settings)  # type: ignore[arg-type]


_SINGLE, _DDP, _FSDP = _strategy("single"), _strategy("ddp"), _strategy("fsdp")


def _zero(stage: int, **settings: Any) -> Strategy:
    return _strategy("deepspeed", zero_stage=stage, **settings)


def _recomputing(strategy: Strategy, mode: str) -> Strategy:
    return strategy.model_copy(update={"activation_checkpointing": mode})


def _lora(rank: int = 16, method: str = "lora") -> Adapter:
    return Adapter(method=method, rank=rank, alpha=32, dropout=0.0)  # type: ignore[arg-type]


def _alone(name: str, **settings: Any) -> Case:
    return Case(name, **{"strategy": _SINGLE, "size": 1, "rank": 0, **settings})


def _gpt2(name: str, **settings: Any) -> Case:
    return Case(name, **{"config": GPT2, "layers_field": "n_layer", "tokens": 1024, "layers": 8, **settings})


def _bert(name: str, **settings: Any) -> Case:
    return Case(
        name,
        **{"config": BERT, "task": "masked-lm", "tokens": 512, "layers": 12, "rows": 16, **settings},
    )


MEMORY_CASES = (
    _alone("llama single", layers=4, tokens=2048),
    _alone("llama single 8192", layers=4),
    _alone("llama single full", layers=4, strategy=_recomputing(_SINGLE, "full")),
    _alone("llama single selective", layers=4, tokens=4096, strategy=_recomputing(_SINGLE, "selective")),
    _alone("llama single fp32", layers=2, tokens=2048, precision="fp32"),
    _alone("llama single one micro-batch", layers=2, tokens=512, accumulation=1),
    Case("llama ddp", _DDP, layers=2, tokens=2048),
    Case("llama fsdp", _FSDP, layers=4, tokens=2048),
    Case("llama fsdp 8192", _FSDP, layers=4),
    Case("llama fsdp full", _recomputing(_FSDP, "full"), layers=4),
    Case("llama fsdp selective", _recomputing(_FSDP, "selective"), layers=4),
    Case("llama fsdp short", _FSDP, layers=4, tokens=512),
    Case("llama fsdp 64", _recomputing(_FSDP, "full"), layers=4, tokens=4096, size=64, rank=31),
    Case("llama fsdp grad-op", _strategy("fsdp", fsdp_sharding="grad-op"), layers=4, tokens=2048),
    Case("llama ZeRO-1", _zero(1), layers=4, tokens=2048),
    Case("llama ZeRO-2", _zero(2), layers=4, tokens=2048),
    Case("llama ZeRO-2 full", _recomputing(_zero(2), "full"), layers=4),
    Case("llama ZeRO-3", _zero(3), layers=4, tokens=2048),
    Case("llama ZeRO-3 full", _recomputing(_zero(3), "full"), layers=4),
    Case("llama LoRA", _DDP, layers=4, tokens=2048, adapter=_lora()),
    Case("llama LoRA full", _recomputing(_DDP, "full"), layers=4, adapter=_lora(64)),
    Case("llama LoRA fsdp", _recomputing(_FSDP, "full"), layers=4, tokens=4096, adapter=_lora(64)),
    _alone("llama LoRA single short", layers=4, tokens=512, adapter=_lora(64)),
    _alone("llama rows", layers=2, tokens=2048, rows=4),
    Case("llama ddp one micro-batch", _DDP, layers=2, tokens=512, accumulation=1),
    Case("llama fsdp one micro-batch", _FSDP, layers=4, tokens=4096, accumulation=1),
    Case("llama fsdp fp32", _FSDP, layers=4, tokens=1024, precision="fp32"),
    _alone("qwen3 single", config=QWEN3, layers=4, tokens=4096),
    Case("qwen3 fsdp", _FSDP, config=QWEN3, layers=4, tokens=4096),
    _gpt2("gpt2 single", strategy=_SINGLE, size=1, rank=0, rows=4),
    _gpt2("gpt2 ddp full", strategy=_recomputing(_DDP, "full"), rows=8),
    _gpt2("gpt2 fsdp", strategy=_FSDP, rows=8),
    _gpt2("gpt2 ZeRO-2", strategy=_zero(2), rows=4),
    _bert("bert single", strategy=_SINGLE, size=1, rank=0),
    _bert("bert ddp", strategy=_DDP, rows=32, tokens=128),
    _bert("bert ddp 256", strategy=_DDP, rows=32, tokens=256),
    _bert("bert fsdp full", strategy=_recomputing(_FSDP, "full"), rows=64, task="text-classification"),
    _bert("bert ZeRO-1 classes", strategy=_zero(1), task="text-classification"),
    _bert("deberta single", config=DEBERTA, strategy=_SINGLE, size=1, rank=0, layers=6, rows=8),
    _bert("deberta long", config=DEBERTA, strategy=_SINGLE, size=1, rank=0, layers=6, rows=1, tokens=2048),
    _bert("deberta ddp full", config=DEBERTA, strategy=_recomputing(_DDP, "full"), layers=6, rows=8),
)
