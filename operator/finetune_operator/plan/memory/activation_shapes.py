"""Activations of a block that the backward pass reads, by architecture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ActivationShape:
    """Elements that one layer saves for the backward pass, per token; see `memory.activation_bytes_per_token`.

    The default is the post-norm encoder layer of BERT: Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022), section 4.1, without its dropout after the softmax, which only unfused attention keeps.
    """

    norm_inputs: float = 2
    """Inputs of the norms, times h; autocast keeps them in fp32."""
    norm_casts: float = 0
    """Part of `norm_inputs` that the model casts to fp32 in any precision, as RMS norms do."""
    hidden: float = 6
    """Hidden states, times h: input of query, key and value, these three, the attention's output, the feed-forward
    layer's input.
    """
    feed_forward: float = 2
    """Input and output of the activation function, times f."""
    feed_forward_fp32: float = 0
    """Part of `feed_forward` that autocast computes in fp32 on GPUs: powers and what follows from them
    (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32").
    """
    shared_inputs: float = 2
    """Copies of inputs, times h, that autocast makes where several linear layers read one fp32 input, less one each:
    two for queries, keys and values.
    """
    dropout_masks: float = 2
    """Dropout masks, times h."""
    query_norms: float = 0
    """Part of `norm_inputs` that is as wide as the queries, half of it cast to fp32."""
    fused_attention: bool = True
    """True if transformers uses scaled_dot_product_attention, unless `ModelFacts.fused_attention` shows otherwise; if
    False, heads x length scores are saved for each token.
    """
    score_tensors: float = 2
    """Score tensors of attention that is not fused, times heads x length: the softmax and its dropped-out form (with
    dropout, one more mask).
    """
    attention_window: int | None = None
    """Tokens that each token attends to; None for all. That of the published checkpoints, as facts have no field."""
    gpu_score_bytes: float | None = None
    """Bytes of a score on GPUs where a trace has found them, with softmax and dropout; None counts `score_tensors`."""
    gpu_relative_bytes: float = 0
    """Further bytes on GPUs for each relative position, of which there are at most `RELATIVE_POSITIONS`."""
    attention_dropout: bool = True
    """True if attention has dropout by default. On CPU this alone keeps scaled_dot_product_attention from its fused
    kernel.
    """


RELATIVE_POSITIONS = 512
"""Relative positions of DeBERTa-v3: twice its position_buckets of 256."""
_ENCODER = ActivationShape()
# The other counts were fitted to torch's saved tensors of one layer (tests/unit/test_plan_memory.py repeats it):
# DeBERTa gathers two more score matrices by relative position; GPT-2 and its kin compute their GELU in Python and save
# three more intermediates; Llama's norm saves its normalised input and its feed-forward layer is gated. Others also
# have norms of queries and keys (counted for four query heads on one key head), or norms after attention and
# feed-forward layer. Gemma 2 saves its capped scores and their softmax, the latter in fp32.
_DECODER = ActivationShape(dropout_masks=0, attention_dropout=False)
_FUSED_INPUTS = replace(_DECODER, shared_inputs=0)
_PYTHON_GELU = replace(_DECODER, feed_forward=5, feed_forward_fp32=3)
_GATED = replace(_DECODER, norm_inputs=4, norm_casts=2, feed_forward=4, shared_inputs=3)
# T5's feed-forward layer has dropout between its products; the gated one computes GELU in Python.
_T5 = ActivationShape(
    norm_inputs=5, norm_casts=5, hidden=9, feed_forward=2.5, shared_inputs=3, dropout_masks=2.5, attention_dropout=True
)
_GATED_T5 = replace(_T5, feed_forward=7.5, feed_forward_fp32=4.4)
_SHAPES: dict[str, ActivationShape] = {
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        ActivationShape(fused_attention=False, score_tensors=10, gpu_score_bytes=8, gpu_relative_bytes=4),
    ),
    # Chunks of queries, keys and values overlap, and there are three more projections for global attention.
    "longformer": ActivationShape(hidden=17.5, fused_attention=False, score_tensors=2.4, attention_window=512),
    "albert": _PYTHON_GELU,
    # A layer of both halves on average: half of them have two attentions, and three norms.
    "bart": replace(_ENCODER, norm_inputs=2.5, hidden=8.3, shared_inputs=3),
    "modernbert": replace(_FUSED_INPUTS, hidden=9, feed_forward=4),
    "gpt2": ActivationShape(feed_forward=5, feed_forward_fp32=3, shared_inputs=0),
    "gpt_neo": _PYTHON_GELU,
    "gptj": replace(_PYTHON_GELU, hidden=5),
    "codegen": replace(_PYTHON_GELU, hidden=5),
    "phi": replace(_PYTHON_GELU, hidden=5),
    "opt": ActivationShape(feed_forward=1, attention_dropout=False),
    "gemma2": replace(_GATED, norm_inputs=8, norm_casts=8, fused_attention=False, score_tensors=4),
    "gemma3_text": replace(_GATED, norm_inputs=11, norm_casts=11),
    "glm4": replace(_GATED, norm_inputs=8, hidden=7),
    "olmo2": replace(_GATED, norm_inputs=8, norm_casts=8),
    # An expert keeps its input and its output besides: 2 experts a token, and 8.
    "mixtral": replace(_GATED, hidden=10),
    "qwen3_moe": replace(_GATED, norm_inputs=6.5, norm_casts=3.25, hidden=22, query_norms=2),
    "phi3": replace(_GATED, hidden=7, shared_inputs=0),
    "qwen3": replace(_GATED, norm_inputs=6, norm_casts=3, query_norms=2),
    "t5": _T5,
    "mt5": _GATED_T5,
    "starcoder2": _DECODER,
    **dict.fromkeys(("bloom", "falcon", "gpt_neox", "mpt"), _FUSED_INPUTS),
    **dict.fromkeys(
        ("cohere", "cohere2", "gemma", "glm", "granite", "llama", "mistral", "olmo", "qwen2", "smollm3", "stablelm"),
        _GATED,
    ),
}


def activation_shape(model_type: str, linear_layers: Collection[str] = ()) -> ActivationShape:
    """Return the activation shape of a layer of `model_type`; by default that of an encoder layer. The names of linear
    layers tell T5's gated feed-forward layers (T5 1.1, Flan-T5) from others.
    """
    if model_type == "t5" and any(name.endswith(".wi_1") for name in linear_layers):
        return _GATED_T5
    return _SHAPES.get(model_type, _ENCODER)


def counted_shapes() -> frozenset[str]:
    """Return the families whose shape differs from that of BERT's layer."""
    return frozenset(_SHAPES)
