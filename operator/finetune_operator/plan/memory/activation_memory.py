"""Memory of activations and logits at each moment of a step."""

from __future__ import annotations

from typing import Literal, TypeAlias

from finetune_contract.choices import DECODER_TASKS, LANGUAGE_TASKS
from finetune_contract.plans import (
    CHUNKED_LOSS_FAMILIES,
    CHUNKED_LOSS_TASKS,
    COUNTED_FAMILIES,
    chunks_loss,
    loss_tokens,
)
from finetune_operator.plan.memory.adapter_sizes import adapted_layers
from finetune_operator.plan.memory.memory_workload import (
    Workload,
    has_traced_block,
    norm_slices,
    shape_of,
    unfused_scores,
)
from finetune_operator.plan.memory.model_parallel_plan import in_flight
from finetune_operator.plan.memory.sequence_plan import slice_tokens
from finetune_operator.plan.types.plan_types import MemoryTerm

BACKWARD = ("layers", "reduction")
"""Moments of the layers' backward pass."""
Moment: TypeAlias = Literal["load", "forward", "loss", "head", "layers", "reduction", "ends", "step"]
"""Moments of a training, in their order: the conversion of weights on the device, then those of a step: the end of the
forward pass, the loss's backward pass, the gradients of the head, the last layer's backward pass, with FSDP that of the
layer before while the last one's gradients are reduced, the embeddings' gradients, the optimizer's step.
"""
FP32_LOSSES = ("modernbert",)
"""Families other than decoders that convert their logits to fp32 for the loss."""
BIASED_LOGITS = ("bart", "mbart", "marian", "pegasus")
"""Families with a bias of the logits that is a buffer, which FSDP leaves in fp32."""


def _kept_bytes_per_token(work: Workload) -> tuple[int, str]:
    """Return the bytes that one layer keeps for one token between its forward and backward pass, and a description.

    Selective checkpointing keeps a layer's input and the results of its matrix products with weights and of fused
    attention (`finetune_trainer.training.passes.activations`); a layer with unknown linear layers counts as four square
    ones and two of the feed-forward layer.
    """
    model, width, wide = work.model, work.compute_bytes, work.wide
    match work.strategy.activation_checkpointing:
        case "none":
            layer = work.saved_per_token
            return layer, f"{layer:,}"
        case "full":
            return model.hidden_size * wide // norm_slices(work), "layer inputs"
        case "selective":
            outputs = sum(linear.outputs for linear in model.linear_layers.values()) // model.layers
            outputs = outputs or 5 * model.hidden_size + model.intermediate_size
            if work.adapter is not None:
                adapted = adapted_layers(model, work.adapter).values()
                outputs += sum(linear.outputs for linear in adapted) // model.layers + len(adapted) * work.adapter.rank
            fused = 0 if unfused_scores(work) else model.hidden_size
            kept = model.hidden_size * wide // norm_slices(work) + (outputs + fused) * width
            return kept, f"{kept:,} of inputs and products"


def activation_term(work: Workload, moment: Moment) -> tuple[MemoryTerm, int]:
    """Return the activations on the device at `moment`, and the bytes of offloaded activations."""
    model, length = work.model, slice_tokens(work.length, work.strategy.sequence)
    tokens = work.micro_batch * work.sequences * length
    layer = work.saved_per_token
    ends = 3 * model.hidden_size * work.wide  # embedding output, its norm and dropout; the final norm
    judged = loss_chunk(work) or tokens
    judges = work.task in LANGUAGE_TASKS and work.end != "first"
    # A loss in chunks has the logits of a tensor rank's part of the vocabulary.
    divided = work.divided_logits or loss_chunk(work)
    vocabulary = model.vocabulary_size // (work.strategy.tensor if divided else 1)
    logits = judged * vocabulary * _logit_bytes(work, moment) if judges else 0
    kept, what = _kept_bytes_per_token(work)
    pipeline = work.strategy.pipeline
    layers, kept_at_once = work.layers - (moment == "reduction"), micro_batches_at_once(work, moment)
    recomputes = work.strategy.activation_checkpointing != "none" and moment in BACKWARD
    if moment in BACKWARD and work.world.device == "cuda":
        ends += _passing_bytes_per_token(work)
    again = max(0, layer - kept) if work.strategy.activation_checkpointing == "selective" else layer
    words = f"{layers} {what}" if what == "layer inputs" else f"{layers} layers x {what}"
    words += f" + 1 layer of {again:,}" if recomputes else ""
    total, offloaded = layers * kept * kept_at_once + (again if recomputes else 0) + ends, 0
    if work.strategy.offload_activations != "none" and work.world.device == "cuda":
        # Only the layer that computes is on the device; none does while the loss is computed.
        computing = layer if moment in ("forward", *BACKWARD) else 0
        words, total, offloaded = f"{1 if computing else 0} layers of {layer:,}", computing + ends, layers * kept
    if moment == "ends":
        total, logits = layers * kept * kept_at_once, 0
    passed = "" if pipeline is None else f", {kept_at_once:.3g} micro-batches at once"
    sequences = f" x {work.sequences} sequences" if work.sequences > 1 else ""
    part = "" if length == work.length else f" of {work.length}"
    if model.model_type not in COUNTED_FAMILIES:
        words += ", layers as traced" if has_traced_block(model) else ", layers as those of BERT"
    words = f"{work.micro_batch} rows{sequences} x {length}{part} tokens x ({words} + ends {ends:,}){passed}"
    if logits:
        words += f" + {judged:,} x {vocabulary:,} logits x {_logit_bytes(work, moment)}"
    return MemoryTerm(name="activations", bytes=int(tokens * total) + logits, formula=words), int(tokens * offloaded)


