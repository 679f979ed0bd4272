"""Time of the forward and backward passes of a step."""

from __future__ import annotations

from finetune_contract.facts import ModelFacts
from finetune_operator.plan.memory.activation_shapes import activation_shape
from finetune_operator.plan.memory.adapter_sizes import FOUR_BIT_BYTES
from finetune_operator.plan.time.product_times import ProductSpeed, efficiency, products_of
from finetune_operator.plan.time.step_work import ADAPTER_KERNELS, Machine, StepWork

FP8_SHARE = 0.305
"""Share of the fp8 peak (twice that of bf16) with torch.compile, including the conversions: a whole step is then 1.25
times as fast as in bf16, as torchao measured with 8 billion parameters on 8 GPUs.
"""
FP8_EAGER_SHARE = 0.14
"""Share without torch.compile: 0.7 of the speed in bf16. Each tensor is read and written several times to be rounded;
on an H100 two layers took 1.4 times as long as in bf16 (pytorch/ao, issue 2262).
"""
FP32_SHARE = 0.6
"""Share of the plain fp32 peak; it is higher, as there are no matrix units that wait for data."""
MEMORY_SHARE = 0.8
"""Share of a memory's bandwidth that kernels over large tensors reach, as copies do on an A100 and an H100."""
RMS_NORM_BYTES, GATE_BYTES = 100.0, 10.0
"""Bytes that the eager kernels of one layer's forward pass between matrix products read and write for a token, for each
element of the hidden and of the feed-forward width, in Llama and its kin: two norms 64 (seven kernels, most in fp32),
residuals 12, rotary embeddings 24; activation and gate 10. The backward pass has twice as many.
"""
LAYER_NORM_BYTES, ACTIVATION_BYTES = 60.0, 4.0
"""Bytes of layers whose norms are one kernel: two norms 16, two dropouts 18, two residuals 24; and for each
intermediate of the activation function (`ActivationShape.feed_forward`).
"""
COMPILED_BYTES = (17.0, 6.0)
"""Bytes with torch.compile, which fuses each norm, residual, rotation and gated activation into one kernel."""
SCORE_BYTES = 24
"""Bytes that attention without a fused kernel reads and writes for each score in the forward pass: product, mask,
softmax in fp32 and its conversion, six passes of 2 to 4 bytes each.
"""
LOGIT_BYTES = 30
"""Bytes for each logit: written in 16 bits, converted to fp32, read for the softmax, and its gradient likewise."""
KERNELS_OF_A_LAYER = 167
"""Kernels of one layer's forward and backward pass: some 2,000 for a 12-layer encoder. A third of them compiled."""
GATED_KERNELS_OF_A_LAYER = 219
"""Kernels of a layer of Llama and its kin: 1.31 times those of BERT (152 and 116 operations of torch 2.15, without
views, counted under autocast).
"""
REPEATED_LAUNCHES = 1.9
"""Factor of the host's time with full recomputation, which has hooks on each saved tensor: 1.9 for Llama and 2.0 with
LoRA, measured on a CPU with layers so narrow (64) that nothing else counts.
"""
LAUNCH_SECONDS = 6.8e-6
"""Time to launch a kernel from Python: 5 to 10 us. Launches run ahead of the GPU, so they count where they take longer
than the kernels. Calibration: Qwen 7B with LoRA, rows of 256 tokens, 4.7 ms a layer with recomputation.
"""
HOOK_SECONDS: dict[str, float] = {
    "single": 0.0,
    "ddp": 0.05e-3,
    "ddp-zero1": 0.05e-3,
    "fsdp": 1.7e-3,
    "deepspeed-zero0": 0.7e-3,
    "deepspeed-zero1": 0.7e-3,
    "deepspeed-zero2": 0.7e-3,
    "deepspeed-zero3": 7e-3,
}
"""Time of Python code of a strategy for a layer's passes and its share of the step, beside that of the model itself
(which took 0.8 ms, as its 167 kernels do). Measured with torch 2.15 and DeepSpeed 0.19 on one process of a CPU whose
BERT of 4 and 12 layers is so narrow (16) that nothing else counts. Like launches, it runs ahead of the GPU.
"""
ADAPTER_HOOKS, REPEATED_ADAPTER_HOOKS = 0.24, 0.6
"""Time of ZeRO-3's hooks for a linear layer with an adapter, which has four modules more, as a share of that of a layer
of BERT; and what full recomputation adds to it, as a share. Measured likewise with Llama's layers, each with 7 adapters
of peft 0.21, in turns with BERT's: 0.23 (least of 12 steps) and 0.24 (median), with recomputation 0.40 and 0.36.
"""
CAST_BYTES = 6
"""Bytes to convert one fp32 weight to 16 bits under autocast: read 4, write 2."""
ACCUMULATE_BYTES = 10
"""Bytes to add one gradient to the sum of earlier micro-batches."""
DEQUANTIZE_BYTES = FOUR_BIT_BYTES + 2 + 2
"""Bytes to dequantize a 4-bit weight for a product: read, written in 16 bits, and read once more by the product."""


