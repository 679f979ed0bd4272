"""Traced runs of further families, widths and lengths, most of which no formula of the plan was fitted to."""

from __future__ import annotations

from typing import Any

from finetune_contract.trainer_job import Adapter, Pipeline, Strategy
from tracing_support.memory_cases import BERT, DEBERTA, GPT2, QWEN3
from tracing_support.traced_cases import WIDTH, Case

_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_1B: dict[str, Any] = {
    **WIDTH,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
"""Width of Llama 3.2 1B."""
LLAMA_70B: dict[str, Any] = {**WIDTH, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
"""Width of Llama 3.1 70B."""
QWEN3_8B: dict[str, Any] = {
    **WIDTH,
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MISTRAL: dict[str, Any] = {
    **WIDTH,
    "model_type": "mistral",
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "head_dim": 128,
}
"""Width of Mistral 7B v0.3."""
QWEN2: dict[str, Any] = {
    **WIDTH,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
"""Width of Qwen2.5 7B."""
QWEN2_SMALL: dict[str, Any] = {
    **QWEN2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Width of Qwen2.5 0.5B."""
PHI: dict[str, Any] = {
    **_ENDS,
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 32,
    "vocab_size": 51200,
    "max_position_embeddings": 4096,
}
"""Width of Phi-2."""
PHI3: dict[str, Any] = {
    **_ENDS,
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": 8192,
}
"""Width of Phi-3 mini."""
GEMMA: dict[str, Any] = {
    **_ENDS,
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
"""Width of Gemma 2B."""
GEMMA2: dict[str, Any] = {
    **GEMMA,
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
"""Width of Gemma 2 2B."""
GEMMA3: dict[str, Any] = {
    **GEMMA,
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
}
"""Width of Gemma 3 1B."""
MIXTRAL: dict[str, Any] = {
    **WIDTH,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
"""Width of Mixtral 8x7B."""
QWEN3_MOE: dict[str, Any] = {
    **WIDTH,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
"""Width of Qwen3 30B-A3B."""
OLMO2: dict[str, Any] = {
    **_ENDS,
    "model_type": "olmo2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
}
"""Width of OLMo 2 1B."""
NEOX: dict[str, Any] = {
    **_ENDS,
    "model_type": "gpt_neox",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
}
"""Width of Pythia 1.4B."""
OPT: dict[str, Any] = {
    **_ENDS,
    "model_type": "opt",
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_attention_heads": 32,
    "vocab_size": 50272,
    "word_embed_proj_dim": 2048,
    "max_position_embeddings": 2048,
}
"""Width of OPT 1.3B."""
STARCODER2: dict[str, Any] = {
    **_ENDS,
    "model_type": "starcoder2",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "sliding_window": None,
    "max_position_embeddings": 16384,
}
"""Width of StarCoder2 3B."""
ROBERTA: dict[str, Any] = {
    **BERT,
    "model_type": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
"""Width of RoBERTa large."""
XLM_ROBERTA: dict[str, Any] = {
    **ROBERTA,
    "model_type": "xlm-roberta",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "vocab_size": 250002,
}
"""Width of XLM-R base."""
ELECTRA: dict[str, Any] = {**BERT, "model_type": "electra", "embedding_size": 1024}
"""Width of ELECTRA large."""
DISTILBERT: dict[str, Any] = {
    "model_type": "distilbert",
    "dim": 768,
    "hidden_dim": 3072,
    "n_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "num_attention_heads": 16,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
}
"""Width of ModernBERT large."""
DEBERTA_BASE: dict[str, Any] = {
    **DEBERTA,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_heads": 12,
    "vocab_size": 32128,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
"""Width of T5 base."""
FLAN_T5: dict[str, Any] = {
    **T5,
    "d_model": 1024,
    "d_ff": 2816,
    "num_heads": 16,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
"""Width of flan-t5 large."""
GRANITE: dict[str, Any] = {**WIDTH, "model_type": "granite", "vocab_size": 49155, "intermediate_size": 12800}
"""Width of Granite 3 8B."""
SMOLLM3: dict[str, Any] = {
    **LLAMA_1B,
    "model_type": "smollm3",
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
STABLELM: dict[str, Any] = {
    **_ENDS,
    "model_type": "stablelm",
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
}
"""Width of StableLM 3B."""
FALCON: dict[str, Any] = {
    **_ENDS,
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
}
"""Width of Falcon 7B."""
BLOOM: dict[str, Any] = {**_ENDS, "model_type": "bloom", "hidden_size": 2048, "n_head": 16, "vocab_size": 250880}
"""Width of BLOOM 1.7B."""
GPTJ: dict[str, Any] = {
    **_ENDS,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "rotary_dim": 64,
    "n_inner": 16384,
    "vocab_size": 50400,
}
"""Width of GPT-J 6B."""
GEMMA2_9B: dict[str, Any] = {
    **GEMMA2,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
GEMMA_7B: dict[str, Any] = {
    **GEMMA,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
MIXTRAL_22B: dict[str, Any] = {
    **MIXTRAL,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "vocab_size": 32768,
}
QWEN3_32B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
}
PHI4: dict[str, Any] = {
    **PHI3,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
}
XLM_ROBERTA_LARGE: dict[str, Any] = {
    **XLM_ROBERTA,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
ALBERT: dict[str, Any] = {
    **BERT,
    "model_type": "albert",
    "vocab_size": 30000,
    "embedding_size": 128,
    "num_hidden_groups": 1,
}
"""Width of ALBERT large."""
T5_LARGE: dict[str, Any] = {**T5, "d_model": 1024, "d_ff": 4096, "num_heads": 16}
MT5: dict[str, Any] = {**FLAN_T5, "model_type": "mt5", "vocab_size": 250112}
"""Width of mT5 large."""
BART: dict[str, Any] = {
    "model_type": "bart",
    "d_model": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 4,
    "decoder_layers": 4,
}
"""Width of BART large."""


LONGFORMER: dict[str, Any] = {
    **_ENDS,
    "model_type": "longformer",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 50265,
    "max_position_embeddings": 4098,
    "type_vocab_size": 1,
    "attention_window": 512,
    "sep_token_id": 2,
}
"""Width of Longformer base, with the window of 512 tokens."""


def _strategy(name: str, checkpointing: str = "none", **settings: Any) -> Strategy:
    return Strategy(name=name, activation_checkpointing=checkpointing, **settings)  # type: ignore[arg-type]


def _single(checkpointing: str = "none") -> dict[str, Any]:
    return {"strategy": _strategy("single", checkpointing), "size": 1, "rank": 0}


def _ddp(checkpointing: str = "none", **settings: Any) -> dict[str, Any]:
    return {"strategy": _strategy("ddp", checkpointing, **settings)}


def _fsdp(checkpointing: str = "none", **settings: Any) -> dict[str, Any]:
    return {"strategy": _strategy("fsdp", checkpointing, **settings)}


def _zero(stage: int, checkpointing: str = "none") -> dict[str, Any]:
    return {"strategy": _strategy("deepspeed", checkpointing, zero_stage=stage)}


def _pipeline(
    degree: int,
    rank: int,
    checkpointing: str = "none",
    *,
    tensor: int = 1,
    schedule: str = "1f1b",
    passes: int = 8,
    replicas: str = "ddp",
    zero_stage: int | None = None,
) -> dict[str, Any]:
    made = Pipeline(degree=degree, micro_batches=passes, schedule=schedule)  # type: ignore[arg-type]
    strategy = _strategy(replicas, checkpointing, pipeline=made, tensor=tensor, zero_stage=zero_stage)
    return {"strategy": strategy, "rank": rank, "accumulation": passes}


def _lora(rank: int = 16, method: str = "lora", dropout: float = 0.0) -> dict[str, Any]:
    return {"adapter": Adapter(method=method, rank=rank, alpha=32, dropout=dropout)}  # type: ignore[arg-type]


def _decoder(name: str, config: dict[str, Any], *parts: dict[str, Any], **settings: Any) -> Case:
    return _case(name, config, *parts, **{"layers": 4, "tokens": 2048, **settings})


def _encoder(name: str, config: dict[str, Any], *parts: dict[str, Any], **settings: Any) -> Case:
    kind = {"task": "masked-lm", "layers": 6, "rows": 16, "tokens": 512}
    return _case(name, config, *parts, **{**kind, **settings})


def _seq2seq(name: str, config: dict[str, Any], *parts: dict[str, Any], **settings: Any) -> Case:
    kind = {"task": "summarization", "layers": 4, "layers_field": "num_layers", "rows": 8, "tokens": 512}
    return _case(name, config, *parts, **{**kind, **settings})


def _case(name: str, config: dict[str, Any], *parts: dict[str, Any], **settings: Any) -> Case:
    merged: dict[str, Any] = {"config": config, "held": True}
    for part in (*parts, settings):
        merged |= part
    return Case(name, **merged)


HELD_CASES = (
    # Other widths and lengths of families that have fitted traces.
    _decoder("llama 1B single", LLAMA_1B, _single(), tokens=4096),
    _decoder("llama 1B ddp selective", LLAMA_1B, _ddp("selective"), layers=8, tokens=4096),
    _decoder("llama 1B ddp 16k full", LLAMA_1B, _ddp("full"), layers=8, tokens=16384),
    _decoder("llama 1B single 128", LLAMA_1B, _single(), tokens=128, rows=16),
    _decoder("llama 1B fsdp 32k full", LLAMA_1B, _fsdp("full"), layers=8, tokens=32768, held=False),
    _decoder("llama 1B sequence 32k", LLAMA_1B, _fsdp("full", sequence=8), layers=8, tokens=32768),
    _decoder("llama 70B fsdp full", LLAMA_70B, _fsdp("full"), size=64, rank=31, tokens=8192),
    _decoder("llama 70B ZeRO-3 full", LLAMA_70B, _zero(3, "full"), size=64, rank=31, tokens=4096),
    _decoder("llama 70B tensor 8", LLAMA_70B, _ddp(tensor=8), layers=2, tokens=4096),
    _decoder("llama 70B LoRA fsdp full", LLAMA_70B, _fsdp("full"), _lora(), tokens=4096),
    _decoder("llama ZeRO-1 selective 16k", WIDTH, _zero(1, "selective"), tokens=16384),
    _decoder("llama pipeline first", WIDTH, _pipeline(4, 0), layers=8, held=False),
    _decoder("llama pipeline full", WIDTH, _pipeline(4, 0, "full"), layers=8, held=False),
    _decoder("llama pipeline last", WIDTH, _pipeline(4, 7), layers=8, held=False),
    _decoder("llama gpipe first", WIDTH, _pipeline(2, 0, schedule="gpipe", passes=4), layers=4, held=False),
    _decoder("llama pipeline tensor", WIDTH, _pipeline(2, 1, tensor=4, passes=4), layers=4, held=False),
    _decoder("llama pipeline ZeRO-1", WIDTH, _pipeline(2, 0, "full", passes=4, zero_stage=1), layers=8),
    _decoder("llama tensor ZeRO-1", WIDTH, _ddp(tensor=2, zero_stage=1), layers=4),
    _decoder("llama 70B tensor 8 ZeRO-1", LLAMA_70B, _ddp("full", tensor=8, zero_stage=1), size=64, rank=31),
    _decoder("llama fsdp tensor 2", WIDTH, _fsdp(tensor=2), layers=2, tokens=4096),
    _decoder("llama fsdp tensor 4 full", WIDTH, _fsdp("full", tensor=4), layers=8, tokens=8192),
    _decoder("llama fsdp tensor grad-op", WIDTH, _fsdp(tensor=2, fsdp_sharding="grad-op"), layers=4, tokens=2048),
    _decoder(
        "llama 70B fsdp tensor 8 full", LLAMA_70B, _fsdp("full", tensor=8), size=64, rank=31, tokens=8192, held=False
    ),
    _decoder("llama fsdp pipeline first", WIDTH, _pipeline(2, 0, "full", passes=4, replicas="fsdp"), layers=4),
    _decoder("llama fsdp pipeline last", WIDTH, _pipeline(2, 7, passes=4, replicas="fsdp"), layers=4),
    _decoder(
        "llama 70B fsdp tensor pipeline last",
        LLAMA_70B,
        _pipeline(2, 63, "full", tensor=8, passes=4, replicas="fsdp"),
        size=64,
        layers=4,
        tokens=4096,
    ),
    _decoder("llama LoRA dropout", WIDTH, _ddp(), _lora(16, dropout=0.1)),
    _decoder("llama DoRA", WIDTH, _ddp(), _lora(16, "dora")),
    _decoder("qwen3 8B ddp", QWEN3_8B, _ddp(), layers=2),
    _decoder("qwen3 8B ZeRO-2 16k full", QWEN3_8B, _zero(2, "full"), tokens=16384),
    _decoder("qwen3 ZeRO-3 selective", QWEN3, _zero(3, "selective"), layers=8, rows=2, tokens=4096),
    # Decoders of other families.
    _decoder("mistral single", MISTRAL, _single()),
    _decoder("mistral fsdp full", MISTRAL, _fsdp("full"), tokens=16384),
    _decoder("mistral ZeRO-1", MISTRAL, _zero(1), tokens=4096),
    _decoder("mistral ZeRO-3 selective", MISTRAL, _zero(3, "selective"), tokens=8192),
    _decoder("mistral LoRA 32k", MISTRAL, _single("full"), _lora(32), tokens=32768),
    _decoder("qwen2 fsdp", QWEN2, _fsdp(), tokens=4096),
    _decoder("qwen2 ZeRO-2", QWEN2, _zero(2), tokens=2048),
    _decoder("qwen2 small single", QWEN2_SMALL, _single(), layers=8, rows=8, tokens=512),
    _decoder("qwen2 small ddp selective", QWEN2_SMALL, _ddp("selective"), layers=8, rows=2, tokens=4096),
    _decoder("phi single", PHI, _single()),
    _decoder("phi fsdp", PHI, _fsdp(), rows=4),
    _decoder("phi ZeRO-2 full", PHI, _zero(2, "full"), rows=4, held=False),
    _decoder("phi3 single", PHI3, _single(), tokens=4096),
    _decoder("phi3 ddp selective", PHI3, _ddp("selective"), tokens=4096),
    _decoder("phi3 fsdp 8k full", PHI3, _fsdp("full"), tokens=8192),
    _decoder("gemma single", GEMMA, _single()),
    _decoder("gemma fsdp full", GEMMA, _fsdp("full"), tokens=8192),
    _decoder("gemma2 single", GEMMA2, _single(), held=False),
    _decoder("gemma2 fsdp", GEMMA2, _fsdp(), tokens=4096),
    _decoder("gemma2 ddp full", GEMMA2, _ddp("full"), tokens=8192, held=False),
    _decoder("gemma2 ZeRO-2", GEMMA2, _zero(2), tokens=1024, rows=2, held=False),
    _decoder("gemma2 ZeRO-3 selective", GEMMA2, _zero(3, "selective"), tokens=4096),
    _decoder("gemma3 single", GEMMA3, _single(), layers=6),
    _decoder("gemma3 ddp full", GEMMA3, _ddp("full"), layers=6, tokens=16384),
    _decoder("gemma3 fsdp", GEMMA3, _fsdp(), layers=6, rows=4, held=False),
    _decoder("mixtral single", MIXTRAL, _single(), layers=1, held=False),
    _decoder("mixtral fsdp full", MIXTRAL, _fsdp("full"), layers=4, tokens=8192),
    _decoder("mixtral fsdp", MIXTRAL, _fsdp(), tokens=4096),
    _decoder("mixtral ZeRO-3", MIXTRAL, _zero(3, "full"), layers=2, tokens=4096, held=False),
    _decoder("mixtral ZeRO-2", MIXTRAL, _zero(2), layers=2, tokens=2048, held=False),
    _decoder("qwen3_moe single", QWEN3_MOE, _single(), layers=2, held=False),
    _decoder("qwen3_moe fsdp full", QWEN3_MOE, _fsdp("full"), layers=4, tokens=8192),
    _decoder("qwen3_moe ZeRO-3", QWEN3_MOE, _zero(3), layers=4, tokens=4096, held=False),
    _decoder("qwen3_moe ddp selective", QWEN3_MOE, _ddp("selective"), layers=1, tokens=4096),
    _decoder("olmo2 single", OLMO2, _single(), tokens=4096),
    _decoder("olmo2 fsdp", OLMO2, _fsdp(), rows=4, held=False),
    _decoder("olmo2 ZeRO-1 full", OLMO2, _zero(1, "full"), rows=4),
    _decoder("neox single", NEOX, _single(), rows=2),
    _decoder("neox fsdp selective", NEOX, _fsdp("selective"), rows=4),
    _decoder("neox ZeRO-2", NEOX, _zero(2), rows=2),
    _decoder("opt single", OPT, _single(), rows=2),
    _decoder("opt fsdp", OPT, _fsdp(), rows=4),
    _decoder("starcoder2 single", STARCODER2, _single()),
    _decoder("starcoder2 fsdp full", STARCODER2, _fsdp("full"), tokens=16384),
    _decoder("gpt2 ZeRO-3", GPT2, _zero(3), layers_field="n_layer", layers=8, rows=8, tokens=1024),
    _decoder(
        "gpt2 ZeRO-1 selective", GPT2, _zero(1, "selective"), layers_field="n_layer", layers=8, rows=8, tokens=512
    ),
    # Encoders.
    _encoder("bert ZeRO-3", BERT, _zero(3), layers=12, rows=32, tokens=128),
    _encoder("bert ddp selective", BERT, _ddp("selective"), layers=12, rows=32),
    _encoder("roberta single", ROBERTA, _single()),
    _encoder("roberta fsdp", ROBERTA, _fsdp(), layers=12, rows=32, tokens=256, held=False),
    _encoder("roberta ZeRO-2 full", ROBERTA, _zero(2, "full"), layers=12, rows=64, held=False),
    _encoder(
        "roberta classes LoRA", ROBERTA, _ddp(), _lora(8), layers=12, task="text-classification", rows=32, tokens=128
    ),
    _encoder("xlm-roberta ddp", XLM_ROBERTA, _ddp()),
    _encoder("xlm-roberta ZeRO-1", XLM_ROBERTA, _zero(1), rows=32, tokens=256),
    _encoder("electra single classes", ELECTRA, _single(), task="text-classification"),
    _encoder("electra ddp full", ELECTRA, _ddp("full"), rows=32),
    _encoder("distilbert single", DISTILBERT, _single(), layers_field="n_layers"),
    _encoder(
        "distilbert fsdp classes", DISTILBERT, _fsdp(), layers_field="n_layers", rows=64, task="text-classification"
    ),
    _encoder("deberta base ddp 256", DEBERTA_BASE, _ddp(), rows=16, tokens=256),
    _encoder("deberta base fsdp", DEBERTA_BASE, _fsdp(), rows=8),
    _encoder("deberta ZeRO-2 classes", DEBERTA, _zero(2), rows=16, tokens=256, task="text-classification", held=False),
    _encoder("deberta base selective", DEBERTA_BASE, _single("selective"), rows=8),
    # Encoder and decoder.
    _seq2seq("t5 single", T5, _single(), held=False),
    _seq2seq("t5 ddp full", T5, _ddp("full"), layers=6, rows=16),
    _seq2seq("t5 fsdp", T5, _fsdp(), rows=16, tokens=256),
    _seq2seq("flan-t5 single", FLAN_T5, _single(), held=False),
    _seq2seq("flan-t5 ZeRO-2", FLAN_T5, _zero(2), rows=16, tokens=256),
    _seq2seq("flan-t5 ddp 1024", FLAN_T5, _ddp(), rows=2, tokens=1024),
    _seq2seq("flan-t5 fsdp selective", FLAN_T5, _fsdp("selective"), rows=8, held=False),
    _seq2seq("bart single", BART, _single(), layers_field="num_hidden_layers", held=False),
    _seq2seq("bart fsdp full", BART, _fsdp("full"), layers_field="num_hidden_layers", rows=16, held=False),
    # Traced after the last change of a formula.
    _decoder("granite single", GRANITE, _single()),
    _decoder("granite fsdp full", GRANITE, _fsdp("full"), tokens=16384),
    _decoder("smollm3 ZeRO-2", SMOLLM3, _zero(2), tokens=4096),
    _decoder("smollm3 ddp selective", SMOLLM3, _ddp("selective"), tokens=8192),
    _decoder("stablelm single", STABLELM, _single(), tokens=4096),
    _decoder("falcon fsdp", FALCON, _fsdp(), rows=2, held=False),
    _decoder("bloom single", BLOOM, _single(), layers_field="n_layer", tokens=1024, rows=2, held=False),
    _decoder("gptj ZeRO-1", GPTJ, _zero(1), layers_field="n_layer", tokens=1024),
    _decoder("gemma2 9B fsdp full", GEMMA2_9B, _fsdp("full"), tokens=4096),
    _decoder("gemma 7B ZeRO-3 full", GEMMA_7B, _zero(3, "full"), tokens=4096),
    _decoder("mixtral 8x22B fsdp full", MIXTRAL_22B, _fsdp("full"), size=64, rank=31, tokens=8192, held=False),
    _decoder("mixtral LoRA", MIXTRAL, _single("full"), _lora(16), layers=2, tokens=4096, held=False),
    _decoder("qwen3 32B ZeRO-3 full 32k", QWEN3_32B, _zero(3, "full"), size=64, rank=31, tokens=32768, held=False),
    _decoder("llama QLoRA single", WIDTH, _single(), _lora(16, "qlora"), layers=8),
    _decoder("llama QLoRA ddp full", WIDTH, _ddp("full"), _lora(64, "qlora"), layers=8, tokens=8192),
    _decoder("llama 70B QLoRA fsdp full", LLAMA_70B, _fsdp("full"), _lora(64, "qlora"), layers=8, tokens=2048),
    _decoder("llama QLoRA fsdp", WIDTH, _fsdp(), _lora(16, "qlora"), layers=2, tokens=8192, held=False),
    _decoder("llama QLoRA fsdp full", WIDTH, _fsdp("full"), _lora(16, "qlora"), layers=8, tokens=8192, held=False),
    _decoder("llama LoRA fsdp 8k full", WIDTH, _fsdp("full"), _lora(16), layers=8, tokens=8192),
    _decoder("qwen3 QLoRA fsdp", QWEN3, _fsdp(), _lora(16, "qlora"), layers=8, rows=2, held=False),
    _decoder("qwen3 32B LoRA ddp selective", QWEN3_32B, _ddp("selective"), _lora(64), layers=2, tokens=8192),
    _decoder("phi4 single", PHI4, _single(), layers=2),
    _encoder("xlm-roberta large fsdp full", XLM_ROBERTA_LARGE, _fsdp("full"), layers=12, rows=32),
    _encoder("deberta small ZeRO-1", DEBERTA_BASE, _zero(1), layers=6, rows=32, tokens=128),
    _encoder("longformer single", LONGFORMER, _single(), rows=2, tokens=4096),
    _encoder("longformer ZeRO-1 1024", LONGFORMER, _zero(1), rows=8, tokens=1024),
    _encoder("longformer fsdp full", LONGFORMER, _fsdp("full"), layers=12, rows=4, tokens=2048),
    _encoder("albert single", ALBERT, _single(), task="text-classification"),
    _encoder("modernbert single", MODERNBERT, _single()),
    _encoder("modernbert ddp 8k", MODERNBERT, _ddp(), rows=1, tokens=8192),
    _encoder("modernbert fsdp full", MODERNBERT, _fsdp("full"), layers=12, rows=4, tokens=2048, held=False),
    _seq2seq("t5 large ZeRO-3 full", T5_LARGE, _zero(3, "full"), layers=6, rows=16),
    _seq2seq("mt5 ddp", MT5, _ddp(), rows=8, tokens=256),
)