def micro_batches_at_once(work: Workload, moment: Moment) -> float:
    """Return the micro-batches whose activations and 16-bit copies of weights a process has at once. Those of the one
    whose backward pass has ended are gone.
    """
    if work.strategy.pipeline is None:
        return 0 if moment == "ends" else 1
    return max(0, in_flight(work.strategy.pipeline, work.end or "first") - (moment == "ends"))


def _passing_bytes_per_token(work: Workload) -> int:
    """Return the bytes of gradients inside a layer, for one token of its backward pass on a GPU.

    Autocast: gradients of the feed-forward layer's two products, and of what it computes in fp32 between them. With
    16-bit weights one and a half, where several operations lie between both; others take the place of activations.
    Attention that is not fused has two gradients of its scores besides, in the type of the scores and in fp32.
    """
    model, shape, tensor = work.model, shape_of(work), work.strategy.tensor
    if work.autocast:
        wide = int(2 * work.compute_bytes + 4 * shape.feed_forward_fp32)
    else:
        narrow = work.precision in ("bf16", "fp16") and shape.feed_forward > 3
        wide = 3 * work.compute_bytes // 2 if narrow else 0
    passing = model.intermediate_size * wide // tensor
    if unfused_scores(work) and shape.gpu_score_bytes is None:
        attended = shape.attention_window or work.length
        passing += model.attention_heads * attended * (work.compute_bytes + 4) // tensor
    return passing


def loss_chunk(work: Workload) -> int:
    """Return the tokens for which logits are computed at a time (the trainer's `chunked_loss.py`); 0: all."""
    if work.whole_logits or not chunks_loss(
        tensor=work.strategy.tensor, staged=work.strategy.pipeline is not None, plain=work.plain_loss
    ):
        return 0
    if work.task not in CHUNKED_LOSS_TASKS or work.model.model_type not in CHUNKED_LOSS_FAMILIES:
        return 0
    tokens = work.micro_batch * work.sequences * slice_tokens(work.length, work.strategy.sequence)
    chunk = loss_tokens(work.model.vocabulary_size)
    return chunk if chunk < tokens else 0


def _logit_bytes(work: Workload, moment: Moment) -> int:
    """Return the bytes of one logit: at the end of the forward pass itself, its fp32 form and the log-probability; for
    the loss's backward pass the log-probability and two gradients in fp32, those of torch's `nll_loss` and
    `log_softmax`; then its gradient.

    Decoders convert their logits to fp32, and autocast does so for all. Otherwise the loss computes in the type of the
    logits, and FSDP returns them in fp32; BART's have a bias in fp32 there. Gemma 2 keeps the tanh of its logits.
    """
    width, decoder = work.compute_bytes, work.task in DECODER_TASKS
    capped = width if work.model.model_type == "gemma2" else 0
    sharded = work.strategy.name == "fsdp"
    family = work.model.model_type
    wide = decoder or work.autocast or family in FP32_LOSSES or (sharded and family in BIASED_LOGITS)
    wide = wide and not work.narrow_loss
    loss = 4 if wide else width
    match moment:
        case "forward":
            returned = 4 if sharded and loss < 4 else 0
            return capped + width + (2 * loss if wide else loss) + returned
        case "loss":
            return capped + 3 * loss
        case "head":
            return width
    return 0