# ---------------------------------------------------------------------------------------------------------- computation


def matrix_parameters(model: ModelFacts, tied: int = 0) -> int:
    """Return the weights that a token is multiplied with: without looked-up embeddings and experts that it passes by;
    `tied`: embeddings that the head multiplies with, too.
    """
    return model.parameters - model.embedding_parameters - model.idle_parameters + tied


def pass_seconds(work: StepWork, machine: Machine) -> float:
    """Return the seconds of the forward and backward pass of one micro-batch, for a process with its part of the
    layers.

    Matrix products take 6 operations a parameter and token (2 forward, 4 backward, of which frozen weights save 2),
    attention 12 x layers x hidden x length (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", 2021, appendix). Full recomputation repeats the forward pass of the blocks; selective recomputation
    repeats what lies between the products.
    """
    strategy, model = work.strategy, work.model
    full = strategy.activation_checkpointing == "full"
    split = strategy.model_ranks
    attention = 12 * model.layers * model.hidden_size * work.length * work.tokens * (4 / 3 if full else 1)
    fused = activation_shape(model.model_type).fused_attention and model.fused_attention
    if work.causal and fused:
        attention /= 2
    in_fp32 = work.precision == "fp32"
    peak = machine.fp32_flops * FP32_SHARE if in_fp32 else machine.half_flops * machine.attention_share
    seconds = _product_seconds(work, machine) / split + attention / peak / split
    if machine.memory:
        passes = 3 if strategy.activation_checkpointing == "none" else 4
        moved = _elementwise_bytes(work, passes, fused) + _weight_bytes_moved(work)
        seconds += moved / (machine.memory * MEMORY_SHARE)
    return max(seconds, host_seconds(work))


def _repeated(work: StepWork) -> float:
    """Return the share of the blocks' products that activation checkpointing repeats."""
    match work.strategy.activation_checkpointing:
        case "full":
            return 1.0
        case "selective":
            return work.recomputed_products
        case "none":
            return 0.0


def host_seconds(work: StepWork) -> float:
    """Return the seconds in which the host launches the kernels of one pass and runs a strategy's hooks."""
    strategy, layers, repeated = work.strategy, work.model.layers, _repeated(work)
    of_layer = GATED_KERNELS_OF_A_LAYER if _is_gated(work.model) else KERNELS_OF_A_LAYER
    kernels = float(of_layer * layers + ADAPTER_KERNELS * work.adapted)
    kernels *= (1 + repeated * (REPEATED_LAUNCHES - 1)) / (3 if work.compiled else 1)
    hooks = HOOK_SECONDS[strategy.sharding] * layers * (1 + repeated / 3)
    if strategy.zero_stage == 3:
        of_adapter = ADAPTER_HOOKS * (1 + repeated * REPEATED_ADAPTER_HOOKS)
        hooks += HOOK_SECONDS[strategy.sharding] * of_adapter * work.adapted
    pipeline = 1 if strategy.pipeline is None else strategy.pipeline.degree
    return (kernels * LAUNCH_SECONDS + hooks) / pipeline


def _product_seconds(work: StepWork, machine: Machine) -> float:
    """Return the seconds of the matrix products of one pass over all layers."""
    matrix = matrix_parameters(work.model, work.tied_head)
    head = work.model.vocabulary_size * work.model.hidden_size if work.scores_vocabulary else 0
    # Blocks with their adapters, and the head, which is neither repeated nor in fp8.
    blocks = max(0, matrix - head)
    trained = work.added or min(blocks, max(0, work.trained - head))
    rate, width = _product_rate(work, machine)
    speed = ProductSpeed(rate, machine.memory * MEMORY_SHARE, machine.units)
    reached = efficiency(products_of(work.model), work.tokens, speed, width, work.strategy.tensor)
    passing = (4 + 2 * _repeated(work)) * (blocks + work.added) * work.tokens / rate / reached.passing
    gradients = 2 * trained * work.tokens / rate / (1 if work.added else reached.weights)
    of_head = ((6 if work.chunked_loss else 4) * head + 2 * min(head, work.trained)) * work.tokens
    # The head is not in fp8.
    of_fp8 = work.precision == "fp8"
    return passing + gradients + of_head / (machine.half_flops * machine.matmul_share if of_fp8 else rate)


def _product_rate(work: StepWork, machine: Machine) -> tuple[float, int]:
    """Return the operations a second of large products in the blocks, and the bytes of an element."""
    match work.precision:
        case "fp32" if work.tf32 and machine.tf32_flops:
            # Not attention: torch's fused kernels for fp32 do not follow the setting.
            return machine.tf32_flops * machine.matmul_share, 4
        case "fp32":
            return machine.fp32_flops * FP32_SHARE, 4
        case "fp8":
            return 2 * machine.half_flops * (FP8_SHARE if work.compiled else FP8_EAGER_SHARE), 1
        case _:
            return machine.half_flops * machine.matmul_share, 2


def _elementwise_bytes(work: StepWork, passes: int, fused: bool) -> float:
    """Return the bytes that a pass moves between its matrix products."""
    model, strategy = work.model, work.strategy
    hidden, feed_forward = _eager_bytes(model) if not work.compiled else COMPILED_BYTES
    # Split layers share the feed-forward width; the hidden width is whole on each tensor rank.
    norms = hidden * model.hidden_size / (strategy.tensor if work.split_norms else 1)
    of_layer = norms + feed_forward * model.intermediate_size / strategy.tensor
    of_layer += work.adapter_bytes * work.adapted_width / model.layers / strategy.tensor
    if not fused:
        of_layer += SCORE_BYTES * model.attention_heads * work.length / strategy.tensor
    stages = 1 if strategy.pipeline is None else strategy.pipeline.degree
    total = passes * of_layer * model.layers / stages
    if work.scores_vocabulary:
        total += LOGIT_BYTES * model.vocabulary_size / strategy.tensor
    return total * work.tokens


def _eager_bytes(model: ModelFacts) -> tuple[float, float]:
    """Return the bytes that eager kernels move for each element of the hidden and of the feed-forward width."""
    if _is_gated(model):
        return RMS_NORM_BYTES, GATE_BYTES
    return LAYER_NORM_BYTES, ACTIVATION_BYTES * activation_shape(model.model_type).feed_forward


def _is_gated(model: ModelFacts) -> bool:
    """Return whether the layers are like Llama's, whose norm is several kernels in transformers, and keeps its
    normalised input.
    """
    return activation_shape(model.model_type).norm_inputs > 2


def _weight_bytes_moved(work: StepWork) -> float:
    """Return the bytes of conversions of weights and sums of gradients in one pass."""
    strategy = work.strategy
    held = work.model.parameters / strategy.model_ranks
    # Under autocast; frozen weights of an adapter in bf16 are held in 16 bits.
    converts = strategy.name in ("single", "ddp") and work.precision != "fp32"
    wide = work.trained if work.added and work.precision == "bf16" else held - work.four_bit
    passes = 3 if strategy.activation_checkpointing == "full" else 2
    return (
        (CAST_BYTES * wide if converts else 0.0)
        + ACCUMULATE_BYTES * work.trained / strategy.model_ranks
        + DEQUANTIZE_BYTES * passes * work.four_bit
    )
